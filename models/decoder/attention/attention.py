"""Causal attention within segments: a plain implementation for any device, and kernels for TPUs and GPUs.

All compute softmax(q k^T / sqrt(K)) v over the positions of a query's segment that are at or before it or, with a
`Prefix`, at or before its `until`. `Scores` can change the scale, bound scores, and limit them to a window. The
kernels (splash on TPUs, cuDNN on GPUs) run inside a `shard_map`, because XLA cannot partition them. If positions are
sharded, keys and values are gathered, or travel around a ring of chips (`ring_attention`). A sink is a learned score
of a query head without a value.

B batch, T length, H query heads, N key/value heads, G = H / N query heads per key head, K head_dim.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from core import computed_share, logical
from core.errors import UserError
from core.platforms import by_platform
from models import derivatives
from models.decoder import prefix as prefixes
from models.decoder.attention import cudnn_attention, kv_cache, ring_attention
from models.decoder.attention.kv_cache import KeysAndValues
from models.decoder.attention.scores import USUAL, Scores
from models.decoder.attention.splash_tiles import LANES, Tiles
from models.decoder.prefix import Prefix

CHOICES = ("auto", "plain", "splash", "cudnn", "none")
BLOCK = 256  # on CPUs, number of KV cache entries that the queries of a chunk attend to at a time
_DEFAULT_TILES = Tiles()
MIXED = "mixed"  # checkpoint name of the kernel's output, and of its other residuals


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    scores: Scores = USUAL,
    *,
    choice: str = "auto",
    arranged: bool = False,
    prefix: Prefix | None = None,
    sinks: jax.Array | None = None,
    tiles: Tiles = _DEFAULT_TILES,
) -> jax.Array:
    """Computes causal attention within segments, [B, T, H, K].

    Args:
      q, k, v: [B, T, H, K], [B, T, N, K], [B, T, N, K]; the heads of v, and of the result, may have another size.
      segment_ids: [B, T] int32.
      choice: "plain"; "splash"; "cudnn"; "auto": a kernel if one can compute this, otherwise plain; "none": each
        position keeps its own value (a control for experiments).
      arranged: whether positions are in the order of the ring, if there is one.
      prefix: which positions attend in both directions; None: none.
      sinks: [H] float32; None: none.

    Raises:
      UserError: the chosen kernel or the ring cannot compute this, or key biases are given with a softcap.
    """
    if choice == "none":
        return _repeat_heads(v, q.shape[2])
    _check(choice, q, v, prefix, softcap=scores.softcap, has_sinks=sinks is not None)
    order: np.ndarray | None = None
    if ring_attention.shards() == 1:
        k, v = (logical.constrain(a, "batch", "kv_length", "kv_heads", "head_dim") for a in (k, v))
        operands = (q, k, v, segment_ids, segment_ids, prefix, sinks)
    elif not arranged:
        q = ring_attention.arrange(q, "batch", "length", "heads", "head_dim")
        k, v = (ring_attention.arrange(a, "batch", "length", "kv_heads", "head_dim") for a in (k, v))
        rows = ring_attention.arrange(segment_ids, "batch", "length")
        mixed = attend(q, k, v, rows, scores, choice=choice, arranged=True, sinks=sinks, tiles=tiles)
        return ring_attention.arrange(mixed, "batch", "length", "heads", "head_dim", back=True)
    elif scores.window is None:
        return _around_ring(q, k, v, segment_ids, scores, choice=choice, sinks=sinks, tiles=tiles)
    else:
        order = ring_attention.order(q.shape[1])
        k, v, kv_segment_ids = (_gathered_from_ring(a) for a in (k, v, segment_ids))
        operands = (q, k, v, segment_ids, kv_segment_ids, None, sinks)
    return _computed(choice, operands, scores, order=order, tiles=tiles)


def _computed(
    choice: str, operands: tuple[Any, ...], scores: Scores, *, order: np.ndarray | None, tiles: Tiles
) -> jax.Array:
    q, _, v, *_, prefix, sinks = operands
    by_products = functools.partial(plain, scores=scores, order=order)
    by_kernel = functools.partial(splash_attention, scores=scores, order=order, tiles=tiles)
    by_cudnn = functools.partial(on_gpus, scores=scores)
    if choice in ("splash", "cudnn"):
        return (by_kernel if choice == "splash" else by_cudnn)(*operands)
    kernels = {"tpu": by_kernel} if fits_tiles(q.shape[1]) else {}
    needs: dict[str, Any] = {"softcap": scores.softcap, "prefix": prefix, "has_sinks": sinks is not None}
    if not cudnn_attention.problem(q.shape[1], q.shape[-1], q.dtype, value_dim=v.shape[-1], **needs):
        kernels["cuda"] = by_cudnn
    if choice == "plain" or not kernels:
        return by_products(*operands)
    return by_platform(*operands, **kernels, default=by_products)


def on_gpus(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    kv_segment_ids: jax.Array,
    prefix: Prefix | None = None,
    sinks: None = None,
    scores: Scores = USUAL,
    *,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> jax.Array:
    """Runs cuDNN's kernel on the rows and heads of each device.

    Args:
      q, k, v, segment_ids, kv_segment_ids, scores: as in `plain`.
      prefix: without key biases.
      implementation: of `jax.nn.dot_product_attention`.
    """
    assert sinks is None
    form = functools.partial(cudnn_attention.attend, scores=scores, implementation=implementation)
    queries = () if prefix is None else (prefix.until,)
    if logical.activation_spec("batch") is None:
        return form(q, k, v, segment_ids, kv_segment_ids, *queries)
    k, v, (q_spec, kv_spec) = _matching_heads(q, k, v, positions=None)
    rows = PartitionSpec(q_spec[0])
    return jax.shard_map(
        form,
        in_specs=(q_spec, kv_spec, kv_spec, rows, rows, *(rows for _ in queries)),
        out_specs=q_spec,
        axis_names=logical.automatic_axes(),
        check_vma=False,  # as for the splash kernel
    )(q, k, v, segment_ids, kv_segment_ids, *queries)


def _gathered_from_ring(x: jax.Array) -> jax.Array:
    names = ("batch", None, "kv_heads", "head_dim")[: x.ndim]
    return ring_attention.arrange(logical.constrain(x, *names), *names, back=True)


def _around_ring(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    scores: Scores,
    *,
    choice: str,
    sinks: jax.Array | None = None,
    tiles: Tiles = _DEFAULT_TILES,
    interpret: bool = False,
) -> jax.Array:
    ring_attention.order(q.shape[1])  # raises UserError if positions do not divide
    q = scaled(q, scores.factor(q.shape[-1]))
    k, v, (q_spec, kv_spec) = _matching_heads(q, k, v, positions="kv_length")
    axes = tuple(logical.mesh_axes(kv_spec[1]))
    by_products = ring_attention.Pairs(axes, MIXED, scores.softcap)
    of_pairs = dataclasses.replace(tiles, fused_backward=False)  # pairs of chunks use separate kernels for gradients
    by_kernel = dataclasses.replace(by_products, tiles=of_pairs, interpret=interpret)

    def form(pairs: ring_attention.Pairs) -> Callable[..., jax.Array]:
        return functools.partial(
            ring_attention.attend, pairs=pairs, specs=(q_spec, kv_spec, PartitionSpec(*q_spec[:2]))
        )

    operands = (q, k, v, segment_ids, sinks)

    if choice == "plain" or (choice == "auto" and not fits_tiles(q.shape[1])):
        return form(by_products)(*operands)
    if choice == "splash":
        return form(by_kernel)(*operands)
    return by_platform(*operands, tpu=form(by_kernel), default=form(by_products))


def plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    kv_segment_ids: jax.Array | None = None,
    prefix: Prefix | None = None,
    sinks: jax.Array | None = None,
    scores: Scores = USUAL,
    *,
    order: np.ndarray | None = None,
) -> jax.Array:
    """Computes attention with scores and softmax in float32, [B, T, H, K]: the reference.

    Args:
      q, k, v, segment_ids, prefix, sinks: as in `attend`.
      kv_segment_ids: of the keys; None: those of the queries.
      order: [T], the positions of the queries; None: in order.
    """
    length = q.shape[1]

    def places() -> jax.Array:
        return jnp.arange(length) if order is None else jnp.asarray(order)

    found = _computed_scores(q, k, scores)
    of_keys = segment_ids if kv_segment_ids is None else kv_segment_ids
    same = segment_ids[:, :, None] == of_keys[:, None, :]  # [B, T, S]
    if prefix is not None:
        if prefix.key_bias is not None:
            found += prefix.key_bias[:, None, None, None]
        return _mixed(found, prefixes.visible(prefix.until, window=scores.window) & same, v, sinks)
    causal = places()[:, None] >= jnp.arange(length)[None, :]  # [T, S]
    if scores.window is not None:
        causal &= places()[:, None] - jnp.arange(length)[None, :] < scores.window
    return _mixed(found, causal & same, v, sinks)


def _computed_scores(q: jax.Array, k: jax.Array, scores: Scores) -> jax.Array:
    """Returns the scores [B, N, G, T, S] float32 of queries [B, T, H, K] and keys [B, S, N, K]."""
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)  # [B, T, N, G, K]
    found = jnp.einsum("btngk,bsnk->bngts", grouped, k, preferred_element_type=jnp.float32)
    return scores.bounded(found * scores.factor(head_dim))


def _mixed(scores: jax.Array, visible: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Returns means [B, T, H, K] of values [B, S, N, K] by the softmax of scores where `visible` [B, T, S]."""
    scores = jnp.where(visible[:, None, None], scores, -1e30)
    if sinks is not None:
        scores = jnp.concatenate([scores, _as_scores(sinks, scores)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)  # [B, N, G, T, S]
    mixed = jnp.einsum("bngts,bsnk->btngk", weights if sinks is None else weights[..., :-1], v)
    return mixed.reshape(*mixed.shape[:2], -1, mixed.shape[-1])


def _as_scores(sinks: jax.Array, like: jax.Array) -> jax.Array:
    """Returns sinks [H] as scores of one more key, [B, N, G, T, 1]."""
    batch, groups, each, length, _ = like.shape
    return jnp.broadcast_to(sinks.reshape(1, groups, each, 1, 1), (batch, groups, each, length, 1))


def cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    before: KeysAndValues,
    start: jax.Array,
    padding: jax.Array,
    scores: Scores = USUAL,
    *,
    choice: str = "auto",
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KeysAndValues]:
    """Computes causal attention of new ids to themselves and to earlier slots; returns [B, T, H, K] and the cache.

    Args:
      q, k, v: [B, T, H, K], [B, T, N, K], [B, T, N, K], of T new slots.
      before: keys and values of earlier slots, each [B, N, R, K].
      start: the first new slot, [] int32.
      padding: [B] int32, empty slots at the beginning of each row.
      choice: "none": the new values are returned, and the cache stays as it is.
    """
    if choice == "none":
        return _repeat_heads(v, q.shape[2]), before
    seen, after = kv_cache.extended(k, v, before, start, window=scores.window)
    return of_cache(q, seen, start, padding, scores, sinks=sinks), after


