"""What one stage does within one tick: its layers on one microbatch, forward or backward.

Everything here runs where `stage` is manual: arrays are those of this stage. Only inputs are kept between the two
passes, and every layer is computed again in the backward pass, so that no parameter is kept with each microbatch.
Gradients are added up in float32, in place, layer by layer, so that a sum costs no more than the product it adds.

    forward    x[l+1] = f(W[l], x[l]);    kept: x[l] of every layer, or the first
    backward   dW[l], dx[l] = vjp(f at W[l], x[l])(dx[l+1]);    dW_sum[l] += dW[l]

b rows of a microbatch, k layers that a stage runs within a tick.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from core import logical
from core.stack import Layer, LayerFn, Side

STAGE = "stage"


class Turn(NamedTuple):
    """Which microbatch it is for this stage.

    Attributes:
      microbatch, repeat: [], int32; within bounds even in a bubble.
      valid: [], bool; false in a bubble.
    """

    microbatch: jax.Array
    repeat: jax.Array
    valid: jax.Array

    @property
    def first(self) -> jax.Array:
        """[], bool: whether it is the first of its repeat."""
        return self.valid & (self.microbatch == 0)


def turn(number: jax.Array, *, microbatches: int, repeats: int) -> Turn:
    """The turn with this number; a bubble outside of 0 … M R - 1."""
    total = microbatches * repeats
    inside = jnp.clip(number, 0, total - 1)
    return Turn(inside % microbatches, inside // microbatches, (number >= 0) & (number < total))


class Stage(NamedTuple):
    """The layers of one stage.

    Attributes:
      fn: one layer.
      layers: in the order in which this stage runs them; leaves [R k, ...].
      sides: what travels with the rows, by microbatch; leaves [M, b, ...].
      depth: k.
      save: "layers", "stage", or "nothing" where no backward pass follows.
      bubble: what a turn without a microbatch computes on, and what is where nothing was put yet; None: anything.
    """

    fn: LayerFn
    layers: Layer
    sides: Side
    depth: int
    save: str
    bubble: float | None

    def input(self, at: Turn, x: jax.Array) -> jax.Array:
        """`x`, or in a bubble what the stage is to compute on then."""
        return x if self.bubble is None else jnp.where(at.valid, x, self.bubble)

    @property
    def repeats(self) -> int:
        """R."""
        return jax.tree.leaves(self.layers.params)[0].shape[0] // self.depth

    def layer(self, at: Turn, i: jax.Array | int) -> Layer:
        """The layer in place i of this turn's."""
        return jax.tree.map(lambda a: take(a, at.repeat * self.depth + i), self.layers)

    def side(self, at: Turn) -> Side:
        """What belongs to the rows of this turn."""
        return jax.tree.map(lambda a: take(a, at.microbatch), self.sides)

    def room(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """An array that nothing is read from before it was put there."""
        sizes = jax.sharding.get_abstract_mesh().shape
        if self.bubble is None and all(sizes[axis] == 1 for axis in logical.automatic_axes()):
            return jax.lax.empty(shape, dtype)  # along an automatic axis it would be whole on every chip
        return jnp.full(shape, self.bubble or 0, dtype)


class Grads(NamedTuple):
    """Gradients of a stage's parameters, float32.

    Each of the k layers has arrays of its own: to add to a part of a larger one, XLA copies the part first.

    Attributes:
      sums: of the repeat at hand; k trees, leaves [...].
      repeats: of all repeats, the latest sums put there at every turn, which costs less than to add them up there;
        k trees, leaves [R, ...], or () where R = 1.
    """

    sums: tuple
    repeats: tuple

    def layers(self) -> tuple:
        """k trees, leaves [R, ...]."""
        return self.repeats or jax.tree.map(lambda a: a[None], self.sums)


def forward(stage: Stage, at: Turn, x: jax.Array, kept: Any, place: jax.Array) -> tuple[jax.Array, Any]:
    """Runs the layers of this turn.

    Args:
      stage: the layers.
      at: the turn; in a bubble what is kept stays as it is.
      x: [b, ...], what enters the first of them.
      kept: by `nothing_kept`.
      place: [], of this turn in `kept`.

    Returns:
      What leaves the last, and what is kept.
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
        return (stage.fn(stage.layer(at, i), x, side), kept), None

    return jax.lax.scan(one, (x, kept), jnp.arange(stage.depth))[0]


def backward(
    stage: Stage, at: Turn, kept: Any, place: jax.Array, dy: jax.Array, grads: Grads
) -> tuple[jax.Array, Grads]:
    """The backward pass of the layers of this turn.

    Args:
      stage: the layers.
      at: the turn; in a bubble the gradients stay as they are.
      kept: what `forward` kept.
      place: [], of this turn in `kept`.
      dy: [b, ...], the gradient of what left the last layer.
      grads: summed so far.

    Returns:
      The gradient of what entered the first layer, [b, ...], and the sums.
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
        # One layer after the other: else the compiler runs several forward at once, and adds up at the end.
        dy, place, sums[i] = jax.lax.optimization_barrier((dy, place, sums[i]))
    return dy, Grads(tuple(sums), tuple(repeats))


def _layer_backward(stage: Stage, at: Turn, i: int, x: jax.Array, dy: jax.Array) -> tuple[Any, jax.Array]:
    params, key = stage.layer(at, i)
    side = stage.side(at)
    _, vjp = jax.vjp(lambda params, x: stage.fn.plain(Layer(params, key), x, side), params, x)
    return vjp(dy)


def _inputs_again(stage: Stage, at: Turn, x: jax.Array) -> jax.Array:
    """The inputs of the layers of this turn, in place 0 of [k, 2, b, ...]."""
    again = stage._replace(save="layers")
    return forward(again, at, x, nothing_kept(again, x, places=1), jnp.asarray(0))[1]


def nothing_kept(stage: Stage, x: jax.Array, *, places: int) -> Any:
    """Room for the inputs of so many turns, [k, places + 1, b, ...] or [1, places + 1, b, ...].

    The last place is for bubbles: to put there costs less than to put back what was in another.
    """
    layers = {"layers": stage.depth, "stage": 1, "nothing": 0}[stage.save]
    return stage.room((layers, places + 1, *x.shape), x.dtype) if layers else ()


def no_grads(stage: Stage) -> Grads:
    """What is there before the first turn."""
    one = jax.tree.map(lambda a: a[0], stage.layers.params)
    sums = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (one,) * stage.depth)
    if stage.repeats == 1:
        return Grads(sums, ())
    return Grads(sums, jax.tree.map(lambda a: stage.room((stage.repeats, *a.shape), jnp.float32), sums))


