"""Saves in progress: their time limit, their errors on all hosts, and what they cost.

A host that fails posts its error for the other hosts; Orbax alone would wait minutes for that host.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from core import library_errors, units
from core.checkpoints.steps import said
from core.errors import UserError
from core.files import paths
from core.hosts import activity, distributed
from core.slices import GIB

THREAD = "checkpoint "  # prefix of the name of the thread that writes a checkpoint
BASE_SECONDS, SECONDS_PER_GIB = 300.0, 20.0  # 55 MB/s per host: a bucket accepts several times that
_LOOK_SECONDS = 0.5  # interval at which errors of other hosts are read


class Cost(NamedTuple):
    """The cost of one save.

    Attributes:
      blocked_seconds: how long training waited for it.
      write_seconds: time from its start until it was complete.
      bytes: total size of its arrays.
      alone: whether it is of parameters alone.
    """

    step: int
    blocked_seconds: float
    write_seconds: float
    bytes: int
    alone: bool = False


class WriteFailedError(RuntimeError):
    """A save failed, or exceeded its time limit."""

    says_all = True
    ends_without_save = True


class TooSlowError(TimeoutError):
    """A save exceeded its time limit."""


def limit_seconds(host_bytes: int) -> float:
    """Returns the default time limit of a save or a restore, in seconds."""
    return BASE_SECONDS + SECONDS_PER_GIB * host_bytes / GIB


def require_space(run_dir: str, size_bytes: int) -> None:
    """Raises UserError if the disk of a run directory has less than `size_bytes` free.

    Buckets are not checked.
    """
    directory = paths.resolve(run_dir)
    if not paths.is_remote(directory) and (free := _free_bytes(directory)) < size_bytes:
        raise UserError(
            f"{run_dir} is on a disk with {units.size(free)} free, and a checkpoint of this run takes up to "
            f"{units.size(size_bytes)}: free some space, or give a --run-dir on another disk"
        )


def _free_bytes(directory: paths.Path) -> int:
    return shutil.disk_usage(next(p for p in (directory, *directory.parents) if p.exists())).free


class Writing:
    """A save in progress."""

    def __init__(
        self,
        step: int,
        directory: paths.Path,
        *,
        size_bytes: int,
        host_bytes: int,
        limit_seconds: float,
        blocked_seconds: float = 0.0,
        alone: bool = False,
    ):
        """`host_bytes` is the size of the arrays on this host; the time limit counts from now; `alone` as in `Cost`."""
        self.step = step
        self._directory, self._alone = directory, alone
        self._size_bytes, self._host_bytes, self._limit_seconds = size_bytes, host_bytes, limit_seconds
        self._blocked_seconds, self._write_seconds = blocked_seconds, 0.0
        self._began, self._looked_at = time.monotonic(), 0.0
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread

    def start(self, begin: Callable[[], Callable[[], None]]) -> None:
        """Starts the save and continues it in a thread.

        `begin` copies the arrays off the devices; what it returns waits until all hosts have written.
        """
        try:
            with activity.enter(activity.SAVING, limit_seconds=self._limit_seconds):
                finish = begin()
        except Exception as error:
            self.fail(error)
            self._raise_own()
        self._blocked_seconds += time.monotonic() - self._began
        self._thread = threading.Thread(target=self._work, args=(finish,), name=f"{THREAD}{self.step}", daemon=True)
        self._thread.start()

    @property
    def has_begun(self) -> bool:
        """Whether a thread continues the save."""
        return "_thread" in vars(self)

    @property
    def cost(self) -> Cost:
        """The cost of a completed save."""
        return Cost(self.step, self._blocked_seconds, self._write_seconds, self._size_bytes, self._alone)

    def is_done(self) -> bool:
        """Returns whether the save is complete; WriteFailedError if it is known to have failed."""
        self._raise_own()
        if not self._thread.is_alive():
            self._raise_own()  # it may have failed since
            return True
        self._require_in_time()
        if time.monotonic() - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._raise_of_others()
        return False

    def wait(self) -> None:
        """Waits until all hosts have written; WriteFailedError if that fails or takes too long."""
        began = time.monotonic()
        with activity.enter(activity.SAVING, limit_seconds=self._limit_seconds):
            while self._thread.is_alive() and self._error is None:
                self._require_in_time()
                self._raise_of_others()
                self._thread.join(_LOOK_SECONDS)
        self._blocked_seconds += time.monotonic() - began
        self._raise_own()

    def _require_in_time(self) -> None:
        if time.monotonic() - self._began > self._limit_seconds:
            held = f"{self._host_bytes / GIB:.3g} GiB on this host"
            self.fail(TooSlowError(f"it was not written within {self._limit_seconds:.0f} s ({held})"))
            self._raise_own()

    def _work(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except BaseException as error:  # disks and buckets raise many types
            self.fail(error)
        self._write_seconds = time.monotonic() - self._began

    def fail(self, error: BaseException) -> None:
        """Records this host's first error and posts it to the other hosts; thread-safe."""
        with self._lock:
            if self._error is None:
                self._error = error
                distributed.post(f"{self._name}/{distributed.process_index()}", self._failure(error))

    @property
    def _name(self) -> str:
        return f"checkpoints/step_{self.step}/failed"

    def _failure(self, error: BaseException) -> str:
        short = library_errors.shortage(error)
        return (
            f"saving the checkpoint of step {self.step} to {self._directory} failed: "
            f"{short.said if short else said(error)}; {space(self._directory, needed_bytes=self._size_bytes)}"
            f"earlier checkpoints are intact. {self._advice(error)}, then start again."
        )

    def _advice(self, error: BaseException) -> str:
        if isinstance(error, TooSlowError):
            return (
                "If the storage is that slow, allow more: set save_limit_seconds of the experiment to "
                f"{2 * self._limit_seconds:.0f}"
            )
        short = library_errors.shortage(error)
        return short.mending if short else "Check free space and permissions"

    def _raise_own(self) -> None:
        if self._error is not None:
            raise WriteFailedError(self._failure(self._error)) from self._error

    def _raise_of_others(self) -> None:
        posted = distributed.posted(self._name)
        posted.pop(str(distributed.process_index()), None)
        for host, text in posted.items():
            raise WriteFailedError(f"host {host}: {text}")


