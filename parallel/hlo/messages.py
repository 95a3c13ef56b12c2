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


# Messages that say nothing of a program's results, nor of its speed beyond what is reported anyway: how one begins, and
# why it is harmless.
_HARMLESS = {
    r"Collective matmul V1 is enabled": "parallel.compiler_options keeps every einsum whole: neither version is used",
    r"Module contains sdy shardings or meshes in frontend_attributes": "asks whether another JAX exported the program",
    r"No hardware is found\. Using default TPU version": "there is no TPU here; the program names the chips it is for",
    r"The log function has NOT been set for the LloModule": "the compiler's own debug log",
    r"Unable to dump host DMA stats": "statistics of a debug dump",
    r"\[.*\] Very slow compile\?": "the time to compile is reported",
    r"The operation took": "the time to compile is reported",
    r"Number of (unique slow barriers|times slow barrier appeared)": "counts the forms that barriers have",
    r"\[[\w.\-]+\] 0-iteration loop inserted": "a loop without iterations does nothing",
    r"Successful retry compilation of": "a second try succeeded; the HLO that follows is what was compiled",
    r"HLO:$|(ROOT )?%?[\w.\-]+ = \(*\w+\[|\{$|\}": "a line of HLO that belongs to another message",
    r"\[spmd\] Involuntary full rematerialization": "reported by parallel.lints, with what to do",
}
_KNOWN = re.compile("|".join(f"(?:{beginning})" for beginning in _HARMLESS))
_LOGGED = re.compile(r"(?m)^([IWEF])\d{4} [\d:.]+\s+\d+ [\w./-]+:\d+\] ?")


def warnings(text: str) -> list[str]:
    """Returns the compiler's warnings and errors in what it wrote to stderr, each once, without the harmless ones.

    Args:
      text: `Messages.text`.
    """
    parts = _LOGGED.split(text)
    logged = zip(parts[1::2], parts[2::2], strict=True)
    found = dict.fromkeys(" ".join(said.strip("\n* ").split()) for level, said in logged if level != "I")
    return [said for said in found if said and not _KNOWN.match(said)]


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
