"""Gradient accumulation with as few collectives as the layout allows.

Left to the partitioner, a loop over microbatches reduces the gradients of each. Where parameters are whole along a mesh
axis that rows are split over, that is waste: sums of sums can be reduced once. So the loop runs in a region where those
axes are manual, every group of chips adds up its own gradients, and one reduction follows.

    for m:  g += grad(loss_sum(params, rows of mine in m));      g = reduce(g)

Axes that split parameters too (fsdp) stay automatic by default: one gather and one reduction per microbatch, at no cost
in memory. With `gather_once` they are manual as well: parameters are gathered before the loop and gradients scattered
after it, which costs a whole copy of both on every chip (`gathered_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from core import logical, step
from core.logical import Axes, Rules
from core.types import Batch, LossOutput, Params
from parallel import rules
from parallel.strategy import Strategy


def manual_axes(tables: Strategy, shape: Mapping[str, int], *, gather_once: bool) -> set[str]:
    """Mesh axes above 1 that rows are split over, and that parameters are not, or are gathered along."""
    rows = {axis for axis in logical.mesh_axes(tables.activation_rules["batch"]) if shape[axis] > 1}
    return rows if gather_once else rows - _stored(tables)


def outermost_axes(tables: Strategy) -> list[str]:
    """Mesh axes of rows in the order in which they become manual: those that parameters are whole along come first."""
    return sorted(logical.mesh_axes(tables.activation_rules["batch"]), key=_stored(tables).__contains__)


def _stored(tables: Strategy) -> set[str]:
    """Mesh axes that parameters are split over."""
    return {axis for axes in tables.param_rules.values() for axis in logical.mesh_axes(axes)}


def sum_gradients(manual: set[str], param_axes: Any, tables: Strategy) -> step.SumGradients:
    """`core.step.sum_gradients` with one reduction over the manual axes.

    Args:
      manual: what `manual_axes` gave.
      param_axes: tree of `Axes`, the parameters'.
      tables: the strategy.
    """
    if not manual:
        return step.sum_gradients
    stored = jax.tree.map(
        lambda axes: logical.partition_spec(axes, tables.param_rules, keep=manual.__contains__),
        param_axes,
        is_leaf=lambda a: isinstance(a, Axes),
    )

    def run(grad: step.Grad, params: Params, batch: Batch, accum_steps: int) -> tuple[Params, LossOutput]:
        def local(params: Params, batch: Batch) -> tuple[Params, LossOutput]:
            whole = jax.tree.map(gather, params, stored)
            grads, out = step.sum_gradients(grad, whole, batch, accum_steps)
            pieces = jax.tree.map(lambda g, spec: reduce(g, spec, manual), grads, stored)
            return pieces, jax.lax.psum(out, tuple(manual))

        rows = {
            k: logical.partition_spec(rules.batch_axes(x.shape), tables.activation_rules, keep=manual.__contains__)
            for k, x in batch.items()
        }
        return jax.shard_map(
            local,
            in_specs=(stored, rows),
            out_specs=(stored, PartitionSpec()),
            axis_names=manual,
            check_vma=False,  # a kernel inside does not declare how its results vary over the mesh
        )(params, batch)

    return run


def _split_dimensions(spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    return [(i, logical.mesh_axes(entry)) for i, entry in enumerate(spec) if entry is not None]


def gather(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The whole of an array that is stored in pieces over manual axes."""
    for dimension, axes in _split_dimensions(spec):
        x = jax.lax.all_gather(x, axes, axis=dimension, tiled=True)
    return x


def reduce(x: jax.Array, spec: PartitionSpec, manual: set[str]) -> jax.Array:
    """Sums over the manual axes; a dimension that is stored in pieces keeps this chip's."""
    pieces = _split_dimensions(spec)
    for dimension, axes in pieces:
        x = jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
    whole = manual - {axis for _, axes in pieces for axis in axes}
    return jax.lax.psum(x, tuple(whole)) if whole else x


def gathered_bytes(
    params: Params, param_axes: Any, param_rules: Rules, shape: Mapping[str, int], manual: set[str]
) -> int:
    """What `gather_once` costs a chip: parameters and gradients, each less the pieces that it holds anyway."""

    def extra(leaf: Any, axes: Axes) -> int:
        spec = logical.partition_spec(axes, param_rules)
        pieces = math.prod(shape[axis] for entry in spec for axis in logical.mesh_axes(entry))
        kept = math.prod(shape[axis] for entry in spec for axis in logical.mesh_axes(entry) if axis not in manual)
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        return 2 * (size // kept - size // pieces)

    return sum(jax.tree.leaves(jax.tree.map(extra, params, param_axes)))
