"""The beginning of every line of a host's log: time (UTC), host and step.

    11-22 00:12:31.4 host 2 step 17 | loss 2.31

The prefix is added by the process that writes the log, not by the one that trains, so that lines from C++ code and the
last lines of a killed process have one too. The training process notes its step in a small file (RENGA_STEP_FILE).
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path

_PREFIX = re.compile(r"^(\d\d-\d\d \d\d:\d\d:\d\d\.\d) [^|]* \| ")


class LogPrefix:
    """Makes the prefixes of one host."""

    def __init__(self, name: str, *, step_file: Path | None = None):
        """Uses `name` until the process notes `host 2 step 17` in `step_file`."""
        self._name = name
        self._step_file = step_file

    def __call__(self) -> str:
        """Returns the prefix of a line that is written now."""
        now = datetime.datetime.now(datetime.UTC)
        return f"{now:%m-%d %H:%M:%S}.{now.microsecond // 100_000} {self._noted() or self._name} | "

    def _noted(self) -> str:
        if self._step_file is None or not self._step_file.exists():
            return ""
        return self._step_file.read_text(errors="replace").strip("\0 \n")


def time_of(line: str) -> str | None:
    """Returns the time in a line's prefix, as text that sorts by time; None for a line without a prefix."""
    found = _PREFIX.match(line)
    return found[1] if found else None
