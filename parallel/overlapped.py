"""Runs a layer stack under FSDP; a layer's gradients are reduced during the backward pass of the layer before it.

Left to XLA's partitioner, a layer's gradients are summed over the chips at the end of its backward pass, and v4 chips
compute nothing meanwhile. Here both passes are loops in a region where the mesh axes of rows are manual. Only the
shards of the weights are saved; the backward pass gathers them again:

    for l = L - 1, ..., 0:   dW[l + 1] = sum over chips of (pending);   pending, dx = vjp of layer l (dx)
    dW[0] = sum over chips of (pending)

The sums go around rings (`parallel.ring_reduction`). Over mesh axes of rows that replicate parameters, gradients are
summed after the loop.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from core import logical, stack
from core.logical import Axes, Rules
from core.stack import Layer, LayerFn, Outputs, Side, Stream, Tail
from parallel import accumulation, derivative_rules, ring_reduction
from parallel.derivative_rules import Trained, Weights

_WHAT = "overlap_reduction"


def runner(param_rules: Rules, activation_rules: Rules, *, otherwise: stack.Runner) -> stack.Runner:
    """Returns a runner of layer stacks (`core.stack.Runner`); models must be traced inside `jax.set_mesh`.

    Args:
      param_rules, activation_rules: the tables of a strategy whose mesh axes all shard rows.
      otherwise: runs the stacks that this runner does not.
    """

    def run(fn: LayerFn, stacked: Layer, x: Stream, side: Side, tail: Tail | None) -> tuple[Any, Outputs]:
        sizes = jax.sharding.get_abstract_mesh().shape
        manual = logical.mesh_axes(activation_rules["batch"])
        rows = tuple(axis for axis in manual if axis in logical.automatic_axes() and sizes[axis] > 1)
        if not rows or fn.is_first:  # gathered once per step, a single chip, or a few layers
            return otherwise(fn, stacked, x, side, tail)
        fn, weights, fixed = derivative_rules.differentiated(fn, stacked)
        if why_not := _why_not(fn, x, math.prod(sizes[axis] for axis in rows)):
            head = () if tail is None else tail.params

            def plain(weights: Weights, fixed: Layer, head: Any, x: Stream, side: Side) -> tuple[Any, Outputs]:
                own = tail and Tail(tail.fn, head)
                return otherwise(fn, fixed._replace(params=weights), x, side, own)

            return derivative_rules.without_gradient(plain, why_not)(weights, fixed, head, x, side)
        named = jax.tree.map(lambda of: Axes(("layers", *of.names)), fn.axes(), is_leaf=_is_axes)
        stored = jax.tree.map(
            lambda of: logical.partition_spec(of, param_rules, keep=rows.__contains__), named, is_leaf=_is_axes
        )
        narrow = jax.tree.map(lambda a, dtype: a.astype(dtype), weights, fn.dtypes)
        y, sums = _differentiable(_Passes(fn, rows, stored))(narrow, x, fixed, side)
        return y if tail is None else tail.fn(tail.params, y, side, sums), Outputs(sums, fn.outputs.stacked)

    return run


def _is_axes(leaf: Any) -> bool:
    return isinstance(leaf, Axes)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, P)


def _why_not(fn: LayerFn, x: Stream, groups: int) -> str:
    """Returns why this runner cannot differentiate these layers; "" if it can."""
    instead = "use strategies.fsdp without overlap_reduction"
    if fn.undivided:
        return f"{_WHAT}: {fn.undivided}"
    if (count := jax.tree.leaves(x)[0].shape[0]) % groups:
        return (
            f"{_WHAT}: {count} rows of the layer stack do not divide over {groups} chips: train on a multiple of that"
        )
    if len(set(fn.kinds)) > 1:
        return f"{_WHAT}: the layers are of {len(set(fn.kinds))} kinds, expected one: {instead}"
    if jax.tree.leaves(fn.outputs.stacked):
        return f"{_WHAT}: the layers have stacked outputs, expected summed ones or none: {instead}"
    if fixed := [str(a.dtype) for a in jax.tree.leaves(x) if not jnp.issubdtype(a.dtype, jnp.floating)]:
        return f"{_WHAT}: x of the layer stack has arrays of {fixed[0]}, expected floating-point ones: {instead}"
    return ""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["structure", "inputs"])
@dataclasses.dataclass(frozen=True)
class _Saved:
    """`inputs` has, for each leaf of a result of `jax.vjp`, its index among a layer's inputs; None: in `arrays`."""

    arrays: list[jax.Array]
    structure: Any
    inputs: tuple[int | None, ...]

    @classmethod
    def of(cls, vjp: Callable, inputs: Sequence[jax.Array]) -> "_Saved":
        """Saves the arrays of `vjp`, a result of `jax.vjp`, that are not among `inputs`."""
        leaves, structure = jax.tree.flatten(vjp)
        number = {id(a): i for i, a in enumerate(inputs)}
        return cls([a for a in leaves if id(a) not in number], structure, tuple(number.get(id(a)) for a in leaves))

    def vjp(self, inputs: Sequence[jax.Array]) -> Callable:
        rest = iter(self.arrays)
        leaves = [next(rest) if number is None else inputs[number] for number in self.inputs]
        return jax.tree.unflatten(self.structure, leaves)


