"""The inner loop of test-time training: every head of every row has a small model that learns from the row's tokens.

The inner model f learns to map the key of a token to its value minus its key. Token t reads weights W_t that have
learned from the tokens of its mini-batch up to t, with gradients at the weights W_0 before the mini-batch:

    g_s = d/df 1/2 |LN(f(k_s; W_0)) - (v_s - k_s)|^2
    W_t = W_0 - a_t sum_{s <= t} rate_s d f/dW (k_s)' g_s
    o_t = q_t + LN(f(q_t; W_t))

`mini_batch` computes this in matrix products. With eta_ts = a_t rate_s for s <= t, else 0, each layer of the inner
model has the outputs Z for queries:

    Z = X W_0 + c_0 - (eta o (X X_k') + eta) G

X are the layer's inputs for queries, X_k those for keys, G the gradients of its outputs for keys; W_0 and c_0 are its
weight and bias, and o multiplies elements.

Sun et al. 2024, "Learning to (Learn at Test Time): RNNs with Expressive Hidden States", sections 2.4 and 2.5. A new
segment starts from the initial weights. On TPUs, products round their inputs to bfloat16 by default.

B rows, H heads, K head_dim, b tokens of a mini-batch, N mini-batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.ttt.config import TTTConfig

_gelu = functools.partial(jax.nn.gelu, approximate=True)


class Linear(NamedTuple):
    """A linear layer of an inner model; the learned initial weights have no dimension B."""

    weight: jax.Array  # [B, H, in, out]
    bias: jax.Array  # [B, H, out]


Fast = tuple[Linear, ...]  # the layers of the inner models


class Norm(NamedTuple):
    """Parameters of the layer norm of each head's output: scale and bias [H, K], and eps."""

    scale: jax.Array
    bias: jax.Array
    eps: float


