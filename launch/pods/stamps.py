"""How every line of a host's log begins: when, which host, at which step.

    11-22 00:12:31.4 host 2 step 17 | what it said

The one idea: the line is stamped by whoever writes it to the log, from outside the process that says it, so that what
C++ prints, and the last words of a process that was killed, are stamped too. Which step it is the process notes in a
small file (RENGA_STEP_FILE). Times are UTC, so that logs of several machines can be merged.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path

_STAMP = re.compile(r"^(\d\d-\d\d \d\d:\d\d:\d\d\.\d) [^|]* \| ")


class Stamp:
    """The stamps of one host."""

    def __init__(self, name: str, *, step_file: Path | None = None):
        """`name` as long as the process has not noted `host 2 step 17` in `step_file`."""
        self._name = name
        self._step_file = step_file

    def __call__(self) -> str:
        """For a line that is written now."""
        now = datetime.datetime.now(datetime.UTC)
        return f"{now:%m-%d %H:%M:%S}.{now.microsecond // 100_000} {self._noted() or self._name} | "

    def _noted(self) -> str:
        if self._step_file is None or not self._step_file.exists():
            return ""
        return self._step_file.read_text(errors="replace").strip("\0 \n")


def time_of(line: str) -> str | None:
    """When a line was stamped, to sort by; None of a line without a stamp."""
    found = _STAMP.match(line)
    return found[1] if found else None
