"""A layer with test-time training: its parameters, its projections, and the inner loop between them.

    q' = x W_q;   q = RoPE(conv_q(q')),   k = RoPE(conv_k(q')),   v = x W_v
    a_t = max(0, tau_t + 1 / (t + 1)),    rate_s = base_rate sigmoid(x_s w_h + b_h) / K
    y = (gelu(x W_g) * LN(inner loop(q, k, v))) W_o

This is the variant "published" (Sun et al. 2024, section 2.7 and appendix A). t, from 0, is the place of a token in
its mini-batch, also for RoPE.

B rows, T positions, D embed, H heads, K head_dim, b tokens of a mini-batch, w width of the convolutions.
"""

from __future__ import annotations

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical
from models.ttt import inner_loop
from models.ttt.config import TTTConfig
from models.ttt.inner_loop import Fast, Learned, Linear, Memory, Norm, Tokens

_STDDEV = 0.02  # initial weights of inner models and of the projection to learning rates


class Weights(NamedTuple):
    """The parameters of a layer."""

    query: jax.Array  # [D, H, K], also of keys
    value: jax.Array  # [D, H, K]
    gate: jax.Array  # [D, H, K]
    output: jax.Array  # [H, K, D]
    conv_query: jax.Array  # [w, H, K]; the last tap is that of the most recent token
    conv_query_bias: jax.Array  # [H, K]
    conv_key: jax.Array  # [w, H, K]
    conv_key_bias: jax.Array  # [H, K]
    rate: jax.Array  # [H, D]
    rate_bias: jax.Array  # [H]
    token_rate: jax.Array  # [b], tau
    initial: Fast  # leaves [H, in, out], [H, out]
    norm_scale: jax.Array  # [H, K]
    norm_bias: jax.Array  # [H, K]
    output_norm_scale: jax.Array  # [H, K]
    output_norm_bias: jax.Array  # [H, K]


class State(NamedTuple):
    """The state of a layer between calls.

    Attributes:
      recent: [B, reach, H, K], projections q' of the last `TTTConfig.conv_reach` tokens.
      recent_segment: [B, reach], int32, the segments of these tokens, -1 before the row; None without segments.
      place: [B], int32, the place of the next token in its mini-batch, from 0.
    """

    memory: Memory
    recent: jax.Array
    recent_segment: jax.Array | None
    place: jax.Array


class Outcome(NamedTuple):
    """The output [B, T, D] of a layer, and its state after the last token.

    Attributes:
      errors: [B, H, N, 3]: mean square errors of the inner model at the last token of each mini-batch, with the weights
        before the call, before this mini-batch, and after it. If the token's segment begins later, its initial weights
        count instead.
    """

    output: jax.Array
    state: State
    errors: jax.Array


def make(config: TTTConfig, embed_dim: int, *, dtype: str, output_init: hk.initializers.Initializer) -> Weights:
    """Creates or reads the parameters inside a Haiku module.

    Args:
      dtype: compute dtype of the projections.
      output_init: initializer of the output matrix.
    """
    d, h, k = embed_dim, config.num_heads, config.head_dim
    heads = ("heads", "head_dim")
    normal = hk.initializers.TruncatedNormal

    def inward(name: str) -> jax.Array:
        return logical.param(name, (d, h, k), ("embed", *heads), normal(d**-0.5), compute_dtype=dtype)

    def bias(name: str, init=jnp.zeros, kind: str = "bias") -> jax.Array:
        return logical.param(name, (h, k), heads, init, kind=kind)

    def conv(name: str) -> jax.Array:
        shape, width = (config.conv_width, h, k), config.conv_width
        return logical.param(name, shape, (None, *heads), normal(width**-0.5), kind="bias")

    def initial(n: int, size: int, out: int) -> Linear:
        axes = ("heads", None, None)
        weight = logical.param(f"initial_{n}", (h, size, out), axes, normal(_STDDEV), stacked=1)
        return Linear(weight, logical.param(f"initial_{n}_bias", (h, out), axes[:2], jnp.zeros, kind="bias"))

    return Weights(
        query=inward("query"),
        value=inward("value"),
        gate=inward("gate"),
        output=logical.param("output", (h, k, d), (*heads, "embed"), output_init, in_dims=2, compute_dtype=dtype),
        conv_query=conv("conv_query"),
        conv_query_bias=bias("conv_query_bias"),
        conv_key=conv("conv_key"),
        conv_key_bias=bias("conv_key_bias"),
        rate=logical.param("rate", (h, d), ("heads", "embed"), normal(_STDDEV), kind="bias", compute_dtype=dtype),
        rate_bias=logical.param("rate_bias", (h,), ("heads",), jnp.zeros),
        token_rate=logical.param("token_rate", (config.mini_batch,), (None,), jnp.zeros),
        initial=tuple(initial(n, *pair) for n, pair in enumerate(zip(config.sizes, config.sizes[1:], strict=False))),
        norm_scale=bias("norm_scale", jnp.ones, "norm"),
        norm_bias=bias("norm_bias", kind="norm"),
        output_norm_scale=bias("output_norm_scale", jnp.ones, "norm"),
        output_norm_bias=bias("output_norm_bias", kind="norm"),
    )


