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
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from parallel.hlo import executions, replica_groups
from parallel.hlo.executions import Branch, Executed, Loop
from parallel.hlo.program import Array, Computation, Instruction, Module, users

_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_TRANSPARENT = ("get-tuple-element", "bitcast", "copy", "convert", "copy-start", "copy-done", "reshape", "transpose")


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
    count: int
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
        rows.append(Row(*labels, len(same), sum(c.times for c in same), payload, wire))
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
    starts = {_identity(e) for e in run if _read_by(e, _START)}
    for executed in run:
        kind = executions.base_opcode(executed.instruction)
        if kind in executions.COLLECTIVES and not _is_later_piece(executed, starts):
            found.append(_collective(module, executed, kind, grid))
    return found


def _is_later_piece(executed: Executed, starts: set[tuple]) -> bool:
    """Fused with computation, one collective is written three times: at its start, in what hides it, at its end."""
    return bool(executed.wrappers) and not _read_by(executed, _START) and _identity(executed) in starts


def _identity(executed: Executed) -> tuple:
    """What the pieces of one collective have in common; a channel alone is used more than once."""
    at = executed.instruction
    return id(executed.schedule), at.opcode, _channel(at), *at.arrays


def _read_by(executed: Executed, target: str) -> bool:
    """Whether a collective inside a fusion feeds the custom call that starts or ends it."""
    if not executed.wrappers or executed.instruction.opcode not in executions.COLLECTIVES:
        return False
    return any(
        executed.instruction.name in i.operands and i.attribute("custom_call_target") == target
        for i in executed.computation.values()
    )


def _channel(at: Instruction) -> str | None:
    return at.attribute("channel_id")


def _collective(module: Module, executed: Executed, kind: str, grid: Grid) -> Collective:
    at = executed.instruction
    groups = replica_groups.device_groups(at, math.prod(grid.shape.values()))
    size = max(map(len, groups), default=1)
    arrays = _payload(executed, kind, size)
    payload = sum(a.bytes for a in arrays)
    sliced_bytes = _sliced_bytes(module, executed) if kind == "all-reduce" else 0
    if sliced_bytes == payload and executed.wrappers:
        kind, sliced_bytes = "reduce-scatter", 0
    beside = _beside(module, executed)
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
    if kind == "collective-broadcast":
        return float(size > 1)
    return (2 if kind == "all-reduce" else 1) * (size - 1) / size


def varying_axes(groups: Sequence[Sequence[int]], grid: Grid) -> tuple[str, ...]:
    """The mesh axes whose position differs between chips of one group.

    Raises:
      ValueError: a chip outside the mesh.
    """
    shape = tuple(grid.shape.values())
    largest = max(itertools.chain(*groups), default=0)
    if largest >= math.prod(shape):
        raise ValueError(f"a collective names chip {largest}, but the mesh {dict(grid.shape)} has {math.prod(shape)}")
    varies = set()
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.asarray(group), shape))  # [axes, chips of the group]
        varies.update(np.flatnonzero(coordinates.max(axis=1) > coordinates.min(axis=1)))
    return tuple(axis for i, axis in enumerate(grid.shape) if i in varies)


def _beside(module: Module, executed: Executed) -> list[Instruction]:
    """What is scheduled between the start and the end of a collective; nothing where it is one instruction."""
    at = executed.wrappers[0] if executed.wrappers else executed.instruction
    schedule = list(executed.schedule.values())
    ends = [i for i, other in enumerate(schedule) if _ends(module, other, at, executed)]
    if not ends or ends[0] == (start := schedule.index(at)):
        return []
    after = next((e for e in ends if e > start), None)
    return schedule[start + 1 : after] if after else schedule[start + 1 :] + schedule[: ends[0]]


def _ends(module: Module, other: Instruction, start: Instruction, executed: Executed) -> bool:
    """Whether `other` ends what `start` started."""
    if start.opcode.endswith("-start"):
        return other.opcode.endswith("-done") and start.name in _chain(executed.schedule, other)
    if other.opcode != "fusion" or other.name == start.name or not _read_by(executed, _START):
        return False
    pieces = module.computations[other.attribute("calls")]
    own = [i.name for i in pieces.values() if _channel(i) == _channel(executed.instruction)]
    return any(i.attribute("custom_call_target") == _DONE and set(own) & set(i.operands) for i in pieces.values())


def _chain(computation: Computation, done: Instruction) -> Iterator[str]:
    """The instruction that a `-done` waits for, and through updates the one before."""
    while done.operands and done.operands[0] in computation:
        done = computation[done.operands[0]]
        yield done.name
        if done.opcode != "async-update":
            return


def _sliced_bytes(module: Module, executed: Executed) -> int:
    at, computation = executed.instruction, executed.computation
    if not at.type.startswith("("):
        return at.arrays[0].bytes if _is_only_sliced(module, computation, at.name) else 0
    elements = [u for u in users(computation, at.name) if u.opcode == "get-tuple-element"]
    sliced = {int(u.attribute("index")) for u in elements if _is_only_sliced(module, computation, u.name)}
    return sum(a.bytes for i, a in enumerate(at.arrays) if i in sliced)


def _is_only_sliced(module: Module, computation: Computation, name: str) -> bool:
    """Whether all that is ever read of an array is slices at computed positions, looking into fusions."""
    readers = users(computation, name)
    return bool(readers) and all(_slices(module, computation, r, name) for r in readers)


def _slices(module: Module, computation: Computation, reader: Instruction, name: str) -> bool:
    if reader.opcode == "dynamic-slice":
        return reader.operands[0] == name
    if reader.opcode in _TRANSPARENT:
        return _is_only_sliced(module, computation, reader.name)
    if reader.opcode == "fusion":
        inner = module.computations[reader.attribute("calls")]
        read = {str(i) for i, operand in enumerate(reader.operands) if operand == name}
        parameters = [i for i in inner.values() if i.opcode == "parameter" and i.argument in read]
        return all(_is_only_sliced(module, inner, p.name) for p in parameters)
    return False
