"""From tables to the layout of every array of a model, with everything that does not fit said at once.

Nothing is silently replicated: a dimension that does not divide is an error that names the parameter, its shape, its
axes, the strategy and the nearest fix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from core import logical
from core.logical import Axes, Rules


def specs(shapes: Any, axes: Any, rules: Rules, *, mesh_shape: Mapping[str, int], where: str) -> Any:
    """The `PartitionSpec` of every array of a tree.

    Args:
      shapes: tree of arrays or `jax.ShapeDtypeStruct`.
      axes: tree of `Axes` of the same structure.
      rules: the table to follow.
      mesh_shape: degree by mesh axis.
      where: what the table is, for messages: "strategy 'fsdp', param_rules".

    Raises:
      ValueError: every array that the table does not fit.
    """
    problems: list[str] = []

    def one(path, shape, named: Axes) -> PartitionSpec:
        try:
            spec = logical.partition_spec(named, rules)
        except ValueError as error:
            problems.append(f"{path_of(path)}: shape {tuple(shape.shape)}, {error}")
            return PartitionSpec()
        problems.extend(f"{path_of(path)}: {p}" for p in _division_problems(shape.shape, named, spec, mesh_shape))
        return spec

    tree = jax.tree_util.tree_map_with_path(one, shapes, axes, is_leaf=lambda a: isinstance(a, Axes))
    if problems:
        raise ValueError(f"{where} does not fit:\n  " + "\n  ".join(problems))
    return tree


def _division_problems(
    shape: Sequence[int], axes: Axes, spec: PartitionSpec, mesh_shape: Mapping[str, int]
) -> list[str]:
    if len(shape) != len(axes.names):
        return [f"shape {tuple(shape)} has {len(shape)} dimensions, its axes {axes} name {len(axes.names)}"]
    problems = []
    for size, name, entry in zip(shape, axes.names, spec, strict=True):
        shards = logical.shards(entry, mesh_shape)
        if size % shards:
            problems.append(
                f"shape {tuple(shape)}, axes {axes}: {name} = {size} does not divide over {entry} = {shards}. "
                + _fix(name, size, shards)
            )
    return problems


def _fix(name: str, size: int, shards: int) -> str:
    """A batch is easily made larger or smaller; a dimension of a model is not, so there the layout gives way."""
    if name in ("batch", "length"):
        return f"Nearest that do: {', '.join(map(str, logical.nearest_multiples(size, shards)))}"
    degrees = [str(d) for d in range(1, 2 * shards + 1) if size % d == 0]
    padded = f"or store it rounded up to {math.ceil(size / shards) * shards} (vocab_multiple); " * (name == "vocab")
    return (
        f"Degrees that do: {', '.join(degrees)}; {padded}or keep it whole: "
        f"strategies.override(param_rules={{{name!r}: None}}, activation_rules={{{name!r}: None}})"
    )


def shardings(spec_tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Each spec bound to the mesh."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), spec_tree, is_leaf=lambda s: isinstance(s, PartitionSpec))


def path_of(path: Sequence[Any]) -> str:
    """`layers/block/query` or `opt_state/1/mu/layers/block/query` of a key path."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path).replace("~/", "")


def batch_axes(shape: Sequence[int]) -> Axes:
    """Axes of an array of a batch: rows first, then, where there is a second dimension, positions."""
    return Axes((("batch", "length") + (None,) * len(shape))[: len(shape)])


def row_axes(shape: Sequence[int]) -> Axes:
    """Axes of an array of the carry: rows first; the rest is whole. A scalar belongs to everybody."""
    return Axes((("batch",) + (None,) * len(shape))[: len(shape)])
