"""Evaluates a model: one pass over batches, which can also return the model's answers, and the hook for a run.

The answers of one batch are read while the devices compute the next, and none are kept: the variants of ARC puzzles are
hundreds of thousands of grids.
"""

import collections
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from core.health import phase
from core.step import TrainState
from core.training import trainer
from core.training.trainer import Hook
from core.types import Batch, WeightedSum

HostBatches = Iterable[Mapping[str, np.ndarray]]
_BY_STEP = re.compile(r"_step_\d+$")  # a mean by step of a recursion


class Program(Protocol):
    """Interface of a model bound to devices, for evaluation."""

    def put(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Places this host's rows on its devices."""

    def eval_step(self, state: TrainState, batch: Batch) -> Mapping[str, WeightedSum]:
        """Returns the loss and metric sums of one batch."""

    def answer_step(self, state: TrainState, batch: Batch) -> tuple[Mapping[str, WeightedSum], Mapping[str, Any]]:
        """Returns the same sums, and the model's answers to every row."""


class EvaluationPass:
    """Evaluates a state once.

    Attributes:
      sums: sums of loss and metrics over the batches whose answers have been returned.
    """

    def __init__(self, program: Program, state: TrainState, batches: HostBatches, *, answering: bool = False):
        """Takes the batches; unless `answering`, the answers are empty."""
        self._program, self._state, self._batches, self._answering = program, state, batches, answering
        self.sums: dict[str, WeightedSum] = {}

    def answers(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Runs the pass and yields the answers batch by batch, one batch later than the devices."""
        dispatched = None
        for batch in self._batches:
            phase.at(phase.EVALUATING)
            previous, dispatched = dispatched, self._dispatch(batch)
            if previous is not None:
                yield self._read(previous)
        if dispatched is not None:
            yield self._read(dispatched)

    def _dispatch(self, batch: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
        placed = self._program.put(batch)
        if self._answering:
            return self._program.answer_step(self._state, placed)
        return self._program.eval_step(self._state, placed), {}

    def _read(self, dispatched: tuple[Any, Any]) -> Mapping[str, np.ndarray]:
        sums, answers = jax.device_get(dispatched)
        self.sums = trainer.add_sums(self.sums, sums)
        return answers


def evaluate(program: Program, state: TrainState, batches: HostBatches) -> dict[str, float]:
    """Returns the means of the model's metrics over all batches; every host must have the same number of batches.

    Metrics whose total weight is 0 are left out.
    """
    evaluation = EvaluationPass(program, state, batches)
    collections.deque(evaluation.answers(), maxlen=0)  # runs the pass
    return trainer.means(evaluation.sums)


class Evaluate(Hook):
    """Evaluates every `every` steps and after the last step, on the same batches each time.

    Attributes:
      latest: the means of the last evaluation, as `validation/<name>`.
    """

    def __init__(
        self,
        program: Program,
        open_batches: Callable[[], HostBatches],
        write: Callable[[int, Mapping[str, float]], None],
        *,
        every: int,
        last_step: int,
    ):
        """Takes `open_batches()`, which is called once, and `write(step, values)`, which gets `latest`."""
        self._program, self._open_batches, self._write = program, open_batches, write
        self._every, self._last_step = every, last_step
        self._batches: HostBatches | None = None
        self.latest: dict[str, float] = {}

    def needs_state(self, step: int) -> bool:
        """Returns True at multiples of `every` and at the last step."""
        return step % self._every == 0 or step == self._last_step

    def at_boundary(self, step: int, state: TrainState) -> None:
        """Evaluates and writes."""
        with phase.enter(phase.EVALUATING):
            if self._batches is None:  # opening the streams takes seconds
                self._batches = list(self._open_batches())
            means = evaluate(self._program, state, self._batches)
        self.latest = {f"validation/{name}": value for name, value in means.items()}
        self._write(step, self.latest)


def curves_apart(means: Mapping[str, float]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Separates means by recursion step from the others: `exact_accuracy_step_01`, … go under `exact_accuracy`."""
    plain = {name: value for name, value in means.items() if not _BY_STEP.search(name)}
    curves: dict[str, list[float]] = {}
    for name, value in sorted(means.items()):
        if name not in plain:
            curves.setdefault(_BY_STEP.sub("", name), []).append(value)
    return plain, curves
