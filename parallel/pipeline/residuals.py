"""The values that a layer saves between its two passes, as arrays that a schedule stores and fetches.

`jax.vjp` returns a function that holds residuals. A pipeline stores for each microbatch only those that depend on x.
The backward pass differentiates the layer again, and replaces these residuals by the stored ones; the compiler removes
the forward pass that this traces.

A slot is the place of one saved array; layers of several kinds share slots of equal shapes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from core.stack import Kind, Layer, LayerFn, Side, Stream
from parallel.derivative_rules import Trained

Slots = tuple[jax.Array, ...]  # saved values of a layer


class Residuals(NamedTuple):
    """The values that a layer of each kind saves.

    Attributes:
      x: shapes of the input of a layer, tree of [b, ...].
      shapes: shape, dtype and memory (chip or host) of each slot.
      stored: for each kind, pairs of the index of a residual and its slot.
    """

    fn: LayerFn
    trained: Trained
    x: Any
    shapes: tuple[Any, ...]
    stored: dict[Kind, list[tuple[int, int]]]

    def forward(self, kind: Kind, layer: Layer, x: Stream, side: Side) -> tuple[Stream, Any, Slots]:
        """Runs a layer on x, a tree of [b, ...]; returns output, summed outputs, and what it saves.

        Args:
          kind, layer, x, side: of the layer, and its inputs.
        """
        (y, sums), residuals, _ = self._differentiate(kind, layer, x, side)
        slots = [zeros(a) for a in self.shapes]
        for index, slot in self.stored[kind]:
            slots[slot] = residuals[index]
        return y, sums, tuple(slots)

    def residuals(self, kind: Kind, layer: Layer, slots: Slots, side: Side) -> tuple[list, Any]:
        """Returns the residuals of a layer and a structure; `unflatten(structure, residuals)` is its backward pass.

        Args:
          kind, layer, side: as in the forward pass.
          slots: what the forward pass saved.
        """
        unused = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.x)
        _, residuals, structure = self._differentiate(kind, layer, unused, side)
        for index, slot in self.stored[kind]:
            residuals[index] = slots[slot]
        return residuals, structure

    def backward(
        self, kind: Kind, layer: Layer, slots: Slots, side: Side, dy: tuple[Stream, Any]
    ) -> tuple[list, Stream]:
        """Returns the gradients of the trained parameters and of x.

        Args:
          kind, layer, slots, side: as in `residuals`.
          dy: gradients of the output and of the summed outputs.
        """
        residuals, structure = self.residuals(kind, layer, slots, side)
        return jax.tree.unflatten(structure, residuals)(dy)

    def _differentiate(self, kind: Kind, layer: Layer, x: Stream, side: Side) -> tuple[tuple, list, Any]:
        return _differentiate(self.fn, self.trained, kind, layer, x, side)


def of_layers(fn: LayerFn, trained: Trained, layer: Layer, x: Stream, side: Side) -> Residuals:
    """Describes what layers of each kind save for the backward pass.

    Args:
      layer, x, side: arrays, or their shapes.
    """
    layer, x, side = _shapes((layer, x, side))
    shapes: list[Any] = []
    stored = {}
    for kind in dict.fromkeys(fn.kinds):
        found = _of_x(fn, trained, kind, layer, x, side)
        stored[kind] = list(zip(found, share(shapes, list(found.values())), strict=True))
    return Residuals(fn, trained, x, tuple(shapes), stored)


def _differentiate(
    fn: LayerFn, trained: Trained, kind: Kind, layer: Layer, x: Stream, side: Side
) -> tuple[tuple, list, Any]:
    def one_layer(picked: list, x: Stream) -> tuple[Stream, Any]:
        after, out = fn(layer._replace(params=trained.fill(picked, layer.params)), x, side, kind)
        return after, out.summed

    results, vjp = jax.vjp(one_layer, trained.pick(layer.params), x)
    return results, *jax.tree.flatten(vjp)


def _of_x(fn: LayerFn, trained: Trained, kind: Kind, layer: Layer, x: Stream, side: Side) -> dict[int, Any]:
    def residuals(layer: Layer, side: Side, x: Stream) -> list:
        return _differentiate(fn, trained, kind, layer, x, side)[1]

    traced = jax.make_jaxpr(residuals)(layer, side, x).jaxpr
    inputs = len(jax.tree.leaves(x))
    found = _dependent(traced, [False] * (len(traced.invars) - inputs) + [True] * inputs)
    return {i: v.aval for i, v in enumerate(traced.outvars) if found[i]}


def _dependent(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Returns which outputs may depend on the marked inputs; only operations `jit` are looked into."""
    marked = {v for v, yes in zip(jaxpr.invars, inputs, strict=True) if yes}
    for equation in jaxpr.eqns:
        reads = [not isinstance(v, Literal) and v in marked for v in equation.invars]
        inner = equation.params.get("jaxpr") if equation.primitive.name == "jit" else None
        outputs = _dependent(inner.jaxpr, reads) if inner else [any(reads)] * len(equation.outvars)
        marked.update(v for v, yes in zip(equation.outvars, outputs, strict=True) if yes)
    return [not isinstance(v, Literal) and v in marked for v in jaxpr.outvars]


def share(shapes: list[Any], wanted: Sequence[Any]) -> list[int]:
    """Returns a slot for each array in `wanted`; adds slots to `shapes` if needed."""
    free, found = list(range(len(shapes))), []
    for a in wanted:
        slot = next((i for i in free if _place(shapes[i]) == _place(a)), len(shapes))
        if slot == len(shapes):
            shapes.append(a)
        else:
            free.remove(slot)
        found.append(slot)
    return found


def _place(a: Any) -> tuple:
    return a.shape, a.dtype, a.memory_space


def zeros(a: Any) -> jax.Array:
    """Returns zeros with the shape and dtype of `a`, in its memory."""
    return in_memory(jnp.zeros(a.shape, a.dtype), a)


def in_memory(array: jax.Array, like: Any) -> jax.Array:
    """Moves an array on the chip to the kind of memory that `like` is in."""
    space = getattr(like, "memory_space", jax.memory.Space.Device)
    return array if space == jax.memory.Space.Device else jax.device_put(array, space)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
