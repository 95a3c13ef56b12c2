"""Counts the bytes per chip of the arrays of a program's state, from shapes alone."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from core import logical, parameters, units
from core.logical import Axes
from parallel.partitioner import Program


class StoredArray(NamedTuple):
    """One array of the state.

    Attributes:
      path: such as `params/layers/block/query`.
      shape, axes, spec: global shape, logical axes, mesh axes as `(-, fsdp)`.
      replicated: whether every chip stores the full array.
    """

    path: str
    shape: tuple[int, ...]
    axes: Axes
    spec: str
    bytes_per_chip: int
    replicated: bool


class Totals(NamedTuple):
    """Bytes of the state: per chip, and of the unsharded state (`whole`)."""

    params: int
    opt_state: int
    carry: int
    everything: int
    whole: int


def rows(program: Program) -> list[StoredArray]:
    """Returns the arrays of parameters, optimizer state and carry."""
    state, axes = program.abstract_state, program.axes
    return [
        *_part("params", state.params, axes.params),
        *_part("opt_state", state.opt_state, axes.opt_state),
        *_part("carry", state.carry, axes.carry),
    ]


def _part(name: str, tree: Any, axes: Any) -> Iterator[StoredArray]:
    named = jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, Axes))
    for (path, leaf), leaf_axes in zip(jax.tree_util.tree_leaves_with_path(tree), named, strict=True):
        shard = leaf.sharding.shard_shape(leaf.shape)
        yield StoredArray(
            path=f"{name}/{parameters.path_name(path)}",
            shape=leaf.shape,
            axes=leaf_axes,
            spec=_spec_text(leaf.sharding.spec),
            bytes_per_chip=math.prod(shard) * leaf.dtype.itemsize,
            replicated=shard == leaf.shape,
        )


def _spec_text(spec: jax.sharding.PartitionSpec) -> str:
    return "(" + ", ".join(" ".join(logical.mesh_axes(entry)) or "-" for entry in spec) + ")"


def totals(program: Program) -> Totals:
    """Returns the bytes of the state: on one chip, and unsharded."""
    by_part = dict.fromkeys(("params", "opt_state", "carry"), 0)
    for row in rows(program):
        by_part[row.path.split("/")[0]] += row.bytes_per_chip
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract_state))
    return Totals(**by_part, everything=sum(by_part.values()), whole=whole)


def table(program: Program) -> str:
    """Returns the parameters with their mesh axes, and the bytes of the state, as text."""
    unit = program.partitioner.slice.chip.unit
    lines = [("array", "shape", "logical axes", "mesh axes", f"MiB per {unit}")]
    for row in rows(program):
        if row.path.startswith("params/"):
            shape = "x".join(map(str, row.shape))
            lines.append((row.path, shape, str(row.axes), row.spec, f"{row.bytes_per_chip / 2**20:,.2f}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sizes = totals(program)
    return "\n".join(
        [
            *("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines),
            "",
            f"per {unit}: parameters {units.size(sizes.params)}, optimizer state {units.size(sizes.opt_state)}, "
            f"carry {units.size(sizes.carry)}; all of it unsharded: {units.size(sizes.whole)}",
        ]
    )


class Weights:
    """Recognizes parameters, or single layers of them, by their shapes on one chip.

    Dimensions may be in another order, and two neighbors merged.
    """

    def __init__(self, program: Program):
        self._by_shape: dict[tuple[int, ...], str] = {}
        table, shape = program.partitioner.strategy.activation_rules, program.partitioner.shape
        for row in _part("params", program.abstract_state.params, program.axes.params):
            names = row.axes.names
            split = [math.prod(shape[a] for a in logical.mesh_axes(table.get(n))) if n else 1 for n in names]
            local = tuple(size // ways for size, ways in zip(row.shape, split, strict=True))
            for dims in (local, tuple(d for d, n in zip(local, names, strict=True) if n not in logical.STACKED)):
                for form in _forms(dims):
                    self._by_shape.setdefault(form, row.path)

    def path_of(self, dims: Sequence[int]) -> str | None:
        """Returns the path of a parameter with this shape; None for vectors, or if there is none."""
        return next((path for form in _forms(dims) if (path := self._by_shape.get(form))), None)


def _forms(dims: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the sorted dimensions without 1s, and variants with two neighbors merged (often heads and head_dim)."""
    bare = [d for d in dims if d > 1]
    merged = [[*bare[:i], bare[i] * bare[i + 1], *bare[i + 2 :]] for i in range(len(bare) - 1)] if len(bare) > 2 else []
    return [tuple(sorted(form)) for form in (bare, *merged) if len(form) > 1]
