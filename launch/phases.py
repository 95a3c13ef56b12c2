"""Phases of a run, which change data, row length, batch size, accumulation or strategy after given steps.

A curriculum of row lengths, or another data mixture at the end of a run, is one experiment with phases:

    PHASES = (@long/experiment.Phase(),)
    long/experiment.Phase.after = 20000
    long/experiment.Phase.batch_size = 8
    long/experiment.Phase.task = @long/text.files()
    long/text.files.length = 8192

Every phase is an experiment of its own, and a run trains them one after another. At a boundary it saves a checkpoint,
from which the next phase continues with parameters, optimizer state and step, like a resumed run. So an interruption
at a boundary changes nothing. Each phase reads its data from the start, in an order of its own. Therefore documents may
be read again before all were read once, even if only the batch size changes. A phase has no learning rate of its own:
schedules depend on the step of the run (`core.optimizers.joined`).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from core.types import Task
from parallel.strategy import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """The settings that change after a step; None keeps the setting of the previous phase.

    Attributes:
      after: the last step of the previous phase; ascending from phase to phase, at least 1, and below `total_steps`.
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
