"""The metrics of one candidate layout, from a compiled step or from arithmetic.

A `Range` holds a figure with all traffic hidden behind computation, and with none hidden: the first is never slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from core.slices import Slice
from parallel.planning.cost import StepTime

Range = tuple[float, float]


class Workload(NamedTuple):
    """The quantities of a training run that do not depend on its layout.

    Attributes:
      slice: to train on.
      tokens_per_row: positions of a row.
      flops_per_row: of the model in training, recomputation not counted; None if the model does not say.
    """

    slice: Slice
    tokens_per_row: int
    flops_per_row: float | None


class CandidateMetrics(NamedTuple):
    """The metrics of a candidate.

    Attributes:
      name: of the candidate.
      rows: of a global batch.
      used_bytes, free_bytes: of a chip's HBM at the peak.
      time: of a step.
      step_seconds, tokens_per_second, mfu, hours: ranges; mfu is None if the model does not say its FLOPs.
      scheduled_seconds: of a step, with the traffic hidden that the compiler overlapped; None if not compiled.
      bubble: idle share of a pipeline's time.
      compile_seconds: None if not compiled.
      is_as_written: whether the candidate is the experiment as written.
    """

    name: str
    rows: int
    used_bytes: float
    free_bytes: float
    time: StepTime
    step_seconds: Range
    tokens_per_second: Range
    mfu: Range | None
    hours: Range
    scheduled_seconds: float | None
    bubble: float
    compile_seconds: float | None
    is_as_written: bool


def metrics(
    workload: Workload,
    *,
    name: str,
    rows: int,
    steps: int,
    used_bytes: float,
    time: StepTime,
    bubble: float,
    compile_seconds: float | None,
    is_as_written: bool,
) -> CandidateMetrics:
    """Computes the metrics of a candidate.

    Args:
      workload: what is trained.
      name: of the candidate.
      rows: of a global batch.
      steps: of the whole run.
      used_bytes: of a chip's HBM at the peak.
      time: of a step.
      bubble: idle share of a pipeline's time.
      compile_seconds: None if `time` and `used_bytes` are arithmetic.
      is_as_written: whether the candidate is the experiment as written.
    """
    seconds, flops = (time.hidden, time.exposed), workload.flops_per_row
    return CandidateMetrics(
        name=name,
        rows=rows,
        used_bytes=used_bytes,
        free_bytes=workload.slice.chip.usable_hbm_bytes - used_bytes,
        time=time,
        step_seconds=seconds,
        tokens_per_second=_each(lambda s: rows * workload.tokens_per_row / s, seconds),
        mfu=_each(lambda s: workload.slice.mfu(flops * rows, seconds=s), seconds) if flops else None,
        hours=_each(lambda s: s * steps / 3600, seconds),
        scheduled_seconds=time.scheduled if compile_seconds is not None else None,
        bubble=bubble,
        compile_seconds=compile_seconds,
        is_as_written=is_as_written,
    )


def chip_hours(hours: Range, slice: Slice) -> Range:
    """Returns the hours of all chips of a slice together."""
    return _each(lambda h: h * slice.chips, hours)


def _each(change: Callable[[float], float], pair: Range) -> Range:
    hidden, exposed = pair
    return change(hidden), change(exposed)
