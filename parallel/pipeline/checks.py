"""Checks whether a model, a batch, a mesh and a schedule fit, from shapes alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from core import logical, units
from core.errors import UserError
from core.logical import Axes
from parallel.pipeline.schedules import Schedule


def problems(schedule: Schedule, shapes: Any, axes: Any, *, stages: int, chips: int, even: bool = False) -> list[str]:
    """Returns the reasons why a model cannot run as this pipeline, each with a fix.

    Args:
      schedule: the strategy's schedule.
      shapes, axes: shapes and axes of the model's parameters, trees of one structure.
      stages: degree of `stage`.
      chips: number of chips of the slice, which bounds other degrees.
      even: whether all stages must have the same number of layers.
    """
    found = depths(shapes, axes)
    if not found:
        return [
            f"{schedule.name}: the model has no layer stack to split into stages (a network that is applied repeatedly "
            "cannot be split: every stage would need all of its weights); build its layers with "
            "core.stack.layer_stack, or use a strategy without a pipeline"
        ]
    unfit = [n for n in found if not schedule.fits(n, stages) or (even and n % schedule.layer_unit(stages))]
    return schedule.problems(stages) + [_depth(schedule, n, stages, chips) for n in unfit]


def depths(shapes: Any, axes: Any) -> list[int]:
    """Returns the distinct numbers of layers of a model's stacks, ascending; arguments as in `problems`."""
    named = zip(jax.tree.leaves(shapes), jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, Axes)), strict=True)
    return sorted({leaf.shape[0] for leaf, of in named if of.names[:1] == ("layers",)})


def _depth(schedule: Schedule, layers: int, stages: int, chips: int) -> str:
    repeats = schedule.repeats
    fits = [str(s) for s in range(1, layers // repeats + 1) if schedule.fits(layers, s) and chips % s == 0]
    times = f" x {repeats} repeats" if repeats > 1 else ""
    other = f"stage one of {', '.join(fits)}" if fits else f"repeats that divide {layers}"
    return (
        f"{schedule.name}: {layers} layers do not divide over stage = {stages}{times}; use {other}, "
        f"or a multiple of {schedule.layer_unit(stages)} layers"
    )


def check_rows(rows: int, *, groups: int, accum_steps: int, schedule: Schedule | None, stages: int, where: str) -> None:
    """Checks that a batch divides over the chips, and on each of them into microbatches.

    Args:
      rows: rows of a global batch.
      groups: number of groups of chips with different rows.
      accum_steps, schedule: both divide the rows of each group; `schedule` is None without a pipeline.
      stages: degree of `stage`.
      where: strategy and slice, for the message.

    Raises:
      UserError: it does not divide; names the nearest sizes that do.
    """
    unit = groups * accum_steps * (schedule.num_microbatches if schedule else 1)
    if rows % unit == 0:
        return
    cut = f" in accum_steps = {accum_steps} microbatches" if accum_steps > 1 else ""
    cut += f" in num_microbatches = {schedule.num_microbatches} of the pipeline" if schedule else ""
    raise UserError(
        f"batch_size = {rows} does not divide{cut} over {units.counted(groups, 'group')} of chips ({where}). "
        f"Nearest that do: {', '.join(map(str, logical.nearest_multiples(rows, unit)))}"
        + _other_microbatches(schedule, rows, groups * accum_steps, stages=stages)
    )


def _other_microbatches(schedule: Schedule | None, rows: int, groups: int, *, stages: int) -> str:
    """Returns a message with the numbers of microbatches that fit these rows."""
    if schedule is None or rows % groups:
        return ""
    local = rows // groups
    divide = (dataclasses.replace(schedule, num_microbatches=m) for m in range(1, local + 1) if local % m == 0)
    fits = [str(other.num_microbatches) for other in divide if not other.problems(stages)]
    return f"; or num_microbatches one of {', '.join(fits)}" if fits else ""
