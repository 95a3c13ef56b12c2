"""The training loop: runs the steps and calls the hooks.

The metrics of step n - 1 are read after step n has been dispatched, so the devices do not wait for the host. If a hook
needs the state (to evaluate or save it), step n is read before n + 1 starts.

    dispatch n   read metrics of n - 1   -> hook.after_step(n - 1)
    …            at a boundary: read n   -> hook.after_step(n), hook.at_boundary(n, state)

A hook that finds a step to be wrong raises `RollBackError`; the loop then restores an earlier state. The data is not
rewound: the wrong batch, and the next one if it was dispatched by then, are dropped.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from core.hosts import activity, interrupt
from core.step import STATISTICS, Metrics, TrainState, UpdateStatistics
from core.types import Batch, WeightedSum

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]  # runs one step; may donate the state


class StatisticsStep(NamedTuple):
    """A training step that also computes statistics of the update.

    Attributes:
      run: runs the step; its metrics contain a `core.step.UpdateStatistics`.
      interval: it replaces the steps whose number is a multiple of this.
    """

    run: TrainStep
    interval: int


# Names in profiles for the parts of a step on the host.
STEP = "train"
INPUT = "wait for the batch"
WAITING = "wait for the step"
HOOKS = "hooks"


class StepReport(NamedTuple):
    """The measurements of a finished step.

    Attributes:
      step: its number; the first is 1.
      metrics: scalar metrics.
      sums: metrics as sums with weights, which may be 0.
      seconds: time since the previous report, without the hooks' work at a boundary.
      input_wait_seconds: how long, in `seconds`, the host waited for batches, usually that of the next step.
      device_seconds: how long, in `seconds`, the host dispatched steps and waited for their results.
    """

    step: int
    metrics: Mapping[str, float]
    sums: Mapping[str, WeightedSum]
    seconds: float
    input_wait_seconds: float
    device_seconds: float = 0.0


class RollBackError(RuntimeError):
    """Raised in `Hook.after_step`, on all hosts at the same step, to continue from an earlier state."""


class LastStep(NamedTuple):
    """Where an exception ended the training loop.

    Attributes:
      step: the last step that was dispatched; if there is none, that of the initial state.
      state: the state after it; None if its arrays were donated, or the data is already one batch ahead.
      metrics: returns the metrics of the step, which every host must have dispatched; {} if none was.
    """

    step: int
    state: TrainState | None
    metrics: Callable[[], Mapping[str, float]]


class Hook:
    """An extension of the training loop; hooks run in order, on every host."""

    def before_step(self, step: int) -> None:
        """Called before step `step` is dispatched."""

    def after_step(self, report: StepReport) -> None:
        """Called when the metrics of a step are known, usually while the next runs."""

    def needs_state(self, step: int) -> bool:
        """Returns whether to call `at_boundary` after this step; if that is a collective, equal on all hosts."""
        del step
        return False

    def at_boundary(self, step: int, state: TrainState) -> None:
        """Called after step `step`, before the next is dispatched; `state` is valid only during this call."""

    def after_rollback(self, step: int) -> None:
        """Called when the loop goes on from the state after `step`; later steps are lost."""

    def on_error(self, error: Exception, last: LastStep) -> None:
        """Called when an exception ends the loop, before `close`; `last.state` is valid only during this call."""

    def close(self) -> None:
        """Called when training ends, also after an error."""


class DeviceBatches(Protocol):
    """An iterator over batches on the devices.

    Attributes:
      input_wait_seconds: how long the last `next` waited for data.
    """

    input_wait_seconds: float

    def __next__(self) -> Batch:
        """Returns the next batch."""


class _Dispatched(NamedTuple):
    step: int
    metrics: Metrics


class _Reader:
    def __init__(self, hooks: Sequence[Hook]):
        self._hooks = hooks
        self._finished_at = time.perf_counter()
        self._device_seconds = self._input_wait_seconds = 0.0
        self.activity = activity.COMPILING  # until the first step is read: the hosts compile at different speeds

    @contextlib.contextmanager
    def with_devices(self) -> Iterator[None]:
        began = time.perf_counter()
        with activity.enter(self.activity):
            yield
        self._device_seconds += time.perf_counter() - began

    def waited_for_input(self, seconds: float) -> None:
        self._input_wait_seconds += seconds

    def wait(self, dispatched: _Dispatched) -> dict[str, Any]:
        with self.with_devices(), jax.profiler.TraceAnnotation(WAITING):
            found = jax.device_get(dict(dispatched.metrics))
        self.activity = activity.TRAINING
        return found

    def report(self, dispatched: _Dispatched, found: Mapping[str, Any]) -> None:
        sums = {k: v for k, v in found.items() if isinstance(v, WeightedSum)}
        if statistics := found.get(STATISTICS):
            sums |= statistics.named()
        now = time.perf_counter()
        seconds = now - self._finished_at
        report = StepReport(
            dispatched.step,
            _numbers(found),
            sums,
            seconds,
            self._input_wait_seconds,
            min(self._device_seconds, seconds),
        )
        self._finished_at, self._device_seconds, self._input_wait_seconds = now, 0.0, 0.0
        with jax.profiler.TraceAnnotation(HOOKS):
            for hook in self._hooks:
                hook.after_step(report)

    def boundary(self, step: int, state: TrainState) -> None:
        for hook in self._hooks:
            if hook.needs_state(step):
                hook.at_boundary(step, state)
        self._finished_at = time.perf_counter()  # time at a boundary is not part of a step


class _Loop:
    def __init__(
        self,
        train_step: TrainStep,
        batches: DeviceBatches,
        state: TrainState,
        hooks: Sequence[Hook],
        statistics: StatisticsStep | None,
    ):
        self._train_step, self._batches, self._hooks, self._statistics = train_step, batches, hooks, statistics
        self._state: TrainState | None = state  # None while an earlier one is restored
        self._step = int(state.step)
        self._is_between_steps = True  # otherwise the position in the data is one batch after the state
        self._last: _Dispatched | None = None

    def run(self, total_steps: int, restore: Callable[[], TrainState] | None) -> TrainState:
        while True:
            try:
                return self._run(total_steps)
            except RollBackError:
                if restore is None:
                    raise
                self._state = None  # frees its memory for the other
            with activity.enter(activity.RESTORING):
                self._state = restore()
            self._step = int(self._state.step)
            for hook in self._hooks:
                hook.after_rollback(self._step)

    def _run(self, total_steps: int) -> TrainState:
        assert self._state is not None
        reader = _Reader(self._hooks)
        unread: _Dispatched | None = None
        for step in range(self._step + 1, total_steps + 1):
            activity.at(activity.BETWEEN, step=step)
            for hook in self._hooks:
                hook.before_step(step)
            found = None
            # Profilers take this for the duration of a step: without the waiting, it would be that of the dispatch.
            with jax.profiler.StepTraceAnnotation(STEP, step_num=step):
                dispatched = self._dispatch(step, reader)
                if unread is not None:
                    reader.report(unread, reader.wait(unread))
                unread = dispatched
                if step == total_steps or any(hook.needs_state(step) for hook in self._hooks):
                    found = reader.wait(dispatched)
            if found is not None:
                reader.report(dispatched, found)
                unread = None
                reader.boundary(step, self._state)
        return self._state

    def _dispatch(self, step: int, reader: _Reader) -> _Dispatched:
        with activity.enter(activity.READING), jax.profiler.TraceAnnotation(INPUT):
            batch = next(self._batches)
        reader.waited_for_input(self._batches.input_wait_seconds)
        self._is_between_steps = False
        statistics = self._statistics
        train_step = statistics.run if statistics and step % statistics.interval == 0 else self._train_step
        with reader.with_devices():
            assert self._state is not None
            self._state, metrics = train_step(self._state, batch)
        self._step, self._is_between_steps = step, True
        interrupt.trained(step)
        self._last = _Dispatched(step, metrics)
        return self._last

    def close(self, error: BaseException | None) -> None:
        """Closes the hooks, after `on_error` if the loop raised; the first exception gets later ones as notes."""
        first = error
        calls = [(hook, hook.close) for hook in self._hooks]
        if isinstance(error, Exception):
            last = self._last_step()
            calls[:0] = [(hook, functools.partial(hook.on_error, error, last)) for hook in self._hooks]
        for hook, call in calls:
            try:
                call()
            except Exception as problem:
                if first is None:
                    first = problem
                else:
                    first.add_note(f"then, in {type(hook).__name__}: {type(problem).__name__}: {problem}")
        if error is None and first is not None:
            raise first

    def _last_step(self) -> LastStep:
        is_intact = self._is_between_steps and not any(
            leaf.is_deleted() for leaf in jax.tree.leaves(self._state) if isinstance(leaf, jax.Array)
        )
        last = self._last

        def metrics() -> Mapping[str, float]:
            return _numbers(jax.device_get(dict(last.metrics))) if last else {}

        return LastStep(self._step, self._state if is_intact else None, metrics)


def train(
    train_step: TrainStep,
    batches: DeviceBatches,
    state: TrainState,
    *,
    total_steps: int,
    hooks: Sequence[Hook],
    statistics: StatisticsStep | None = None,
    restore: Callable[[], TrainState] | None = None,
) -> TrainState:
    """Trains from `state.step` to `total_steps`; returns the last state.

    Args:
      train_step: runs one step; donates the state.
      batches: batches at the position that belongs to `state`.
      state: the initial state; donated.
      total_steps: number of the last step.
      statistics: the step that also computes statistics of the update; None: no step does.
      restore: returns the state to continue from after a `RollBackError`; None: the error ends the loop.
    """
    loop = _Loop(train_step, batches, state, hooks, statistics)
    del state
    try:
        final = loop.run(total_steps, restore)
    except BaseException as error:
        loop.close(error)
        raise
    loop.close(None)
    return final


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    own = (WeightedSum, UpdateStatistics)
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, own)}


def add_sums(total: Mapping[str, WeightedSum], more: Mapping[str, WeightedSum]) -> dict[str, WeightedSum]:
    """Adds sums by name, on the host, in float64; a name may be in only one of them."""
    found = dict(total)
    for name, (value, weight) in more.items():
        before = found.get(name, WeightedSum(np.float64(0), np.float64(0)))
        found[name] = WeightedSum(before.total + np.float64(value), before.weight + np.float64(weight))
    return found


def means(sums: Mapping[str, WeightedSum]) -> dict[str, float]:
    """Divides sums by their weights; sums with weight 0 are left out."""
    return {name: float(s.total / s.weight) for name, s in sums.items() if s.weight > 0}
