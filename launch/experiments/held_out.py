"""Selects the held-out rows of an evaluation, and describes them, so that no score is shown without what it is of.

Puzzles end: all of them can be evaluated, or a subset drawn with a seed. Text repeats from its start, so its first rows
are evaluated.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np

from core.errors import UserError
from core.types import DataLayout, DescribesEvaluation, SizesEvaluation, can
from launch.experiment import Experiment


class HeldOut(NamedTuple):
    """The rows of an evaluation: so many batches of the experiment's task; None: until the data ends."""

    experiment: Experiment
    batches: int | None

    def open(self, layout: DataLayout) -> Iterator[Mapping[str, np.ndarray]]:
        """Returns this host's rows, batch by batch, from the start."""
        return itertools.islice(self.experiment.task.evaluation(layout), self.batches)

    def describe(self) -> str:
        """Describes the rows; the task must be prepared."""
        most = None if self.batches is None else self.batches * self.experiment.batch_size
        if can(self.experiment.task, DescribesEvaluation):
            return self.experiment.task.evaluated_on(most)
        return "all held-out rows" if most is None else f"the first {most:,} rows of the validation data"


def select(experiment: Experiment, *, rows: int | Literal["all"] | None) -> HeldOut:
    """Selects the rows to evaluate.

    Args:
      experiment: of the run.
      rows: a number of rows (for text rounded up to whole batches), or all; None: the rows of the run's own
        evaluations, at most EVAL_BATCHES x BATCH_SIZE.

    Raises:
      UserError: all rows of data that does not end, or no number for a run without evaluations.
    """
    task, ends = experiment.task, can(experiment.task, SizesEvaluation)
    if rows is None:
        if experiment.eval_batches:
            return HeldOut(experiment, experiment.eval_batches)
        either = "--rows N or --rows all" if ends else "--rows N"
        raise UserError(f"the run has no evaluations of its own (EVAL_BATCHES = 0): give {either}")
    if ends:
        return HeldOut(dataclasses.replace(experiment, task=task.evaluating(None if rows == "all" else rows)), None)
    if rows == "all":
        raise UserError(
            "--rows all: this task's validation data has no end (text repeats from its start): give a number of rows"
        )
    return HeldOut(experiment, math.ceil(rows / experiment.batch_size))
