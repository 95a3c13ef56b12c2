"""Applies the tables of a strategy to the arrays of a model, and reports everything that does not fit.

Nothing is replicated silently: a dimension that does not divide is an error that names the parameter, its shape, its
axes, the strategy and the nearest fix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from core import logical, parameters
from core.batches import BatchSpec, check_spec
from core.errors import UserError
from core.logical import Axes, Rules


def specs(shapes: Any, axes: Any, rules: Rules, *, mesh_shape: Mapping[str, int], where: str) -> Any:
    """Returns the `PartitionSpec` of every array of a tree.

    Args:
      shapes: tree of arrays or `jax.ShapeDtypeStruct`.
      axes: tree of `Axes` of the same structure.
      rules: the table to follow.
      mesh_shape: degree by mesh axis.
      where: name of the table for messages: "strategy 'fsdp', param_rules".

    Raises:
      UserError: lists every array that the table does not fit.
    """
    problems: dict[str, list[str]] = {}  # problem -> arrays

    def one(path, shape, named: Axes) -> PartitionSpec:
        array = f"{parameters.path_name(path)}: shape {tuple(shape.shape)}, axes {named}"
        try:
            spec = stored_spec(shape.shape, named, rules, mesh_shape)
        except UserError as error:
            problems.setdefault(str(error), []).append(f"{parameters.path_name(path)}: shape {tuple(shape.shape)}")
            return PartitionSpec()
        for problem in _division_problems(shape.shape, named, spec, mesh_shape):
            problems.setdefault(problem, []).append(array)
        return spec

    tree = jax.tree_util.tree_map_with_path(one, shapes, axes, is_leaf=lambda a: isinstance(a, Axes))
    if problems:
        raise UserError(f"{where} does not fit:\n  " + "\n  ".join(map(_formatted, problems, problems.values())))
    return tree


def stored_spec(shape: Sequence[int], axes: Axes, rules: Rules, mesh_shape: Mapping[str, int]) -> PartitionSpec:
    """Returns the `PartitionSpec` of a stored array.

    Layers that do not divide over the stages of a pipeline are not sharded. Instead `stage` shards the first other
    dimension that divides, so that a chip stores as much as if they did.
    """
    spec = logical.partition_spec(axes, rules)
    if axes.names[:1] != ("layers",) or spec[0] != "stage" or shape[0] % mesh_shape["stage"] == 0:
        return spec
    entries = [logical.mesh_axes(entry) for entry in spec[1:]]
    for i, size in enumerate(shape[1:]):
        if size % logical.shards((*entries[i], "stage"), mesh_shape) == 0:
            entries[i] = (*entries[i], "stage")
            break
    return PartitionSpec(None, *(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def _formatted(problem: str, arrays: Sequence[str]) -> str:
    """Formats a problem once for all arrays that have it."""
    others = [array.partition(":")[0] for array in arrays[1:]]
    return f"{arrays[0]}: {problem}" + (f" (also {', '.join(others)})" if others else "")


def _division_problems(
    shape: Sequence[int], axes: Axes, spec: PartitionSpec, mesh_shape: Mapping[str, int]
) -> list[str]:
    if len(shape) != len(axes.names):
        return [f"{len(shape)} dimensions, but its axes name {len(axes.names)}"]
    problems = []
    for size, name, entry in zip(shape, axes.names, spec, strict=True):
        shards = logical.shards(entry, mesh_shape)
        if name is not None and size % shards:
            fix = _fix(name, size, entry, mesh_shape)
            problems.append(f"{name} = {size} does not divide over {_product(entry)} = {shards}. {fix}")
    return problems


def _product(entry: str | tuple[str, ...]) -> str:
    return " x ".join(logical.mesh_axes(entry))


def _fix(name: str, size: int, entry: str | tuple[str, ...], mesh_shape: Mapping[str, int]) -> str:
    """Suggests a size for data dimensions, which are easy to change, and another layout for dimensions of the model."""
    shards = logical.shards(entry, mesh_shape)
    if name in ("batch", "length"):
        return f"Nearest that do: {', '.join(map(str, logical.nearest_multiples(size, shards)))}"
    chips = math.prod(mesh_shape.values())
    degrees = [str(d) for d in range(1, chips + 1) if size % d == 0 and chips % d == 0]
    of = f"of {_product(entry)} " if len(logical.mesh_axes(entry)) > 1 else ""
    padded = f"or store it rounded up to {math.ceil(size / shards) * shards} (vocab_multiple); " * (name == "vocab")
    return (
        f"Degrees {of}that do: {', '.join(degrees)}; {padded}or replicate it: "
        f"strategies.override(strategy, {{{name!r}: None}})"
    )


def shardings(spec_tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Binds each spec to the mesh."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), spec_tree, is_leaf=lambda s: isinstance(s, PartitionSpec))


def batch_axes(spec: BatchSpec) -> dict[str, Axes]:
    """Returns the logical axes of the fields of a batch.

    Raises:
      UserError: a field is not a `Field`, has another number of rows than the others, or an unknown axis.
    """
    check_spec(spec)
    for name, field in spec.items():
        logical.check_names(field.axes, where=f"field {name!r} of a batch")
    return {name: Axes(field.axes) for name, field in spec.items()}


def row_axes(shape: Sequence[int]) -> Axes:
    """Returns the axes of an array that is sharded over its first dimension only, the rows; a scalar has no axes."""
    return Axes((("batch",) + (None,) * len(shape))[: len(shape)])
