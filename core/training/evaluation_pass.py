"""One pass over evaluation batches that also returns the model's answers.

The answers of one batch are read while the devices compute the next, and none are kept: the variants of ARC puzzles are
hundreds of thousands of grids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from core.health import phase
from core.train_state import TrainState
from core.training import trainer
from core.types import Batch, WeightedSum


class Program(Protocol):
    """A model bound to devices, as an evaluation uses it."""

    def put(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Places this host's rows on its devices."""

    def eval_step(self, state: TrainState, batch: Batch) -> Mapping[str, WeightedSum]:
        """Returns the loss and metric sums of one batch."""

    def answer_step(self, state: TrainState, batch: Batch) -> tuple[Mapping[str, WeightedSum], Mapping[str, Any]]:
        """Returns the same sums, and the model's answers to every row."""


class EvaluationPass:
    """Evaluates a state once.

    Attributes:
      sums: of loss and metrics, over the batches whose answers have been returned.
    """

    def __init__(
        self, program: Program, state: TrainState, batches: Iterable[Mapping[str, np.ndarray]], *, answering: bool
    ):
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
