"""Gradient accumulation with few collectives.

Left to XLA's partitioner, a loop over microbatches reduces the gradients of each microbatch. Here mesh axes that shard
rows but not parameters are manual, and one reduction follows the loop:

    for m:  g += grad(loss_sum(params, local rows of microbatch m));      g = reduce(g)

With `gather_once`, axes that also shard parameters (fsdp) are manual too: parameters are gathered before the loop and
gradients scattered after it, which takes memory for both.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from core import logical, step
from core.logical import Axes
from core.types import Batch, LossOutput, Params
from parallel import strategy
from parallel.strategy import Strategy


def manual_axes(tables: Strategy, shape: Mapping[str, int], *, gather_once: bool) -> set[str]:
    """Returns mesh axes of degree above 1 that shard rows.

    Without `gather_once`, those that shard parameters are left out.
    """
    rows = {axis for axis in logical.mesh_axes(tables.activation_rules["batch"]) if shape[axis] > 1}
    return rows if gather_once else rows - _stored(tables)


def outermost_axes(tables: Strategy) -> list[str]:
    """Returns the mesh axes of rows, first those that shard no parameter."""
    return sorted(logical.mesh_axes(tables.activation_rules["batch"]), key=_stored(tables).__contains__)


def _stored(tables: Strategy) -> set[str]:
    return {axis for axes in tables.param_rules.values() for axis in logical.mesh_axes(axes)}


def sum_gradients(manual: set[str], param_axes: Any, tables: Strategy) -> step.SumGradients:
    """Returns a function like `core.step.sum_gradients` that reduces only once over the manual axes.

    `param_axes`: tree of `Axes` of the parameters.
    """
    if not manual:
        return step.sum_gradients
    of_each = functools.partial(jax.tree.map, is_leaf=lambda a: isinstance(a, Axes))
    stored = of_each(
        lambda axes: logical.partition_spec(axes, tables.param_rules, keep=manual.__contains__), param_axes
    )
    kept = of_each(
        lambda axes: logical.kept_spec(axes, tables.param_rules, tables.activation_rules, manual), param_axes
    )

    def run(grad: step.Grad, params: Params, batch: Batch, accum_steps: int) -> tuple[Params, LossOutput]:
        def local(params: Params, batch: Batch) -> tuple[Params, LossOutput]:
            gathered = jax.tree.map(gather, params, stored, kept)
            grads, out = step.sum_gradients(grad, gathered, batch, accum_steps)
            shards = jax.tree.map(lambda g, spec, held: reduce(g, spec, held, manual), grads, stored, kept)
            return shards, jax.lax.psum(out, tuple(manual))

        rows = {
            k: logical.partition_spec(strategy.row_axes(x.shape), tables.activation_rules, keep=manual.__contains__)
            for k, x in batch.items()
        }
        return jax.shard_map(
            local,
            in_specs=(stored, rows),
            out_specs=(stored, PartitionSpec()),
            axis_names=manual,
            check_vma=False,  # kernels do not declare over which mesh axes their results vary
        )(params, batch)

    return run


def _gathered_dimensions(stored: PartitionSpec, kept: PartitionSpec | None) -> list[tuple[int, tuple[str, ...]]]:
    kept = kept or PartitionSpec(*[None] * len(stored))
    entries = [tuple(map(logical.mesh_axes, pair)) for pair in zip(stored, kept, strict=True)]
    return [(i, axes[len(held) :]) for i, (axes, held) in enumerate(entries) if len(axes) > len(held)]


def gather(x: jax.Array, stored: PartitionSpec, kept: PartitionSpec | None = None) -> jax.Array:
    """Gathers the shards of an array over the manual axes of `stored` that are not in `kept` (None: over all)."""
    for dimension, axes in _gathered_dimensions(stored, kept):
        x = jax.lax.all_gather(x, axes, axis=dimension, tiled=True)
    return x


def reduce(x: jax.Array, stored: PartitionSpec, kept: PartitionSpec, manual: set[str]) -> jax.Array:
    """Sums an array over the manual axes but those of `kept`, and scatters what `gather` gathers.

    Args:
      x: an array, such as a gradient, on each chip.
      stored, kept: as in `gather`.
      manual: the manual axes.
    """
    for dimension, axes in _gathered_dimensions(stored, kept):
        x = jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
    replicated = manual - {axis for entry in stored for axis in logical.mesh_axes(entry)}
    return jax.lax.psum(x, tuple(replicated)) if replicated else x


def gathered_bytes(
    params: Params,
    param_axes: Any,
    trained: Sequence[bool],
    *,
    tables: Strategy,
    shape: Mapping[str, int],
    manual: set[str],
) -> int:
    """Returns the bytes per chip that `gather_once` adds for parameters, and for gradients of trained ones.

    Args:
      params: the parameters, or their shapes.
      trained: whether each parameter is trained, in the order of the leaves.
      shape: degree by mesh axis.
      manual: the mesh axes over which parameters are gathered.
    """

    def extra(leaf: Any, axes: Axes, is_trained: bool) -> int:
        spec = logical.partition_spec(axes, tables.param_rules)
        held = logical.kept_spec(axes, tables.param_rules, tables.activation_rules, manual)
        stay = {axis for entry in held for axis in logical.mesh_axes(entry)}
        used = [axis for entry in spec for axis in logical.mesh_axes(entry)]
        shards = math.prod(shape[axis] for axis in used)
        kept = math.prod(shape[axis] for axis in used if axis not in manual or axis in stay)
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        return (1 + is_trained) * (size // kept - size // shards)

    named = jax.tree.leaves(param_axes, is_leaf=lambda a: isinstance(a, Axes))
    return sum(map(extra, jax.tree.leaves(params), named, trained))
