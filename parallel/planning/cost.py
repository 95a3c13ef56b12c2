"""Predicts the time of a compiled step, with bounds: all traffic hidden behind computation, and none hidden.

    compute    the compiler's estimated cycles, as often as they run / the chip's clock
    kernels    FLOPs of attention kernels and grouped products from their shapes / 40 % of the chip's peak
    traffic    wire bytes of every collective / what the links of its group carry (`planning.links`)

    hidden     max(compute + kernels, traffic)
    scheduled  compute + kernels + traffic - traffic that the compiled schedule overlaps with computation
    exposed    compute + kernels + traffic

Not modeled: latency, input, and work of hosts between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from core.slices import Slice
from parallel.compiled.analysis import Analysis
from parallel.compiled.traffic import Collective
from parallel.partitioner import Program
from parallel.planning import kernel_flops
from parallel.planning.links import Links

# Cycles per second. v4: Jouppi et al. 2023 ("TPU v4"), table 4: 1050 MHz. The others: peak FLOP/s over the FLOPs that
# the matrix units do per cycle (Google Cloud, "TPU v5p", "TPU v5e", "TPU v6e"): 2 x 4 units of 128 x 128 in v5p, 4 in
# v5e, and in v6e as many FLOPs as the compiler counts per cycle (a test compiles a product for each generation). The
# peak of tpu7x is that of 2.2 GHz; by default it runs at 1.9 GHz, where its published products reach 956 TFLOP/s.
CLOCK_HZ: Mapping[str, float] = {"v4": 1.05e9, "v5p": 1.75e9, "v5e": 1.5e9, "v6e": 1.75e9, "tpu7x": 1.9e9}
# Of peak, in a kernel. Assumed; published rates of causal flash attention on TPUs are 30 to 60 %.
KERNEL_SHARE_OF_PEAK = 0.4
BOUNDS = ("hidden", "scheduled", "exposed")  # times of `StepTime`


class AxisTime(NamedTuple):
    """The traffic of a step over the same mesh axes and network.

    Attributes:
      axes: mesh axes, or `host`.
      network: "ICI", "DCN", or "PCIe".
      seconds: if nothing overlaps it.
      beside: seconds that the compiled schedule overlaps with computation.
      wire_bytes: sent by one chip, and over PCIe also received; 0 if not known.
    """

    axes: tuple[str, ...]
    network: str
    seconds: float
    beside: float
    wire_bytes: int


class StepTime(NamedTuple):
    """Seconds of one training step.

    Attributes:
      compute: computation besides kernels.
      kernels: attention kernels and grouped products.
      unpriced: unknown kernels, and loops of unknown trip count (counted once).
    """

    compute: float
    kernels: float
    traffic: tuple[AxisTime, ...]
    unpriced: tuple[str, ...]

    @property
    def busy(self) -> float:
        """Seconds of computation and kernels."""
        return self.compute + self.kernels

    @property
    def traffic_seconds(self) -> float:
        """Seconds of all traffic."""
        return sum(axis.seconds for axis in self.traffic)

    @property
    def hidden(self) -> float:
        """Seconds of a step in which traffic and computation overlap completely."""
        return max(self.busy, self.traffic_seconds)

    @property
    def exposed(self) -> float:
        """Seconds of a step in which no traffic is hidden."""
        return self.busy + self.traffic_seconds

    @property
    def exposed_traffic(self) -> float:
        """Seconds of the traffic that the compiler did not overlap with computation."""
        beside = min(self.busy, sum(axis.beside for axis in self.traffic))
        return max(0.0, self.traffic_seconds - beside)

    @property
    def scheduled(self) -> float:
        """Seconds of a step if the traffic that the compiler overlapped with computation is hidden."""
        return self.busy + self.exposed_traffic

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {**self._asdict(), "traffic": [axis._asdict() for axis in self.traffic]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> StepTime:
        """Converts the result of `as_json` back."""
        traffic = tuple(AxisTime(**{**axis, "axes": tuple(axis["axes"])}) for axis in plain["traffic"])
        return cls(**{**plain, "traffic": traffic, "unpriced": tuple(plain["unpriced"])})


def step_time(found: Analysis, bound: Program) -> StepTime:
    """Predicts the time of a compiled step; `found` is `analysis.analyze(bound)`."""
    slice_ = bound.partitioner.slice
    priced = [(kernel, kernel_flops.of_compiled(kernel)) for kernel in found.costs.kernels]
    unknown = [f"kernel {kernel.name} x {kernel.times}" for kernel, flops in priced if flops is None]
    open_loops = [loop for loop in found.costs.loops if loop.trips is None]
    return StepTime(
        compute=found.costs.total_cycles / CLOCK_HZ[slice_.generation],
        kernels=sum(flops or 0.0 for _, flops in priced) / (KERNEL_SHARE_OF_PEAK * slice_.chip.peak_flops),
        traffic=traffic_times(found.collectives, Links(bound.partitioner.mesh, slice_)),
        unpriced=(*unknown, *(f"loop {loop.op_name or loop.name}, counted once" for loop in open_loops)),
    )


def predicted(time: StepTime, slice_: Slice, flops: float | None) -> dict[str, Any]:
    """Returns seconds and shares of the peak, rounded to four digits.

    Args:
      flops: FLOPs of the model in a step; None: there is no MFU.
    """
    bounds = {bound: getattr(time, bound) for bound in BOUNDS}
    return {
        "compute_seconds": _rounded(time.compute),
        "kernel_seconds": _rounded(time.kernels),
        "traffic_seconds": {
            f"{' '.join(axis.axes)} {axis.network}": {"all": _rounded(axis.seconds), "beside": _rounded(axis.beside)}
            for axis in time.traffic
        },
        "step_seconds": {bound: _rounded(seconds) for bound, seconds in bounds.items()},
        "mfu": {bound: _rounded(slice_.share_of_peak(flops, seconds=s)) for bound, s in bounds.items()}
        if flops
        else {},
        "unpriced": list(time.unpriced),
    }


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def traffic_times(collectives: Sequence[Collective], links: Links) -> tuple[AxisTime, ...]:
    """Returns the time of a step's traffic by mesh axes and network, most seconds first."""
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
