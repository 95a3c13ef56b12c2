"""Where the output of one simulated host goes: always to its log, for host 0 also to the terminal.

The one idea: host 0 writes to a pseudo-terminal when we have a terminal ourselves, so that a progress line redraws in
place as it would alone; its log gets the same text without the escape sequences and without overwritten lines. Noise of
libraries (`core.library_noise`) stays in the log.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import fcntl
import io
import os
import pty
import re
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

from core import library_noise
from launch import terminal

_KEPT_LINES = 200
_ESCAPES = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
_JOIN_SECONDS = 2.0  # a grandchild may hold the pipe open after its host is gone


class HostOutput:
    """The reading end of one host's output.

    Attributes:
      child_end: file descriptor for the host's stdout and stderr, until `follow`.
      log_path: where it is logged.
    """

    def __init__(self, log_path: Path, *, to_terminal: bool, stamp: Callable[[], str] = lambda: ""):
        """`stamp()` begins every line of the log; the terminal has the lines as they are."""
        self.log_path = log_path
        self._stamp = stamp
        self._to_terminal = to_terminal
        if to_terminal and sys.stdout.isatty():
            self._read_end, self.child_end = pty.openpty()
            size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.child_end, termios.TIOCSWINSZ, size)
        else:
            self._read_end, self.child_end = os.pipe()
        self._last = collections.deque(maxlen=_KEPT_LINES)
        self._thread: threading.Thread | None = None

    def follow(self, *, title: str) -> None:
        """Closes our copy of the host's end and starts copying; `title` heads this run in the log."""
        os.close(self.child_end)
        self._thread = threading.Thread(target=self._copy, args=(title,), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until everything that the ended host wrote has been copied."""
        assert self._thread is not None
        self._thread.join(_JOIN_SECONDS)

    def last_lines(self, count: int) -> list[str]:
        """The last lines of this run that tell something."""
        return list(self._last)[-count:]

    def _copy(self, title: str) -> None:
        pending = held = b""
        with contextlib.closing(_Log(self.log_path)) as log:
            log.write(
                f"{self._stamp()}{title} ({datetime.datetime.now().astimezone().isoformat(timespec='seconds')})\n"
            )
            while chunk := self._read():
                if self._to_terminal:
                    whole, held = _split_lines(held + chunk)
                    _write_to_terminal(library_noise.without(whole))
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._write_line(log, line)
            if held:
                _write_to_terminal(library_noise.without(held))
            if pending:
                self._write_line(log, pending)
        os.close(self._read_end)

    def _read(self) -> bytes:
        try:
            return os.read(self._read_end, 1 << 16)
        except OSError:  # how a pseudo-terminal says that the other side is closed
            return b""

    def _write_line(self, log: _Log, raw: bytes) -> None:
        redrawn = _ESCAPES.sub(b"", raw).rstrip(b"\r").split(b"\r")
        told = library_noise.without(redrawn[-1])
        if told or not redrawn[-1]:
            self._last.append(told.decode(errors="replace"))
        log.write(self._stamp() + redrawn[-1].decode(errors="replace") + "\n")


class _Log:
    """A log file. Lines that a full disk refuses are left out, which is said once; the terminal still has them."""

    def __init__(self, path: Path):
        self._path = path
        self._file: io.RawIOBase | None = None
        self._is_failing = False

    def write(self, line: str) -> None:
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            self._file.write(line.encode())
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                said = f"warning: {self._path} cannot be written ({error}); lines are left out of it until it can be"
                print(said, file=sys.stderr, flush=True)
            self._is_failing = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _split_lines(text: bytes) -> tuple[bytes, bytes]:
    """`text` up to its last line break or carriage return, and the rest, which may become noise."""
    end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
    return text[:end], text[end:]


def _write_to_terminal(chunk: bytes) -> None:
    with contextlib.suppress(OSError):  # a closed terminal ends the copy, not the run
        sys.stdout.buffer.write(chunk)
        terminal.flush()
