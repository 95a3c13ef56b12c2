"""`python -m launch.hosts.host_output LOG HOSTNAME COMMAND …`: runs a command on a host and logs its output.

Copies the output of one host's process to its log and, for host 0 of a simulation, to the terminal.

If this process has a terminal, host 0 gets a pseudo-terminal, so that progress lines redraw in place. The log has the
same text without escape sequences and without the overwritten versions of redrawn lines. Known noise of libraries
(`core.library_noise`) goes to the log alone. Standard library only: on a host this runs before anything is installed.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import fcntl
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from core import bookkeeping, library_noise
from launch import terminal
from launch.hosts import log_prefix

_KEPT_LINES = 200
_ESCAPES = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
_JOIN_SECONDS = 2.0  # a grandchild may hold the pipe open after its host is gone
_HOLD_SECONDS = 0.1  # an incomplete line is shown after this: a line of noise comes faster, a redrawn line is complete
_KEPT_BYTES = 2**20  # of a log that cannot be written


class HostOutput:
    """Reads the output of one host's process.

    Attributes:
      child_end: file descriptor for the process's stdout and stderr, until `follow`.
      log_path: the log file.
    """

    def __init__(self, log_path: Path, *, to_terminal: bool, prefix: Callable[[], str] = lambda: ""):
        """Opens a pipe, or a pseudo-terminal; `prefix()` begins every line of the log, and none on the terminal."""
        self.log_path = log_path
        self._prefix = prefix
        self._to_terminal = to_terminal
        if to_terminal and sys.stdout.isatty():
            self._read_end, self.child_end = pty.openpty()
            size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.child_end, termios.TIOCSWINSZ, size)
        else:
            self._read_end, self.child_end = os.pipe()
        self._last = collections.deque(maxlen=_KEPT_LINES)
        self._thread: threading.Thread | None = None

    def start(self, command: Sequence[str], *, title: str, env: Mapping[str, str], **options: Any) -> subprocess.Popen:
        """Starts the process whose output this is; `title` is the first line in the log, `options` are of Popen."""
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=self.child_end, stderr=self.child_end, **options
        )
        self.follow(title=f"--- {title}: {shlex.join(command)}")
        return process

    def follow(self, *, title: str) -> None:
        """Closes this process's copy of `child_end` and starts copying; `title` is the first line in the log."""
        os.close(self.child_end)
        self._thread = threading.Thread(target=self._copy, args=(title,), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until everything that the ended process wrote has been copied."""
        assert self._thread is not None
        self._thread.join(_JOIN_SECONDS)

    def last_lines(self, count: int) -> list[str]:
        """Returns the last lines of this process, without noise."""
        return list(self._last)[-count:]

    def _copy(self, title: str) -> None:
        pending = held = b""
        with contextlib.closing(bookkeeping.Appender(self.log_path, most_bytes=_KEPT_BYTES)) as log:
            began = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            log.write(f"{self._prefix()}{title} ({began})\n".encode())
            while chunk := self._read():
                if self._to_terminal:
                    held = self._show(held + chunk)
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._log_line(log, line)
            if held:
                _write_to_terminal(library_noise.without(held))
            if pending:
                self._log_line(log, pending)
        os.close(self._read_end)

    def _show(self, text: bytes) -> bytes:
        """Writes `text` to the terminal; returns its last line instead if the rest of that line is on its way."""
        whole, rest = _split_lines(text)
        _write_to_terminal(library_noise.without(whole))
        if rest and not select.select([self._read_end], [], [], _HOLD_SECONDS)[0]:
            _write_to_terminal(rest)
            rest = b""
        return rest

    def _read(self) -> bytes:
        try:
            return os.read(self._read_end, 1 << 16)
        except OSError:  # a pseudo-terminal whose other side is closed
            return b""

    def _log_line(self, log: bookkeeping.Appender, raw: bytes) -> None:
        redrawn = _ESCAPES.sub(b"", raw).rstrip(b"\r").split(b"\r")
        told = library_noise.without(redrawn[-1])
        if told or not redrawn[-1]:
            self._last.append(told.decode(errors="replace"))
        log.write(self._prefix().encode() + redrawn[-1] + b"\n")
        log.flush()


def _split_lines(text: bytes) -> tuple[bytes, bytes]:
    """Splits `text` after its last line break or carriage return; the rest may be the beginning of a line of noise."""
    end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
    return text[:end], text[end:]


def _write_to_terminal(chunk: bytes) -> None:
    with contextlib.suppress(OSError):  # a closed terminal ends the copy, not the run
        sys.stdout.buffer.write(chunk)
        terminal.flush()


def run(log_path: Path, name: str, command: Sequence[str]) -> int:
    """Runs `command` to its end on the host called `name` and logs its output.

    This process outlives the command, whatever ends that, because the last lines matter most: it ignores signals to the
    process group, which the command handles.

    Returns:
      The command's exit code, or 128 + N if signal N ended it.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the command would inherit
    with tempfile.TemporaryDirectory(prefix="renga-step-") as folder:
        step_file = Path(folder) / "step"
        prefix = log_prefix.LogPrefix(name, step_file=step_file)
        output = HostOutput(log_path, to_terminal=False, prefix=prefix)
        process = output.start(command, title=name, env={**os.environ, "RENGA_STEP_FILE": str(step_file)})
        returncode = process.wait()
        output.finish()
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
