"""Retries non-essential reads and writes: a full disk or an unreachable bucket delays them but never ends the run.

Uses the standard library only, because `launch.hosts.host_output` imports this where nothing else is installed.
"""

import contextlib
import io
import os
import pathlib
from collections.abc import Callable


class Bookkeeping:
    """Runs an action whose failures are only warnings; of several failures in a row, only the first is printed."""

    def __init__(self, what: str, *, done: str = "written"):
        """Stores the words of the warning: `WHAT could not be DONE`."""
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
    """Appends to a local file. Content that cannot be written is kept, reported once, and written later.

    A partial write is completed later, so that no line is truncated. If the file ends with an incomplete line, left by
    a killed process, a newline is written first.
    """

    def __init__(self, path: pathlib.Path, *, most_bytes: int | None = None):
        """Opens or creates the file; if that fails, every `flush` tries again.

        Args:
          path: path of the file.
          most_bytes: limit in bytes on the content that stays pending when a flush fails; None: everything is kept.
            Whole lines beyond the limit are dropped until the file can be written again; a line in the file then says
            how many bytes are missing. The rest of a partly written line is always kept.
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
        """Writes the pending content, as far as possible. Never raises."""
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
        """Writes what is pending and closes the file; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.flush()
            if self._file is not None:
                self._file.close()
