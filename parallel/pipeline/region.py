"""Where a pipeline runs: regions in which some mesh axes are manual, and how arrays get in and out.

Left to the partitioner, weights that are split over fsdp are gathered and their gradients reduced for every microbatch.
So the axes that rows are split over are manual outside of the loop over ticks: weights come in as pieces, are gathered
once, and gradients leave as pieces, reduced once. `stage` is manual inside; other axes stay automatic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from core import logical
from core.logical import Axes, Rules
from core.stack import LayerFn
from parallel import accumulation
from parallel.pipeline.stage import STAGE


class Region(NamedTuple):
    """The manual axes of rows, and how parameters are stored over them.

    Attributes:
      rows: mesh axes above 1 that rows are split over, in their order; may be none.
      others: the other automatic ones above 1, `stage` among them.
      stored: tree of specs, of stacked parameters over `rows`.
      kept: likewise over `others`: how weights stay split when they are gathered.
      dtypes: tree of what the layers compute with, which is what travels.
    """

    rows: tuple[str, ...]
    others: tuple[str, ...]
    stored: Any
    kept: Any
    dtypes: Any

    @property
    def by_rows(self) -> P:
        """Spec of an array [B, ...]."""
        return P(self.rows or None)

    def run(self, fn: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
        """`fn` on the arrays of one group of rows."""
        if not self.rows:  # for shard_map, none would be all
            return fn
        return jax.shard_map(
            fn, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.rows), check_vma=False
        )  # as for every region with a kernel inside: it does not declare how its results vary

    def cast(self, params: Any) -> Any:
        """Pieces in the dtype of computation."""
        return jax.tree.map(lambda a, dtype: a.astype(dtype), params, self.dtypes)

    def gather(self, params: Any, *, then: Callable = lambda tree: tree) -> Any:
        """Whole weights from pieces; `then`, on the weights of one stage, comes before."""

        def whole(tree: Any) -> Any:
            return jax.tree.map(accumulation.gather, then(tree), self.stored)

        return self._on_every_chip(whole, params, in_specs=self.kept)

    def reduce(self, grads: tuple, *, then: Callable = lambda tree: tree) -> Any:
        """Pieces of gradients, summed over all rows.

        Args:
          grads: of each of the k layers that a stage runs within a tick, leaves [R, ...].
          then: applied behind, to those of one stage, [R k, ...].
        """

        def pieces(grads: tuple) -> Any:
            layers = [jax.tree.map(self._reduced, tree, self.stored) for tree in grads]
            return then(jax.tree.map(_one_behind_the_other, *layers))

        return self._on_every_chip(pieces, grads, in_specs=(self.kept,) * len(grads))

    def _reduced(self, g: jax.Array, spec: P) -> jax.Array:
        return accumulation.reduce(g, spec, set(self.rows))

    def _on_every_chip(self, fn: Callable, tree: Any, *, in_specs: Any) -> Any:
        """With every axis manual: the partitioner would first make whole what a collective of ours is given."""
        return jax.shard_map(
            fn, in_specs=(in_specs,), out_specs=self.kept, axis_names=set(self.others), check_vma=False
        )(tree)

    def sum(self, tree: Any) -> Any:
        """Sums over all rows of something small."""
        return jax.lax.psum(tree, self.rows) if self.rows else tree


def region(fn: LayerFn, param_rules: Rules, activation_rules: Rules) -> Region:
    """The region of a layer stack, inside of whatever is manual already."""
    sizes = jax.sharding.get_abstract_mesh().shape
    automatic = [axis for axis in sizes if axis in logical.automatic_axes() and sizes[axis] > 1]
    rows = tuple(axis for axis in logical.mesh_axes(activation_rules["batch"]) if axis in automatic)
    others = tuple(axis for axis in automatic if axis not in rows)

    def specs(axes: tuple[str, ...]) -> Any:
        def one(named: Axes) -> P:
            return logical.partition_spec(Axes(("layers", *named.names)), param_rules, keep=axes.__contains__)

        return jax.tree.map(one, fn.axes(), is_leaf=lambda a: isinstance(a, Axes))

    return Region(rows, others, specs(rows), specs(others), fn.dtypes)


def _one_behind_the_other(*layers: jax.Array) -> jax.Array:
    """k arrays [R, ...] as [R k, ...], in the order in which they run."""
    stacked = jnp.stack(layers, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])


def over_stages(fn: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
    """`fn` on the arrays of one stage."""
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names={STAGE}, check_vma=False)


def split_rows(x: jax.Array, microbatches: int) -> jax.Array:
    """[B, ...] -> [M, B / M, ...]; microbatch m holds rows m, m + M, …"""
    return x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:]).swapaxes(0, 1)


def merge_rows(x: jax.Array) -> jax.Array:
    """[M, b, ...] -> [M b, ...], in the order that `split_rows` took them from."""
    return x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])
