"""Lists the collectives of a compiled program, by mesh axis, with their bytes and number of executions.

Copies between a chip and its host are listed with them: kind `to host` or `from host`, network "PCIe", axes `host`. Two
sizes are defined for a collective over n chips, both per execution and chip:

    payload   bytes of the unsharded array: the result of a gather, the input of a reduction
    wire      bytes that one chip sends, by the ring formula
                all-gather, reduce-scatter, all-to-all    (n - 1) / n x payload
                all-reduce                            2 x (n - 1) / n x payload
                collective-permute                    payload x the fraction of chips that send to another chip
                collective-broadcast                  payload
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from core.errors import UserError
from parallel.compiled.hlo import dataflow, executions, host_copies, replica_groups
from parallel.compiled.hlo.executions import Branch, Executed, Loop
from parallel.compiled.hlo.host_copies import HostCopy
from parallel.compiled.hlo.program import Array, Computation, Instruction, Module


class Grid(NamedTuple):
    """The shape of a mesh and the slices of its chips.

    Attributes:
      shape: degree by mesh axis, in mesh order.
      slices: index of each chip's slice, in mesh order.
    """

    shape: Mapping[str, int]
    slices: tuple[int, ...]


class Collective(NamedTuple):
    """One collective, or copy between chip and host, at one place of the program.

    Attributes:
      kind: such as `all-gather`; an all-reduce fused with the slice that follows it is a `reduce-scatter`.
      times: executions in a step.
      payload_bytes, wire_bytes: of one execution.
      network: "ICI", "DCN" if a group spans slices, or "PCIe".
      is_overlapped: whether computation is scheduled between its start and its end.
      cycles_beside: estimated cycles of that computation, without kernels.
      sliced_bytes: bytes of an all-reduce's arrays of which only slices are read.
      op_name: such as `jit(run)/jvp()/while/body/dot_general`; "" if unknown.
    """

    name: str
    kind: str
    arrays: tuple[Array, ...]
    times: int
    payload_bytes: int
    wire_bytes: int
    group_size: int
    axes: tuple[str, ...]
    network: str
    loops: tuple[Loop, ...]
    branches: tuple[Branch, ...]
    is_overlapped: bool
    cycles_beside: int
    sliced_bytes: int
    op_name: str

    @property
    def dtype(self) -> str:
        """The dtype of most bytes of the payload; "" without arrays."""
        by_dtype = {a.dtype: sum(b.bytes for b in self.arrays if b.dtype == a.dtype) for a in self.arrays}
        return max(sorted(by_dtype), key=by_dtype.__getitem__, default="")


class TrafficRow(NamedTuple):
    """The sum of all collectives that agree in the first six fields; bytes are per step and chip."""

    axes: tuple[str, ...]
    network: str
    kind: str
    dtype: str
    in_loop: bool
    is_overlapped: bool
    count: int  # type: ignore[assignment]  # hides tuple.count
    times: int
    payload_bytes: int
    wire_bytes: int


def grid(mesh: jax.sharding.Mesh) -> Grid:
    """Returns the grid of a mesh."""
    return Grid(dict(mesh.shape), tuple(getattr(d, "slice_index", 0) or 0 for d in mesh.devices.flat))


def table(collectives: Sequence[Collective]) -> list[TrafficRow]:
    """Sums collectives that agree in the first six fields of a row; most wire bytes first."""

    def key(c: Collective) -> tuple:
        return c.axes, c.network, c.kind, c.dtype, bool(c.loops), c.is_overlapped

    rows = []
    for labels, group in itertools.groupby(sorted(collectives, key=key), key):
        same = list(group)
        payload, wire = (sum(getattr(c, size) * c.times for c in same) for size in ("payload_bytes", "wire_bytes"))
        rows.append(TrafficRow._make((*labels, len(same), sum(c.times for c in same), payload, wire)))
    return sorted(rows, key=lambda r: (-r.wire_bytes, r))


def wire_bytes_by_axes(collectives: Sequence[Collective]) -> dict[tuple[str, ...], int]:
    """Returns the wire bytes per chip and step, by mesh axes."""
    totals: dict[tuple[str, ...], int] = {}
    for c in collectives:
        totals[c.axes] = totals.get(c.axes, 0) + c.wire_bytes * c.times
    return dict(sorted(totals.items()))


def collectives(module: Module, run: Sequence[Executed], grid: Grid) -> list[Collective]:
    """Returns the collectives of a program, and its copies between chip and host.

    `run` is `executions.walk(module)`.

    Raises:
      UserError: a group contains a chip that is not in the mesh.
    """
    found = []
    starts = [e for e in run if dataflow.is_start(e)]
    chips = _numbered(run, grid)
    for executed in run:
        kind = executions.base_opcode(executed.instruction)
        if kind in executions.COLLECTIVES and not _is_later_piece(executed, starts):
            found.append(_collective(module, executed, kind, grid, chips))
        elif kind == "send" and _between_slices(executed.instruction):
            found.append(_dcn_collective(executed, grid))
        elif copy := host_copies.find(executed):
            found.append(_host_copy(module, executed, copy))
    return found


def _is_later_piece(executed: Executed, starts: Sequence[Executed]) -> bool:
    """A fused collective appears in its start, in its end, and in the computation between."""
    if not executed.wrappers or dataflow.is_start(executed):
        return False
    depth = len(executed.loops)
    return any(
        s.schedule is executed.schedule or (len(s.loops) < depth and s.loops == executed.loops[: len(s.loops)])
        for s in starts
        if _identity(s) == _identity(executed)
    )


def _identity(executed: Executed) -> tuple:
    """Several collectives may use one channel."""
    at = executed.instruction
    return at.opcode, at.attribute("channel_id"), *at.arrays


def _numbered(run: Sequence[Executed], grid: Grid) -> list[int]:
    """Returns the chips that the program numbers: those of the first slice, unless it has larger numbers."""
    first = [chip for chip, slice_ in enumerate(grid.slices) if slice_ == grid.slices[0]]
    by_collective = (replica_groups.device_groups(e.instruction, 1) for e in run if _is_collective(e))
    largest = _largest_in_mesh(itertools.chain.from_iterable(by_collective), grid)
    return first if largest < len(first) else list(range(len(grid.slices)))


def _is_collective(executed: Executed) -> bool:
    return executions.base_opcode(executed.instruction) in executions.COLLECTIVES


def _collective(module: Module, executed: Executed, kind: str, grid: Grid, chips: Sequence[int]) -> Collective:
    at = executed.instruction
    numbers = replica_groups.device_groups(at, len(chips))
    groups = [[chips[i] for i in group] for group in numbers]
    size = max(map(len, groups), default=1)
    arrays = _payload(executed, kind, size)
    payload = sum(a.bytes for a in arrays)
    sliced_bytes = dataflow.sliced_bytes(module, executed) if kind == "all-reduce" else 0
    if sliced_bytes == payload and executed.wrappers:
        kind, sliced_bytes = "reduce-scatter", 0
    beside = dataflow.beside(module, executed)
    cycles = sum(i.estimated_cycles or 0 for i in beside)
    return Collective(
        name=at.name,
        kind=kind,
        arrays=arrays,
        times=executed.times,
        payload_bytes=payload,
        wire_bytes=round(payload * _wire_share(at, kind, size, len(chips))),
        group_size=size,
        axes=varying_axes(groups, grid),
        network="DCN" if any(len({grid.slices[i] for i in group}) > 1 for group in groups) else "ICI",
        loops=executed.loops,
        branches=executed.branches,
        is_overlapped=cycles > 0 or any(map(executions.is_kernel, beside)),
        cycles_beside=cycles,
        sliced_bytes=sliced_bytes,
        op_name=at.op_name or next((w.op_name for w in reversed(executed.wrappers) if w.op_name), ""),
    )


def _host_copy(module: Module, executed: Executed, copy: HostCopy) -> Collective:
    at = executed.instruction
    beside = dataflow.beside(module, executed)
    cycles = sum(i.estimated_cycles or 0 for i in beside)
    return Collective(
        name=at.name,
        kind=copy.direction,
        arrays=(copy.array,),
        times=executed.times,
        payload_bytes=copy.array.bytes,
        wire_bytes=copy.array.bytes,
        group_size=1,
        axes=("host",),
        network="PCIe",
        loops=executed.loops,
        branches=executed.branches,
        is_overlapped=cycles > 0 or any(map(executions.is_kernel, beside)),
        cycles_beside=cycles,
        sliced_bytes=0,
        op_name=at.op_name,
    )


# Between slices a collective is a `send` and a `recv` whose attributes name it; the runtime executes it.
_TRANSFER = "_xla_megascale_transfer_type"
_DCN_KINDS = {"ONE_TO_ONE": "collective-permute"}


def _between_slices(at: Instruction) -> str | None:
    return at.attribute(_TRANSFER)


def _dcn_collective(executed: Executed, grid: Grid) -> Collective:
    at, computation = executed.instruction, executed.computation
    transfer = at.required(_TRANSFER)
    kind = _DCN_KINDS.get(transfer, transfer.lower().replace("_", "-"))
    groups = _across_slices(grid)
    size = max(map(len, groups))
    arrays = tuple(a for a in computation[at.operands[0]].arrays if a.dims)
    if kind == "all-gather":
        arrays = tuple(Array(a.dtype, (a.dims[0] * size, *a.dims[1:])) for a in arrays)
    payload = sum(a.bytes for a in arrays)
    share = 1 if kind == "collective-permute" else _ring_share(kind, size)
    rendezvous = at.attribute("_xla_host_transfer_rendezvous")
    ends = [i for i in computation.values() if i.opcode == "recv-done" and _waits_for(computation, i, rendezvous)]
    order = list(computation.values())
    beside = order[order.index(at) : order.index(ends[0])] if ends else []
    cycles = sum(i.estimated_cycles or 0 for i in beside)
    return Collective(
        name=at.name,
        kind=kind,
        arrays=arrays,
        times=executed.times,
        payload_bytes=payload,
        wire_bytes=round(payload * share),
        group_size=size,
        axes=varying_axes(groups, grid),
        network="DCN",
        loops=executed.loops,
        branches=executed.branches,
        is_overlapped=cycles > 0,
        cycles_beside=cycles,
        sliced_bytes=0,
        op_name=_source(computation, at),
    )


def _across_slices(grid: Grid) -> list[tuple[int, ...]]:
    by_slice: dict[int, list[int]] = {}
    for chip, slice_ in enumerate(grid.slices):
        by_slice.setdefault(slice_, []).append(chip)
    return list(zip(*by_slice.values(), strict=True))


def _waits_for(computation: Computation, done: Instruction, rendezvous: str | None) -> bool:
    return computation[done.operands[0]].attribute("_xla_host_transfer_rendezvous") == rendezvous


def _source(computation: Computation, at: Instruction) -> str:
    while not at.op_name and at.operands and at.operands[0] in computation:
        at = computation[at.operands[0]]
    return at.op_name


def _payload(executed: Executed, kind: str, size: int) -> tuple[Array, ...]:
    """Returns the arrays that a collective reads; for a gather, unsharded."""
    at = executed.instruction
    operands = at.operands[:1] if kind == "collective-permute" else at.operands
    arrays = [a for o in operands for a in executed.computation[o].arrays]
    if kind != "all-gather":
        return tuple(arrays)
    (dimension,) = map(int, re.findall(r"(?:^|[\s,])dimensions=\{(\d+)\}", at.attributes))
    return tuple(
        Array(a.dtype, (*a.dims[:dimension], a.dims[dimension] * size, *a.dims[dimension + 1 :])) for a in arrays
    )


def _wire_share(at: Instruction, kind: str, size: int, chips: int) -> float:
    if kind == "collective-permute":
        return sum(a != b for a, b in replica_groups.pairs(at)) / chips
    return float(size > 1) if kind == "collective-broadcast" else _ring_share(kind, size)


def _ring_share(kind: str, size: int) -> float:
    return (2 if kind == "all-reduce" else 1) * (size - 1) / size


def varying_axes(groups: Sequence[Sequence[int]], grid: Grid) -> tuple[str, ...]:
    """Returns the mesh axes whose coordinate differs between chips of one group.

    Raises:
      UserError: a group contains a chip that is not in the mesh.
    """
    _largest_in_mesh(groups, grid)
    shape = tuple(grid.shape.values())
    varies: set[int] = set()
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.asarray(group), shape))  # [axes, chips of the group]
        varies.update(np.flatnonzero(coordinates.max(axis=1) > coordinates.min(axis=1)))
    return tuple(axis for i, axis in enumerate(grid.shape) if i in varies)


def _largest_in_mesh(groups: Iterable[Sequence[int]], grid: Grid) -> int:
    largest, devices = max(itertools.chain.from_iterable(groups), default=0), math.prod(grid.shape.values())
    if largest >= devices:
        raise UserError(
            f"a collective contains device {largest}, but the mesh {dict(grid.shape)} has {devices} devices"
        )
    return largest