def of_cache(
    q: jax.Array,
    seen: KeysAndValues,
    start: jax.Array,
    padding: jax.Array,
    scores: Scores = USUAL,
    *,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes causal attention of T new ids to these and to earlier slots, [B, T, H, K].

    Args:
      q: [B, T, H, K].
      seen: from `kv_cache.extended`, with the window of `scores`.
      start, padding: as in `cached`.
    """
    entries, length = seen.keys.shape[2], q.shape[1]
    if scores.window is not None and entries < scores.window:  # the row is shorter than the window
        scores = dataclasses.replace(scores, window=None)
    if scores.window is None or length == 1:
        slots = kv_cache.held(entries, start + length)
    else:  # the cache before the new slots, and these
        slots = jnp.concatenate([kv_cache.held(entries - length, start), start + jnp.arange(length)])
    by_products, by_blocks = (functools.partial(form, scores=scores) for form in (_mixed_at_once, _mixed_by_blocks))
    operands = (q, seen, slots, start, padding, sinks)
    if length == 1:
        return by_products(*operands)
    return by_platform(*operands, cpu=by_blocks, default=by_products)


def _visible(slots: jax.Array, start: jax.Array, padding: jax.Array, *, length: int, window: int | None) -> jax.Array:
    """Returns whether each of T = `length` queries, from slot `start` on, attends to each of S slots, [B, T, S]."""
    queries = start + jnp.arange(length)[:, None]
    visible = (slots <= queries) & (slots >= padding[:, None, None])
    return visible if window is None else visible & (queries - slots < window)


def _mixed_at_once(
    q: jax.Array,
    seen: KeysAndValues,
    slots: jax.Array,
    start: jax.Array,
    padding: jax.Array,
    sinks: jax.Array | None,
    *,
    scores: Scores,
) -> jax.Array:
    """Returns [B, T, H, K]: attention to entries [B, N, S, K], which have `slots` [S] (negative: empty entry)."""
    keys, values = (jnp.swapaxes(a, 1, 2) for a in seen)
    visible = _visible(slots, start, padding, length=q.shape[1], window=scores.window)
    return _mixed(_computed_scores(q, keys, scores), visible, values, sinks)


def _mixed_by_blocks(
    q: jax.Array,
    seen: KeysAndValues,
    slots: jax.Array,
    start: jax.Array,
    padding: jax.Array,
    sinks: jax.Array | None,
    *,
    scores: Scores,
) -> jax.Array:
    """Computes the same block by block, as FlashAttention (Dao et al. 2022, algorithm 1)."""
    (batch, length, heads, head_dim), (_, groups, entries, _) = q.shape, seen.keys.shape
    block = min(BLOCK, entries)
    # Without a window, empty entries are the last ones; with a window they are few.
    filled = entries if scores.window is not None else start + length
    queries = jnp.transpose(q.reshape(batch, length, groups, heads // groups, head_dim), (0, 2, 3, 1, 4))

    def add_block(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, mixed = sums  # [B, N, G, T, 1], [B, N, G, T, 1], [B, N, G, T, K], float32
        first = jnp.minimum(i * block, entries - block)  # the last block may overlap the previous one
        keys, values = (jax.lax.dynamic_slice_in_dim(a, first, block, axis=2) for a in seen)
        found = jnp.einsum("bngtk,bnsk->bngts", queries, keys, preferred_element_type=jnp.float32)
        found = scores.bounded(found * scores.factor(head_dim))
        here = jax.lax.dynamic_slice_in_dim(slots, first, block)
        visible = _visible(here, start, padding, length=length, window=scores.window) & (
            first + jnp.arange(block) >= i * block
        )
        found = jnp.where(visible[:, None, None], found, -1e30)
        top = jnp.maximum(largest, jnp.max(found, axis=-1, keepdims=True))
        weights, shrunk = jnp.exp(found - top), jnp.exp(largest - top)
        added = jnp.einsum(
            "bngts,bnsk->bngtk", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return top, total * shrunk + jnp.sum(weights, axis=-1, keepdims=True), mixed * shrunk + added

    rows = queries.shape[:-1]
    nothing = jnp.full((*rows, 1), -1e30), jnp.zeros((*rows, 1)), jnp.zeros((*rows, head_dim))
    if sinks is not None:  # a sink has weight 1 relative to itself
        nothing = _as_scores(sinks, queries), jnp.ones((*rows, 1)), nothing[2]
    _, total, mixed = jax.lax.fori_loop(0, (filled + block - 1) // block, add_block, nothing)
    mixed = jnp.transpose(mixed / total, (0, 3, 1, 2, 4))  # [B, T, N, G, K]
    return mixed.reshape(q.shape).astype(q.dtype)


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    kv_segment_ids: jax.Array | None = None,
    prefix: Prefix | None = None,
    sinks: jax.Array | None = None,
    scores: Scores = USUAL,
    *,
    order: np.ndarray | None = None,
    masks: Sequence[splash.splash_attention_mask.Mask] = (),
    tiles: Tiles = _DEFAULT_TILES,
    interpret: bool = False,
) -> jax.Array:
    """Runs the splash kernel on the rows, heads and query positions of each chip.

    Args:
      q, k, v, segment_ids, kv_segment_ids, prefix, sinks, order: as in `plain`.
      masks: a mask for every head; (): the causal or window mask.
      interpret: whether to use Pallas's interpreter.
    """
    q = scaled(q, scores.factor(q.shape[-1]))
    of_keys = segment_ids if kv_segment_ids is None else kv_segment_ids
    queries: jax.Array | None = None
    if prefix is not None:
        q, k = prefixes.with_bias(q, k, prefix.key_bias)
        queries = prefixes.sequence(prefix.until, window=scores.window)
    make = functools.partial(
        _kernel,
        q.shape[1],
        q.shape[2],
        scores,
        order=order,
        interpret=interpret,
        prefix=queries is not None,
        masks=masks,
        tiles=tiles,
    )
    with computed_share.scope(
        _computed_share(q.shape[1], scores, order=order, is_prefix=prefix is not None, tiles=tiles)
    ):
        return _on_every_chip(
            make, q, k, v, segment_ids, of_keys, queries, sinks, positions="kv_length" if order is None else None
        )


def _computed_share(
    length: int, scores: Scores, *, order: np.ndarray | None, is_prefix: bool, tiles: Tiles
) -> float | None:
    """Returns the share of scores that the kernel computes; None: that of causal attention."""
    if is_prefix:
        return prefixes.computed_share(length, window=scores.window)
    if scores.window is None:
        return None
    positions = np.arange(length) if order is None else order
    return tiles.computed_share(positions, window=scores.window, shards=ring_attention.length_shards())


def _on_every_chip(
    make: Callable[..., Any],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    of_keys: jax.Array,
    queries: jax.Array | None,
    sinks: jax.Array | None,
    *,
    positions: str | None,
) -> jax.Array:
    if logical.activation_spec("batch") is None:
        return _attend_locally(make(), q, k, v, segment_ids, of_keys, queries, sinks)
    k, v, (q_spec, kv_spec) = _matching_heads(q, k, v, positions=positions)
    mesh = jax.sharding.get_abstract_mesh()
    length_shards, head_shards = (logical.shards(q_spec[i], mesh.shape) for i in (1, 2))
    kernel = make(length_shards=length_shards, head_shards=head_shards)
    # This mesh only serves to compute the spec, because inside a pipeline, axes of `mesh` may be manual.
    free = AbstractMesh(mesh.axis_sizes, mesh.axis_names)
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(free, PartitionSpec(q_spec[2], q_spec[1])))
    rows, of_kv = PartitionSpec(*q_spec[:2]), PartitionSpec(*kv_spec[:2])
    others = None if queries is None else rows, None if sinks is None else PartitionSpec(q_spec[2])
    return jax.shard_map(
        _attend_locally,
        in_specs=(kernel_spec, q_spec, kv_spec, kv_spec, rows, of_kv, *others),
        out_specs=q_spec,
        axis_names=logical.automatic_axes(),
        check_vma=False,  # the kernel's gradient does not declare how its results vary over the mesh
    )(kernel, q, k, v, segment_ids, of_keys, queries, sinks)


def _matching_heads(
    q: jax.Array, k: jax.Array, v: jax.Array, *, positions: str | None
) -> tuple[jax.Array, jax.Array, tuple[PartitionSpec, PartitionSpec]]:
    """Returns keys and values, repeated if their heads are sharded unlike query heads, and the two specs."""
    q_spec = logical.activation_spec("batch", "length", "heads", "head_dim")
    kv_spec = logical.activation_spec("batch", positions, "kv_heads", "head_dim")
    assert q_spec is not None
    assert kv_spec is not None
    if kv_spec[2] != q_spec[2]:  # sharded differently from query heads: repeat key heads for each
        k, v = _repeat_heads(k, q.shape[2]), _repeat_heads(v, q.shape[2])
        kv_spec = PartitionSpec(*kv_spec[:2], *q_spec[2:])
    return k, v, (q_spec, kv_spec)


def _kernel(
    length: int,
    heads: int,
    scores: Scores,
    *,
    order: np.ndarray | None,
    interpret: bool,
    prefix: bool,
    masks: Sequence[splash.splash_attention_mask.Mask],
    tiles: Tiles,
    length_shards: int = 1,
    head_shards: int = 1,
):
    shape = (length, length)
    mask: Any
    if prefix:
        mask = prefixes.PrefixMask(length, window=scores.window, shard_count=length_shards)
    elif scores.window is None:
        mask = splash.CausalMask(shape, shard_count=length_shards)
    else:
        mask = splash.LocalMask(shape, (scores.window - 1, 0), 0, shard_count=length_shards)
    if order is not None:
        mask.q_sequence = order.astype(np.int32)
    return splash.make_splash_mha(
        splash.MultiHeadMask(masks or [mask] * heads),
        attn_logits_soft_cap=scores.softcap,
        block_sizes=tiles.block_sizes(length // length_shards),
        head_shards=head_shards,
        q_seq_shards=length_shards,
        residual_checkpoint_name=MIXED,
        interpret=interpret,
    )


def _attend_locally(
    kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    kv_segments: jax.Array,
    queries: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    def one_row(queries: jax.Array | None, *operands: Any) -> jax.Array:
        of_heads = None if sinks is None else derivatives.with_float32_gradient(sinks)  # the kernel's has q's dtype
        return (kernel if queries is None else prefixes.with_sequence(kernel, queries))(*operands, of_heads)

    heads_first = [jnp.swapaxes(a, 1, 2) for a in (q, k, v)]  # [B, H, T, K], [B, N, S, K] x 2
    out = jax.vmap(one_row)(queries, *heads_first, splash.SegmentIds(q_segments, kv_segments))
    return jnp.swapaxes(out, 1, 2)  # [B, T, H, K]


def _check(
    choice: str, q: jax.Array, v: jax.Array, prefix: Prefix | None, *, softcap: float | None, has_sinks: bool
) -> None:
    if choice == "splash":
        _check_tiles(q.shape[1])
    if choice == "cudnn":
        needs: dict[str, Any] = {"softcap": softcap, "prefix": prefix, "has_sinks": has_sinks}
        cudnn_attention.check(q.shape[1], q.shape[-1], q.dtype, value_dim=v.shape[-1], **needs)
    if prefix is None:
        return
    if ring_attention.shards() > 1:
        raise UserError(
            "keys that travel around a ring can only be attended to causally, and here positions attend both ways or "
            "are hidden, such as the patches of an image: choose a strategy whose activation table has kv_length = None"
        )
    if softcap is not None and prefix.key_bias is not None:
        raise UserError(
            f"Attention.softcap = {softcap}: bounded scores cannot hide a position; choose a selector that gathers "
            "its patches, with as many slots as it chooses, or a decoder without the bound"
        )


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """Multiplies x by a number, in float32."""
    return x if scale == 1 else (x.astype(jnp.float32) * scale).astype(x.dtype)


def fits_tiles(length: int) -> bool:
    """Returns whether rows of `length` positions give every chip whole tiles of queries, in a ring in both chunks."""
    return length % _tile_unit() == 0


def _tile_unit() -> int:
    chunks = 2 if ring_attention.shards() > 1 else 1  # chunks of a row on each chip
    return ring_attention.length_shards() * chunks * LANES


def _check_tiles(length: int) -> None:
    if not fits_tiles(length):
        unit = _tile_unit()
        raise UserError(
            f"attention = 'splash': {length} positions are not a multiple of {unit}: the kernel needs tiles of {LANES} "
            "positions in each shard of a row, two of them in a ring. Nearest lengths that fit: "
            f"{', '.join(map(str, logical.nearest_multiples(length, unit)))}; attention = 'auto' computes other "
            "lengths by plain products"
        )


def _repeat_heads(x: jax.Array, heads: int) -> jax.Array:
    return jnp.repeat(x, heads // x.shape[2], axis=2)
