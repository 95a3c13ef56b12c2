"""Helpers for custom derivatives of layer stacks: which arguments have gradients, and their values."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from core.errors import UserError
from core.logical import Axes
from core.stack import Kind, Layer, LayerFn, Outputs, Stream


class Weights(NamedTuple):
    """What is differentiated of a `Layer`: its parameters, and the floating-point arrays of its `inputs`."""

    params: Any
    inputs: list


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Trained:
    """The structure of a tree of parameters, and which of its leaves get gradients."""

    structure: Any
    leaves: tuple[bool, ...]

    def pick(self, tree: Any) -> list:
        """Returns the trained leaves of a tree of arrays or of `PartitionSpec`s."""
        leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        return [leaf for leaf, yes in zip(leaves, self.leaves, strict=True) if yes]

    def fill(self, trained: list, others: Any = None) -> Any:
        """Returns the tree of the leaves `trained` and, elsewhere, those of `others` or None."""
        rest = jax.tree.leaves(others) if others is not None else [None] * len(self.leaves)
        found = iter(trained)
        leaves = [next(found) if yes else other for yes, other in zip(self.leaves, rest, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)


def differentiated(fn: LayerFn, stacked: Layer) -> tuple[LayerFn, Weights, Layer]:
    """Moves the floating-point arrays of `layer_in`, which have gradients, to the parameters of the layers.

    Returns:
      A `LayerFn` whose parameters are `Weights`; the `Weights`; and a `Layer` of the rest.
    """
    leaves, structure = jax.tree.flatten(stacked.inputs)
    is_float = [jnp.issubdtype(a.dtype, jnp.floating) for a in leaves]
    floats, others = ([a for a, yes in zip(leaves, is_float, strict=True) if yes == which] for which in (True, False))

    def whole(layer: Layer) -> Layer:
        parts = {True: iter(layer.params.inputs), False: iter(layer.inputs)}
        inputs = jax.tree.unflatten(structure, [next(parts[yes]) for yes in is_float])
        return Layer(layer.params.params, layer.key, inputs)

    def rematerialized(kind: Kind, in_loop: bool) -> Callable[..., tuple[Stream, Outputs]]:
        run = fn.rematerialized(kind, in_loop)
        return lambda layer, x, side: run(whole(layer), x, side)

    weighted = dataclasses.replace(
        fn,
        plain=lambda layer, x, side, kind: fn.plain(whole(layer), x, side, kind),
        rematerialized=rematerialized,
        axes=lambda: Weights(fn.axes(), [Axes((None,) * (a.ndim - 1)) for a in floats]),
        dtypes=Weights(fn.dtypes, [a.dtype for a in floats]),
    )
    return weighted, Weights(stacked.params, floats), Layer((), stacked.key, others)


def trained(weights: Any) -> Trained:
    """Returns which leaves of `weights` are differentiated.

    `weights`: an argument of a `jax.custom_vjp` forward rule with `symbolic_zeros=True`.
    """
    leaves, structure = jax.tree.flatten(weights)
    return Trained(structure, tuple(leaf.perturbed for leaf in leaves))


def values(args: tuple, *, what: str) -> tuple:
    """Returns the arguments of a forward rule as arrays. Raises UserError if `side` depends on parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(args[-1])
    found = [jax.tree_util.keystr(path) for path, leaf in leaves if leaf.perturbed]
    if found:
        raise UserError(
            f"{what}: the side of the layer stack depends on parameters ({', '.join(found)}), and it computes no "
            "gradient of that: make it depend on the batch only, or add it to x"
        )
    return jax.tree.map(lambda a: a.value, args)


def without_gradient(fn: Any, why_not: str) -> Any:
    """Returns `fn`; its gradient raises UserError with the message `why_not`."""
    call = jax.custom_vjp(fn)

    def forward(*args: Any) -> Any:
        raise UserError(why_not)

    call.defvjp(forward, lambda saved, dy: saved, symbolic_zeros=True)
    return call


def dense(cotangent: Any) -> Any:
    """Returns a cotangent as an array; zeros for a symbolic zero."""
    return jnp.zeros(cotangent.shape, cotangent.dtype) if isinstance(cotangent, SymbolicZero) else cotangent
