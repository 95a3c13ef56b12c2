"""Merges the logs of all hosts by time: from a run directory, or live from the hosts of a slice.

Every line begins with its time (`launch.hosts.log_prefix`), and a line without one stays after the line before it. Live
lines are held back for a moment, because those of some hosts arrive later.
"""

from __future__ import annotations

import heapq
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from core import paths
from core.errors import UserError
from launch.hosts import log_prefix

_HOLD_SECONDS = 1.5
_POLL_SECONDS = 0.2


def show(run_dir: str) -> int:
    """Prints the merged logs of all hosts from a run directory.

    Raises:
      UserError: it has none.
    """
    folder = paths.resolve(run_dir) / "logs"
    files = sorted(folder.glob("host_*.log")) if folder.exists() else []
    if not files:
        raise UserError(
            f"{folder} has no host_N.log: a simulated run has them in its run directory; those of a slice are on its "
            "hosts: launch/pod.sh logs --tpu NAME --zone ZONE"
        )
    for line in merged(file.read_bytes().decode(errors="replace").splitlines() for file in files):
        print(line)
    return 0


def merged(logs: Iterable[Iterable[str]]) -> Iterator[str]:
    """Merges the lines of several logs by time; each log keeps its order."""
    return (line for _, line in heapq.merge(*map(_timed, logs), key=lambda timed: timed[0]))


def _timed(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    latest = ""
    for line in lines:
        latest = log_prefix.time_of(line) or latest
        yield latest, line


def follow(
    commands: Sequence[Sequence[str]], *, write: Callable[[str], object] = lambda line: print(line, flush=True)
) -> int:
    """Runs commands that print logs until all have ended, and writes their lines merged.

    Args:
      commands: argv of each.
      write: gets the lines.

    Returns:
      The exit code of the first that failed, or 0.
    """
    running = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, errors="replace") for argv in commands]
    arrived: queue.Queue[tuple[str, float, str]] = queue.Queue()
    threads = [threading.Thread(target=_read, args=(process, arrived), daemon=True) for process in running]
    for thread in threads:
        thread.start()
    held: list[tuple[str, int, float, str]] = []
    number = 0
    try:
        while True:
            alive = any(thread.is_alive() for thread in threads)
            while not arrived.empty():
                timed, at, line = arrived.get()
                heapq.heappush(held, (timed, number, at, line))
                number += 1
            while held and (not alive or time.monotonic() - held[0][2] > _HOLD_SECONDS):
                write(heapq.heappop(held)[3])
            if not alive and arrived.empty():
                break
            time.sleep(_POLL_SECONDS)
    except (KeyboardInterrupt, BrokenPipeError) as stop:
        for process in running:
            process.terminate()
        if isinstance(stop, BrokenPipeError):
            raise
    codes = [process.wait() for process in running]
    for argv, code in zip(commands, codes, strict=True):
        if code:
            print(f"failed (exit code {code}): {' '.join(argv)}", file=sys.stderr)
    return next((code for code in codes if code), 0)


def _read(process: subprocess.Popen, arrived: queue.Queue) -> None:
    for timed, line in _timed(line.rstrip("\n") for line in process.stdout):
        arrived.put((timed, time.monotonic(), line))
