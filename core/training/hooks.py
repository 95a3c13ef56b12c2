"""Hooks of the training loop: logs, checkpoints and preemption.

Each hook does one thing and gets everything it needs through its constructor. More hooks are in `evaluation`,
`goodput`, `non_finite`, `profiling`, `replicas` and `run_lock`.
"""

from __future__ import annotations

import mmap
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core.health import phase
from core.train_state import TrainState
from core.training import compilation, trainer
from core.training.trainer import Hook, StepReport
from core.types import WeightedSum

_STEP_FILE_BYTES = 64

Scalars = Callable[[int, Mapping[str, float]], None]  # (step, name -> value)


class Compiled(Hook):
    """Reports the compiled programs once, after the first step."""

    def __init__(self, write: Callable[[int, compilation.Totals], None]):
        """Takes `write(step, totals)`, which is called with the compilations of the process so far."""
        self._write: Callable[[int, compilation.Totals], None] | None = write

    def after_step(self, report: StepReport) -> None:
        """Reports after the first step."""
        if self._write is not None:
            self._write(report.step, compilation.totals())
            self._write = None


class Log(Hook):
    """Writes the metrics of every `every`-th step.

    Loss, learning rate and gradient norm are those of the step. Rates and the model's own metrics are means over all
    steps since the last line; a metric whose weight is 0 in these steps is left out.
    """

    def __init__(self, write: Scalars, *, every: int, items_per_step: int, last_step: int | None = None):
        """Takes `write(step, values)`: values are metrics, tokens_per_second, and step_seconds with its parts."""
        self._write = write
        self._every = every
        self._items_per_step = items_per_step
        self._last_step = last_step
        self._seconds: list[float] = []
        self._waits: list[float] = []
        self._on_devices: list[float] = []
        self._sums: dict[str, WeightedSum] = {}
        self._started = False

    def after_step(self, report: StepReport) -> None:
        """Writes at the first and the last step and at multiples of `every`."""
        self._seconds.append(report.seconds)
        self._waits.append(report.input_wait_seconds)
        self._on_devices.append(report.device_seconds)
        self._sums = trainer.add_sums(self._sums, report.sums)
        if self._started and report.step % self._every and report.step != self._last_step:
            return
        self._started = True
        mean_seconds, waits, on_devices = map(_mean, (self._seconds, self._waits, self._on_devices))
        rates = {
            "step_seconds": mean_seconds,
            "input_wait_seconds": waits,
            "device_seconds": on_devices,
            "host_seconds": max(mean_seconds - waits - on_devices, 0.0),
            "tokens_per_second": self._items_per_step / mean_seconds,
        }
        own = trainer.means(self._sums)
        self._seconds, self._waits, self._on_devices, self._sums = [], [], [], {}
        self._write(report.step, {**own, **report.metrics, **rates})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Save(Hook):
    """Saves the state, the position in the data and the run's metadata at the steps that are due."""

    def __init__(
        self,
        checkpoints: Any,
        position: Callable[[], Mapping[str, bytes]],
        meta: Mapping[str, Any],
        *,
        due: Callable[[int], bool],
        costs: Any,
        check: Callable[[], None] = lambda: None,
    ):
        """Takes a run's `Checkpoints`, the prefetcher's `position`, the metadata to store, and when a save is due.

        `costs.add(cost)` is called for each completed save, `costs.end()` after the last. `check()` is called before
        anything is written, and raises an error if nothing must be.
        """
        self._checkpoints = checkpoints
        self._position = position
        self._meta = meta
        self._due = due
        self._costs = costs
        self._check = check

    def before_step(self, step: int) -> None:
        """Raises an error if the current save has failed on any host."""
        del step
        self._checkpoints.check()
        self._tell()

    def needs_state(self, step: int) -> bool:
        """Returns True if a save is due."""
        return self._due(step)

    def at_boundary(self, step: int, state: TrainState) -> None:
        """Starts an asynchronous save; the arrays are copied off the devices when this returns."""
        with phase.enter(phase.SAVING):
            self._checkpoints.wait()  # the save before this one may take minutes
            self._check()
            self._checkpoints.save(step, state=state, data=self._position(), meta=self._meta)

    def close(self) -> None:
        """Waits for the last save, and raises its error."""
        with phase.enter(phase.SAVING):
            self._checkpoints.wait()
        self._tell()
        self._costs.end()

    def _tell(self) -> None:
        for cost in self._checkpoints.costs():
            self._costs.add(cost)


class PreemptedError(RuntimeError):
    """The run was preempted after saving a checkpoint, and can be resumed."""


class StopWhenPreempted(Hook):
    """Ends the run at a step that all hosts agree on after one of them was preempted. Must follow `Save`."""

    def __init__(self, preempted: Callable[[int], bool]):
        """Takes `preempted(step)`, which is called once per step on every host and returns the same on all."""
        self._preempted = preempted
        self._stopping = False

    def before_step(self, step: int) -> None:
        """Checks for a preemption."""
        self._stopping = self._stopping or self._preempted(step)

    def needs_state(self, step: int) -> bool:
        """Returns True if this step is the last."""
        del step
        return self._stopping

    def at_boundary(self, step: int, state: TrainState) -> None:
        """Raises PreemptedError; the state has been saved."""
        del state
        raise PreemptedError(f"preempted (SIGTERM): saved a checkpoint at step {step}; run the same command to resume")


class NoteStep(Hook):
    """Writes `host 2 step 17` before each step, for the process that prefixes this host's log.

    The file is memory-mapped, so that writing copies 64 bytes and needs no system call.
    """

    def __init__(self, path: str, *, name: str, step: int):
        """Creates the file for the host of this name, which starts after `step`."""
        file = pathlib.Path(path)
        file.write_bytes(bytes(_STEP_FILE_BYTES))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _STEP_FILE_BYTES)
        self._name = name
        self.before_step(step)

    def before_step(self, step: int) -> None:
        """Writes the step."""
        self._map[:] = f"{self._name} step {step}".encode()[:_STEP_FILE_BYTES].ljust(_STEP_FILE_BYTES, b"\0")
