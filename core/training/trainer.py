"""The training loop: runs the steps and calls the hooks.

The devices do not wait for the host: the metrics of step n - 1 are read after step n has been dispatched, so that
logging happens while the devices work. Only if a hook needs the state (to evaluate or save it) is step n read before
n + 1 starts; a non-finite loss is then detected before it is saved.

    dispatch n   read metrics of n - 1   -> hook.after_step(n - 1)
    …            at a boundary: read n   -> hook.after_step(n), hook.at_boundary(n, state)

The loop records its current phase in `core.health.phase`, for the hosts that monitor one another.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from core.health import phase
from core.step import Metrics, TrainState
from core.types import Batch, WeightedSum

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]  # runs one step; may donate the state

# Names in profiles for the parts of a step on the host.
STEP = "train"
INPUT = "wait for the batch"
WAITING = "wait for the step"
HOOKS = "hooks"


class StepReport(NamedTuple):
    """The measurements of a finished step.

    Attributes:
      step: its number; the first is 1.
      metrics: scalar metrics of this step.
      sums: the model's metrics of this step as sums with weights; a weight may be 0.
      seconds: time since the end of the previous step; for the first step, since its dispatch (includes compilation).
      input_wait_seconds: the part of it during which the host waited for its batch.
      device_seconds: the part of it during which the host dispatched the step and waited for its result; the rest is
        work of the host itself.
    """

    step: int
    metrics: Mapping[str, float]
    sums: Mapping[str, WeightedSum]
    seconds: float
    input_wait_seconds: float
    device_seconds: float = 0.0


class Hook:
    """An extension of the training loop. Hooks run in order, on every host."""

    def before_step(self, step: int) -> None:
        """Called before step `step` is dispatched."""

    def after_step(self, report: StepReport) -> None:
        """Called when the metrics of a step are known, usually while the next step runs."""

    def needs_state(self, step: int) -> bool:
        """Returns whether to call `at_boundary` after this step; must be equal on all hosts."""
        del step
        return False

    def at_boundary(self, step: int, state: TrainState) -> None:
        """Called after step `step`, before the next is dispatched; `state` is valid only during this call."""

    def close(self) -> None:
        """Called when training ends, also after an error."""


class DeviceBatches(Protocol):
    """An iterator over batches on the devices."""

    input_wait_seconds: float

    def __next__(self) -> Batch:
        """Returns the next batch."""


class _Dispatched(NamedTuple):
    step: int
    metrics: Metrics
    input_wait_seconds: float


class _Reader:
    """Turns dispatched steps into reports, timing from one finished step to the next."""

    def __init__(self, hooks: Sequence[Hook]):
        self._hooks = hooks
        self._finished_at = time.perf_counter()
        self._device_seconds = 0.0
        self.phase = phase.COMPILING  # until the first step is read: the hosts compile at different speeds

    @contextlib.contextmanager
    def with_devices(self) -> Iterator[None]:
        """Context in which the host dispatches work to the devices or waits for them, which is timed."""
        began = time.perf_counter()
        with phase.enter(self.phase):
            yield
        self._device_seconds += time.perf_counter() - began

    def read(self, dispatched: _Dispatched) -> None:
        with self.with_devices(), jax.profiler.TraceAnnotation(WAITING):
            found = jax.device_get(dict(dispatched.metrics))  # waits for the step
        self.phase = phase.TRAINING
        sums = {k: v for k, v in found.items() if isinstance(v, WeightedSum)}
        values = {k: float(v) for k, v in found.items() if k not in sums}
        now = time.perf_counter()
        seconds = now - self._finished_at
        report = StepReport(
            dispatched.step, values, sums, seconds, dispatched.input_wait_seconds, min(self._device_seconds, seconds)
        )
        self._finished_at, self._device_seconds = now, 0.0
        with jax.profiler.TraceAnnotation(HOOKS):
            for hook in self._hooks:
                hook.after_step(report)

    def boundary(self, step: int, state: TrainState) -> None:
        for hook in self._hooks:
            if hook.needs_state(step):
                hook.at_boundary(step, state)
        self._finished_at = time.perf_counter()  # time at a boundary is not part of a step


def train(
    train_step: TrainStep, batches: DeviceBatches, state: TrainState, *, total_steps: int, hooks: Sequence[Hook]
) -> TrainState:
    """Trains from `state.step` to `total_steps`.

    Args:
      train_step: runs one step; donates the state.
      batches: batches at the position that belongs to `state`.
      state: the initial state; donated.
      total_steps: number of the last step.
      hooks: called in this order.

    Returns:
      The state after the last step.
    """
    reader = _Reader(hooks)
    unread: _Dispatched | None = None
    with contextlib.ExitStack() as closing:  # every hook is closed, in order, also when one of them raises
        for hook in reversed(hooks):
            closing.callback(hook.close)
        for step in range(int(state.step) + 1, total_steps + 1):
            phase.at(phase.BETWEEN, step=step)
            for hook in hooks:
                hook.before_step(step)
            with phase.enter(phase.READING), jax.profiler.TraceAnnotation(INPUT):
                batch = next(batches)
            with reader.with_devices(), jax.profiler.StepTraceAnnotation(STEP, step_num=step):
                state, metrics = train_step(state, batch)
            if unread is not None:
                reader.read(unread)
            unread = _Dispatched(step, metrics, batches.input_wait_seconds)
            if step == total_steps or any(hook.needs_state(step) for hook in hooks):
                reader.read(unread)
                unread = None
                reader.boundary(step, state)
    return state


def add_sums(total: Mapping[str, WeightedSum], more: Mapping[str, WeightedSum]) -> dict[str, WeightedSum]:
    """Adds sums by name, on the host, in float64; `total` may be empty."""
    wide = {k: WeightedSum(np.float64(s.total), np.float64(s.weight)) for k, s in more.items()}
    return jax.tree.map(np.add, dict(total), wide) if total else wide


def means(sums: Mapping[str, WeightedSum]) -> dict[str, float]:
    """Divides sums by their weights; sums with weight 0 are left out."""
    return {name: float(s.total / s.weight) for name, s in sums.items() if s.weight > 0}