class _Pending(NamedTuple):
    """The carry of the backward pass; layer l is the next to run.

    Attributes:
      dx: gradient of the output of layer l; tree of [b, ...].
      grads: this chip's gradients of the parameters of layer l + 1; [...].
      reduced: reduced gradients of later layers, sharded as the parameters; [L, ...].
    """

    dx: Stream
    grads: list[jax.Array]
    reduced: list[jax.Array]


class _Passes:
    """The two passes over the layers; the mesh axes `rows` are manual inside."""

    def __init__(self, fn: LayerFn, rows: tuple[str, ...], stored: Any):
        self._fn, self._rows, self._stored = fn, rows, stored
        self._one = jax.tree.map(lambda spec: P(*spec[1:]), stored, is_leaf=_is_spec)  # of one layer

    def forward(self, weights: Weights, x: Stream, fixed: Layer, side: Side, trained: Trained | None) -> tuple:
        """Returns the last layer's output, summed outputs, and what the backward pass needs: () without `trained`."""
        by_rows = P(self._rows)

        def local(weights: Weights, fixed: Layer, x: Stream, side: Side) -> tuple[Stream, Any, Any]:
            def step(carry: tuple[Stream, Any], layer: tuple[Layer, Weights]) -> tuple[tuple[Stream, Any], Any]:
                (x, sums), (rest, shards) = carry, layer
                gathered = self._gathered(shards)
                if trained is None:
                    x, out = self._layer(rest, gathered, side, x)
                    return (x, jax.tree.map(jnp.add, sums, out.summed)), ()
                call = functools.partial(self._trained_layer, rest, gathered, side, trained)
                (x, out), vjp = jax.vjp(call, trained.pick(gathered), x)
                saved = _Saved.of(vjp, jax.tree.leaves((rest, gathered, side)))
                return (x, jax.tree.map(jnp.add, sums, out.summed)), saved

            (x, sums), saved = jax.lax.scan(step, (x, self._fn.zero_sums()), (fixed, weights))
            return x, jax.lax.psum(sums, self._rows), saved

        specs, out_specs = (self._stored, P(), by_rows, by_rows), (by_rows, P(), by_rows)
        return self._manual(local, specs, out_specs)(weights, fixed, x, side)

    def backward(
        self, weights: Weights, fixed: Layer, side: Side, saved: _Saved, dy: Stream, dsums: Any, trained: Trained
    ) -> tuple[list, Stream]:
        by_rows, layers = P(self._rows), len(self._fn.kinds)
        specs = trained.pick(self._one)

        def local(
            weights: Weights, fixed: Layer, side: Side, saved: _Saved, dy: Stream, dsums: Any
        ) -> tuple[list, Stream]:
            def step(at: _Pending, layer: tuple) -> tuple[_Pending, None]:
                rest, shards, saved, number = layer
                reduced = self._put(at.reduced, self._scattered(at.grads, specs), (number + 1) % layers)
                vjp = saved.vjp(jax.tree.leaves((rest, self._gathered(shards), side)))
                grads, dx = vjp((at.dx, Outputs(dsums, self._fn.outputs.stacked)))
                return _Pending(dx, grads, reduced), None

            one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), weights)
            zeros = [jnp.zeros(a.shape, a.dtype) for a in trained.pick(jax.eval_shape(self._gathered, one))]
            # The first step puts zeros in the place of layer 0, which is written last.
            start = _Pending(dy, zeros, jax.tree.map(jnp.zeros_like, trained.pick(weights)))
            each = (fixed, weights, saved, jnp.arange(layers))
            end, _ = jax.lax.scan(step, start, each, reverse=True)
            reduced = self._put(end.reduced, self._scattered(end.grads, specs), jnp.asarray(0))
            return [self._summed(g, spec) for g, spec in zip(reduced, specs, strict=True)], end.dx

        in_specs = (self._stored, P(), by_rows, by_rows, by_rows, P())
        run = self._manual(local, in_specs, (trained.pick(self._stored), by_rows))
        return run(weights, fixed, side, saved, dy, dsums)

    def _manual(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            fn, in_specs=in_specs, out_specs=out_specs, axis_names=set(self._rows), check_vma=False
        )  # check_vma: kernels do not declare over which mesh axes their results vary

    def _layer(self, rest: Layer, gathered: Weights, side: Side, x: Stream) -> tuple[Stream, Outputs]:
        return self._fn(rest._replace(params=gathered), x, side, self._fn.kinds[0])

    def _trained_layer(
        self, rest: Layer, gathered: Weights, side: Side, trained: Trained, weights: list, x: Stream
    ) -> tuple[Stream, Outputs]:
        return self._layer(rest, trained.fill(weights, gathered), side, x)

    def _gathered(self, shards: Weights) -> Weights:
        return jax.tree.map(accumulation.gather, shards, self._one)

    @staticmethod
    def _scattered(grads: list[jax.Array], specs: list[P]) -> list[jax.Array]:
        """Sums gradients over the axes that shard them; every second array goes around the rings the other way."""
        found = []
        for number, (g, spec) in enumerate(zip(grads, specs, strict=True)):
            for dimension, entry in enumerate(spec):
                for axis in logical.mesh_axes(entry):
                    g = ring_reduction.reduce_scatter(g, axis, dimension=dimension, toward=(-1) ** number)
            found.append(g)
        return found

    def _summed(self, g: jax.Array, spec: P) -> jax.Array:
        """Sums gradients [L, ...] over the axes of rows that do not shard them."""
        rest = set(self._rows) - {axis for entry in spec for axis in logical.mesh_axes(entry)}
        return jax.lax.psum(g, tuple(rest)) if rest else g

    @staticmethod
    def _put(arrays: list[jax.Array], values: list[jax.Array], at: jax.Array) -> list[jax.Array]:
        return [jax.lax.dynamic_update_index_in_dim(a, v, at, 0) for a, v in zip(arrays, values, strict=True)]


def _differentiable(passes: _Passes) -> Any:
    @jax.custom_vjp
    def call(weights: Weights, x: Stream, fixed: Layer, side: Side) -> tuple[Stream, Any]:
        return passes.forward(weights, x, fixed, side, None)[:2]

    def forward(*args: Any) -> tuple[tuple[Stream, Any], tuple]:
        trained = derivative_rules.trained(args[0])
        weights, x, fixed, side = derivative_rules.values(args, what=_WHAT)
        y, sums, saved = passes.forward(weights, x, fixed, side, trained)
        return (y, sums), (weights, fixed, side, saved, trained)

    def backward(kept: tuple, cotangents: Any) -> tuple:
        weights, fixed, side, saved, trained = kept
        dy, dsums = jax.tree.map(derivative_rules.dense, cotangents)
        grads, dx = passes.backward(weights, fixed, side, saved, dy, dsums, trained)
        return trained.fill(grads), dx, None, None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call
