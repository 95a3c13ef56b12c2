"""The manual region of a pipeline: its mesh axes, and how arrays enter and leave it.

XLA's partitioner would gather weights sharded over fsdp, and reduce their gradients, for each microbatch. Therefore the
axes that shard rows are manual around the loop over ticks: weights are gathered before it, and gradients reduced after
it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from core import logical
from core.logical import Axes, Rules
from core.stack import LayerFn
from parallel import accumulation, strategy
from parallel.derivative_rules import Trained
from parallel.pipeline import layer_order, schedules
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.stage import STAGE


class Region(NamedTuple):
    """The manual axes of rows, and the sharding of parameters over them.

    Attributes:
      rows: mesh axes of degree above 1 that shard rows; may be empty.
      others: the other automatic axes of degree above 1, such as `stage`.
      stored: specs of stacked parameters over `rows`.
      held: specs over `rows` that remain when weights are gathered: those of exchanged parameters.
      kept: specs over `others`, which remain when weights are gathered.
      staged: as `kept`, but with layers over stages.
      dtypes: in which the layers compute.
      layers, padded: L without and with padding.
    """

    rows: tuple[str, ...]
    others: tuple[str, ...]
    stored: Any
    held: Any
    kept: Any
    staged: Any
    dtypes: Any
    layers: int
    padded: int
    spans_slices: bool

    @property
    def by_rows(self) -> P:
        """Spec of an array [B, ...] that is sharded over `rows`."""
        return P(self.rows or None)

    def run(self, fn: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
        """Returns `fn` in a `shard_map` with manual axes `rows`, or `fn` itself without any."""
        if not self.rows:  # an empty `axis_names` would mean all axes
            return fn
        return jax.shard_map(
            fn, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.rows), check_vma=False
        )  # check_vma: kernels do not declare over which mesh axes their results vary

    def cast(self, params: Any) -> Any:
        """Casts weights to the dtypes in which the layers compute."""
        return jax.tree.map(lambda a, dtype: a.astype(dtype), params, self.dtypes)

    def gather(self, params: Any, *, then: Callable = lambda tree: tree) -> Any:
        """Gathers weights over the axes of rows; `then` is applied to the shards before."""

        def gathered(tree: Any) -> Any:
            if self.padded != self.layers:
                tree = jax.tree.map(lambda a, spec: layer_order.from_storage(a, spec, self.padded), tree, self.kept)
            return jax.tree.map(accumulation.gather, then(tree), self.stored, self.held)

        return self._on_every_chip(gathered, params, in_specs=self.kept, out_specs=self.staged)

    def reduce(self, grads: tuple, trained: Trained, *, then: Callable = lambda tree: tree) -> Any:
        """Sums gradients over all rows, and shards them as the parameters.

        `grads` has a list of [R, ...] for each of the k layers that a stage runs in a tick; `then` is applied to the
        sums of one stage, [R k, ...].
        """

        def reduced(grads: tuple) -> Any:
            layers = [jax.tree.map(self._reduced, tree, stored, held) for tree in grads]
            tree = then(jax.tree.map(_interleave, *layers))
            if self.padded != self.layers:
                tree = jax.tree.map(lambda a, spec: layer_order.to_storage(a, spec, self.layers), tree, kept)
            return tree

        stored, held, staged, kept = map(trained.pick, (self.stored, self.held, self.staged, self.kept))
        return self._on_every_chip(reduced, grads, in_specs=(staged,) * len(grads), out_specs=kept)

    def _reduced(self, g: jax.Array, stored: P, held: P) -> jax.Array:
        return accumulation.reduce(g, stored, held, set(self.rows))

    def _on_every_chip(self, fn: Callable, tree: Any, *, in_specs: Any, out_specs: Any) -> Any:
        """All axes are manual; otherwise XLA's partitioner replicates operands of explicit collectives."""
        return jax.shard_map(
            fn, in_specs=(in_specs,), out_specs=out_specs, axis_names=set(self.others), check_vma=False
        )(tree)

    def sum(self, tree: Any) -> Any:
        """Adds up the arrays of all groups of rows."""
        return jax.lax.psum(tree, self.rows) if self.rows else tree


def region(
    fn: LayerFn, stacked: Any, schedule: Schedule, param_rules: Rules, activation_rules: Rules, spans_slices: bool
) -> Region:
    """Returns the region of a layer stack; axes that are already manual are left out.

    Args:
      stacked: parameters, leaves [L, ...].
      param_rules, activation_rules: the strategy's tables.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    automatic = [axis for axis in sizes if axis in logical.automatic_axes() and sizes[axis] > 1]
    rows = tuple(axis for axis in logical.mesh_axes(activation_rules["batch"]) if axis in automatic)
    others = tuple(axis for axis in automatic if axis not in rows)

    is_axes = functools.partial(jax.tree.map, is_leaf=lambda a: isinstance(a, Axes))
    named = is_axes(lambda of: Axes(("layers", *of.names), of.exchanged), fn.axes())
    stored = is_axes(
        lambda of, a: strategy.stored_spec(logical.whole_shape(a.shape, of), of, param_rules, sizes), named, stacked
    )
    held = is_axes(lambda of: logical.kept_spec(of, param_rules, activation_rules, rows), named)
    staged = is_axes(lambda of: logical.partition_spec(of, param_rules, keep=others.__contains__), named)
    layers = len(fn.kinds)
    return Region(
        rows=rows,
        others=others,
        stored=_only(rows, stored),
        held=held,
        kept=_only(others, stored),
        staged=staged,
        dtypes=fn.dtypes,
        layers=layers,
        padded=schedules.padded(layers, schedule.layer_unit(sizes[STAGE])),
        spans_slices=spans_slices,
    )


def _only(axes: tuple[str, ...], specs: Any) -> Any:
    def one(spec: P) -> P:
        entries = [tuple(axis for axis in logical.mesh_axes(entry) if axis in axes) for entry in spec]
        return P(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))

    return jax.tree.map(one, specs, is_leaf=lambda spec: isinstance(spec, P))


def _interleave(*layers: jax.Array) -> jax.Array:
    """Interleaves k arrays [R, ...] into one [R k, ...]: entry r k + i is `layers[i][r]`."""
    stacked = jnp.stack(layers, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])


def over_stages(fn: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
    """Returns `fn` mapped over stages: a `shard_map` in which `stage` is manual."""
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names={STAGE}, check_vma=False)


def split_rows(x: jax.Array, microbatches: int) -> jax.Array:
    """Splits [B, ...] into [M, B / M, ...]; microbatch m has rows m, m + M, …"""
    return x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:]).swapaxes(0, 1)


def merge_rows(x: jax.Array) -> jax.Array:
    """Merges [M, b, ...] into [M b, ...]; the inverse of `split_rows`."""
    return x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])
