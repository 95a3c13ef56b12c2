"""The step that this process is at, in a small file for whoever writes its log.

The one idea: the file is mapped into memory, so that noting a step is a copy of 64 bytes and no call of the system.
"""

from __future__ import annotations

import mmap
import pathlib

from core.training.trainer import Hook

_BYTES = 64


class NoteStep(Hook):
    """Notes `host 2 step 17` before each step."""

    def __init__(self, path: str, *, name: str, step: int):
        """Makes the file, for the host of this name, which continues behind `step`."""
        file = pathlib.Path(path)
        file.write_bytes(bytes(_BYTES))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _BYTES)
        self._name = name
        self.before_step(step)

    def before_step(self, step: int) -> None:
        """Notes it."""
        self._map[:] = f"{self._name} step {step}".encode()[:_BYTES].ljust(_BYTES, b"\0")
