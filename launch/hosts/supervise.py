"""Restarts a run whose exit code says that a restart can help.

Restarts are counted since the last new checkpoint: a run that makes progress is restarted without limit, one that keeps
failing at the same step is given up after the allowed number, with growing pauses.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

from core import paths
from core.health import exit_codes

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 300.0
_POLL_SECONDS = 0.2


def supervise(
    attempt: Callable[[], int],
    *,
    restarts: int,
    newest_step: Callable[[], int | None],
    requested: Sequence[int],
    ending: Callable[[int], exit_codes.Ending] = exit_codes.ending,
    first_pause_seconds: float = FIRST_PAUSE_SECONDS,
) -> int:
    """Calls `attempt`, and repeats it as long as its exit code says that a restart can help.

    Args:
      attempt: runs to the end and returns an exit code.
      restarts: how many restarts without progress to allow; 0 for none.
      newest_step: returns the newest checkpointed step, or None.
      requested: gets an exit code when this process is asked to stop; nothing is started after that.
      ending: returns the meaning of an exit code, and whether a restart can help.
      first_pause_seconds: before the first restart; doubles with each restart without progress.

    Returns:
      The exit code of the last attempt.
    """
    progress = Progress(newest_step) if restarts else None
    while True:
        code = attempt()
        meaning, can_help = ending(code)
        if requested or progress is None or not can_help:
            return code
        failures = progress.after_failure()
        if failures > restarts:
            print(f"ended with exit code {code}: {meaning}; given up, {restarts} restarts brought no checkpoint")
            return code
        pause_seconds = min(first_pause_seconds * 2 ** (failures - 1), LONGEST_PAUSE_SECONDS)
        print(
            f"ended with exit code {code}: {meaning}. Starts again in {pause_seconds:g} s, {progress.goes_on} "
            f"(restart {failures} of at most {restarts} without a new checkpoint)",
            flush=True,
        )
        if not waited(pause_seconds, requested):
            return requested[0]


class Progress:
    """Tracks the newest checkpoint of a run, and how often it failed since that one.

    If checkpoints cannot be listed (a bucket that does not answer), neither counts as changed.

    Attributes:
      goes_on: where a restart would resume, in words.
    """

    def __init__(self, newest_step: Callable[[], int | None]):
        """Lists the checkpoints for the first time."""
        self._newest_step = newest_step
        self._furthest: int | None = None  # -1: no checkpoint; None: not known yet
        self._failures = 0
        self.goes_on = ""
        self._look()

    def after_failure(self) -> int:
        """Lists the checkpoints again and returns how often the run failed since the last new one."""
        before = self._furthest
        self._look()
        is_further = before is not None and self._furthest > before
        self._failures = 1 if is_further else self._failures + 1
        return self._failures

    def _look(self) -> None:
        try:
            newest = self._newest_step()
        except Exception as error:  # a bucket fails with its client's own types
            print(f"cannot list checkpoints: {type(error).__name__}: {error}", flush=True)
            self.goes_on = "from its newest checkpoint"
            return
        self._furthest = max(-1 if self._furthest is None else self._furthest, -1 if newest is None else newest)
        self.goes_on = "from the start" if newest is None else f"from the checkpoint of step {newest}"


def run_child(command: Sequence[str], requested: Sequence[int]) -> int:
    """Runs `command` to its end, and sends it SIGTERM when a stop is requested.

    Returns:
      Its exit code, or 128 + N if signal N ended it.
    """
    child = subprocess.Popen(command)
    while child.poll() is None and not requested:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_SECONDS)
    child.terminate()  # nothing if it has ended
    return exit_codes.of_process(child.wait())


def newest_step(run_dir: str) -> int | None:
    """Returns the step of a run's newest complete checkpoint, or None. Raises what the bucket's client raises."""
    from core.checkpoints import steps  # orbax takes a second to import

    return max(steps.complete(paths.resolve(run_dir) / "checkpoints"), default=None)


def is_finished(run_dir: str, *, last_step: int) -> bool:
    """Returns whether a run already has its last checkpoint; if so, prints what to do next."""
    try:
        newest = newest_step(run_dir)
    except Exception as error:  # a bucket fails with its client's own types; the hosts look again
        print(f"cannot list checkpoints: {type(error).__name__}: {error}", flush=True)
        return False
    if newest is None or newest < last_step:
        return False
    print(
        f"nothing to train: {run_dir} has the checkpoint of step {newest:,}, and this run ends after step "
        f"{last_step:,}.\n"
        "  train longer   raise TOTAL_STEPS or --steps\n"
        "  start over     give another --run-dir\n"
        f"  evaluate it    launch/run evaluate {run_dir}"
    )
    return True


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Inside, SIGINT, SIGTERM and SIGHUP append their exit code to the list that this yields, and do nothing else."""
    requested: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: requested.append(128 + number)) for number in numbers}
    try:
        yield requested
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def waited(seconds: float, requested: Sequence[int]) -> bool:
    """Sleeps; returns False, early, if a stop is requested."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not requested:
        time.sleep(min(_POLL_SECONDS, seconds))
    return not requested