def multiplications(config: TTTConfig, embed_dim: int) -> tuple[float, float]:
    """Returns the multiplications per token of the layer's matrices, and of the inner loop."""
    products = sum(a * b for a, b in zip(config.sizes, config.sizes[1:], strict=False))  # number of weights of one head
    through = products - config.sizes[0] * config.sizes[1]  # gradients of hidden units
    mixed = config.mini_batch * (sum(config.sizes[:-1]) + sum(config.sizes[1:]))  # (X X_k') G
    inner = config.num_heads * (3 * products + through + mixed)  # keys, queries and gradients of weights
    return embed_dim * config.num_heads * (4 * config.head_dim + 1), inner


def empty(config: TTTConfig, weights: Weights, rows: int, *, segments: bool = False) -> State:
    """Returns the state before the first token of rows.

    Args:
      segments: whether rows may have several segments.
    """
    h, k = weights.norm_scale.shape
    wide = _wide(weights.query.dtype)
    recent = jnp.zeros((rows, config.conv_reach, h, k), wide)
    before = jnp.full((rows, config.conv_reach), -1, jnp.int32) if segments else None
    memory = inner_loop.start(_learned(config, weights, wide), rows, segments=segments)
    return State(memory, recent, before, jnp.zeros((rows,), jnp.int32))


def run(
    config: TTTConfig,
    weights: Weights,
    x: jax.Array,
    segments: jax.Array | None = None,
    state: State | None = None,
    *,
    rate_scale: jax.Array | None = None,
) -> Outcome:
    """Runs the layer on rows.

    Args:
      x: [B, T, D].
      segments: [B, T], int32, not negative; None, as in `state`, if every row is one segment.
      state: the state after earlier tokens, a multiple of b; None: rows begin here.
      rate_scale: [B], a further factor of the learning rates; None: 1.
    """
    wide = _wide(x.dtype)
    state = empty(config, weights, x.shape[0], segments=segments is not None) if state is None else state
    learned = _learned(config, weights, wide)
    places = jnp.arange(x.shape[1]) % config.mini_batch
    tokens, recent, recent_segment = _tokens(config, weights, x, segments, state, places[None], rate_scale)
    memory, (out, errors) = inner_loop.run(config, learned, state.memory, tokens)
    after = State(memory, recent, recent_segment, jnp.full_like(state.place, x.shape[1] % config.mini_batch))
    return Outcome(_output(config, weights, x, out), after, errors)


def extend(config: TTTConfig, weights: Weights, x: jax.Array, state: State, real: jax.Array) -> tuple[jax.Array, State]:
    """Runs the layer token by token; returns its output [B, T, D] and the next state.

    Args:
      x: [B, T, D].
      state: of rows that are one segment each.
      real: [B, T], bool; a token that is not real leaves its row's state as it was.
    """
    learned = _learned(config, weights, _wide(x.dtype))

    def one(state: State, token: tuple[jax.Array, jax.Array]) -> tuple[State, jax.Array]:
        x, real = token
        tokens, recent, _ = _tokens(config, weights, x[:, None], None, state, state.place[:, None], None)
        memory, out = inner_loop.token(config, learned, state.memory, tokens, state.place)
        after = State(memory, recent, None, (state.place + 1) % config.mini_batch)
        after = jax.tree.map(lambda a, b: jnp.where(real.reshape(-1, *(1,) * (a.ndim - 1)), a, b), after, state)
        return after, _output(config, weights, x[:, None], out)[:, 0]

    state, y = jax.lax.scan(one, state, (jnp.swapaxes(x, 0, 1), real.T))
    return jnp.swapaxes(y, 0, 1), state


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _learned(config: TTTConfig, weights: Weights, dtype: jnp.dtype) -> Learned:
    initial, norm = weights.initial, Norm(weights.norm_scale, weights.norm_bias, config.norm_eps)
    token_rate = jnp.ones_like(weights.token_rate) if config.is_ponder else _token_rate(weights)
    return jax.tree.map(lambda a: a if isinstance(a, float) else a.astype(dtype), Learned(initial, norm, token_rate))


