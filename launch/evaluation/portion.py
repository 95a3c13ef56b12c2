"""Which held-out rows an evaluation takes.

The one idea: a score is never without what it is of. Puzzles end, so all of them can be taken, or a subset that is
drawn once with a seed; text starts again at its end, so of text the first rows are taken.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np

from core.errors import UserError
from core.types import DataLayout, DescribesEvaluation, SizesEvaluation, Task, can
from launch.experiment import Experiment


class Portion(NamedTuple):
    """The rows of an evaluation.

    Attributes:
      experiment: whose task evaluates them.
      batches: how many; None: until they end.
    """

    experiment: Experiment
    batches: int | None

    def open(self, layout: DataLayout) -> Iterator[Mapping[str, np.ndarray]]:
        """This host's rows, batch by batch, from the start."""
        return itertools.islice(self.experiment.task.evaluation(layout), self.batches)

    def describe(self) -> str:
        """What the score is of. Once the task is prepared."""
        task: Task = self.experiment.task
        most = None if self.batches is None else self.batches * self.experiment.batch_size
        if can(task, DescribesEvaluation):
            return task.evaluated_on(most)
        return "all held-out rows" if most is None else f"the first {most:,} rows of the validation data"


def portion(experiment: Experiment, *, rows: int | Literal["all"] | None) -> Portion:
    """The rows that are asked for.

    Args:
      experiment: of the run.
      rows: so many (of text rounded up to whole batches), or all; None: those of the run's own evaluations, at most
        EVAL_BATCHES x BATCH_SIZE.

    Raises:
      ValueError: all rows of data without an end; data of which the run evaluated none, and no number.
    """
    task, ends = experiment.task, can(experiment.task, SizesEvaluation)
    if rows is None:
        if not experiment.eval_batches:
            either = "--rows N or --rows all" if ends else "--rows N"
            raise UserError(f"the run evaluated nothing (EVAL_BATCHES = 0): say how many rows to take, {either}")
        return Portion(experiment, experiment.eval_batches)
    if ends:
        task = task.evaluating(None if rows == "all" else rows)
        return Portion(dataclasses.replace(experiment, task=task), None)
    if rows == "all":
        raise UserError(
            "--rows all: this task does not say where its validation data ends (that of text starts again there): "
            "give a number of rows"
        )
    return Portion(experiment, math.ceil(rows / experiment.batch_size))
