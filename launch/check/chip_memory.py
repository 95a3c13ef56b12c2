"""Checks whether a program fits into the memory of a chip."""

import math
from typing import TYPE_CHECKING

from core import units
from core.batches import batch_size
from core.slices import GIB
from launch.findings import Finding
from parallel.compiled import report
from parallel.partitioner import Program

if TYPE_CHECKING:
    from parallel.planning.arithmetic import Estimate

_SURELY_TOO_MUCH = 2.0  # estimated bytes / bytes of a chip; the compiler does not always confirm the estimate


def estimate(program: Program) -> "tuple[Estimate | None, str]":
    """Estimates memory and time of a step; if that fails, returns None and the reason."""
    from parallel.planning import arithmetic  # slow to import, and only needed here

    try:
        return arithmetic.estimate(*arithmetic.place(program)), ""
    except Exception as error:  # a failed estimate stops no run: it traces a model of any author
        return None, f"activations not estimated: {type(error).__name__}: {error}"


def check(program: Program, estimated: "Estimate | None", why_not: str = "") -> Finding:
    """Compares the memory that a program needs with that of a chip.

    An estimate that is too large may be only a note, because the compiler may need less.

    Args:
      program: bound to a slice.
      estimated: the estimate of its step; None: the state alone is compared.
      why_not: why the step could not be estimated; "": no estimate was tried.
    """
    have, sizes = program.partitioner.slice.chip.usable_hbm_bytes, report.totals(program)
    state = f"state {units.significant(sizes.everything / GIB)} GiB"
    of = f"of {have / GIB:.4g} GiB per {program.partitioner.slice.chip.unit} (arithmetic"
    if sizes.everything > have:
        excess = f"{units.significant((sizes.everything - have) / GIB)} GiB too much"
        return Finding("memory", False, f"{state} {of}; activations not counted), {excess}. {_more_chips(program)}")
    if estimated is None:
        return Finding("memory", True, f"{state} {of}; {why_not or 'activations not counted'})", is_note=bool(why_not))
    peak = f"{units.significant(estimated.peak_bytes / GIB)} GiB with activations and gradients"
    said = f"{state}, {peak}, {of}, not compiled)"
    if estimated.peak_bytes <= have:
        return Finding("memory", True, said)
    if estimated.peak_bytes <= _SURELY_TOO_MUCH * have:
        return Finding("memory", True, f"{said}; launch/run report --compile decides whether it fits", is_note=True)
    excess = f"{units.significant((estimated.peak_bytes - have) / GIB)} GiB too much"
    advice = (
        f"BATCH_SIZE = {batch_size(program.spec):,}: lower it, raise ACCUM_STEPS, or let the model rematerialize more."
    )
    return Finding("memory", False, f"{said}, {excess}. {advice} {_more_chips(program)}")


def _more_chips(program: Program) -> str:
    slice_, sizes = program.partitioner.slice, report.totals(program)
    least = sizes.whole / slice_.devices
    if least > slice_.chip.usable_hbm_bytes:
        needed = math.ceil(sizes.whole / slice_.chip.usable_hbm_bytes)
        return (
            f"Take a larger slice: {slice_.name} has {slice_.devices:,} {slice_.chip.unit}s, and the whole state of "
            f"{units.size(sizes.whole)} alone fills {needed:,}."
        )
    if sizes.everything > 2 * least:
        return (
            f"Split it over more {slice_.chip.unit}s (STRATEGY = @strategies.fsdp(), or tensor): over all "
            f"{slice_.devices:,} of {slice_.name} the state is {units.significant(least / GIB)} GiB per "
            f"{slice_.chip.unit}."
        )
    return "Take a larger slice."