class Tokens(NamedTuple):
    """The inputs of the inner loop for the tokens of a mini-batch.

    Attributes:
      query, key, value: [B, H, b, K].
      rate: [B, H, b], the learning rate of each token.
      segment: [B, b], int32; None if every row is one segment.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    rate: jax.Array
    segment: jax.Array | None


class Memory(NamedTuple):
    """The state of the inner loop between mini-batches.

    Attributes:
      fast: the inner models' weights at the start of a mini-batch.
      sums: gradients times rates, summed over the tokens of this mini-batch so far.
      segment: [B], int32, the segment of the last token, -1 before the first; None if every row is one segment.
    """

    fast: Fast
    sums: Fast
    segment: jax.Array | None


class Learned(NamedTuple):
    """The learned constants of the inner loop.

    Attributes:
      initial: weights at the start of a segment, without the dimension B.
      token_rate: [b], the factors a_t of the learning rate.
    """

    initial: Fast
    norm: Norm
    token_rate: jax.Array


def start(learned: Learned, rows: int, *, segments: bool) -> Memory:
    """Returns the memory before the first token of rows."""
    fast = jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *a.shape)), learned.initial)
    return Memory(fast, jax.tree.map(jnp.zeros_like, fast), jnp.full((rows,), -1, jnp.int32) if segments else None)


def normalized(z: jax.Array, norm: Norm) -> jax.Array:
    """Applies the layer norm over the last dimension of z [B, H, b, K]."""
    return _standard(z, norm.eps)[0] * norm.scale[:, None] + norm.bias[:, None]


def _standard(z: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    centered = z - jnp.mean(z, axis=-1, keepdims=True)
    per_length = jax.lax.rsqrt(jnp.mean(centered**2, axis=-1, keepdims=True) + eps)
    return centered * per_length, per_length


def _output_gradient(z: jax.Array, target: jax.Array, norm: Norm) -> jax.Array:
    """Returns the gradient of 1/2 |normalized(z) - target|^2 with respect to z."""
    unit, per_length = _standard(z, norm.eps)
    scale = norm.scale[:, None]
    d_unit = (unit * scale + norm.bias[:, None] - target) * scale
    mean = functools.partial(jnp.mean, axis=-1, keepdims=True)
    return per_length * (d_unit - mean(d_unit) - unit * mean(d_unit * unit))


def _applied(layer: Linear, x: jax.Array) -> jax.Array:
    return x @ layer.weight + layer.bias[..., None, :]


Apply = Callable[[Callable[[Linear, jax.Array], jax.Array], int, jax.Array], jax.Array]  # (function, layer, x)


def _of_segments(memory: Memory, initial: Fast, segment: jax.Array | None) -> tuple[Apply, jax.Array | None]:
    if segment is None or memory.segment is None:
        return lambda fn, n, x: fn(memory.fast[n], x), None
    is_new = segment != memory.segment[:, None]  # [B, b]
    choice = is_new[:, None, :, None]
    return lambda fn, n, x: jnp.where(choice, fn(initial[n], x), fn(memory.fast[n], x)), is_new


def _gradients(apply: Apply, depth: int, tokens: Tokens, norm: Norm) -> tuple[list[jax.Array], list[jax.Array]]:
    inputs: list[jax.Array] = [tokens.key]
    outputs: list[jax.Array] = []
    for n in range(depth):
        inputs += [_gelu(outputs[-1])] if n else []
        outputs.append(apply(_applied, n, inputs[n]))
    gradients = [_output_gradient(outputs[-1], tokens.value - tokens.key, norm)]
    for n in reversed(range(1, depth)):
        d_input = apply(lambda layer, g: g @ jnp.swapaxes(layer.weight, -1, -2), n, gradients[0])
        gradients.insert(0, jax.vjp(_gelu, outputs[n - 1])[1](d_input)[0])
    return inputs, gradients


def _summed(inputs: list[jax.Array], gradients: list[jax.Array], rate: jax.Array) -> Fast:
    weighted = [g * rate[..., None] for g in gradients]
    return tuple(
        Linear(jnp.swapaxes(x, -1, -2) @ g, jnp.sum(g, axis=-2)) for x, g in zip(inputs, weighted, strict=True)
    )


def _minus(fast: Fast, factor: jax.Array, sums: Fast) -> Fast:
    def one(w: jax.Array, total: jax.Array) -> jax.Array:
        return w - factor.reshape(factor.shape + (1,) * (w.ndim - factor.ndim)) * total

    return jax.tree.map(one, fast, sums)


def _forward(fast: Fast, x: jax.Array) -> jax.Array:
    for n, layer in enumerate(fast):
        x = _applied(layer, _gelu(x) if n else x)
    return x


def _error(z: jax.Array, target: jax.Array, norm: Norm) -> jax.Array:
    return jnp.mean((normalized(z, norm) - target) ** 2, axis=-1)


def mini_batch(
    config: TTTConfig, learned: Learned, first: Memory, memory: Memory, tokens: Tokens, *, ends: bool = True
) -> tuple[Memory, tuple[jax.Array, jax.Array]]:
    """Runs a mini-batch.

    Args:
      first: the memory before the first mini-batch of the call, for the errors.
      tokens: at most b.
      ends: whether the mini-batch is complete; otherwise the returned memory has its sums, and the weights before it.

    Returns:
      The memory after it; the outputs o [B, H, b, K]; the errors [B, H, 3] of `models.ttt.layer.Outcome`.
    """
    if config.resets:
        memory = memory._replace(fast=start(learned, tokens.key.shape[0], segments=False).fast)
    size, depth, segment = tokens.key.shape[2], len(learned.initial), tokens.segment
    apply, is_new = _of_segments(memory, learned.initial, segment)
    inputs, gradients = _gradients(apply, depth, tokens, learned.norm)
    rate = learned.token_rate[:size, None] * tokens.rate[:, :, None, :]  # [B, H, t, s]
    eta = rate * jnp.tril(jnp.ones((size, size), rate.dtype), config.diagonal)
    if segment is not None:
        eta *= (segment[:, :, None] == segment[:, None, :])[:, None]
    x = tokens.query
    for n in range(depth):
        x = _gelu(x) if n else x
        x = apply(_applied, n, x) - (eta * (x @ jnp.swapaxes(inputs[n], -1, -2)) + eta) @ gradients[n]
    outputs = tokens.query + normalized(x, learned.norm)

    last_rate = tokens.rate
    before = memory
    if segment is not None and is_new is not None:
        last_rate = last_rate * (segment == segment[:, -1:])[:, None]
        fresh, initial = is_new[:, -1], start(learned, segment.shape[0], segments=True).fast
        before = Memory(_chosen(fresh, initial, memory.fast), memory.sums, segment[:, -1])
        assert first.segment is not None
        fresh_since = segment[:, -1] != first.segment
        first = first._replace(fast=_chosen(fresh_since, initial, first.fast))
    sums = _summed(inputs, gradients, last_rate)
    after = _minus(before.fast, learned.token_rate[size - 1], sums)
    errors = _errors_of_last(tokens, learned.norm, first.fast, before.fast, after)
    if ends:
        memory = before._replace(fast=after)
    else:
        memory = before._replace(sums=sums)
    return memory, (outputs, errors)


def _chosen(rows: jax.Array, ours: Fast, theirs: Fast) -> Fast:
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *(1,) * (a.ndim - 1)), a, b), ours, theirs)


def _errors_of_last(tokens: Tokens, norm: Norm, *weights: Fast) -> jax.Array:
    key, value = tokens.key[:, :, -1:], tokens.value[:, :, -1:]
    return jnp.concatenate([_error(_forward(fast, key), value - key, norm) for fast in weights], axis=-1)


def token(
    config: TTTConfig, learned: Learned, memory: Memory, tokens: Tokens, place: jax.Array
) -> tuple[Memory, jax.Array]:
    """Runs one token of each row; up to rounding, tokens one by one give what `mini_batch` gives.

    Args:
      tokens: [B, H, 1, ...], without segments.
      place: [B], int32, the token's place in its mini-batch, from 0.

    Returns:
      The memory after it, and its output [B, H, 1, K].
    """
    apply, _ = _of_segments(memory, learned.initial, None)
    inputs, gradients = _gradients(apply, len(learned.initial), tokens, learned.norm)
    before = memory.sums
    sums = jax.tree.map(jnp.add, before, _summed(inputs, gradients, tokens.rate))
    factor = learned.token_rate[place]  # [B]
    reads = _minus(memory.fast, factor, before if config.diagonal else sums)
    output = tokens.query + normalized(_forward(reads, tokens.query), learned.norm)
    ends = place == config.mini_batch - 1
    after = memory.fast if config.resets else _minus(memory.fast, factor, sums)
    fast = _chosen(ends, after, memory.fast)
    return memory._replace(fast=fast, sums=_chosen(ends, jax.tree.map(jnp.zeros_like, sums), sums)), output


def run(config: TTTConfig, learned: Learned, memory: Memory, tokens: Tokens) -> tuple[Memory, tuple[Any, Any]]:
    """Runs the mini-batches of rows.

    Args:
      memory: the memory before the first token, which must begin a mini-batch.
      tokens: [B, H, T, ...] and segments [B, T], or None.

    Returns:
      The memory after the last token; the outputs [B, H, T, K] and errors [B, H, N, 3] (see `mini_batch`).
    """
    size, length = config.mini_batch, tokens.key.shape[2]
    count = length // size
    group = math.isqrt(max(count - 1, 0)) + 1
    looped = count // group * group

    def one(memory: Memory, part: Tokens) -> tuple[Memory, Any]:
        return mini_batch(config, learned, memory_before, memory, part)

    memory_before, parts = memory, []
    several = jax.checkpoint(lambda memory, parts: jax.lax.scan(one, memory, parts), prevent_cse=False)
    full = _divided(_range(tokens, 0, count * size), count)
    if looped:
        grouped = jax.tree.map(lambda a: a[:looped].reshape(-1, group, *a.shape[1:]), full)
        memory, found = jax.lax.scan(several, memory, grouped)
        parts.append(_joined(jax.tree.map(lambda a: a.reshape(looped, *a.shape[2:]), found)))
    if looped < count:
        memory, found = several(memory, jax.tree.map(lambda a: a[looped:], full))
        parts.append(_joined(found))
    if length % size:
        rest = _range(tokens, count * size, length)
        memory, (outputs, errors) = mini_batch(config, learned, memory_before, memory, rest, ends=False)
        parts.append((outputs, errors[:, :, None]))
    outputs, errors = (jnp.concatenate(each, axis=2) for each in zip(*parts, strict=True))
    return memory, (outputs, errors)


def _range(tokens: Tokens, begin: int, end: int) -> Tokens:
    segment = None if tokens.segment is None else tokens.segment[:, begin:end]
    return Tokens._make((*(a[:, :, begin:end] for a in tokens[:4]), segment))


def _divided(tokens: Tokens, count: int) -> Tokens:
    def one(a: jax.Array, axis: int) -> jax.Array:
        a = a.reshape(*a.shape[:axis], count, -1, *a.shape[axis + 1 :]) if count else a[None][:0]
        return jnp.moveaxis(a, axis, 0) if count else a

    segment = None if tokens.segment is None else one(tokens.segment, 1)
    return Tokens._make((*(one(a, 2) for a in tokens[:4]), segment))


def _joined(found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    outputs, errors = (jnp.moveaxis(a, 0, 2) for a in found)  # [B, H, N, ...]
    return outputs.reshape(*outputs.shape[:2], -1, outputs.shape[-1]), errors
