"""What a plan says of one candidate, as numbers: from a record or from arithmetic, between two bounds of time.

A pair is (all traffic hidden, none hidden): the first is never slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from core.slices import Slice
from launch.plans.planning import Question, Tried
from launch.plans.records import Record
from parallel.planning.cost import AxisTime, StepTime

Pair = tuple[float, float]


class Figures(NamedTuple):
    """One row of the table.

    Attributes:
      name: of the candidate.
      rows: of a batch.
      used_bytes, free_bytes: HBM of a chip at the peak.
      time: of a step.
      step_seconds, tokens_per_second, mfu, hours: pairs; mfu None where the model does not say its FLOPs.
      scheduled_seconds: with that hidden which the compiler put beside computation; None where nothing was compiled.
      bubble: share of a pipeline's time.
      compile_seconds: None where nothing was compiled.
      is_as_written: whether it is the experiment itself.
    """

    name: str
    rows: int
    used_bytes: float
    free_bytes: float
    time: StepTime
    step_seconds: Pair
    tokens_per_second: Pair
    mfu: Pair | None
    hours: Pair
    scheduled_seconds: float | None
    bubble: float
    compile_seconds: float | None
    is_as_written: bool

    @property
    def traffic(self) -> tuple[AxisTime, ...]:
        """By mesh axes and network."""
        return self.time.traffic


def of(question: Question, tried: Tried, record: Record | None = None) -> Figures:
    """The figures of a record, or without one those of arithmetic."""
    rows, slice_ = tried.candidate.batch_size, question.slice
    time = record.time if record else tried.estimate.time
    used = record.needed_bytes if record else tried.estimate.peak_bytes
    seconds = time.hidden, time.exposed
    flops = question.flops(rows)
    tokens = rows * question.tokens_per_row
    return Figures(
        name=tried.name,
        rows=rows,
        used_bytes=used,
        free_bytes=slice_.chip.usable_hbm_bytes - used,
        time=time,
        step_seconds=seconds,
        tokens_per_second=_each(lambda s: tokens / s, seconds),
        mfu=_each(lambda s: slice_.mfu(flops, seconds=s), seconds) if flops else None,
        hours=_each(lambda s: s * question.steps(rows) / 3600, seconds),
        scheduled_seconds=time.scheduled if record else None,
        bubble=record.bubble if record else tried.estimate.bubble,
        compile_seconds=record.compile_seconds if record else None,
        is_as_written=tried.is_as_written,
    )


def _each(change, pair: Sequence[float]) -> Pair:
    fast, slow = pair
    return change(fast), change(slow)


def chip_hours(hours: Pair, slice: Slice) -> Pair:
    """Of all chips."""
    return _each(lambda h: h * slice.chips, hours)
