"""Causal attention within segments: a plain form for any device, and the splash kernel for TPU.

Both compute softmax(Q K^T / sqrt(K)) V over the positions at or before a query that belong to the same segment. The
plain form is the reference and holds [B, H, T, T] scores; splash (a Pallas kernel that comes with JAX) never does. On
TPU the kernel runs inside a `shard_map` over batch and heads, since a kernel cannot be partitioned automatically.

B batch, T length, H query heads, N key/value heads, G = H / N query heads per key head, K head_dim.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from core import logical

LANES = 128  # a TPU vector register is 128 wide; splash blocks are multiples of it
CHOICES = ("auto", "plain", "splash", "none")


def rotary(x: jax.Array, positions: jax.Array, *, theta: float) -> jax.Array:
    """Rotary position embedding in the half-split form: dimension i turns with dimension i + K/2.

    Su et al. 2021 (RoFormer), eq. 34, with the pairing of Llama.

    Args:
      x: [B, T, heads, K].
      positions: [B, T], int32, position within the document.
      theta: base of the geometric series of wavelengths.

    Returns:
      [B, T, heads, K], in the dtype of x.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)  # [K/2]
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency  # [B, T, 1, K/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # [B, T, heads, K/2]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, choice: str = "auto") -> jax.Array:
    """Causal attention within segments.

    Args:
      q: [B, T, H, K].
      k: [B, T, N, K]; key head n serves query heads n G .. n G + G - 1.
      v: [B, T, N, K].
      segment_ids: [B, T], int32.
      choice: "plain"; "splash"; "auto": splash on TPU where its tiles fit, plain elsewhere; "none": no mixing over
        positions at all (a control for experiments: each position keeps its own value).

    Returns:
      [B, T, H, K].
    """
    if choice == "none":
        return _repeat_heads(v, q.shape[2])
    if choice == "plain" or (choice == "auto" and q.shape[1] % LANES):
        return plain(q, k, v, segment_ids)
    if choice == "splash":
        return _sharded_splash(q, k, v, segment_ids)
    return jax.lax.platform_dependent(q, k, v, segment_ids, tpu=_sharded_splash, default=plain)


def plain(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The reference form; scores and softmax in float32."""
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)  # [B, T, N, G, K]
    scores = jnp.einsum("btngk,bsnk->bngts", grouped, k, preferred_element_type=jnp.float32) / math.sqrt(head_dim)
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]  # [T, S]
    visible = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])  # [B, T, S]
    scores = jnp.where(visible[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)  # [B, N, G, T, S]
    return jnp.einsum("bngts,bsnk->btngk", weights, v).reshape(batch, length, heads, head_dim)


def splash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """The splash kernel on the arrays of one device; shapes as in `attend`. `interpret` runs it on any device."""
    length, heads, head_dim = q.shape[1:]
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
        block_sizes=_block_sizes(length),
        interpret=interpret,
    )
    scaled = (q.astype(jnp.float32) / math.sqrt(head_dim)).astype(q.dtype)
    heads_first = [jnp.swapaxes(a, 1, 2) for a in (scaled, k, v)]  # [B, H, T, K], [B, N, T, K] x 2
    out = jax.vmap(kernel)(*heads_first, splash.SegmentIds(segment_ids, segment_ids))  # [B, H, T, K]
    return jnp.swapaxes(out, 1, 2)


@functools.cache
def _block_sizes(length: int) -> splash.BlockSizes:
    block = next(b for b in (512, 384, 256, LANES) if length % b == 0)
    return splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )


def _sharded_splash(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    q_spec = logical.activation_spec("batch", "length", "heads", "head_dim")
    if q_spec is None:
        return splash_attention(q, k, v, segment_ids)
    kv_spec = logical.activation_spec("batch", "length", "kv_heads", "head_dim")
    if kv_spec != q_spec:  # key heads are not split as query heads are: give every query head a key head of its own
        k, v, kv_spec = _repeat_heads(k, q.shape[2]), _repeat_heads(v, q.shape[2]), q_spec
    return jax.shard_map(
        splash_attention,
        in_specs=(q_spec, kv_spec, kv_spec, logical.activation_spec("batch", "length")),
        out_specs=q_spec,
        check_vma=False,  # the kernel's custom gradient does not declare how its results vary over the mesh
    )(q, k, v, segment_ids)


def _repeat_heads(x: jax.Array, heads: int) -> jax.Array:
    return jnp.repeat(x, heads // x.shape[2], axis=2)
