"""What hangs on the training loop: progress, evaluation, checkpoints, profiles, and the stop on a non-finite loss.

Each hook does one thing and is told of the run only through its constructor, so that a run is a list of hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from core.train_state import TrainState
from core.training import compile_cache, trainer
from core.training.trainer import Hook, StepReport
from core.types import WeightedSum

Scalars = Callable[[int, Mapping[str, float]], None]  # (step, name -> value)


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient is not a number."""


class StopOnNonFinite(Hook):
    """Ends the run at the first step whose loss or gradient norm is not finite, before it can be saved."""

    def after_step(self, report: StepReport) -> None:
        """Raises NonFiniteLossError."""
        bad = {k: v for k, v in report.metrics.items() if k in ("loss", "gradient_norm") and not math.isfinite(v)}
        if bad:
            found = ", ".join(f"{k} = {v}" for k, v in bad.items())
            raise NonFiniteLossError(
                f"step {report.step}: {found}. The last checkpoint precedes this step. Usual causes: a learning rate "
                "that is too high, no warm-up, or a bad batch; start again from the checkpoint with a lower rate."
            )


class Compiled(Hook):
    """Says once, behind the first step, what had to be compiled to get there."""

    def __init__(self, write: Callable[[int, compile_cache.Totals], None]):
        """`write(step, totals)` is called with what the process has compiled so far."""
        self._write: Callable[[int, compile_cache.Totals], None] | None = write

    def after_step(self, report: StepReport) -> None:
        """Writes behind the first step."""
        if self._write is not None:
            self._write(report.step, compile_cache.totals())
            self._write = None


class Log(Hook):
    """Writes the metrics of every `every`-th step.

    Loss, learning rate and gradient norm are those of the step. Rates and the model's own metrics are means over all
    steps since the last line; a metric of which these steps had nothing (no row halted) is left out.
    """

    def __init__(self, write: Scalars, *, every: int, items_per_step: int, last_step: int | None = None):
        """`write(step, values)` gets the metrics, step_seconds, input_wait_seconds and tokens_per_second."""
        self._write = write
        self._every = every
        self._items_per_step = items_per_step
        self._last_step = last_step
        self._seconds: list[float] = []
        self._waits: list[float] = []
        self._sums: dict[str, WeightedSum] = {}
        self._started = False

    def after_step(self, report: StepReport) -> None:
        """Writes when it is time, and the first and the last step."""
        self._seconds.append(report.seconds)
        self._waits.append(report.input_wait_seconds)
        self._sums = trainer.add_sums(self._sums, report.sums)
        if self._started and report.step % self._every and report.step != self._last_step:
            return
        self._started = True
        mean_seconds = sum(self._seconds) / len(self._seconds)
        rates = {
            "step_seconds": mean_seconds,
            "input_wait_seconds": sum(self._waits) / len(self._waits),
            "tokens_per_second": self._items_per_step / mean_seconds,
        }
        own = trainer.means(self._sums)
        self._seconds, self._waits, self._sums = [], [], {}
        self._write(report.step, {**own, **report.metrics, **rates})


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
    """Every `every` steps, and behind the last: means over the validation batches."""

    def __init__(self, run: Callable[[TrainState], Mapping[str, float]], write: Scalars, *, every: int, last_step: int):
        """`run(state)` evaluates; `write(step, values)` gets its means as `validation/<name>`."""
        self._run = run
        self._write = write
        self._every = every
        self._last_step = last_step
        self.latest: dict[str, float] = {}

    def needs_state(self, step: int) -> bool:
        """At multiples of `every`, and at the end."""
        return step % self._every == 0 or step == self._last_step

    def at_boundary(self, step: int, state: TrainState) -> None:
        """Evaluates and writes."""
        self.latest = {f"validation/{k}": v for k, v in self._run(state).items()}
        self._write(step, self.latest)


class Save(Hook):
    """Saves the state, the position in the data, and what the run is, whenever it is due."""

    def __init__(
        self,
        checkpoints: Any,
        position: Callable[[], Mapping[str, bytes]],
        meta: Mapping[str, Any],
        *,
        due: Callable[[int], bool],
        costs: Any,
    ):
        """Takes a run's `Checkpoints`, the prefetcher's `position`, what to keep beside them, and when.

        `costs.add(cost)` is told of each save that is complete, `costs.end()` that there will be no more.
        """
        self._checkpoints = checkpoints
        self._position = position
        self._meta = meta
        self._due = due
        self._costs = costs

    def before_step(self, step: int) -> None:
        """Raises soon after a save has failed on any host."""
        del step
        self._checkpoints.check()
        self._tell()

    def needs_state(self, step: int) -> bool:
        """When it is due."""
        return self._due(step)

    def at_boundary(self, step: int, state: TrainState) -> None:
        """Starts an asynchronous save; the copy off the devices is done when this returns."""
        self._checkpoints.save(step, state=state, data=self._position(), meta=self._meta)

    def close(self) -> None:
        """Waits for the last save; its error surfaces here."""
        self._checkpoints.wait()
        self._tell()
        self._costs.end()

    def _tell(self) -> None:
        for cost in self._checkpoints.costs():
            self._costs.add(cost)


class PreemptedError(RuntimeError):
    """The machine is to be given back; the run can be continued."""


class StopWhenPreempted(Hook):
    """Ends the run at the step that all hosts agree on once one of them was told to stop; stands behind `Save`."""

    def __init__(self, preempted: Callable[[int], bool]):
        """`preempted(step)` is asked once a step, on every host, and answers alike on all."""
        self._preempted = preempted
        self._stopping = False

    def before_step(self, step: int) -> None:
        """Asks."""
        self._stopping = self._stopping or self._preempted(step)

    def needs_state(self, step: int) -> bool:
        """Whether this step is the last."""
        del step
        return self._stopping

    def at_boundary(self, step: int, state: TrainState) -> None:
        """Raises PreemptedError; the state has been saved."""
        del state
        raise PreemptedError(f"told to stop (SIGTERM): saved step {step}; the same command continues from there")


class Profile(Hook):
    """Traces windows of `num_steps` steps that start at the given ones, on every host into one session."""

    def __init__(self, start: Callable[[int], Any], *, at: Sequence[int], num_steps: int = 3):
        """`start(step)` begins a trace and returns something with `stop()`."""
        self._start = start
        self._at = frozenset(at)
        self._num_steps = num_steps
        self._window: Any = None
        self._until = 0

    def before_step(self, step: int) -> None:
        """Opens a window."""
        if step in self._at and self._window is None:
            self._window, self._until = self._start(step), step + self._num_steps - 1

    def after_step(self, report: StepReport) -> None:
        """Closes it once its last step has finished."""
        if self._window is not None and report.step >= self._until:
            self.close()

    def close(self) -> None:
        """Ends an open window."""
        if self._window is not None:
            self._window.stop()
            self._window = None
