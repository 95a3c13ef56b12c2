"""What a compiled program sends between chips: every collective, by mesh axis, with its bytes and how often it runs.

The compiler speaks of numbered chips; here each group of numbers is mapped back to the axes of the program's mesh that
vary inside it. The one idea: two sizes, defined once, for every kind of collective over n chips.

    payload   bytes of the array as it is whole: what a gather ends with, what a reduction starts from
    wire      bytes that one chip sends, by the ring formula
                all-gather, reduce-scatter, all-to-all    (n - 1) / n x payload
                all-reduce                            2 x (n - 1) / n x payload
                collective-permute                    payload x the share of chips that send to another chip
                collective-broadcast                  payload

Both are for one execution on one chip; `times` says how often it runs in a step.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from core.errors import UserError
from parallel.hlo import dataflow, executions, replica_groups
from parallel.hlo.executions import Branch, Executed, Loop
from parallel.hlo.program import Array, Computation, Instruction, Module


class Grid(NamedTuple):
    """A mesh as numbers.

    Attributes:
      shape: degree by mesh axis, in mesh order.
      slices: of each chip, in mesh order, the slice that it is in; DCN joins slices.
    """

    shape: Mapping[str, int]
    slices: tuple[int, ...]


class Collective(NamedTuple):
    """One collective in one place of the program.

    Attributes:
      name: of its instruction.
      kind: `all-gather`; an all-reduce fused with the slice that follows it is a `reduce-scatter`.
      arrays: the payload, array by array.
      times: executions in a step.
      payload_bytes, wire_bytes: of one execution, as the module defines them.
      group_size: chips that take part in one group.
      axes: mesh axes that vary inside a group.
      network: "ICI", or "DCN" where a group spans slices.
      loops, branches: around it, outermost first.
      is_overlapped: whether computation is scheduled between its start and its end.
      cycles_beside: of one execution, the compiler's estimate for that computation, kernels left out.
      sliced_bytes: of the payload of an all-reduce, what every reader takes no more than a slice of.
      op_name: where in the source it comes from.
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
        """Of most of the payload."""
        by_dtype = {a.dtype: sum(b.bytes for b in self.arrays if b.dtype == a.dtype) for a in self.arrays}
        return max(sorted(by_dtype), key=by_dtype.__getitem__, default="")


class Row(NamedTuple):
    """All collectives that differ only in place and size; bytes are those of a whole step."""

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
    """The numbers of a mesh."""
    return Grid(dict(mesh.shape), tuple(getattr(d, "slice_index", 0) or 0 for d in mesh.devices.flat))


def table(collectives: Sequence[Collective]) -> list[Row]:
    """Rows by mesh axes and kind, in the order of their wire bytes."""

    def key(c: Collective) -> tuple:
        return c.axes, c.network, c.kind, c.dtype, bool(c.loops), c.is_overlapped

    rows = []
    for labels, group in itertools.groupby(sorted(collectives, key=key), key):
        same = list(group)
        payload, wire = (sum(getattr(c, size) * c.times for c in same) for size in ("payload_bytes", "wire_bytes"))
        rows.append(Row._make((*labels, len(same), sum(c.times for c in same), payload, wire)))
    return sorted(rows, key=lambda r: (-r.wire_bytes, r))


def wire_bytes_by_axes(collectives: Sequence[Collective]) -> dict[tuple[str, ...], int]:
    """Wire bytes of a step by the mesh axes that they travel over."""
    totals: dict[tuple[str, ...], int] = {}
    for c in collectives:
        totals[c.axes] = totals.get(c.axes, 0) + c.wire_bytes * c.times
    return dict(sorted(totals.items()))


def collectives(module: Module, run: Sequence[Executed], grid: Grid) -> list[Collective]:
    """Every collective of a program, once, however many instructions stand for it.

    Args:
      module: the program.
      run: `executions.walk(module)`.
      grid: the mesh it was compiled for.

    Raises:
      ValueError: a group names a chip that the mesh does not have.
    """
    found = []
    starts = [e for e in run if dataflow.is_start(e)]
    for executed in run:
        kind = executions.base_opcode(executed.instruction)
        if kind in executions.COLLECTIVES and not _is_later_piece(executed, starts):
            found.append(_collective(module, executed, kind, grid))
        elif kind == "send" and _between_slices(executed.instruction):
            found.append(_dcn_collective(executed, grid))
    return found


