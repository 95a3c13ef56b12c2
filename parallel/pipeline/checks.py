"""Whether a model, a mesh and a schedule fit, from shapes alone."""

from __future__ import annotations

from typing import Any

import jax

from core.logical import Axes
from parallel.pipeline.schedules import Schedule


def problems(schedule: Schedule, shapes: Any, axes: Any, *, stages: int) -> list[str]:
    """Everything that keeps a model from running as this pipeline, each with what would do.

    Args:
      schedule: the strategy's.
      shapes, axes: of the model's parameters, trees of one structure.
      stages: degree of `stage`.
    """
    named = zip(jax.tree.leaves(shapes), jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, Axes)), strict=True)
    depths = sorted({leaf.shape[0] for leaf, of in named if of.names[:1] == ("layers",)})
    if not depths:
        return [
            f"{schedule.name}: the model has no layer stack to cut into stages (one network that is applied again and "
            "again is none: every stage would need all of its weights); build its layers with core.stack.layer_stack, "
            "or take a strategy without a pipeline"
        ]
    return schedule.problems(stages) + [_depth(schedule, n, stages) for n in depths if n % schedule.layer_unit(stages)]


def _depth(schedule: Schedule, layers: int, stages: int) -> str:
    repeats = schedule.repeats
    fits = [str(s) for s in range(1, layers // repeats + 1) if layers % (s * repeats) == 0]
    times = f" x {repeats} repeats" if repeats > 1 else ""
    other = f"stage one of {', '.join(fits)}" if fits else f"repeats that divide {layers}"
    return (
        f"{schedule.name}: {layers} layers do not divide over stage = {stages}{times}; take {other}, "
        f"or a multiple of {schedule.layer_unit(stages)} layers"
    )


def other_microbatches(schedule: Schedule | None, rows: int, groups: int) -> str:
    """The numbers of microbatches that these rows do divide into on every group of chips, for a message."""
    if schedule is None or rows % groups:
        return ""
    local = rows // groups
    return f"; or num_microbatches one of {', '.join(str(m) for m in range(1, local + 1) if local % m == 0)}"
