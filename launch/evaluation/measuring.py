"""One checkpoint on the devices: the means over held-out rows, and the votes of the answers where they are judged.

The one idea: answers are counted while the devices work on the next batch, and none is kept, because the variants of
ARC are hundreds of thousands of grids.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from core.checkpoints.store import Checkpoints
from core.errors import UserError
from core.train_state import TrainState
from core.training import trainer
from core.types import Evaluates, WeightedSum, can
from core.watch import phase
from launch.evaluation.portion import Portion
from launch.prepared_run import Run
from parallel.partitioner import Program
from tasks.puzzles import arc_voting
from tasks.puzzles.arc_voting import Judge, Votes

SECONDS_BETWEEN_LINES = 15.0


class Measured(NamedTuple):
    """What came of one checkpoint.

    Attributes:
      step: its step.
      means: by metric.
      scored: supervised items that the loss is a mean over: puzzles, or tokens.
      same_data: it was trained on the data that this evaluation holds some of.
      votes: of its answers; None where nobody judges them, and on other hosts than host 0.
    """

    step: int
    means: Mapping[str, float]
    scored: int
    same_data: bool
    votes: Votes | None


def require_answers(program: Program) -> None:
    """Looks, before any device works, that the model answers what a judge reads.

    Raises:
      ValueError: it does not.
    """
    answered = program.abstract_answers()
    if missing := [name for name in arc_voting.ANSWERED if name not in answered]:
        model = type(program.model).__name__
        lacks = f"the extras of its `evaluate` lack {', '.join(missing)}"
        raise UserError(
            f"the data is ARC's, which is scored by the votes of a model's answers, but {model} gives none: "
            f"{lacks if can(program.model, Evaluates) else 'it has no `evaluate`'}. "
            f"Expected {', '.join(arc_voting.ANSWERED)} by row in the extras of its `evaluate`, as models/trm has them"
        )


def measure(run: Run, checkpoints: Checkpoints, step: int, *, portion: Portion, judge: Judge | None) -> Measured | None:
    """Evaluates the checkpoint of one step, with the weights that the optimizer averages where it does.

    Returns:
      What came of it; None, on every host, where a run that is still training removed it meanwhile.

    Raises:
      ValueError: the checkpoint does not fit the model, or there are no held-out rows.
    """
    with phase.enter(phase.RESTORING):
        restored = checkpoints.restore_if_there(step, run.program.abstract_state)
    if restored is None:
        return None
    state, _, meta = restored
    layout = run.program.partitioner.data_layout(run.experiment.batch_size)
    once = _Pass(run.program, state, portion.open(layout), answering=judge is not None)
    answers = _said(once.answers(), f"step {step}", quiet=not run.host.is_zero, rows=run.experiment.batch_size)
    votes = None
    if judge and run.host.is_zero:
        votes = judge.votes(answers)
    for _ in answers:  # what nobody counts is computed with the others
        pass
    if not once.sums:
        raise UserError("there are no held-out rows to evaluate")
    same = meta.get("data") == run.meta["data"]
    return Measured(step, trainer.means(once.sums), round(float(once.sums["loss"].weight)), same, votes)


class _Pass:
    """One evaluation. `answers` runs it; then `sums` are there."""

    def __init__(self, program: Program, state: TrainState, batches: Iterable[Mapping], *, answering: bool):
        self._program, self._state, self._batches, self._answering = program, state, batches, answering
        self.sums: dict[str, WeightedSum] = {}

    def answers(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Answers by batch; empty ones where nobody asks. The next batch is on its way while one is looked at."""
        on_its_way = None
        for batch in self._batches:
            phase.at(phase.EVALUATING)
            dispatched = self._dispatch(batch)
            if on_its_way is not None:
                yield self._read(on_its_way)
            on_its_way = dispatched
        if on_its_way is not None:
            yield self._read(on_its_way)

    def _dispatch(self, batch: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
        batch = self._program.put(batch)
        if self._answering:
            return self._program.answer_step(self._state, batch)
        return self._program.eval_step(self._state, batch), {}

    def _read(self, dispatched: tuple[Any, Any]) -> Mapping[str, np.ndarray]:
        sums, answers = jax.device_get(dispatched)
        self.sums = trainer.add_sums(self.sums, sums)
        return answers


def _said(batches: Iterator[Any], what: str, *, quiet: bool, rows: int) -> Iterator[Any]:
    """The same, with a line now and then."""
    began = last = time.monotonic()
    for number, batch in enumerate(batches, 1):
        now = time.monotonic()
        if not quiet and now - last >= SECONDS_BETWEEN_LINES:
            last = now
            print(f"{what}: {number * rows:,} rows, {number * rows / (now - began):.3g} rows/s", flush=True)
        yield batch
