"""Restarts a failed run if its exit code is one for which a restart can help."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from core.files import paths
from core.hosts import exit_codes, tied_process

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 300.0
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 75.0  # more than a simulated pod gives its hosts; a second Ctrl-C ends the child at once


def supervise(
    attempt: Callable[[], int],
    *,
    restarts: int,
    newest_step: Callable[[], int | None],
    requested: Sequence[int],
    ending: Callable[[int], exit_codes.Ending] = exit_codes.ending,
    first_pause_seconds: float = FIRST_PAUSE_SECONDS,
) -> int:
    """Calls `attempt`, and repeats it while a restart can help; returns an exit code.

    Args:
      attempt: runs to the end and returns an exit code.
      restarts: how many restarts without a new checkpoint to allow; 0 for none.
      newest_step: returns the newest step with a checkpoint, or None.
      requested: gets an exit code when a stop is requested; nothing is started after that.
      ending: returns the meaning of an exit code, and whether a restart can help.
      first_pause_seconds: pause before the first restart; it doubles with each restart without progress.
    """
    furthest, failures = _listed(newest_step) if restarts else None, 0
    while True:
        code = attempt()
        meaning, can_help = ending(code)
        if requested or not restarts or not can_help:
            return code
        newest = _listed(newest_step)
        is_further = furthest is not None and newest is not None and newest > furthest
        furthest = max((step for step in (furthest, newest) if step is not None), default=None)
        failures = 1 if is_further else failures + 1
        if failures > restarts:
            print(f"ended with exit code {code}: {meaning}; given up, {restarts} restarts brought no checkpoint")
            return code
        pause_seconds = min(first_pause_seconds * 2 ** (failures - 1), LONGEST_PAUSE_SECONDS)
        resumes = {None: "from its newest checkpoint", -1: "from the start"}
        print(
            f"ended with exit code {code}: {meaning}. Starts again in {pause_seconds:g} s, "
            f"{resumes.get(newest, f'from the checkpoint of step {newest}')} "
            f"(restart {failures} of at most {restarts} without a new checkpoint)",
            flush=True,
        )
        if not waited(pause_seconds, requested):
            return requested[0]


def _listed(newest_step: Callable[[], int | None]) -> int | None:
    """Returns the newest step, -1 if there is none, and None if checkpoints cannot be listed."""
    try:
        newest = newest_step()
    except Exception as error:  # a bucket fails with its client's own types
        print(f"cannot list checkpoints: {type(error).__name__}: {error}", flush=True)
        return None
    return -1 if newest is None else newest


def run_child(command: Sequence[str], requested: Sequence[int], *, output: IO[str] | None = None) -> int:
    """Runs `command` to its end, or ends it when a stop is requested; returns its exit code.

    The terminal sends Ctrl-C to the child as well: it has time to end before it gets SIGTERM.

    Args:
      requested: exit codes of the stops so far, which grows meanwhile.
      output: file for what the child prints; None: that of this process.
    """
    child = subprocess.Popen(
        tied_process.tied(command, signal.SIGTERM),  # it saves, and ends
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
    )
    while child.poll() is None and not requested:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_SECONDS)
    if requested and requested[0] == exit_codes.INTERRUPTED:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_SECONDS)
    child.terminate()  # nothing if it has ended
    return exit_codes.of_process(child.wait())


def newest_step(run_dir: str) -> int | None:
    """Returns the step of a run's newest complete checkpoint, or None."""
    from core.checkpoints import steps  # it imports jax, which takes a second

    return max(steps.complete(paths.resolve(run_dir) / "checkpoints"), default=None)


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Context in which SIGINT, SIGTERM and SIGHUP only append their exit codes to a list.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """
    requested: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    before = {number: signal.signal(number, lambda number, _: requested.append(128 + number)) for number in numbers}
    try:
        yield requested
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def waited(seconds: float, requested: Sequence[int]) -> bool:
    """Sleeps for `seconds` and returns True; returns False once a stop is requested."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not requested:
        time.sleep(min(_POLL_SECONDS, seconds))
    return not requested
