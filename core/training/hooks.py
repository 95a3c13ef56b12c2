"""Hooks of the training loop: progress, evaluation, checkpoints, preemption, profiles.

Each hook does one thing and gets everything it needs through its constructor. More hooks are in `non_finite`,
`goodput`, `run_lock` and `core.training.replicas`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from core.health import phase
from core.train_state import TrainState
from core.training import compile_cache, trainer
from core.training.profile_requests import Window
from core.training.trainer import Hook, StepReport
from core.types import WeightedSum

Scalars = Callable[[int, Mapping[str, float]], None]  # (step, name -> value)


class Compiled(Hook):
    """Reports once, after the first step, what has been compiled."""

    def __init__(self, write: Callable[[int, compile_cache.Totals], None]):
        """Takes `write(step, totals)`, which is called with the compilations of the process so far."""
        self._write: Callable[[int, compile_cache.Totals], None] | None = write

    def after_step(self, report: StepReport) -> None:
        """Writes after the first step."""
        if self._write is not None:
            self._write(report.step, compile_cache.totals())
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


def evaluate(eval_step: Callable, state: TrainState, batches: Any, *, num_batches: int) -> dict[str, float]:
    """Means over `num_batches` batches; every host runs the same number.

    Args:
      eval_step: `(state, batch) -> sums`.
      state: what to evaluate; not consumed.
      batches: iterator of device batches.
      num_batches: how many.

    Returns:
      The model's metrics by name, as `loss`, `accuracy`, …; without those of which the batches had nothing.
    """
    total: dict[str, WeightedSum] = {}
    for _ in range(num_batches):
        total = trainer.add_sums(total, jax.device_get(eval_step(state, next(batches))))
    return trainer.means(total)


class Evaluate(Hook):
    """Evaluates every `every` steps and after the last step."""

    def __init__(self, run: Callable[[TrainState], Mapping[str, float]], write: Scalars, *, every: int, last_step: int):
        """Takes `run(state)`, which evaluates, and `write(step, values)`, which gets `validation/<name>`."""
        self._run = run
        self._write = write
        self._every = every
        self._last_step = last_step
        self.latest: dict[str, float] = {}

    def needs_state(self, step: int) -> bool:
        """Returns True at multiples of `every` and at the last step."""
        return step % self._every == 0 or step == self._last_step

    def at_boundary(self, step: int, state: TrainState) -> None:
        """Evaluates and writes."""
        with phase.enter(phase.EVALUATING):
            self.latest = {f"validation/{k}": v for k, v in self._run(state).items()}
        self._write(step, self.latest)


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
        """Raises an error soon after a save has failed on any host."""
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


class Profile(Hook):
    """Profiles windows of steps: those of the configuration and those requested while the run trains."""

    def __init__(
        self,
        start: Callable[[int], Any],
        *,
        at: Sequence[int],
        num_steps: int = 3,
        asked: Callable[[int], Window | None] = lambda step: None,
        done: Callable[[Window], None] = lambda window: None,
    ):
        """Profiles windows of `num_steps` at the given steps, and the requested ones.

        Args:
          start: `start(step)` begins the trace of the window that begins at `step`; what it returns has `stop()`.
          at: steps at which a window begins.
          num_steps: of each of these.
          asked: the window that somebody wants and that `step` is in; no window is given twice.
          done: is told of a window that was asked for, once it is written.
        """
        self._start = start
        self._at = frozenset(at)
        self._num_steps = num_steps
        self._asked = asked
        self._done = done
        self._open: tuple[Any, Window, bool] | None = None

    def before_step(self, step: int) -> None:
        """Opens a window if one begins at this step."""
        if self._open is not None:
            return
        asked = self._asked(step)
        planned = Window(step, step + self._num_steps - 1) if step in self._at else None
        if window := asked or planned:
            self._open = self._start(window.first_step), window, asked is not None

    def needs_state(self, step: int) -> bool:
        """Returns True at the last step of a window, so that it finishes before the next step is dispatched.

        A host that learned of a window late may answer differently from the others; it then only reads that step's
        metrics earlier.
        """
        return self._open is not None and step >= self._open[1].last_step

    def after_step(self, report: StepReport) -> None:
        """Closes the window after its last step."""
        if self._open is not None and report.step >= self._open[1].last_step:
            self.close()

    def close(self) -> None:
        """Closes an open window."""
        if self._open is not None:
            trace, window, was_asked = self._open
            self._open = None
            trace.stop()
            if was_asked:
                self._done(window)


class MemoryProfile(Hook):
    """Writes a profile of the device memory after the given steps."""

    def __init__(self, write: Callable[[int], None], *, at: Sequence[int]):
        """Takes `write(step)`, which writes the profile."""
        self._write = write
        self._at = frozenset(at)

    def after_step(self, report: StepReport) -> None:
        """Writes at the given steps; the next step has usually begun by then, so its arrays are included."""
        if report.step in self._at:
            self._write(report.step)