def _is_later_piece(executed: Executed, starts: Sequence[Executed]) -> bool:
    """Fused with computation, one collective is written three times: at its start, in what hides it, at its end.

    What hides it may stand in a loop that the start stands in front of.
    """
    if not executed.wrappers or dataflow.is_start(executed):
        return False
    depth = len(executed.loops)
    return any(
        s.schedule is executed.schedule or (len(s.loops) < depth and s.loops == executed.loops[: len(s.loops)])
        for s in starts
        if _identity(s) == _identity(executed)
    )


def _identity(executed: Executed) -> tuple:
    """What the pieces of one collective have in common; a channel alone is used more than once."""
    at = executed.instruction
    return at.opcode, at.attribute("channel_id"), *at.arrays


def _collective(module: Module, executed: Executed, kind: str, grid: Grid) -> Collective:
    at = executed.instruction
    groups = replica_groups.device_groups(at, math.prod(grid.shape.values()))
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
        wire_bytes=round(payload * _wire_share(at, kind, size, grid)),
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


# Between slices the compiler hands a collective to the runtime: a `send` and a `recv` that say what they stand for.
_TRANSFER = "_xla_megascale_transfer_type"
_DCN_KINDS = {"ONE_TO_ONE": "collective-permute"}


def _between_slices(at: Instruction) -> str | None:
    """`ALL_REDUCE` where a send stands for a collective between slices."""
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
    """The chips at the same place of every slice."""
    by_slice: dict[int, list[int]] = {}
    for chip, slice_ in enumerate(grid.slices):
        by_slice.setdefault(slice_, []).append(chip)
    return list(zip(*by_slice.values(), strict=True))


def _waits_for(computation: Computation, done: Instruction, rendezvous: str | None) -> bool:
    return computation[done.operands[0]].attribute("_xla_host_transfer_rendezvous") == rendezvous


def _source(computation: Computation, at: Instruction) -> str:
    """Where what an instruction reads comes from."""
    while not at.op_name and at.operands and at.operands[0] in computation:
        at = computation[at.operands[0]]
    return at.op_name


def _payload(executed: Executed, kind: str, size: int) -> tuple[Array, ...]:
    """The arrays that it reads; of a gather, made whole."""
    at = executed.instruction
    operands = at.operands[:1] if kind == "collective-permute" else at.operands
    arrays = [a for o in operands for a in executed.computation[o].arrays]
    if kind != "all-gather":
        return tuple(arrays)
    (dimension,) = map(int, re.findall(r"(?:^|[\s,])dimensions=\{(\d+)\}", at.attributes))
    return tuple(
        Array(a.dtype, (*a.dims[:dimension], a.dims[dimension] * size, *a.dims[dimension + 1 :])) for a in arrays
    )


def _wire_share(at: Instruction, kind: str, size: int, grid: Grid) -> float:
    if kind == "collective-permute":
        return sum(a != b for a, b in replica_groups.pairs(at)) / math.prod(grid.shape.values())
    return float(size > 1) if kind == "collective-broadcast" else _ring_share(kind, size)


def _ring_share(kind: str, size: int) -> float:
    return (2 if kind == "all-reduce" else 1) * (size - 1) / size


def varying_axes(groups: Sequence[Sequence[int]], grid: Grid) -> tuple[str, ...]:
    """The mesh axes whose position differs between chips of one group.

    Raises:
      ValueError: a chip outside the mesh.
    """
    shape = tuple(grid.shape.values())
    largest = max(itertools.chain(*groups), default=0)
    if largest >= math.prod(shape):
        raise UserError(f"a collective names chip {largest}, but the mesh {dict(grid.shape)} has {math.prod(shape)}")
    varies: set[int] = set()
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.asarray(group), shape))  # [axes, chips of the group]
        varies.update(np.flatnonzero(coordinates.max(axis=1) > coordinates.min(axis=1)))
    return tuple(axis for i, axis in enumerate(grid.shape) if i in varies)
