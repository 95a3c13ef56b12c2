"""The network of the Tiny Recursive Model, and the recursion over its two states.

One stack of blocks, N, updates both states. Blocks normalize after the residual sum, have no scales and no biases, and
are not causal. x is the embedded puzzle, y the answer (z_h) and z the latent (z_l):

    H times:  { L times:  z <- N(z + y + x);    y <- N(y + z) }

Only the last of the H cycles has a gradient. Jolicoeur-Martineau 2025, section 4 and figure 3.

B batch, T positions with prefix, D embed, F mlp, H heads, K head_dim, L layers.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from core import logical, rematerialization
from models.decoder import rotary
from models.trm import operations

Block = Mapping[str, jax.Array]  # weights of one layer
Net = Callable[[jax.Array], jax.Array]  # [B, T, D] -> [B, T, D]

LATENTS = ("two", "single", "many")
GRADIENTS = ("last_cycle", "last_calls")
_keep = jax.checkpoint_policies.save_only_these_names
REMAT_POLICIES = {
    **rematerialization.REMAT_POLICIES,
    "norms": _keep(operations.NORMED),
    "mixing": _keep(operations.NORMED, operations.GATED),
}
REMAT_CHOICES = ("none", *REMAT_POLICIES)


class States(NamedTuple):
    """The states that the recursion updates.

    Attributes:
      z_h: [B, T, D], the answer.
      z_l: the latents, each [B, T, D]; `Recursion.latents` says how many.
    """

    z_h: jax.Array
    z_l: tuple[jax.Array, ...]


class Recursion(NamedTuple):
    """The structure of the recursion.

    Attributes:
      latents: which states there are: "two" (z and y), "single" (y only), "many" (y, and a z for each inner cycle).
      gradient: what has a gradient: "last_cycle": the last outer cycle; "last_calls": the last update of z and that of
        y.
      remat: what the backward pass recomputes: "none": nothing; "dots": all but products with weights; "full":
        everything; "norms": all but the outputs of norms; "mixing": all but the outputs of norms and the inputs of
        gates.
      unroll: number of calls of the last cycle that are unrolled.
    """

    h_cycles: int
    l_cycles: int
    latents: str
    gradient: str
    remat: str
    unroll: int


def run(
    layers: Sequence[Block],
    states: States,
    x: jax.Array,
    *,
    net: Callable,
    recursion: Recursion,
    now: tuple[jax.Array, jax.Array] | None = None,
) -> States:
    """Returns the states after the H cycles; the last has a gradient for `layers` and `x`.

    Args:
      layers: weights by layer, in the compute dtype.
      x: the embedded puzzle, [B, T, D]; [T, B, D], as are the states, if `net` runs `mixing_block`.
      net: applies the blocks: `net(layers, x)` returns an array like x.
      now: outer and inner cycles at this training step, [] int32; None: those of `recursion`.
    """
    h_now, l_now = now or (None, None)
    still, still_x = jax.lax.stop_gradient((layers, x))

    def early(states: States) -> States:
        return _cycle(functools.partial(net, still), states, still_x, recursion, l_now)

    states = _repeat(early, jax.lax.stop_gradient(states), times=h_now, most=recursion.h_cycles)
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), layers)  # gradients of the calls are summed in float32

    def last(x: jax.Array) -> jax.Array:
        return net(jax.tree.map(lambda w: w.astype(x.dtype), wide), x)

    if recursion.remat != "none":
        last = jax.checkpoint(last, policy=REMAT_POLICIES[recursion.remat])
    return _cycle(last, states, x, recursion, l_now, loop=_Loop(_mask, recursion.unroll))


def _skip(is_on: jax.Array, update: Callable, value: Any) -> Any:
    """Computes the update only if `is_on`; in the last cycle, chips would sum its gradients at every call."""
    return jax.lax.cond(is_on, update, lambda v: v, value)


def _mask(is_on: jax.Array, update: Callable, value: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, is_on), update(value), value)


class _Loop(NamedTuple):
    """How calls are repeated: `leave_out` is `_skip` or `_mask`, for calls that a curriculum leaves out."""

    leave_out: Callable
    unroll: int


_EARLY = _Loop(_skip, 1)


def _cycle(
    net: Net,
    states: States,
    x: jax.Array,
    recursion: Recursion,
    l_now: jax.Array | None = None,
    loop: _Loop = _EARLY,
) -> States:
    stop = jax.lax.stop_gradient if recursion.gradient == "last_calls" else (lambda a: a)
    z_h, z_l = states

    def inner(z: jax.Array, inject: jax.Array) -> jax.Array:
        z = _repeat(lambda z: net(z + inject), z, times=l_now, most=recursion.l_cycles, loop=loop)
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


def _repeat(update: Callable, value: Any, *, times: jax.Array | None, most: int, loop: _Loop = _EARLY) -> Any:
    """Makes one update less than `times` (None: than `most`); the caller makes the last one."""

    def body(value: Any, i: jax.Array) -> tuple[Any, None]:
        return update(value) if times is None else loop.leave_out(i < times, update, value), None

    return jax.lax.scan(body, value, jnp.arange(1, most), unroll=min(loop.unroll, max(most - 1, 1)))[0]


def attention_block(weights: Block, x: jax.Array, *, theta: float | None, eps: float) -> jax.Array:
    """Applies attention over all positions and a feed-forward layer to x [B, T, D].

    Args:
      theta: base of the rotary embedding; None: there is none.
    """
    x = logical.constrain(x, "batch", "residual_length", "embed")
    x = operations.rms_norm(x + _attend(weights, x, theta=theta), -1, eps)
    x = logical.constrain(x, "batch", "residual_length", "embed")
    x = _feed_forward(weights, x, ("batch", "length"), eps=eps)
    return logical.constrain(x, "batch", "residual_length", "embed")


def mixing_block(weights: Block, x: jax.Array, *, eps: float) -> jax.Array:
    """Applies a feed-forward layer over positions and one over channels to x [T, B, D]."""
    x = logical.constrain(x, "residual_length", "batch", "embed")
    gate, up = (operations.over_positions(weights[name], x) for name in ("token_gate", "token_up"))
    gate, up = (logical.constrain(a, "mlp", "batch", "embed") for a in (gate, up))
    mixed = operations.over_positions(weights["token_down"], operations.swiglu(gate, up))
    x = operations.rms_norm(x + mixed, 0, eps)
    x = _feed_forward(weights, x, ("length", "batch"), eps=eps)
    return logical.constrain(x, "residual_length", "batch", "embed")


def _feed_forward(weights: Block, x: jax.Array, axes: tuple[str, str], *, eps: float) -> jax.Array:
    gate, up = (logical.constrain(x @ weights[name], *axes, "mlp") for name in ("gate", "up"))
    gate, up = (checkpoint_name(a, operations.GATED) for a in (gate, up))
    return operations.rms_norm(x + operations.swiglu(gate, up) @ weights["down"], -1, eps)


def _attend(weights: Block, x: jax.Array, *, theta: float | None) -> jax.Array:
    qkv = jnp.einsum("btd,dchk->btchk", x, weights["qkv"])  # [B, T, 3, H, K]
    qkv = logical.constrain(qkv, "batch", "length", None, "heads", "head_dim")
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    if theta is not None:
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        q, k = (rotary.rotate(a, positions, theta=theta) for a in (q, k))
    k, v = (logical.constrain(a, "batch", "kv_length", "heads", "head_dim") for a in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)
    return jnp.einsum(
        "bthk,hkd->btd", logical.constrain(mixed, "batch", "length", "heads", "head_dim"), weights["output"]
    )
