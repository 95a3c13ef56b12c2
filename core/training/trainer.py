"""The training loop: one batch, one step, and what hangs on it.

The one idea is that the device never waits for the host. The metrics of step n - 1 are read after step n has been
dispatched, so that logging happens while the device works. Only where a hook needs the state itself (to evaluate it or
to save it) is step n read before n + 1 starts; then a loss that is not finite is seen before it is saved.

    dispatch n   read metrics of n - 1   -> hook.after_step(n - 1)
    …            at a boundary: read n   -> hook.after_step(n), hook.at_boundary(n, state)

Where the loop is at every moment stands in `core.watch.phase`, for the hosts that watch one another.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from core.step import Metrics
from core.train_state import TrainState
from core.types import Batch, WeightedSum
from core.watch import phase

# What a profile calls the parts of a step on the host.
STEP = "train"
INPUT = "wait for the batch"
WAITING = "wait for the step"
HOOKS = "hooks"


class StepReport(NamedTuple):
    """What is known of a finished step.

    Attributes:
      step: its number; the first is 1.
      metrics: numbers of this step.
      sums: of this step, what the model's metrics are means of; a weight may be 0.
      seconds: since the previous step finished; for the first, since it was dispatched (compilation included).
      input_wait_seconds: of these, how long the host waited for its batch.
      device_seconds: of these, how long it was handing over the step and waiting for its result; the rest is its own
        work.
    """

    step: int
    metrics: Mapping[str, float]
    sums: Mapping[str, WeightedSum]
    seconds: float
    input_wait_seconds: float
    device_seconds: float = 0.0


class Hook:
    """Something that happens beside training. Hooks run in order, on every host alike."""

    def before_step(self, step: int) -> None:
        """Before step `step` is dispatched."""

    def after_step(self, report: StepReport) -> None:
        """Once the metrics of a step are known, usually while the next one runs."""

    def needs_state(self, step: int) -> bool:
        """Whether `at_boundary` is to be called behind this step. Must be equal on all hosts."""
        del step
        return False

    def at_boundary(self, step: int, state: TrainState) -> None:
        """Behind step `step`, before the next is dispatched; `state` is valid during this call only."""

    def close(self) -> None:
        """When training ends, also by an error."""


class Program(Protocol):
    """What the loop needs of a model bound to devices."""

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step; consumes `state`."""


class DeviceBatches(Protocol):
    """Batches that are on the devices already."""

    input_wait_seconds: float

    def __next__(self) -> Batch:
        """The next one."""


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
        """Inside, the host hands something to the devices or waits for them."""
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
        self._finished_at = time.perf_counter()  # time at a boundary is nobody's step time


def train(
    program: Program, batches: DeviceBatches, state: TrainState, *, total_steps: int, hooks: Sequence[Hook]
) -> TrainState:
    """Trains from `state.step` to `total_steps`.

    Args:
      program: the model bound to devices.
      batches: at the position that belongs to `state`.
      state: consumed.
      total_steps: the last step's number.
      hooks: called in this order.

    Returns:
      The state behind the last step.
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
                state, metrics = program.train_step(state, batch)
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
    """What the sums are means of; no entry where the weight is 0, for a mean of nothing is no number."""
    return {name: float(s.total / s.weight) for name, s in sums.items() if s.weight > 0}
