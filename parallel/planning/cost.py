"""The model of time: what a compiled step takes, between all of its traffic hidden behind computation and none of it.

    compute    the compiler's estimated cycles, as often as they run / the chip's clock
    kernels    FLOPs of attention kernels from their shapes / 40 % of the chip's peak
    traffic    wire bytes of every collective / what the links of its group carry (`planning.links`)

    hidden     max(compute + kernels, traffic)        exposed    compute + kernels + traffic

The one idea: nothing is fitted. The constants stand below with their sources, and how far predictions are from
published measurements is said beside every figure (`planning.label`). `optimal_seconds` and `cost_analysis()` are not
used: they count the body of a loop once. Left out: latency, input, and what hosts do between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from core.slices import Slice
from parallel.analysis import Analysis
from parallel.hlo.costs import Costs
from parallel.partitioner import Program
from parallel.planning import kernels
from parallel.planning.links import Links
from parallel.traffic import Collective

# Cycles per second. v4: Jouppi et al. 2023 ("TPU v4"), table 4: 1050 MHz. The others from peak FLOP/s over what the
# matrix units do in a cycle (Google Cloud, "TPU v5p", "TPU v5e", "TPU v6e"): 2 x 4 units of 128 x 128 in v5p, 4 of
# them in v5e, and for v6e as many FLOPs as the compiler counts a cycle (a test compiles a product for each kind).
CLOCK_HZ: Mapping[str, float] = {"v4": 1.05e9, "v5p": 1.75e9, "v5e": 1.5e9, "v6e": 1.75e9}
# Of peak, in a splash kernel. Assumed; published rates of causal flash attention on TPUs are 30 to 60 %.
KERNEL_SHARE_OF_PEAK = 0.4


class AxisTime(NamedTuple):
    """The traffic of a step over the same mesh axes.

    Attributes:
      axes: mesh axes.
      network: "ICI" or "DCN".
      seconds: by itself.
      beside: of them, what the compiled schedule puts beside computation, no more than that computation takes.
      wire_bytes: that one chip sends.
    """

    axes: tuple[str, ...]
    network: str
    seconds: float
    beside: float
    wire_bytes: int


class StepTime(NamedTuple):
    """Seconds of one training step.

    Attributes:
      compute: what the compiler estimates.
      kernels: attention kernels.
      traffic: by mesh axes, most seconds first.
      unpriced: what costs time and has no estimate: kernels that are not known, loops that turn an unknown number of
        times (counted once).
    """

    compute: float
    kernels: float
    traffic: tuple[AxisTime, ...]
    unpriced: tuple[str, ...]

    @property
    def busy(self) -> float:
        """Computation and kernels."""
        return self.compute + self.kernels

    @property
    def traffic_seconds(self) -> float:
        """All traffic, one after the other."""
        return sum(axis.seconds for axis in self.traffic)

    @property
    def hidden(self) -> float:
        """All traffic runs beside computation."""
        return max(self.busy, self.traffic_seconds)

    @property
    def exposed(self) -> float:
        """None of it does."""
        return self.busy + self.traffic_seconds

    @property
    def scheduled(self) -> float:
        """What the compiler put beside computation is hidden, and nothing else."""
        beside = min(self.busy, sum(axis.beside for axis in self.traffic))
        return self.exposed - beside


def step_time(found: Analysis, bound: Program) -> StepTime:
    """The time of a compiled step.

    Args:
      found: `analysis.analyze(bound)`.
      bound: the program, on the chips of its slice.
    """
    slice_ = bound.partitioner.slice
    seconds, unknown = _kernels(found.costs, slice_)
    links = Links(bound.partitioner.mesh, slice_)
    return StepTime(
        compute=found.costs.total_cycles / CLOCK_HZ[slice_.generation],
        kernels=seconds,
        traffic=traffic_times(found.collectives, links),
        unpriced=(*unknown, *_open_loops(found.costs)),
    )


def _kernels(costs: Costs, slice_: Slice) -> tuple[float, list[str]]:
    """Seconds of the kernels that are known, names of the others."""
    priced = [(kernel, kernels.flops(kernel)) for kernel in costs.kernels]
    total = sum(flops for _, flops in priced if flops is not None)
    unknown = [f"kernel {kernel.name} x {kernel.times}" for kernel, flops in priced if flops is None]
    return total / (KERNEL_SHARE_OF_PEAK * slice_.chip.peak_flops), unknown


def _open_loops(costs: Costs) -> list[str]:
    return [f"loop {loop.op_name or loop.name}, counted once" for loop in costs.loops if loop.trips is None]


def traffic_times(collectives: Sequence[Collective], links: Links) -> tuple[AxisTime, ...]:
    """Time of the traffic by mesh axes and network."""
    clock = CLOCK_HZ[links.slice.generation]
    totals: dict[tuple[tuple[str, ...], str], tuple[float, float, int]] = {}
    for each in collectives:
        once = links.seconds(each)
        beside = min(once, each.cycles_beside / clock) if each.is_overlapped else 0.0
        key = (each.axes, each.network)
        seconds, hidden, sent = totals.get(key, (0.0, 0.0, 0))
        times = each.times
        totals[key] = (seconds + once * times, hidden + beside * times, sent + each.wire_bytes * times)
    rows = [AxisTime(axes, network, *total) for (axes, network), total in totals.items() if total[2]]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.axes, row.network)))
