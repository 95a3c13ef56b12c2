"""Retries non-essential reads and writes, whose failures are only warnings.

Uses the standard library only: `launch.hosts.host_output` runs where nothing else is installed.
"""

import contextlib
import io
import os
import pathlib
from collections.abc import Callable


class Bookkeeping:
    """Runs an action whose failures are only warnings; of several in a row, only the first is printed."""

    def __init__(self, what: str, *, done: str = "written"):
        """The warning begins with `WHAT could not be DONE`."""
        self._what, self._done, self._is_failing = what, done, False

    def attempt(self, act: Callable[[], object]) -> bool:
        """Calls `act`; returns whether it succeeded."""
        try:
            act()
        except Exception as error:  # a bucket fails with its client's own types
            if not self._is_failing:
                said = f"{self._what} could not be {self._done} ({type(error).__name__}: {error}); the run continues"
                with contextlib.suppress(OSError):  # standard output may be a file on the same disk
                    print(f"warning: {said}", flush=True)
            self._is_failing = True
            return False
        self._is_failing = False
        return True


class Appender:
    """Appends to a local file; content that cannot be written is kept, and written later."""

    def __init__(self, path: pathlib.Path, *, most_bytes: int | None = None):
        """Opens or creates the file; if that fails, every `flush` tries again.

        Args:
          most_bytes: limit on what stays pending after a failed flush; None: no limit. Later lines are dropped.
        """
        self._path, self._most_bytes = path, most_bytes
        self._file: io.FileIO | None = None
        self._pending = bytearray()
        self._dropped = 0
        self._after_dropped = bytearray()  # pending too, after the line that says what is missing
        self._is_within_a_line = False  # at the end of what was written
        self._is_closed = False
        self._bookkeeping = Bookkeeping(os.fspath(path))
        self.flush()

    def write(self, content: bytes) -> None:
        """Keeps `content` for the next `flush`."""
        if self._dropped:
            self._after_dropped += content
        else:
            self._pending += content

    def flush(self) -> None:
        """Writes the pending content, as far as possible."""
        if not self._bookkeeping.attempt(self._push) and self._most_bytes is not None:
            self._drop(self._most_bytes)

    def _drop(self, most_bytes: int) -> None:
        self._dropped += len(self._after_dropped)
        self._after_dropped.clear()
        if len(self._pending) > most_bytes:
            begun_bytes = self._pending.find(b"\n") + 1 if self._is_within_a_line else 0  # the rest of a line
            kept_bytes = max(begun_bytes, self._pending.rfind(b"\n", 0, most_bytes) + 1)
            self._dropped += len(self._pending) - kept_bytes
            del self._pending[kept_bytes:]

    def _push(self) -> None:
        if self._file is None:
            self._file = self._path.open("ab+", buffering=0)
            if self._file.seek(0, io.SEEK_END) and os.pread(self._file.fileno(), 1, self._file.tell() - 1) != b"\n":
                self._pending[:0] = b"\n"
        self._write_pending(self._file)
        if self._dropped:
            note = b"(%d bytes are missing here: the disk was full)\n" % self._dropped
            written = self._file.write(note)
            self._is_within_a_line = written < len(note)
            self._pending += note[written:] + self._after_dropped
            self._dropped = 0
            self._after_dropped.clear()
            self._write_pending(self._file)

    def _write_pending(self, file: io.FileIO) -> None:
        while self._pending:
            written = file.write(self._pending)
            self._is_within_a_line = self._pending[written - 1 : written] != b"\n"
            del self._pending[:written]

    def close(self) -> None:
        """Writes what is pending and closes the file."""
        if not self._is_closed:
            self._is_closed = True
            self.flush()
            if self._file is not None:
                self._file.close()
