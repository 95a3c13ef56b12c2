"""Starts a run again when its process ended in a way that another start can help.

The one idea: what counts is progress. A run that saved a checkpoint since its last start has all its restarts again;
one that fails at the same place over and over is given up after so many, with pauses that grow, and its code is ours.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

from core import paths
from core.watch import exit_codes

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 300.0
_POLL_SECONDS = 0.2


def supervise(
    attempt: Callable[[], int],
    *,
    restarts: int,
    newest_step: Callable[[], int | None],
    requested: Sequence[int],
    first_pause_seconds: float = FIRST_PAUSE_SECONDS,
) -> int:
    """Runs `attempt` to its end, and again while its exit code says that this can help.

    Args:
      attempt: runs to the end and returns an exit code.
      restarts: how many times to start again without progress; 0 for never.
      newest_step: of the checkpoints there are, None where there is none.
      requested: gets an exit code when somebody asks this process to stop; nothing is started after that.
      first_pause_seconds: before the first restart; doubles with each that brings no progress.

    Returns:
      The exit code of the last attempt.
    """
    progress = Progress(newest_step) if restarts else None
    while True:
        code = attempt()
        ending = exit_codes.ending(code)
        if requested or progress is None or not ending.restart:
            return code
        failures = progress.after_failure()
        if failures > restarts:
            print(f"ended with exit code {code}: {ending.meaning}; given up, {restarts} restarts brought no checkpoint")
            return code
        pause_seconds = min(first_pause_seconds * 2 ** (failures - 1), LONGEST_PAUSE_SECONDS)
        print(
            f"ended with exit code {code}: {ending.meaning}. Starts again in {pause_seconds:g} s, {progress.goes_on} "
            f"(restart {failures} of at most {restarts} without a new checkpoint)",
            flush=True,
        )
        if not waited(pause_seconds, requested):
            return requested[0]


class Progress:
    """How far a run came by its checkpoints, and how often it failed without coming further.

    A look that fails (a bucket that does not answer) says nothing: not that there are none, nor that there are more.

    Attributes:
      goes_on: where another start would go on from, in words.
    """

    def __init__(self, newest_step: Callable[[], int | None]):
        """Looks for the first time."""
        self._newest_step = newest_step
        self._is_known, self._furthest, self._failures = False, -1, 0
        self.goes_on = ""
        self._look()

    def after_failure(self) -> int:
        """Looks again; how often the run failed since it last came further, with this time."""
        was_known, before = self._is_known, self._furthest
        self._look()
        is_further = was_known and self._furthest > before
        self._failures = 1 if is_further else self._failures + 1
        return self._failures

    def _look(self) -> None:
        try:
            newest = self._newest_step()
        except Exception as error:  # a bucket fails with its client's own types
            print(f"cannot look for checkpoints: {type(error).__name__}: {error}", flush=True)
            self.goes_on = "from its newest checkpoint"
            return
        self._is_known = True
        self._furthest = max(self._furthest, -1 if newest is None else newest)
        self.goes_on = "from the start" if newest is None else f"from the checkpoint of step {newest}"


def run_child(command: Sequence[str], requested: Sequence[int]) -> int:
    """Runs `command` to its end; asked to stop, it asks the child to.

    Returns:
      Its exit code, 128 + N where signal N ended it.
    """
    child = subprocess.Popen(command)
    told = False
    while child.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_SECONDS)
        if requested and not told:
            told = True
            child.send_signal(signal.SIGTERM)
    return exit_codes.of_process(child.returncode)


def newest_step(run_dir: str) -> int | None:
    """The newest complete checkpoint of a run; None where there is none. Raises whatever a bucket's client raises."""
    from core.checkpoints import steps  # orbax takes a second to import

    return max(steps.complete(paths.resolve(run_dir) / "checkpoints"), default=None)


def is_finished(run_dir: str, *, last_step: int) -> bool:
    """Whether a run has its last checkpoint already; if so, prints what can be done with it."""
    try:
        newest = newest_step(run_dir)
    except Exception as error:  # a bucket fails with its client's own types; the hosts look again
        print(f"cannot look for checkpoints: {type(error).__name__}: {error}", flush=True)
        return False
    if newest is None or newest < last_step:
        return False
    print(
        f"nothing to train: {run_dir} has the checkpoint of step {newest:,}, and this run ends after step "
        f"{last_step:,}.\n"
        "  train on     raise TOTAL_STEPS or --steps\n"
        "  start anew   give another --run-dir\n"
        f"  score it     launch/run evaluate {run_dir}"
    )
    return True


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Inside, signals that ask us to stop add the exit code they stand for to a list, and do nothing else."""
    requested: list[int] = []

    def note(number, frame):
        requested.append(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield requested
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def waited(seconds: float, requested: Sequence[int]) -> bool:
    """Sleeps; whether the whole pause passed without anybody asking us to stop."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not requested:
        time.sleep(min(_POLL_SECONDS, seconds))
    return not requested
