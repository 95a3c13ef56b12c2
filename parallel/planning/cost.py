"""Predicts the time of a compiled step, between all traffic hidden behind computation and none hidden.

    compute    the compiler's estimated cycles, as often as they run / the chip's clock
    kernels    FLOPs of attention kernels from their shapes / 40 % of the chip's peak
    traffic    wire bytes of every collective / what the links of its group carry (`planning.links`)

    hidden     max(compute + kernels, traffic)        exposed    compute + kernels + traffic

Nothing is fitted. The constants below have their sources beside them, and every printed figure is followed by how far
predictions are from published measurements (`planning.calibration`). `optimal_seconds` and `cost_analysis()` are not
used because they count the body of a loop once. Not modelled: latency, input, and work of hosts between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from core.slices import Slice
from parallel.analysis import Analysis
from parallel.hlo.costs import Costs
from parallel.partitioner import Program
from parallel.planning import kernels
from parallel.planning.links import Links
from parallel.traffic import Collective

# Cycles per second. v4: Jouppi et al. 2023 ("TPU v4"), table 4: 1050 MHz. The others: peak FLOP/s over the FLOPs that
# the matrix units do per cycle (Google Cloud, "TPU v5p", "TPU v5e", "TPU v6e"): 2 x 4 units of 128 x 128 in v5p, 4 in
# v5e, and in v6e as many FLOPs as the compiler counts per cycle (a test compiles a product for each generation).
CLOCK_HZ: Mapping[str, float] = {"v4": 1.05e9, "v5p": 1.75e9, "v5e": 1.5e9, "v6e": 1.75e9}
# Of peak, in a splash kernel. Assumed; published rates of causal flash attention on TPUs are 30 to 60 %.
KERNEL_SHARE_OF_PEAK = 0.4


class AxisTime(NamedTuple):
    """The traffic of a step over one group of mesh axes.

    Attributes:
      axes: mesh axes.
      network: "ICI" or "DCN".
      seconds: if nothing overlaps it.
      beside: seconds that the compiled schedule overlaps with computation, at most the time of that computation.
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
      compute: estimated by the compiler.
      kernels: of attention kernels.
      traffic: by mesh axes, most seconds first.
      unpriced: what takes time and has no estimate: unknown kernels, and loops of unknown trip count (counted once).
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
        """All traffic, in sequence."""
        return sum(axis.seconds for axis in self.traffic)

    @property
    def hidden(self) -> float:
        """The step with all traffic hidden behind computation."""
        return max(self.busy, self.traffic_seconds)

    @property
    def exposed(self) -> float:
        """The step with no traffic hidden."""
        return self.busy + self.traffic_seconds

    @property
    def scheduled(self) -> float:
        """The step with that traffic hidden which the compiler overlapped with computation."""
        beside = min(self.busy, sum(axis.beside for axis in self.traffic))
        return self.exposed - beside

    def as_json(self) -> dict[str, Any]:
        """Returns the time as plain values."""
        return {**self._asdict(), "traffic": [axis._asdict() for axis in self.traffic]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> StepTime:
        """Returns the time of which `as_json` gave the plain values."""
        traffic = tuple(AxisTime(**{**axis, "axes": tuple(axis["axes"])}) for axis in plain["traffic"])
        return cls(**{**plain, "traffic": traffic, "unpriced": tuple(plain["unpriced"])})


def step_time(found: Analysis, bound: Program) -> StepTime:
    """Predicts the time of a compiled step.

    Args:
      found: `analysis.analyze(bound)`.
      bound: the program, bound to the chips of its slice.
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
    """Returns the seconds of known kernels, and the names of the others."""
    priced = [(kernel, kernels.flops(kernel)) for kernel in costs.kernels]
    total = sum(flops for _, flops in priced if flops is not None)
    unknown = [f"kernel {kernel.name} x {kernel.times}" for kernel, flops in priced if flops is None]
    return total / (KERNEL_SHARE_OF_PEAK * slice_.chip.peak_flops), unknown


def _open_loops(costs: Costs) -> list[str]:
    return [f"loop {loop.op_name or loop.name}, counted once" for loop in costs.loops if loop.trips is None]


def traffic_times(collectives: Sequence[Collective], links: Links) -> tuple[AxisTime, ...]:
    """Returns the time of traffic by mesh axes and network."""
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
