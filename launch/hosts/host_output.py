"""`python -m launch.hosts.host_output LOG HOSTNAME COMMAND …`: runs a command on a host and logs its output.

Lines of a log begin with the time (UTC), the host and its step:

    11-22 00:12:31.4 host 2 step 17 | loss 2.31

Standard library only: on a host this runs before anything is installed.
"""

import collections
import contextlib
import datetime
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
from collections.abc import Mapping, Sequence
from pathlib import Path

from core.files import bookkeeping
from core.hosts import log_filters, tied_process
from launch import terminal

_KEPT_LINES = 20
_ESCAPES = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
_PREFIX = re.compile(r"^(\d\d-\d\d \d\d:\d\d:\d\d\.\d) [^|]* \| ")
_JOIN_SECONDS = 2.0  # a grandchild may keep the pipe open after the host's process has ended
_HOLD_SECONDS = 0.1  # then an incomplete line is shown: lines of noise are complete sooner
_KEPT_BYTES = 2**20  # output that is kept while the log cannot be written


def time_of(line: str) -> str | None:
    """Returns the time in a line's prefix; None for a line without a prefix."""
    found = _PREFIX.match(line)
    return found[1] if found else None


class HostProcess(subprocess.Popen):
    """The process of one host, and a thread that copies its output to a log."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        name: str,
        step_file: Path,
        env: Mapping[str, str] = os.environ,
        to_terminal: bool = False,
        start_new_session: bool = False,
    ):
        """Starts the process; its lines have the prefix `name` until `step_file` has text."""
        self.log_path, self._name, self._step_file, self._to_terminal = log_path, name, step_file, to_terminal
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        if to_terminal and sys.stdout.isatty():
            self._read_end, write_end = pty.openpty()
            termios.tcsetwinsize(write_end, termios.tcgetwinsize(sys.stdout))
        else:
            self._read_end, write_end = os.pipe()
        self._command = command
        super().__init__(
            tied_process.tied(command),
            env={**env, "RENGA_STEP_FILE": str(step_file)},
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            start_new_session=start_new_session,
        )
        os.close(write_end)
        self._copier = threading.Thread(target=self._copy, daemon=True)
        self._copier.start()

    def finish(self) -> None:
        """Waits at most 2 s until the process's output has been copied."""
        self._copier.join(_JOIN_SECONDS)

    def _prefix(self) -> str:
        now = datetime.datetime.now(datetime.UTC)
        noted = self._step_file.read_text(errors="replace").strip("\0 \n") if self._step_file.exists() else ""
        return f"{now:%m-%d %H:%M:%S}.{now.microsecond // 100_000} {noted or self._name} | "

    def _copy(self) -> None:
        pending = held = b""
        began = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        with contextlib.closing(bookkeeping.Appender(self.log_path, most_bytes=_KEPT_BYTES)) as log:
            log.write(f"{self._prefix()}--- {self._name}: {shlex.join(self._command)} ({began})\n".encode())
            while chunk := self._read():
                if self._to_terminal:
                    held = self._show(held + chunk)
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._log_line(log, line)
            if held:
                _write_to_terminal(log_filters.without(held))
            if pending:
                self._log_line(log, pending)
        os.close(self._read_end)

    def _show(self, text: bytes) -> bytes:
        """Writes `text` without noise; returns its last line, unwritten, if more of that line is to come."""
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        whole, rest = text[:end], text[end:]  # it may be the beginning of a line of noise
        _write_to_terminal(log_filters.without(whole))
        if rest and not select.select([self._read_end], [], [], _HOLD_SECONDS)[0]:
            _write_to_terminal(rest)
            rest = b""
        return rest

    def _read(self) -> bytes:
        try:
            return os.read(self._read_end, 1 << 16)
        except OSError:  # a pseudo-terminal raises this if its other side is closed
            return b""

    def _log_line(self, log: bookkeeping.Appender, raw: bytes) -> None:
        line = _ESCAPES.sub(b"", raw).rstrip(b"\r").split(b"\r")[-1]  # keeps the last version of a redrawn line
        shown = log_filters.without(line)
        if shown or not line:
            self.last_lines.append(shown.decode(errors="replace"))
        log.write(self._prefix().encode() + line + b"\n")
        log.flush()


def _write_to_terminal(chunk: bytes) -> None:
    with contextlib.suppress(OSError):  # a closed terminal ends the copying, not the run
        sys.stdout.buffer.write(chunk)
        terminal.flush()


def run(log_path: Path, name: str, command: Sequence[str]) -> int:
    """Runs `command` here and logs its output as that of host `name`; returns its exit code, 128 + N after signal N."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler, because the command would inherit SIG_IGN
    with tempfile.TemporaryDirectory(prefix="renga-step-") as folder:
        host = HostProcess(command, log_path=log_path, name=name, step_file=Path(folder) / "step")
        returncode = host.wait()
        host.finish()
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
