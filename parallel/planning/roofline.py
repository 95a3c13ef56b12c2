"""The roofline of a compiled step: which of computation, HBM bandwidth and networks limits it."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from core.slices import Chip
from parallel.compiled.hlo import program
from parallel.compiled.hlo.executions import Executed
from parallel.compiled.hlo.program import Array, Instruction
from parallel.planning.cost import StepTime

_MOVES = ("copy-start", "slice-start", "dynamic-slice-start")
_ARRAY = re.compile(r"\b([a-z]\w*\[[\d,]*\])(\{[^}]*\})?")


class Roofline(NamedTuple):
    """Seconds that each resource needs for a step.

    Attributes:
      products: of its matrix products at the chip's peak.
      hbm_bytes: upper bound of the bytes that the step reads from and writes to HBM.
      hbm: of these bytes at the chip's HBM bandwidth.
    """

    time: StepTime
    products: float
    hbm_bytes: float
    hbm: float

    @property
    def networks(self) -> Mapping[str, float]:
        """Seconds of traffic over "ICI", "DCN" and "PCIe"; 0 for one without traffic."""
        return {n: sum(a.seconds for a in self.time.traffic if a.network == n) for n in ("ICI", "DCN", "PCIe")}

    @property
    def binds(self) -> str:
        """The resource that limits the step: "ICI", "DCN", "PCIe", "HBM" or "computation"."""
        if self.time.traffic_seconds > self.time.busy:
            return max(self.networks, key=lambda network: self.networks[network])
        is_hbm = min(self.hbm, self.time.compute) > self.products + self.time.kernels
        return "HBM" if is_hbm else "computation"


def roofline(time: StepTime, *, product_flops: float, executed: Iterable[Executed], chip: Chip) -> Roofline:
    """Computes the roofline of a step.

    Args:
      executed: from `executions.walk`.
    """
    touched = sum(map(touched_bytes, executed))
    return Roofline(time, product_flops / chip.peak_flops, touched, touched / chip.hbm_bytes_per_second)


def touched_bytes(executed: Executed) -> float:
    """Returns an upper bound of the HBM bytes that an instruction reads and writes in a step.

    If a loop iterates over a stack of layers, each execution counts one layer. The result is 0 inside a fusion, and
    without an estimate of cycles, except for copies.
    """
    at = executed.instruction
    if executed.wrappers:  # counted where the wrapping instruction is scheduled
        return 0.0
    if at.opcode in _MOVES:
        return _moved_bytes(at) * executed.times
    if not at.estimated_cycles:
        return 0.0
    trips = next((loop.trips for loop in reversed(executed.loops) if loop.trips), 0)
    types = [at.type, *(executed.computation[o].type for o in at.operands if o in executed.computation)]
    in_hbm = (array for type_ in types for array, is_in_hbm in _arrays(type_) if is_in_hbm)
    return executed.times * sum(a.bytes / (trips if trips and a.dims[:1] == (trips,) else 1) for a in in_hbm)


def _moved_bytes(at: Instruction) -> float:
    """A slice's type also contains its whole operand: each side counts with the smallest array's size."""
    sides = [(array, is_in_hbm) for array, is_in_hbm in _arrays(at.type) if array.dims]
    return min((array.bytes for array, _ in sides), default=0) * sum(is_in_hbm for _, is_in_hbm in sides)


def _arrays(type_: str) -> list[tuple[Array, bool]]:
    found = _ARRAY.findall(type_)
    return [
        (array, not re.search(r"S\([1-9]", layout)) for shape, layout in found for array in program.arrays_of(shape)
    ]