def space(directory: paths.Path, *, needed_bytes: int) -> str:
    """Describes the size of a checkpoint and, on a disk, the free space."""
    takes = f"a checkpoint takes {needed_bytes / GIB:.3g} GiB"
    with contextlib.suppress(OSError):
        if not paths.is_remote(directory) and directory.exists():
            return f"{takes}, {paths.free_space(directory)}; "
    return f"{takes}; "


class SaveCosts:
    """Records what saves cost; reports the first, and the total at the end."""

    def __init__(
        self,
        *,
        say: Callable[[str], None],
        write: Callable[[int, Mapping[str, float]], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`say` receives lines for the terminal; `write(step, values)` records metrics."""
        self._say = say
        self._write = write
        self._clock = clock
        self._began = clock()
        self._costs: list[Cost] = []

    def add(self, cost: Cost) -> None:
        """Records a completed save."""
        self._costs.append(cost)
        what = "parameters_checkpoint" if cost.alone else "checkpoint"
        values = {
            f"{what}/blocked_seconds": cost.blocked_seconds,
            f"{what}/write_seconds": cost.write_seconds,
            f"{what}/bytes": float(cost.bytes),
        }
        self._write(cost.step, values)
        if len(self._costs) == 1:
            of = f"{units.size(cost.bytes)}{' (parameters alone)' * cost.alone}"
            self._say(
                f"step {cost.step:>6}: checkpoint of {of} saved; training waited "
                f"{units.seconds(cost.blocked_seconds, digits=2)}, "
                f"writing took {units.seconds(cost.write_seconds, digits=2)}"
            )

    def end(self) -> None:
        """Reports the total, if there were saves."""
        if not self._costs:
            return
        most_bytes = max(cost.bytes for cost in self._costs)
        each = "each" if all(cost.bytes == most_bytes for cost in self._costs) else "or less each"
        training_seconds = max(self._clock() - self._began, 1e-9)
        blocked = sum(cost.blocked_seconds for cost in self._costs)
        self._say(
            f"checkpoints: {len(self._costs)} saved, {units.size(most_bytes)} {each}; training waited "
            f"{units.seconds(blocked / len(self._costs), digits=2)} per save, "
            f"{100 * blocked / training_seconds:.2g} % of {units.seconds(training_seconds)}"
        )


def estimate_saves(
    run_dir: str,
    *,
    interval: int,
    keep: int,
    size_bytes: int,
    keeps_best: bool = False,
    keep_params: int = 0,
    params_bytes: int = 0,
) -> str:
    """Describes how often a run saves, how much and, on a disk, the free space.

    Args:
      interval: steps between saves.
      keep: number of latest checkpoints to keep.
      size_bytes: size of all arrays.
      keeps_best: whether the best checkpoint is kept, too.
      keep_params: number of latest checkpoints with parameters alone to keep; 0: none are saved.
      params_bytes: size of the parameters.
    """
    best_one = " and the best" * keeps_best
    text = (
        f"every {units.counted(interval, 'step')}, keeping the latest {keep}{best_one}, {units.size(size_bytes)} each"
    )
    directory = paths.resolve(run_dir)
    if paths.is_remote(directory):
        return text
    free_bytes = _free_bytes(directory)
    needed_bytes = (keep + keeps_best + 1) * size_bytes  # the oldest is removed after the newest is complete
    needed_bytes += (keep_params + 1) * params_bytes if keep_params else 0
    short = f", but {units.size(needed_bytes)} are needed: free some space, or lower KEEP_CHECKPOINTS"
    return f"{text}; {units.size(free_bytes)} of disk free{short * (free_bytes < needed_bytes)}"
