"""The network of the Tiny Recursive Model, and the recursion over its two states.

One stack of blocks, N, updates both states. Blocks normalize after the residual sum, have no scales and no biases, and
are not causal. x is the embedded puzzle, y the answer (z_h) and z the latent (z_l):

    H times:  { L times:  z <- N(z + y + x);    y <- N(y + z) }

Only the last of the H cycles has a gradient: the others see parameters, states and input through `stop_gradient`, so
nothing of them is saved for the backward pass. Jolicoeur-Martineau 2025, section 4 and figure 3.

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
      z_h: [B, T, D], the answer; the heads read it.
      z_l: the latents, each [B, T, D]. Their number depends on `Recursion.latents`: one for "two", none for "single",
        one for each of the L inner cycles for "many".
    """

    z_h: jax.Array
    z_l: tuple[jax.Array, ...]


class Recursion(NamedTuple):
    """The structure of the recursion.

    Attributes:
      h_cycles, l_cycles: outer and inner cycles.
      latents: which states there are: "two" (z and y), "single" (y only), "many" (y, and a z for each inner cycle).
      gradient: what has a gradient: "last_cycle": the last outer cycle; "last_calls": only the last update of z and the
        last one of y.
      remat: what the backward pass recomputes: "none": nothing; "dots": all but matrix products; "full": everything;
        "norms": everything but the outputs of norms; "mixing": the mixing over positions, and only the elementwise
        parts of the feed-forward layer over channels.
      unroll: number of calls of the last cycle that are unrolled. Their saved values are then not copied into a stacked
        array, which is faster on TPUs by the compiler's estimate; on a CPU 1 is faster.
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
    """Returns the states after the H cycles. Only the last has a gradient, for `layers` and `x`; `states` get none.

    Args:
      layers: weights by layer, in the compute dtype.
      states: initial states.
      x: the embedded puzzle, [B, T, D]; [T, B, D], as are the states, if `net` runs `mixing_block`.
      net: applies the blocks: `net(layers, x)` returns an array like x.
      recursion: the structure of the recursion.
      now: numbers of outer and inner cycles at this training step, [] int32, at most those of `recursion`; None: all.
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
    """Returns `update(value)` if `is_on`, a boolean scalar, else the value; a skipped update costs nothing.

    Not for the last cycle: its gradients would be summed over chips inside the branch, at every call.
    """
    return jax.lax.cond(is_on, update, lambda v: v, value)


def _mask(is_on: jax.Array, update: Callable, value: Any) -> Any:
    """Returns `update(value)` if `is_on`, a boolean scalar, else the value; always computes the update.

    Unlike with `_skip`, gradients are not summed over chips at every call.
    """
    return jax.tree.map(functools.partial(jnp.where, is_on), update(value), value)


class _Loop(NamedTuple):
    """How repeated calls of the network are executed.

    Attributes:
      leave_out: `_skip` or `_mask`, for calls that a curriculum leaves out.
      unroll: number of calls that are unrolled.
    """

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
    """Returns the states after the inner cycles and one update of the answer.

    There are `l_now` inner cycles; None: as many as `recursion` has.
    """
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
    """Returns the value after one update less than `times` (None: than `most`); the caller makes the last one."""

    def body(value: Any, i: jax.Array) -> tuple[Any, None]:
        return update(value) if times is None else loop.leave_out(i < times, update, value), None

    return jax.lax.scan(body, value, jnp.arange(1, most), unroll=min(loop.unroll, max(most - 1, 1)))[0]


def attention_block(weights: Block, x: jax.Array, *, theta: float | None, eps: float) -> jax.Array:
    """Returns x [B, T, D] after attention over all positions and a feed-forward layer.

    Args:
      weights: weights of the block.
      x: [B, T, D].
      theta: base of the rotary embedding; None: there is none.
      eps: epsilon of the RMS norms.
    """
    x = logical.constrain(x, "batch", "residual_length", "embed")
    x = operations.rms_norm(x + _attend(weights, x, theta=theta), -1, eps)
    x = logical.constrain(x, "batch", "residual_length", "embed")
    x = _feed_forward(weights, x, ("batch", "length"), eps=eps)
    return logical.constrain(x, "batch", "residual_length", "embed")


def mixing_block(weights: Block, x: jax.Array, *, eps: float) -> jax.Array:
    """Returns x after a feed-forward layer over positions, normalized over them, and then one over channels.

    x is [T, B, D] here: with positions first and channels last, both layers are plain matrix products.
    """
    x = logical.constrain(x, "residual_length", "batch", "embed")
    gate, up = (operations.over_positions(weights[name], x) for name in ("token_gate", "token_up"))
    gate, up = (logical.constrain(a, "mlp", "batch", "embed") for a in (gate, up))
    mixed = operations.over_positions(weights["token_down"], operations.swiglu(gate, up))
    x = operations.rms_norm(x + mixed, 0, eps)
    x = _feed_forward(weights, x, ("length", "batch"), eps=eps)
    return logical.constrain(x, "residual_length", "batch", "embed")


def _feed_forward(weights: Block, x: jax.Array, axes: tuple[str, str], *, eps: float) -> jax.Array:
    """Applies a feed-forward layer over channels and normalizes over them; `axes` are the two leading logical axes."""
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
