"""Draws two bars of text for the winner of a plan: a chip's memory, and a step's time."""

from collections.abc import Mapping, Sequence

from core.slices import GIB
from parallel.planning.candidate_metrics import CandidateMetrics

_WIDTH = 40  # characters of a bar
_MARKS = "█▓▒░"
_FREE = " "
_STATE = ("parameters", "optimizer")  # sizes that the analytical estimate knows exactly

Parts = Sequence[tuple[str, float]]


def lines(best: CandidateMetrics, hbm: Mapping[str, float]) -> list[str]:
    """Returns the bars of memory and time, each followed by its legend.

    `hbm`: estimated bytes per chip, by kind.
    """
    compiled = best.compile_seconds is not None
    memory = [(name, hbm[name]) for name in _STATE] if compiled else list(hbm.items())
    if compiled:
        memory.append(("gradients, activations and buffers", best.used_bytes - sum(size for _, size in memory)))
    unhidden = (best.time.scheduled if compiled else best.time.exposed) - best.time.busy
    time = [("computation", best.time.compute), ("kernels", best.time.kernels)]
    time.append(("traffic that is not hidden" if compiled else "traffic, if none is hidden", unhidden))
    have, unit = best.slice.chip.usable_hbm_bytes, best.slice.chip.unit
    return [
        f"HBM   |{_bar(_largest(memory), have)}| {best.used('{:.1f}')} of {have / GIB:.1f} GiB a {unit}",
        f"      {_legend(_largest(memory), 1 / GIB)}",
        f"step  |{_bar(_largest(time), sum(spent for _, spent in time))}| ms, predicted",
        f"      {_legend(_largest(time), 1e3)}",
    ]


def _largest(parts: Parts) -> Parts:
    """Returns at most one part per mark; the last may be the sum of smaller ones."""
    ordered = sorted((part for part in parts if part[1] > 0), key=lambda part: -part[1])
    if len(ordered) <= len(_MARKS):
        return ordered
    shown, rest = ordered[: len(_MARKS) - 1], ordered[len(_MARKS) - 1 :]
    return [*shown, ("other", sum(size for _, size in rest))]


def _bar(parts: Parts, whole: float) -> str:
    ends, total = [], 0.0
    for _, size in parts:
        total += size
        ends.append(min(round(_WIDTH * total / whole), _WIDTH))
    drawn = "".join(mark * (end - start) for mark, start, end in zip(_MARKS, [0, *ends], ends, strict=False))
    return drawn.ljust(_WIDTH, _FREE)


def _legend(parts: Parts, factor: float) -> str:
    return ", ".join(f"{mark} {name} {size * factor:.3g}" for mark, (name, size) in zip(_MARKS, parts, strict=False))
