"""Causal attention within segments: a plain form for any device, and the splash kernel for TPU.

Both compute softmax(Q K^T / sqrt(K)) V over the positions at or before a query that belong to the same segment. The
plain form is the reference and holds [B, H, T, T] scores; splash (a Pallas kernel that comes with JAX) never does. On
TPU the kernel runs inside a `shard_map` over rows, heads and query positions, since a kernel cannot be partitioned
automatically. Where positions are split over chips, queries stay where they are and keys and values are gathered.

B batch, T length, H query heads, N key/value heads, G = H / N query heads per key head, K head_dim.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from core import logical

LANES = 128  # a TPU vector register is 128 wide; splash blocks are multiples of it
CHOICES = ("auto", "plain", "splash", "none")
MIXED = "mixed"  # names, for rematerialisation, what the kernel gives and what else its derivative needs


class Turn(NamedTuple):
    """How far every pair of dimensions of a head turns at every position; [B, T, 1, K] float32 each."""

    cos: jax.Array
    sin: jax.Array


def turn_by_position(positions: jax.Array, head_dim: int, *, theta: float, length: float = 1.0) -> Turn:
    """The tables of the rotary position embedding in the half-split form: dimension i turns with dimension i + K/2.

    Su et al. 2021 (RoFormer), eq. 34, with the pairing of Llama.

    Args:
      positions: [B, T], int32, position within the document.
      head_dim: K.
      theta: base of the geometric series of wavelengths.
      length: what a turned vector of length 1 has.
    """
    half = head_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)  # [K/2]
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency  # [B, T, 1, K/2]
    return Turn(*(length * jnp.concatenate([table, table], axis=-1) for table in (jnp.cos(angle), jnp.sin(angle))))


def rotary(x: jax.Array, positions: jax.Array, *, theta: float) -> jax.Array:
    """[B, T, heads, K], turned by `positions` [B, T]; in the dtype of x."""
    return turned(x, turn_by_position(positions, x.shape[-1], theta=theta))


def turned(x: jax.Array, by: Turn) -> jax.Array:
    """[B, T, heads, K], turned; in the dtype of x."""
    return _turn(x, *by)


@jax.custom_vjp
def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x cos + (-b, a) sin, where (a, b) are the halves of x; tables [B, T, 1, K].

    The halves change places in a matrix product with ones and zeros, which is exact. Half of 128 dimensions does not
    fill a vector register: cutting and joining halves took a TPU as long as a third of the projection to queries.
    """
    half = x.shape[-1] // 2
    places = np.eye(2 * half, k=half) - np.eye(2 * half, k=-half)  # (a, b) -> (-b, a)
    swapped = jnp.einsum(
        "bthk,kj->bthj",
        x,
        jnp.asarray(places, x.dtype),
        precision=jax.lax.Precision.HIGHEST,  # float32 as it is; a bfloat16 is exact anyway
        preferred_element_type=jnp.float32,
    )
    return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)


def _turn_forward(x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, tuple]:
    return _turn(x, cos, sin), (cos, sin)


def _turn_back(tables: tuple, dy: jax.Array) -> tuple:
    """A turn's transpose is the turn by the opposite angle; positions have no gradient."""
    cos, sin = tables
    return _turn(dy, cos, -sin), jnp.zeros_like(cos), jnp.zeros_like(sin)


_turn.defvjp(_turn_forward, _turn_back)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    choice: str = "auto",
    scale: float | None = None,
) -> jax.Array:
    """Causal attention within segments.

    Args:
      q: [B, T, H, K].
      k: [B, T, N, K]; key head n serves query heads n G .. n G + G - 1.
      v: [B, T, N, K].
      segment_ids: [B, T], int32.
      choice: "plain"; "splash"; "auto": splash on TPU where its tiles fit, plain elsewhere; "none": no mixing over
        positions at all (a control for experiments: each position keeps its own value).
      scale: what scores are multiplied by; None: 1 / sqrt(K).

    Returns:
      [B, T, H, K].
    """
    if choice == "none":
        return _repeat_heads(v, q.shape[2])
    k, v = (logical.constrain(a, "batch", "kv_length", "kv_heads", "head_dim") for a in (k, v))
    by_kernel, by_products = (functools.partial(form, scale=scale) for form in (splash_attention, plain))
    if choice == "plain" or (choice == "auto" and not _tiles(q.shape[1])):
        return by_products(q, k, v, segment_ids)
    if choice == "splash":
        return by_kernel(q, k, v, segment_ids)
    return jax.lax.platform_dependent(q, k, v, segment_ids, tpu=by_kernel, default=by_products)


