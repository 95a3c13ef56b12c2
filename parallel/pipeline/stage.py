"""What one stage does within one tick: its layers on one microbatch, forward or backward.

Everything here runs where `stage` is manual: arrays are those of this stage. Only inputs are kept between the two
passes, and every layer is computed again in the backward pass, so that no parameter is kept with each microbatch.
Gradients are added up in float32, in place, layer by layer.

    forward    x[l+1] = f(W[l], x[l]);    kept: x[l] of every layer, or the first
    backward   dW[l], dx[l] = vjp(f at W[l], x[l])(dx[l+1]);    dW_sum[l] += dW[l]

b rows of a microbatch, k layers that a stage runs within a tick.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
    """

    fn: LayerFn
    layers: Layer
    sides: Side
    depth: int
    save: str

    def side(self, at: Turn) -> Side:
        """What belongs to the rows of this turn."""
        return jax.tree.map(lambda a: take(a, at.microbatch), self.sides)


def forward(stage: Stage, at: Turn, x: jax.Array) -> tuple[jax.Array, Any]:
    """Runs the layers of this turn.

    Args:
      stage: the layers.
      at: the turn.
      x: [b, ...], what enters the first of them.

    Returns:
      What leaves the last, and what is kept: [k, b, ...], [1, b, ...], or ().
    """
    y, inputs = _run(stage, at, x)
    return y, {"layers": inputs, "stage": x[None], "nothing": ()}[stage.save]


def backward(stage: Stage, at: Turn, kept: jax.Array, dy: jax.Array, grads: Any) -> tuple[jax.Array, Any]:
    """The backward pass of the layers of this turn.

    Args:
      stage: the layers.
      at: the turn; in a bubble the gradients stay as they are.
      kept: what `forward` kept.
      dy: [b, ...], the gradient of what left the last layer.
      grads: float32, leaves [R k, ...], summed so far.

    Returns:
      The gradient of what entered the first layer, [b, ...], and the sums.
    """
    inputs = kept if stage.save == "layers" else _run(stage, at, kept[0])[1]
    side = stage.side(at)

    def one(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
        dy, grads = carry
        number = at.repeat * stage.depth + i
        layer = jax.tree.map(lambda a: take(a, number), stage.layers)
        _, vjp = jax.vjp(lambda params, x: stage.fn(Layer(params, layer.key), x, side), layer.params, take(inputs, i))
        dw, dx = vjp(dy)
        grads = jax.tree.map(lambda g, d: put(g, take(g, number) + jnp.where(at.valid, d, 0), number), grads, dw)
        return (dx, grads), None

    (dx, grads), _ = jax.lax.scan(one, (dy, grads), jnp.arange(stage.depth), reverse=True)
    return dx, grads


def zero_grads(layers: Layer) -> Any:
    """Float32 zeros like the parameters."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), layers.params)


def _run(stage: Stage, at: Turn, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    side = stage.side(at)

    def one(x: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array | tuple]:
        layer = jax.tree.map(lambda a: take(a, at.repeat * stage.depth + i), stage.layers)
        return stage.fn(layer, x, side), () if stage.save == "nothing" else x

    return jax.lax.scan(one, x, jnp.arange(stage.depth))


def take(a: jax.Array, i: jax.Array) -> jax.Array:
    """a[i]."""
    return jax.lax.dynamic_index_in_dim(a, i, keepdims=False)


def put(a: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
    """`a` with a[i] = value."""
    return jax.lax.dynamic_update_index_in_dim(a, value.astype(a.dtype), i, 0)


def put_if(condition: jax.Array, a: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
    """`put` where the condition holds; else `a`. Only the entry is selected, so that it happens in place."""
    return put(a, jnp.where(condition, value, take(a, i)), i)


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
