"""Merges the logs of all hosts by time: from a run directory, or live from the hosts of a slice."""

import datetime
import heapq
import itertools
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from core.errors import UserError
from core.files import paths
from core.hosts import exit_codes
from launch.hosts import host_output

_HOLD_SECONDS = 1.5
_POLL_SECONDS = 0.2


def show(run_dir: str) -> int:
    """Prints the merged logs of a run directory; returns 0. Raises UserError if it has none."""
    folder = paths.resolve(run_dir) / "logs"
    files = sorted(folder.glob("host_*.log")) if folder.exists() else []
    if not files:
        raise UserError(
            f"{folder} has no host_N.log: a simulated run has them in its run directory; those of a slice are on its "
            "hosts: launch/pod.sh logs --tpu NAME --zone ZONE"
        )

    def timed(file: paths.Path) -> Iterator[tuple[str, str]]:
        written = datetime.datetime.fromtimestamp(file.stat().mtime)
        return _timed(file.read_bytes().decode(errors="replace").splitlines(), until=lambda: written)

    for _, line in heapq.merge(*map(timed, files), key=lambda timed: timed[0]):
        print(line)
    return 0


def follow(
    commands: Sequence[Sequence[str]], *, write: Callable[[str], object] = lambda line: print(line, flush=True)
) -> int:
    """Runs commands that print logs, and calls `write` with each line, merged by time.

    Returns the first exit code that is not 0, or 0; 130 after Ctrl-C. Lines wait for a moment, as others may come late.
    """
    running = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, errors="replace") for argv in commands]
    arrived: queue.PriorityQueue[tuple[str, int, float, str]] = queue.PriorityQueue()
    numbers = itertools.count()  # keeps the order of lines of the same time

    def read(process: subprocess.Popen) -> None:
        assert process.stdout is not None
        for timed, line in _timed((line.rstrip("\n") for line in process.stdout), until=datetime.datetime.now):
            arrived.put((timed, next(numbers), time.monotonic(), line))

    threads = [threading.Thread(target=read, args=(process,), daemon=True) for process in running]
    for thread in threads:
        thread.start()
    try:
        alive = True
        while alive or not arrived.empty():
            time.sleep(_POLL_SECONDS)
            alive = any(thread.is_alive() for thread in threads)
            while not arrived.empty() and (not alive or time.monotonic() - arrived.queue[0][2] > _HOLD_SECONDS):
                write(arrived.get()[-1])
    except (KeyboardInterrupt, BrokenPipeError) as stop:
        for process in running:
            process.terminate()
        if isinstance(stop, BrokenPipeError):
            raise
        for process in running:
            process.wait()
        return exit_codes.of_process(-signal.SIGINT)
    codes = [exit_codes.of_process(process.wait()) for process in running]
    for argv, code in zip(commands, codes, strict=True):
        if code:
            print(f"failed (exit code {code}): {' '.join(argv)}", file=sys.stderr)
    return next((code for code in codes if code), 0)


def _timed(lines: Iterable[str], *, until: Callable[[], datetime.datetime]) -> Iterator[tuple[str, str]]:
    """Yields each line after its time with a year, which prefixes lack.

    `until`: returns a time after which no line was written, to within a day: clocks and time zones may differ.
    """
    latest = ""
    for line in lines:
        if time_ := host_output.time_of(line):
            newest = until() + datetime.timedelta(days=1)
            is_of_last_year = time_ > f"{newest:%m-%d} 24"
            latest = f"{newest.year - is_of_last_year} {time_}"
        yield latest, line