def _token_rate(weights: Weights) -> jax.Array:
    """Returns a_t, [b]."""
    places = jnp.arange(1, len(weights.token_rate) + 1, dtype=weights.token_rate.dtype)
    return jnp.maximum(weights.token_rate + 1 / places, 0)


def _tokens(
    config: TTTConfig,
    weights: Weights,
    x: jax.Array,
    segments: jax.Array | None,
    state: State,
    places: jax.Array,
    rate_scale: jax.Array | None,
) -> tuple[Tokens, jax.Array, jax.Array | None]:
    wide = _wide(x.dtype)
    shared = jnp.einsum("btd,dhk->bthk", x, weights.query).astype(wide)
    value = jnp.einsum("btd,dhk->bthk", x, weights.value).astype(wide)
    seen = jnp.concatenate([state.recent.astype(wide), shared], axis=1)  # [B, reach + T, H, K]
    seen_segments = None
    if segments is not None:
        assert state.recent_segment is not None
        seen_segments = jnp.concatenate([state.recent_segment, segments], axis=1)
    angles = _angles(config, places, wide)
    turned = [
        _turned(_convolved(config, kernel, bias, seen, seen_segments), angles)
        for kernel, bias in (
            (weights.conv_query, weights.conv_query_bias),
            (weights.conv_key, weights.conv_key_bias),
        )
    ]
    rate = _rates(config, weights, x, places)  # [B, T, H]
    if rate_scale is not None:
        rate *= rate_scale[:, None, None]
    by_head = [
        jnp.swapaxes(logical.constrain(a, "batch", "length", "heads", "head_dim"), 1, 2) for a in (*turned, value)
    ]
    reach = config.conv_reach
    recent = seen[:, seen.shape[1] - reach :]
    recent_segment = None if seen_segments is None else seen_segments[:, seen_segments.shape[1] - reach :]
    return Tokens._make((*by_head, jnp.swapaxes(rate, 1, 2), segments)), recent, recent_segment


def _rates(config: TTTConfig, weights: Weights, x: jax.Array, places: jax.Array) -> jax.Array:
    wide = _wide(x.dtype)
    logits = jnp.einsum("btd,hd->bth", x, weights.rate).astype(wide) + weights.rate_bias
    rate = config.rate_factor(x.shape[-1]) * jax.nn.sigmoid(logits)
    if not config.is_ponder:
        return rate
    by_place = _token_rate(weights) * jnp.exp(config.decay * (jnp.arange(config.mini_batch) + 1 - config.mini_batch))
    return rate * by_place.astype(wide)[places][..., None]


def _convolved(
    config: TTTConfig, kernel: jax.Array, bias: jax.Array, seen: jax.Array, segments: jax.Array | None
) -> jax.Array:
    reach = config.conv_reach
    length = seen.shape[1] - reach
    total = bias.astype(seen.dtype)
    for tap in range(config.conv_width):
        part = seen[:, tap : tap + length]
        if segments is not None:
            part = jnp.where((segments[:, tap : tap + length] == segments[:, reach:])[..., None, None], part, 0)
        total = total + kernel[tap].astype(seen.dtype) * part
    return total


def _angles(config: TTTConfig, places: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines, [B or 1, T, 1, K / 2]."""
    frequencies = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=dtype) / config.head_dim)
    angles = places.astype(dtype)[..., None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _turned(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (2 i, 2 i + 1) of x [B, T, H, K] by `angles` (Su et al. 2021)."""
    cos, sin = angles
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def _output(config: TTTConfig, weights: Weights, x: jax.Array, inner: jax.Array) -> jax.Array:
    inner = jnp.swapaxes(inner, 1, 2)
    mean = jnp.mean(inner, axis=(2, 3), keepdims=True)
    variance = jnp.mean((inner - mean) ** 2, axis=(2, 3), keepdims=True)
    unit = (inner - mean) * jax.lax.rsqrt(variance + config.norm_eps)
    unit = unit * weights.output_norm_scale + weights.output_norm_bias
    gate = jnp.einsum("btd,dhk->bthk", x, weights.gate).astype(unit.dtype)
    gated = (jax.nn.gelu(gate, approximate=True) * unit).astype(x.dtype)
    gated = logical.constrain(gated, "batch", "length", "heads", "head_dim")
    return jnp.einsum("bthk,hkd->btd", gated, weights.output)
