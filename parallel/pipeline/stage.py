"""The work of one stage in one tick: its layers on one microbatch, forward or backward.

Everything here runs where `stage` is manual: arrays are local to a stage. Only inputs are saved between the two passes;
every layer is recomputed in the backward pass, so that no parameter is saved per microbatch. Gradients are accumulated
in float32, in place and layer by layer, so that XLA fuses each sum with the product that it adds.

    forward    x[l+1] = f(W[l], x[l]);    saved: x[l] of every layer, or of the first
    backward   dW[l], dx[l] = vjp(f at W[l], x[l])(dx[l+1]);    dW_sum[l] += dW[l]

b rows of a microbatch, k layers that a stage runs in a tick.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from core import logical
from core.stack import Layer, LayerFn, Side

STAGE = "stage"


class Turn(NamedTuple):
    """The microbatch and repeat of a stage in one tick.

    Attributes:
      microbatch, repeat: [], int32; in range even in a bubble.
      valid: [], bool; false in a bubble.
    """

    microbatch: jax.Array
    repeat: jax.Array
    valid: jax.Array

    @property
    def first(self) -> jax.Array:
        """[], bool: whether it is the first microbatch of its repeat."""
        return self.valid & (self.microbatch == 0)


def turn(number: jax.Array, *, microbatches: int, repeats: int) -> Turn:
    """Returns the turn with a given number; a bubble outside of 0 … M R - 1."""
    total = microbatches * repeats
    inside = jnp.clip(number, 0, total - 1)
    return Turn(inside % microbatches, inside // microbatches, (number >= 0) & (number < total))


class Stage(NamedTuple):
    """The layers of one stage.

    Attributes:
      fn: one layer.
      layers: in the order in which this stage runs them; leaves [R k, ...].
      sides: arrays that belong to rows, by microbatch; leaves [M, b, ...].
      depth: k.
      save: "layers", "stage", or "nothing" if no backward pass follows.
      bubble: value on which the stage computes in a bubble, and of uninitialized memory; None: whatever is there.
    """

    fn: LayerFn
    layers: Layer
    sides: Side
    depth: int
    save: str
    bubble: float | None

    def input(self, at: Turn, x: jax.Array) -> jax.Array:
        """Returns `x`, or the bubble's value in a bubble."""
        return x if self.bubble is None else jnp.where(at.valid, x, self.bubble)

    @property
    def repeats(self) -> int:
        """R, the number of times that a microbatch passes through this stage."""
        return jax.tree.leaves(self.layers.params)[0].shape[0] // self.depth

    def layer(self, at: Turn, i: jax.Array | int) -> Layer:
        """Returns the i-th layer that the stage runs in the turn `at`."""
        return jax.tree.map(lambda a: take(a, at.repeat * self.depth + i), self.layers)

    def side(self, at: Turn) -> Side:
        """Returns the side of this turn's microbatch."""
        return jax.tree.map(lambda a: take(a, at.microbatch), self.sides)

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Returns an uninitialized array, for entries that are written before they are read."""
        sizes = jax.sharding.get_abstract_mesh().shape
        if self.bubble is None and all(sizes[axis] == 1 for axis in logical.automatic_axes()):
            return jax.lax.empty(shape, dtype)  # along automatic axes it would be replicated
        return jnp.full(shape, self.bubble or 0, dtype)


class Grads(NamedTuple):
    """Float32 gradients of a stage's parameters.

    Each of the k layers has arrays of its own: XLA copies a part of a larger array before adding to it.

    Attributes:
      sums: of the current repeat; k trees, leaves [...].
      repeats: of all repeats; the sums are copied here in every turn, which is cheaper than accumulating here; k trees,
        leaves [R, ...], or () if R = 1.
    """

    sums: tuple
    repeats: tuple

    def layers(self) -> tuple:
        """Returns k trees, leaves [R, ...]."""
        return self.repeats or jax.tree.map(lambda a: a[None], self.sums)


def forward(stage: Stage, at: Turn, x: jax.Array, kept: Any, place: jax.Array) -> tuple[jax.Array, Any]:
    """Runs the layers of this turn.

    Args:
      stage: the layers.
      at: the turn; in a bubble saved inputs do not change.
      x: [b, ...], the input of the first layer.
      kept: from `empty_saved`.
      place: [], of this turn in `kept`.

    Returns:
      The output of the last layer, and the saved inputs.
    """
    side = stage.side(at)
    if stage.save != "nothing":
        place = jnp.where(at.valid, place, kept.shape[1] - 1)
    if stage.save == "stage":
        kept = put(kept, x, 0, place)

    def one(carry: tuple[jax.Array, Any], i: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
        x, kept = carry
        if stage.save == "layers":
            kept = put(kept, x, i, place)
        return (stage.fn(stage.layer(at, i), x, side)[0], kept), None

    return jax.lax.scan(one, (x, kept), jnp.arange(stage.depth))[0]


def backward(
    stage: Stage, at: Turn, kept: Any, place: jax.Array, dy: jax.Array, grads: Grads
) -> tuple[jax.Array, Grads]:
    """Runs the backward pass of the layers of this turn.

    Args:
      stage: the layers.
      at: the turn; in a bubble the gradients do not change.
      kept: inputs saved by `forward`.
      place: [], of this turn in `kept`.
      dy: [b, ...], the gradient of the output of the last layer.
      grads: summed so far.

    Returns:
      The gradient of the input of the first layer, [b, ...], and the sums.
    """
    if stage.save == "stage":
        kept, place = _inputs_again(stage, at, take(kept, 0, place)), jnp.zeros_like(place)
    sums, repeats = list(grads.sums), list(grads.repeats)

    def add(so_far: jax.Array, new: jax.Array) -> jax.Array:
        before = jnp.where(at.first, 0, so_far) if repeats else so_far
        return before + jnp.where(at.valid, new, 0)

    for i in reversed(range(stage.depth)):
        dw, dy = _layer_backward(stage, at, i, take(kept, i, place), dy)
        sums[i] = jax.tree.map(add, sums[i], dw)
        if repeats:
            repeats[i] = jax.tree.map(lambda all_, new: put(all_, new, at.repeat), repeats[i], sums[i])
        # Without a barrier the compiler runs several layers forward at once and sums at the end, which needs memory.
        dy, place, sums[i] = jax.lax.optimization_barrier((dy, place, sums[i]))
    return dy, Grads(tuple(sums), tuple(repeats))


def _layer_backward(stage: Stage, at: Turn, i: int, x: jax.Array, dy: jax.Array) -> tuple[Any, jax.Array]:
    params, key, _ = stage.layer(at, i)
    side = stage.side(at)
    _, vjp = jax.vjp(lambda params, x: stage.fn.plain(Layer(params, key), x, side, None)[0], params, x)
    return vjp(dy)


def _inputs_again(stage: Stage, at: Turn, x: jax.Array) -> jax.Array:
    """Recomputes the inputs of the layers of this turn, in place 0 of [k, 2, b, ...]."""
    again = stage._replace(save="layers")
    return forward(again, at, x, empty_saved(again, x, places=1), jnp.asarray(0))[1]


def empty_saved(stage: Stage, x: jax.Array, *, places: int) -> Any:
    """Allocates saved inputs of `places` turns, [k, places + 1, b, ...] or [1, places + 1, b, ...].

    The last place is written in bubbles, which is cheaper than restoring the previous value of another place.
    """
    layers = {"layers": stage.depth, "stage": 1, "nothing": 0}[stage.save]
    return stage.allocate((layers, places + 1, *x.shape), x.dtype) if layers else ()


def zero_grads(stage: Stage) -> Grads:
    """Returns zero gradients."""
    one = jax.tree.map(lambda a: a[0], stage.layers.params)
    sums = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (one,) * stage.depth)
    if stage.repeats == 1:
        return Grads(sums, ())
    return Grads(sums, jax.tree.map(lambda a: stage.allocate((stage.repeats, *a.shape), jnp.float32), sums))


def take(a: jax.Array, *index: jax.Array | int) -> jax.Array:
    """Returns a[index]."""
    n = len(index)
    starts = (*index, *[0] * (a.ndim - n))
    return jax.lax.dynamic_slice(a, starts, (*[1] * n, *a.shape[n:])).reshape(a.shape[n:])


def put(a: jax.Array, value: jax.Array, *index: jax.Array | int) -> jax.Array:
    """Returns `a` with a[index] = value."""
    n = len(index)
    starts = (*index, *[0] * (a.ndim - n))
    return jax.lax.dynamic_update_slice(a, value.astype(a.dtype).reshape(*[1] * n, *a.shape[n:]), starts)


def put_if(condition: jax.Array, a: jax.Array, value: jax.Array, *index: jax.Array | int) -> jax.Array:
    """Returns `put(a, value, *index)` if the condition holds, else `a`; in place, since only the entry is selected."""
    return put(a, jnp.where(condition, value, take(a, *index)), *index)


def send(x: jax.Array, *, toward: int) -> jax.Array:
    """Sends `x` to the next (+1) or previous (-1) stage around the ring; returns what the neighbour sent."""
    stages = jax.lax.axis_size(STAGE)
    return jax.lax.ppermute(x, STAGE, [(i, (i + toward) % stages) for i in range(stages)])


def broadcast(x: jax.Array, *, source: int) -> jax.Array:
    """Returns on every stage the `x` of stage `source`; the number of stages that have it doubles in every step.

    A sum with zeros elsewhere would cost arithmetic, and XLA cannot compile it for CPUs in bfloat16.
    """
    stages, have = jax.lax.axis_size(STAGE), 1
    offset = (jax.lax.axis_index(STAGE) - source) % stages
    while have < stages:
        pairs = [((source + i) % stages, (source + i + have) % stages) for i in range(min(have, stages - have))]
        arrived = jax.lax.ppermute(x, STAGE, pairs)
        x = jnp.where((offset >= have) & (offset < 2 * have), arrived, x)
        have *= 2
    return x
