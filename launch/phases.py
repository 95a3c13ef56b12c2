"""Phases of a run, which change data, batch size, accumulation or strategy after given steps.

    PHASES = (@long/experiment.Phase(),)
    long/experiment.Phase.after = 20000
    long/experiment.Phase.batch_size = 8
    long/experiment.Phase.task = @long/text.files()
    long/text.files.length = 8192

A run trains its phases one after another. A later phase continues from the checkpoint of the one before, with
parameters, optimizer state and step, and reads its data from the start, in an order of its own. Learning rates depend
on the step of the run.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from core.types import Task
from parallel.strategy import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Settings that change after a step; None keeps the setting of the previous phase.

    Attributes:
      after: the last step of the previous phase.
      task: the data.
      batch_size: rows of a global batch.
      accum_steps: microbatches per step.
      strategy: how arrays are sharded over the chips.
    """

    after: int
    task: Task | None = None
    batch_size: int | None = None
    accum_steps: int | None = None
    strategy: Strategy | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """The settings that change, as fields of `Experiment`."""
        return {name: value for name in CHANGED if (value := getattr(self, name)) is not None}


CHANGED = tuple(f.name for f in dataclasses.fields(Phase) if f.name != "after")


def problems(phases: Sequence[Phase], *, total_steps: int) -> Iterator[str]:
    """Yields what is wrong with the phases of an experiment."""
    before = 0
    for index, phase in enumerate(phases):
        if isinstance(phase.after, bool) or not isinstance(phase.after, int):
            yield f"phases[{index}].after = {phase.after!r}: expected an integer"
            continue
        if not before < phase.after < total_steps:
            yield (
                f"phases[{index}].after = {phase.after}: expected a step from {before + 1} to {total_steps - 1}, "
                "before the end of the run and in ascending order"
            )
        if not phase.changes:
            yield f"phases[{index}] changes nothing: expected a task, batch_size, accum_steps or strategy"
        before = max(before, phase.after)
