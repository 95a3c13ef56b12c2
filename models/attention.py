"""Causal attention within segments: a plain implementation for any device, and the splash kernel for TPUs.

Both compute softmax(Q K^T / sqrt(K)) V over the positions at or before a query in the same segment. The plain
implementation is the reference and materializes [B, H, T, T] scores; splash (a Pallas kernel that comes with JAX) does
not. On TPUs the kernel runs inside a `shard_map` over rows, heads and query positions, because the partitioner cannot
partition a kernel. Where positions are sharded, queries stay on their chips and keys and values are gathered.

B batch, T length, H query heads, N key/value heads, G = H / N query heads per key head, K head_dim.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from core import logical

LANES = 128  # a TPU vector register is 128 wide; splash blocks are multiples of it
CHOICES = ("auto", "plain", "splash", "none")
MIXED = "mixed"  # checkpoint name of the kernel's output and of the other residuals of its derivative


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    choice: str = "auto",
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Computes causal attention within segments.

    Args:
      q: [B, T, H, K].
      k: [B, T, N, K]; key head n serves query heads n G .. n G + G - 1.
      v: [B, T, N, K].
      segment_ids: [B, T], int32.
      choice: "plain"; "splash"; "auto": splash on TPUs if its tiles fit, plain otherwise; "none": no mixing over
        positions, each position keeps its own value (a control for experiments).
      scale: factor of the scores; None: 1 / sqrt(K).
      window: a query attends to this many positions, its own being the last; None: to all positions up to its own.
      softcap: scores s become softcap tanh(s / softcap) (Gemma 2); None: they are not bounded.

    Returns:
      [B, T, H, K].
    """
    if choice == "none":
        return _repeat_heads(v, q.shape[2])
    k, v = (logical.constrain(a, "batch", "kv_length", "kv_heads", "head_dim") for a in (k, v))
    by_kernel, by_products = (
        functools.partial(form, scale=scale, window=window, softcap=softcap) for form in (splash_attention, plain)
    )
    if choice == "plain" or (choice == "auto" and not _tiles(q.shape[1])):
        return by_products(q, k, v, segment_ids)
    if choice == "splash":
        return by_kernel(q, k, v, segment_ids)
    return jax.lax.platform_dependent(q, k, v, segment_ids, tpu=by_kernel, default=by_products)


def plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Computes attention with scores and softmax in float32: the reference. Arguments and result as in `attend`."""
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)  # [B, T, N, G, K]
    scores = jnp.einsum("btngk,bsnk->bngts", grouped, k, preferred_element_type=jnp.float32)
    scores *= 1 / math.sqrt(head_dim) if scale is None else scale
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]  # [T, S]
    if window is not None:
        causal &= jnp.arange(length)[:, None] - jnp.arange(length)[None, :] < window
    visible = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])  # [B, T, S]
    scores = jnp.where(visible[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)  # [B, N, G, T, S]
    return jnp.einsum("bngts,bsnk->btngk", weights, v).reshape(batch, length, heads, head_dim)


def cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    before: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    *,
    choice: str = "auto",
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Computes causal attention of new positions to themselves and to cached ones.

    Args:
      q, k, v: arrays of T new positions, [B, T, H, K] for q and [B, T, N, K] for k and v.
      before: keys and values of earlier positions, [B, S, N, K] each; entry s belongs to position s.
      positions: [B, T], int32, consecutive in each row; entries of `before` from the first of them on are not used.
      choice: "none" for no mixing over positions; all others are computed alike.
      scale, window, softcap: as in `attend`.

    Returns:
      [B, T, H, K].
    """
    if choice == "none":
        return _repeat_heads(v, q.shape[2])
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)  # [B, T, N, G, K]
    there = jnp.broadcast_to(jnp.arange(before[0].shape[1]), (batch, before[0].shape[1]))  # [B, S]
    parts = []
    for keys, at, seen in (
        (before[0], there, there[:, None] < positions[:, :1, None]),
        (k, positions, positions[:, None] <= positions[:, :, None]),
    ):
        scores = jnp.einsum("btngk,bsnk->bngts", grouped, keys, preferred_element_type=jnp.float32)
        scores *= 1 / math.sqrt(head_dim) if scale is None else scale
        scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
        if window is not None:
            seen &= positions[:, :, None] - at[:, None] < window
        parts.append(jnp.where(seen[:, None, None], scores, -1e30))
    weights = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1).astype(v.dtype)  # [B, N, G, T, S + T]
    split = before[0].shape[1]
    mixed = jnp.einsum("bngts,bsnk->btngk", weights[..., :split], before[1])
    mixed += jnp.einsum("bngts,bsnk->btngk", weights[..., split:], v)
    return mixed.reshape(batch, length, heads, head_dim)


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Runs the splash kernel on each chip's rows, heads and query positions; shapes as in `attend`.

    Args:
      q, k, v, segment_ids, scale, window, softcap: as in `attend`; a chip needs all positions of its keys and values.
      interpret: run the kernel in Pallas's interpreter, on any device.
    """
    q = scaled(q, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    make = functools.partial(_kernel, q.shape[1], q.shape[2], window=window, softcap=softcap, interpret=interpret)
    q_spec = logical.activation_spec("batch", "length", "heads", "head_dim")
    if q_spec is None:
        return _attend_locally(make(), q, k, v, segment_ids, segment_ids)
    kv_spec = logical.activation_spec("batch", "kv_length", "kv_heads", "head_dim")
    if kv_spec[2] != q_spec[2]:  # key heads are sharded differently from query heads: repeat them for every query head
        k, v = _repeat_heads(k, q.shape[2]), _repeat_heads(v, q.shape[2])
        kv_spec = PartitionSpec(*kv_spec[:2], *q_spec[2:])
    mesh = jax.sharding.get_abstract_mesh()
    length_shards, head_shards = (logical.shards(q_spec[i], mesh.shape) for i in (1, 2))
    kernel = make(length_shards=length_shards, head_shards=head_shards)
    # Used only to compute the spec: inside a pipeline, axes of `mesh` may be manual.
    free = AbstractMesh(mesh.axis_sizes, mesh.axis_names)
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(free, PartitionSpec(q_spec[2], q_spec[1])))
    return jax.shard_map(
        _attend_locally,
        in_specs=(kernel_spec, q_spec, kv_spec, kv_spec, PartitionSpec(*q_spec[:2]), PartitionSpec(*kv_spec[:2])),
        out_specs=q_spec,
        axis_names=logical.automatic_axes(),
        check_vma=False,  # the kernel's custom gradient does not declare how its results vary over the mesh
    )(kernel, q, k, v, segment_ids, segment_ids)


def _kernel(
    length: int,
    heads: int,
    *,
    window: int | None,
    softcap: float | None,
    interpret: bool,
    length_shards: int = 1,
    head_shards: int = 1,
):
    """Returns the kernel for all positions; over chips it is sharded like its queries."""
    shape = (length, length)
    if window is None:
        mask = splash.CausalMask(shape, shard_count=length_shards)
    else:
        mask = splash.LocalMask(shape, (window - 1, 0), 0, shard_count=length_shards)
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        attn_logits_soft_cap=softcap,
        block_sizes=_block_sizes(length // length_shards),
        head_shards=head_shards,
        q_seq_shards=length_shards,
        residual_checkpoint_name=MIXED,
        interpret=interpret,
    )


def _attend_locally(
    kernel, q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, kv_segments: jax.Array
) -> jax.Array:
    """Runs the kernel on the arrays of one chip."""
    heads_first = [jnp.swapaxes(a, 1, 2) for a in (q, k, v)]  # [B, H, T, K], [B, N, S, K] x 2
    out = jax.vmap(kernel, in_axes=(0, 0, 0, 0))(*heads_first, splash.SegmentIds(q_segments, kv_segments))
    return jnp.swapaxes(out, 1, 2)  # [B, T, H, K]


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """Multiplies x by a number, in float32."""
    return x if scale == 1 else (x.astype(jnp.float32) * scale).astype(x.dtype)


def _tiles(length: int) -> bool:
    """Returns whether every chip's query positions fill whole tiles."""
    spec = logical.activation_spec("length")
    shards = 1 if spec is None else logical.shards(spec[0], jax.sharding.get_abstract_mesh().shape)
    return length % (shards * LANES) == 0


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


def _repeat_heads(x: jax.Array, heads: int) -> jax.Array:
    return jnp.repeat(x, heads // x.shape[2], axis=2)