def plain(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, scale: float | None = None) -> jax.Array:
    """The reference form; scores and softmax in float32."""
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)  # [B, T, N, G, K]
    scores = jnp.einsum("btngk,bsnk->bngts", grouped, k, preferred_element_type=jnp.float32)
    scores *= 1 / math.sqrt(head_dim) if scale is None else scale
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]  # [T, S]
    visible = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])  # [B, T, S]
    scores = jnp.where(visible[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)  # [B, N, G, T, S]
    return jnp.einsum("bngts,bsnk->btngk", weights, v).reshape(batch, length, heads, head_dim)


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    scale: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The splash kernel, on each chip's rows, heads and query positions; shapes as in `attend`.

    Args:
      q, k, v, segment_ids, scale: as in `attend`; a chip needs all positions of its keys and values.
      interpret: run the kernel's own definition, on any device.
    """
    q = scaled(q, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    q_spec = logical.activation_spec("batch", "length", "heads", "head_dim")
    if q_spec is None:
        kernel = _kernel(q.shape[1], q.shape[2], interpret=interpret)
        return _attend_locally(kernel, q, k, v, segment_ids, segment_ids)
    kv_spec = logical.activation_spec("batch", "kv_length", "kv_heads", "head_dim")
    if kv_spec[2] != q_spec[2]:  # key heads are not split as query heads are: give every query head one of its own
        k, v = _repeat_heads(k, q.shape[2]), _repeat_heads(v, q.shape[2])
        kv_spec = PartitionSpec(*kv_spec[:2], *q_spec[2:])
    mesh = jax.sharding.get_abstract_mesh()
    length_shards, head_shards = (logical.shards(q_spec[i], mesh.shape) for i in (1, 2))
    kernel = _kernel(q.shape[1], q.shape[2], length_shards=length_shards, head_shards=head_shards, interpret=interpret)
    free = AbstractMesh(mesh.axis_sizes, mesh.axis_names)  # for arithmetic: inside a pipeline, axes may be manual
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(free, PartitionSpec(q_spec[2], q_spec[1])))
    return jax.shard_map(
        _attend_locally,
        in_specs=(kernel_spec, q_spec, kv_spec, kv_spec, PartitionSpec(*q_spec[:2]), PartitionSpec(*kv_spec[:2])),
        out_specs=q_spec,
        axis_names=logical.automatic_axes(),
        check_vma=False,  # the kernel's custom gradient does not declare how its results vary over the mesh
    )(kernel, q, k, v, segment_ids, segment_ids)


def _kernel(length: int, heads: int, *, length_shards: int = 1, head_shards: int = 1, interpret: bool):
    """The kernel of the whole attention; over chips it is split like its queries."""
    return splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((length, length), shard_count=length_shards)] * heads),
        block_sizes=_block_sizes(length // length_shards),
        head_shards=head_shards,
        q_seq_shards=length_shards,
        residual_checkpoint_name=MIXED,
        interpret=interpret,
    )


def _attend_locally(
    kernel, q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, kv_segments: jax.Array
) -> jax.Array:
    """The kernel on the arrays of one chip."""
    heads_first = [jnp.swapaxes(a, 1, 2) for a in (q, k, v)]  # [B, H, T, K], [B, N, S, K] x 2
    out = jax.vmap(kernel, in_axes=(0, 0, 0, 0))(*heads_first, splash.SegmentIds(q_segments, kv_segments))
    return jnp.swapaxes(out, 1, 2)  # [B, T, H, K]


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """x times a number, in float32."""
    return x if scale == 1 else (x.astype(jnp.float32) * scale).astype(x.dtype)


def _tiles(length: int) -> bool:
    """Whether every chip's query positions fill whole tiles."""
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
