"""What the compiler writes to stderr, kept: it says there what it could not do well, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# Environment in which libtpu says on stderr what it warns of; it reads it once, when it is loaded.
AUDIBLE_WARNINGS = {"TPU_STDERR_LOG_LEVEL": "1"}


class Messages:
    """Text that is there once `compiler_messages` has ended."""

    text = ""


# Warnings that say nothing of a program's results or speed here. Exact beginnings of lines, each with its reason.
_HARMLESS = {
    "Collective matmul V1 is enabled": "parallel.compiler_options keeps every einsum whole: neither version is used",
    "Module contains sdy shardings or meshes in frontend_attributes": "it asks whether the program was exported by an "
    "older JAX; it was lowered in this process",
    "No hardware is found. Using default TPU version": "there is no TPU here; the program names the chips it is for",
    "The log function has NOT been set for the LloModule": "the compiler's own debug log",
    "Unable to dump host DMA stats": "statistics of a debug dump",
    "[Compiling module": "says that compiling takes long",
    "The operation took": "says that compiling took long",
}
_LOGGED = re.compile(r"(?m)^([IWEF])\d{4} [\d:.]+\s+\d+ [\w./-]+:\d+\] ?")


def warnings(text: str) -> list[str]:
    """Returns the compiler's warnings and errors in what it wrote to stderr, each once, without the harmless ones.

    Involuntary full rematerialization is left out too: `parallel.lints` reports it.

    Args:
      text: `Messages.text`.
    """
    parts = _LOGGED.split(text)
    found = [
        " ".join(said.strip("\n* ").split())
        for level, said in zip(parts[1::2], parts[2::2], strict=True)
        if level != "I"
    ]
    known = (*_HARMLESS, "[spmd] Involuntary full rematerialization")
    return [said for said in dict.fromkeys(found) if said and not said.startswith(known)]


@contextlib.contextmanager
def compiler_messages(*, pass_on: bool = True) -> Iterator[Messages]:
    """Keeps what C++ writes to file descriptor 2 meanwhile; at the end passes on all but the compiler's warnings.

    Args:
      pass_on: False keeps all of it to itself.
    """
    messages = Messages()
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield messages
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            kept.seek(0)
            messages.text = kept.read().decode(errors="replace")
            if pass_on:
                os.write(2, re.sub(r"(?m)^[WI]\d{4} .*\n?", "", messages.text).encode())