def take(a: jax.Array, *index: jax.Array | int) -> jax.Array:
    """a[index]."""
    n = len(index)
    starts = (*index, *[0] * (a.ndim - n))
    return jax.lax.dynamic_slice(a, starts, (*[1] * n, *a.shape[n:])).reshape(a.shape[n:])


def put(a: jax.Array, value: jax.Array, *index: jax.Array | int) -> jax.Array:
    """`a` with a[index] = value."""
    n = len(index)
    starts = (*index, *[0] * (a.ndim - n))
    return jax.lax.dynamic_update_slice(a, value.astype(a.dtype).reshape(*[1] * n, *a.shape[n:]), starts)


def put_if(condition: jax.Array, a: jax.Array, value: jax.Array, *index: jax.Array | int) -> jax.Array:
    """`put` where the condition holds; else `a`. Only the entry is selected, so that it happens in place."""
    return put(a, jnp.where(condition, value, take(a, *index)), *index)


def send(x: jax.Array, *, toward: int) -> jax.Array:
    """What the neighbour sent: each stage hands `x` on to the next (+1) or the previous (-1) one, around the ring."""
    stages = jax.lax.axis_size(STAGE)
    return jax.lax.ppermute(x, STAGE, [(i, (i + toward) % stages) for i in range(stages)])


def broadcast(x: jax.Array, *, source: int) -> jax.Array:
    """On every stage, the `x` of stage `source`: those that have it double at every step.

    Not a sum with zeros, which costs arithmetic, and which XLA cannot compile for CPUs in bfloat16.
    """
    stages, have = jax.lax.axis_size(STAGE), 1
    offset = (jax.lax.axis_index(STAGE) - source) % stages
    while have < stages:
        pairs = [((source + i) % stages, (source + i + have) % stages) for i in range(min(have, stages - have))]
        arrived = jax.lax.ppermute(x, STAGE, pairs)
        x = jnp.where((offset >= have) & (offset < 2 * have), arrived, x)
        have *= 2
    return x
