"""The network of the Tiny Recursive Model, and the recursion over its two states.

One stack of blocks N serves both updates. Blocks normalise behind their residual sum, have no gains and no biases, and
look in both directions. With x the embedded puzzle, y the answer (z_h) and z the latent (z_l):

    H times:  { L times:  z <- N(z + y + x);    y <- N(y + z) }

Only the last of the H cycles has a gradient: the others see parameters, states and input through `stop_gradient`, so
that nothing of them is kept for the backward pass. Jolicoeur-Martineau 2025, section 4 and figure 3.

B batch, T positions with prefix, D embed, F mlp, H heads, K head_dim, L layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from core import logical, stack
from models import attention

Block = Mapping[str, jax.Array]  # weights of one layer
Net = Callable[[jax.Array], jax.Array]  # [B, T, D] -> [B, T, D]

LATENTS = ("two", "single", "many")
GRADIENTS = ("last_cycle", "last_calls")


class States(NamedTuple):
    """What recursion refines.

    Attributes:
      z_h: [B, T, D], the answer; the heads read it.
      z_l: the latents, each [B, T, D]: one; none ("single"); one for each of the L inner steps ("many").
    """

    z_h: jax.Array
    z_l: tuple[jax.Array, ...]


class Recursion(NamedTuple):
    """How often, over what, and what of it has a gradient.

    Attributes:
      h_cycles, l_cycles: outer and inner repetitions.
      latents: "two" (z and y), "single" (y alone), "many" (a z for each inner step).
      gradient: "last_cycle", or "last_calls": of the last update of each state alone.
      remat: what the backward pass recomputes: "none", "dots", "full".
    """

    h_cycles: int
    l_cycles: int
    latents: str
    gradient: str
    remat: str


def run(
    layers: Sequence[Block],
    states: States,
    x: jax.Array,
    *,
    net: Callable,
    recursion: Recursion,
    now: tuple[jax.Array, jax.Array] | None = None,
) -> States:
    """All H cycles.

    Args:
      layers: weights by layer, in the dtype of computation.
      states: to start from.
      x: [B, T, D], the embedded puzzle.
      net: `net(layers, x) -> x`.
      recursion: how.
      now: outer and inner repetitions, [] int32, of those that `recursion` has; None: all of them.
    """
    h_now, l_now = now or (None, None)
    still, still_x = jax.lax.stop_gradient((layers, x))

    def early(states: States) -> States:
        return _cycle(functools.partial(net, still), states, still_x, recursion, l_now)

    states = _repeat(early, jax.lax.stop_gradient(states), times=h_now, most=recursion.h_cycles)
    last = functools.partial(net, layers)
    if recursion.remat != "none":
        last = jax.checkpoint(last, policy=stack.REMAT_POLICIES[recursion.remat])
    return _cycle(last, states, x, recursion, l_now, leave_out=_mask)


def _skip(is_on: jax.Array, update: Callable, value: Any) -> Any:
    """The update, or nothing at no cost. Its gradient would be summed over chips inside of the branch, each time."""
    return jax.lax.cond(is_on, update, lambda v: v, value)


def _mask(is_on: jax.Array, update: Callable, value: Any) -> Any:
    """The update, computed in any case, or the value as it was: gradients are summed over chips once, as ever."""
    return jax.tree.map(functools.partial(jnp.where, is_on), update(value), value)


def _cycle(
    net: Net,
    states: States,
    x: jax.Array,
    recursion: Recursion,
    l_now: jax.Array | None = None,
    leave_out: Callable = _skip,
) -> States:
    """L updates of the latent, then one of the answer."""
    stop = jax.lax.stop_gradient if recursion.gradient == "last_calls" else (lambda a: a)
    z_h, z_l = states

    def inner(z: jax.Array, inject: jax.Array) -> jax.Array:
        z = _repeat(lambda z: net(z + inject), z, times=l_now, most=recursion.l_cycles, leave_out=leave_out)
        return net(stop(z) + inject)

    if recursion.latents == "single":
        return States(net(inner(z_h, x)), ())
    inject = z_h + x
    if recursion.latents == "two":
        z_l = (inner(z_l[0], inject),)
    else:
        for i in range(recursion.l_cycles):
            z_l = stop(z_l)
            z_l = (*z_l[:i], net(sum(z_l) + inject), *z_l[i + 1 :])
    return States(net(z_h + sum(z_l)), z_l)


def _repeat(update: Callable, value: Any, *, times: jax.Array | None, most: int, leave_out: Callable = _skip) -> Any:
    """`update` applied once less than `times`, or once less than `most` where that is None."""
    if times is None:
        return jax.lax.scan(lambda v, _: (update(v), None), value, length=most - 1)[0]
    return jax.lax.scan(lambda v, i: (leave_out(i < times, update, v), None), value, jnp.arange(1, most))[0]


def attention_block(weights: Block, x: jax.Array, *, theta: float | None, eps: float) -> jax.Array:
    """Attention over all positions, then the feed-forward layer; theta of the rotary embedding, None for none."""
    x = logical.constrain(x, "batch", "residual_length", "embed")
    x = rms_norm(x + _attend(weights, x, theta=theta), eps=eps)
    x = logical.constrain(x, "batch", "residual_length", "embed")
    return _feed_forward(weights, x, eps=eps)


def mixing_block(weights: Block, x: jax.Array, *, eps: float) -> jax.Array:
    """A feed-forward layer over positions, channel by channel, normalised over positions; then one over channels."""
    x = logical.constrain(x, "batch", "residual_length", "embed")
    hidden = jnp.einsum("btd,tcf->bcfd", x, weights["token_gate_up"])  # [B, 2, F, D]
    hidden = logical.constrain(hidden, "batch", None, "mlp", "embed")
    mixed = jnp.einsum("bfd,ft->btd", jax.nn.silu(hidden[:, 0]) * hidden[:, 1], weights["token_down"])
    x = rms_norm(x + mixed, eps=eps, axis=1)
    return _feed_forward(weights, x, eps=eps)


def _feed_forward(weights: Block, x: jax.Array, *, eps: float) -> jax.Array:
    hidden = jnp.einsum("btd,dcf->btcf", x, weights["gate_up"])  # [B, T, 2, F]
    hidden = logical.constrain(hidden, "batch", "length", None, "mlp")
    x = rms_norm(x + (jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1]) @ weights["down"], eps=eps)
    return logical.constrain(x, "batch", "residual_length", "embed")


def _attend(weights: Block, x: jax.Array, *, theta: float | None) -> jax.Array:
    qkv = jnp.einsum("btd,dchk->btchk", x, weights["qkv"])  # [B, T, 3, H, K]
    qkv = logical.constrain(qkv, "batch", "length", None, "heads", "head_dim")
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    if theta is not None:
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        q, k = (attention.rotary(a, positions, theta=theta) for a in (q, k))
    k, v = (logical.constrain(a, "batch", "kv_length", "heads", "head_dim") for a in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)
    return jnp.einsum(
        "bthk,hkd->btd", logical.constrain(mixed, "batch", "length", "heads", "head_dim"), weights["output"]
    )


def rms_norm(x: jax.Array, *, eps: float, axis: int = -1) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) over an axis, in float32, without a gain."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=axis, keepdims=True) + eps)).astype(x.dtype)
