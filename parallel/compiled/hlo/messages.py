"""Captures the compiler's messages on stderr, and extracts its warnings."""

import contextlib
import os
import re
from collections.abc import Iterator

from core.hosts import log_filters

# Environment variables that make libtpu write warnings to stderr; it reads them when it is loaded.
AUDIBLE_WARNINGS = {"TPU_STDERR_LOG_LEVEL": "1"}


class Messages:
    """The compiler's output to stderr; empty until the context of `compiler_messages` ends."""

    text = ""


# Messages that do not concern a program's results, nor its speed beyond what is reported anyway: a pattern for the
# beginning, and the reason why it is harmless.
_HARMLESS = {
    r"Collective matmul V1 is enabled": "compiler_options.py disables collective matmul: no version is used",
    r"Module contains sdy shardings or meshes in frontend_attributes": "concerns programs exported by another JAX",
    r"No hardware is found\. Using default TPU version": "no TPU is needed; the program specifies its chips",
    r"The log function has NOT been set for the LloModule": "the compiler's own debug log",
    r"Unable to dump host DMA stats": "statistics of a debug dump",
    r"\[.*\] Very slow compile\?": "the time to compile is reported",
    r"The operation took": "the time to compile is reported",
    r"Constant folding an instruction is taking > \d+s": "the time to compile is reported",
    r"Number of (unique slow barriers|times slow barrier appeared)": "statistics of barriers",
    r"\[[\w.\-]+\] 0-iteration loop inserted": "a loop without iterations does nothing",
    r"Successful retry compilation of": "the second attempt succeeded; the HLO that follows was compiled",
    r"HLO:$|(ROOT )?%?[\w.\-]+ = \(*\w+\[|\{$|\}": "a line of HLO that belongs to another message",
    r"Treat tiling (?P<tiling>T\([\dx,]+\)) as (?P=tiling)$": "both tilings are the same",
    r"\[spmd\] Involuntary full rematerialization": "reported by parallel.compiled.lints, with a fix",
}
_KNOWN = re.compile("|".join(f"(?:{beginning})" for beginning in _HARMLESS))
_LOGGED = re.compile(r"(?m)^([IWEF])\d{4} [\d:.]+\s+\d+ [\w./-]+:\d+\] ?")


def warnings(text: str) -> list[str]:
    """Returns the distinct warnings and errors in the compiler's output, without known harmless ones."""
    parts = _LOGGED.split(text)
    logged = zip(parts[1::2], parts[2::2], strict=True)
    found = dict.fromkeys(" ".join(said.strip("\n* ").split()) for level, said in logged if level != "I")
    return [said for said in found if said and not _KNOWN.match(said)]


@contextlib.contextmanager
def compiler_messages(*, pass_on: bool = True) -> Iterator[Messages]:
    """Captures output to file descriptor 2; at the end it is passed on, without the compiler's warnings.

    With `pass_on=False` nothing is passed on.
    """
    messages, held = Messages(), log_filters.Held()
    try:
        with log_filters.holding_stderr() as held:
            yield messages
    finally:
        messages.text = held.content.decode(errors="replace")
        if pass_on:
            os.write(2, re.sub(r"(?m)^[WI]\d{4} .*\n?", "", messages.text).encode())
