"""Causal attention in which keys and values travel around a ring of chips that share the positions of a row.

This is ring attention (Liu et al. 2023) with positions in zig-zag order: a row is divided into 2 S chunks for S chips,
and chip i has an early chunk i and a late chunk 2 S - 1 - i. In the order of the row, the last chip would have nearly
twice the mean work.

    chip:    0    1    2    3        S = 4
    chunks:  0 7  1 6  2 5  3 4

First, every chip attends causally to its own chunks. Then keys and values move to the next chip, S - 1 times. When chip
i receives the two chunks of chip j, the early keys are all before its late queries. Of the other three pairs, exactly
one is visible: early queries with early keys if j < i, otherwise late queries with late keys.

A pair gives a mean of values and the log of its normalizer; means are added with weights from these logs (Dao et al.
2022, FlashAttention). In the backward pass, gradients of keys and values move around the ring with them.

B batch, H query heads, N key/value heads, G = H / N, T positions (of a row, a chip or a chunk), S positions of keys, K
head_dim. Inside the ring, arrays have heads before positions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

from core import computed_share, jax_internals, logical
from core.errors import UserError
from models.decoder.attention.splash_tiles import Tiles

_HIDDEN = -1e30


def shards() -> int:
    """Returns the number of chips over which keys are sharded by position; 1 without a ring."""
    spec = logical.activation_spec("kv_length")
    return 1 if spec is None else logical.shards(spec[0], jax.sharding.get_abstract_mesh().shape)


def length_shards() -> int:
    """Returns the number of chips over which queries are sharded by position."""
    spec = logical.activation_spec("length")
    return 1 if spec is None else logical.shards(spec[0], jax.sharding.get_abstract_mesh().shape)


def order(length: int) -> np.ndarray:
    """Returns the positions [T] of a row in the order in which the chips have them.

    Raises:
      UserError: they do not divide into chunks, or queries are sharded differently from keys.
    """
    count = shards()
    if length % (2 * count):
        raise UserError(
            f"ring attention: {length} positions do not divide into two chunks for each of {count} chips; nearest "
            f"lengths that do: {', '.join(map(str, logical.nearest_multiples(length, 2 * count)))}"
        )
    queries, keys = (logical.activation_spec(name) for name in ("length", "kv_length"))
    assert queries is not None
    assert keys is not None
    if queries != keys:
        raise UserError(
            f"ring attention: the activation table shards kv_length over {keys[0]!r} and length over {queries[0]!r}; "
            "shard both over the same mesh axis, or set kv_length to None, and keys and values are gathered"
        )
    return np.arange(length).reshape(2 * count, -1)[_chunks(count)].ravel()


def _chunks(count: int) -> list[int]:
    return [chunk for i in range(count) for chunk in (i, 2 * count - 1 - i)]


def arrange(x: jax.Array, *names: str | None, back: bool = False) -> jax.Array:
    """Returns x [B, T, ...] in the order of the ring, or with `back` in that of the row.

    Without a ring, x is unchanged. Raises UserError if the ring does not fit its positions.
    """
    count = shards()
    if count == 1:
        return x
    order(x.shape[1])  # raises UserError if positions do not divide
    chunks = jnp.split(x, 2 * count, axis=1)  # slices, because their gradients are no scatter-adds
    moved = np.argsort(_chunks(count)) if back else _chunks(count)
    return logical.constrain(jnp.concatenate([chunks[i] for i in moved], axis=1), *names)


class Keys(NamedTuple):
    """Keys and values, each [B, N, S, K], and their segments [B, 1, S]."""

    keys: jax.Array
    values: jax.Array
    segments: jax.Array


class Queries(NamedTuple):
    """Scaled queries [B, H, T, K] and their segments, [B, 1, T]."""

    queries: jax.Array
    segments: jax.Array


class Mixed(NamedTuple):
    """Means of values [B, H, T, K], and the logs [B, H, T] float32 of the normalizers of their weights."""

    means: jax.Array
    log_total: jax.Array


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Computes attention between two chunks on one chip.

    Attributes:
      axes: mesh axes of the ring.
      name: checkpoint name of the result.
      softcap: as in `scores.Scores`.
      tiles: tiles of the kernel; None: plain products.
      interpret: whether to use Pallas's interpreter.
    """

    axes: tuple[str, ...]
    name: str
    softcap: float | None = None
    tiles: Tiles | None = None
    interpret: bool = False

    def forward(self, q: Queries, kv: Keys, *, causal: bool = False) -> Mixed:
        """Computes the attention of queries to all keys or, if `causal`, to keys up to the query's own index."""
        if self.tiles is None:
            scores = self._scores(q, kv, causal=causal)(q.queries, kv.keys)
            log_total = jax.nn.logsumexp(scores, axis=-1)  # [B, N, G, T]
            means = _weighted(jnp.exp(scores - log_total[..., None]), kv.values)
            return Mixed(means.astype(jnp.float32), log_total.reshape(means.shape[:3]))
        kernel = self._kernel(q.queries, causal=causal, save_residuals=True)
        with computed_share.scope(None if causal else 1.0):
            means, (log_total,) = jax.vmap(kernel)(q.queries, *kv[:2], _segments(q, kv))
        return Mixed(means.astype(jnp.float32), log_total)

    def backward(self, q: Queries, kv: Keys, of: Mixed, d_means: jax.Array, *, causal: bool = False) -> tuple:
        """Returns the gradients of queries, keys and values that pass through this pair.

        Args:
          of: the attention of these queries to the keys of all chunks.
          d_means: the gradient of `of.means`.
        """
        if self.tiles is None:
            scores = self._scores(q, kv, causal=causal)

            def weighted(queries: jax.Array, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
                found = scores(queries, keys)
                weights = jnp.exp(found - of.log_total.reshape(*found.shape[:4], 1))
                return _weighted(weights, values), jnp.sum(weights, axis=-1).reshape(of.log_total.shape)

            # The normalizer is a constant here; its gradient is that of the sum of weights, times this factor.
            d_total = -jnp.sum(of.means.astype(jnp.float32) * d_means.astype(jnp.float32), axis=-1)
            return jax.vjp(weighted, q.queries, *kv[:2])[1]((d_means, d_total))
        kernel = self._kernel(q.queries, causal=causal, save_residuals=False)
        of_row = functools.partial(jax_internals.splash_gradients, kernel)
        with computed_share.scope(None if causal else 1.0):
            return jax.vmap(of_row)(q.queries, *kv[:2], _segments(q, kv), *of, d_means)

    def _scores(self, q: Queries, kv: Keys, *, causal: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Returns a function that maps queries and keys to their scores [B, N, G, T, S] float32."""
        visible = q.segments[..., None] == kv.segments[:, :, None]  # [B, 1, T, S]
        if causal:
            visible &= jnp.tril(jnp.ones(visible.shape[2:], bool))

        def scores(queries: jax.Array, keys: jax.Array) -> jax.Array:
            (rows, _, length, width), groups = queries.shape, keys.shape[1]
            grouped = queries.reshape(rows, groups, -1, length, width)  # [B, N, G, T, K]
            found = jnp.einsum("bngtk,bnsk->bngts", grouped, keys, preferred_element_type=jnp.float32)
            found = found if self.softcap is None else self.softcap * jnp.tanh(found / self.softcap)
            return jnp.where(visible[:, None], found, _HIDDEN)

        return scores

    def _kernel(self, queries: jax.Array, *, causal: bool, save_residuals: bool) -> splash.SplashAttentionKernel:
        _, heads, length, _ = queries.shape
        mask = (masks.CausalMask if causal else masks.FullMask)((length, length))
        assert self.tiles is not None
        return splash.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            attn_logits_soft_cap=self.softcap,
            block_sizes=self.tiles.block_sizes(length),
            head_shards=1,
            q_seq_shards=1,
            save_residuals=save_residuals,
            interpret=self.interpret,
        )


def _weighted(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the sums [B, H, T, K] of values [B, N, S, K], weighted by [B, N, G, T, S]."""
    found = jnp.einsum("bngts,bnsk->bngtk", weights.astype(values.dtype), values)
    return found.reshape(found.shape[0], -1, *found.shape[3:])


def _segments(q: Queries, kv: Keys) -> splash.SegmentIds:
    return splash.SegmentIds(q.segments[:, 0], kv.segments[:, 0])


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    sinks: jax.Array | None = None,
    *,
    pairs: Pairs,
    specs: tuple[PartitionSpec, ...],
) -> jax.Array:
    """Computes attention [B, T, H, K] of rows in the order of the ring.

    Args:
      q: scaled queries [B, T, H, K].
      k, v: [B, T, N, K].
      segment_ids: [B, T].
      sinks: [H] float32, or None.
      specs: over automatic mesh axes, of q, of k and v, and of segment_ids.
    """
    by_heads, by_keys, by_rows = specs
    return jax.shard_map(
        functools.partial(_on_chip, pairs),
        in_specs=(by_heads, by_keys, by_keys, by_rows, None if sinks is None else PartitionSpec(by_heads[2])),
        out_specs=by_heads,
        axis_names=logical.automatic_axes(),
        check_vma=False,  # the derivative does not declare how its results vary over the mesh
    )(q, k, v, segment_ids, sinks)


def _on_chip(
    pairs: Pairs, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, sinks: jax.Array | None
) -> jax.Array:
    heads = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
    return jnp.swapaxes(_around(pairs, *heads, segments[:, None], sinks), 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _around(
    pairs: Pairs, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, sinks: jax.Array | None
) -> jax.Array:
    return _forward(pairs, q, k, v, segments, sinks)[0]


def _forward(
    pairs: Pairs, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, tuple[Queries, Keys, Mixed, jax.Array | None]]:
    own, own_keys = Queries(q, segments), Keys(k, v, segments)
    halves = _halves(own)

    def add(found: tuple[Mixed, Mixed], keys: Keys, step: jax.Array | int) -> tuple[Mixed, Mixed]:
        is_early = _is_early(pairs, step)
        late, second = _rows_apart(pairs.forward(*_two_pairs(is_early, halves, _halves(keys))))
        early, second_late = (
            second._replace(log_total=jnp.where(here, second.log_total, _HIDDEN)) for here in (is_early, ~is_early)
        )
        return _added(found[0], early), _added(_added(found[1], late), second_late)

    def step(carry: tuple[Keys, tuple[Mixed, Mixed]], number: jax.Array) -> tuple[tuple, None]:
        keys, found = carry
        return (_sent(pairs, keys), add(found, keys, number)), None  # the next keys are sent during this

    moves = jax.lax.axis_size(pairs.axes) - 1
    carry = (_sent(pairs, own_keys), _halves(pairs.forward(own, own_keys, causal=True)))
    (keys, found), _ = jax.lax.scan(step, carry, jnp.arange(1, moves))
    mixed = _joined(*add(found, keys, moves))
    if sinks is not None:
        mixed = _added(mixed, Mixed(jnp.zeros_like(mixed.means), jnp.zeros_like(mixed.log_total) + sinks[:, None]))
    mixed = Mixed(*(checkpoint_name(a, pairs.name) for a in (mixed.means.astype(q.dtype), mixed.log_total)))
    return mixed.means, (own, own_keys, mixed, sinks)


def _backward(pairs: Pairs, saved: tuple[Queries, Keys, Mixed, jax.Array | None], d_means: jax.Array) -> tuple:
    own, own_keys, mixed, sinks = saved
    halves, of = _halves(own), _halves((mixed, d_means))
    dq, *d_keys = pairs.backward(own, own_keys, mixed, d_means, causal=True)

    def add(d_queries: tuple, keys: Keys, d_keys: list[jax.Array], step: jax.Array | int) -> tuple[tuple, list]:
        is_early = _is_early(pairs, step)
        q, kv = _two_pairs(is_early, halves, _halves(keys))
        dq, *dkv = pairs.backward(q, kv, *_of_queries(is_early, of))
        late, second = _rows_apart(dq.astype(jnp.float32))
        early, second_late = _only(is_early, second)
        d_queries = d_queries[0] + early, d_queries[1] + late + second_late
        return d_queries, [
            _plus(arrived, jnp.concatenate([first + to_early, to_late], axis=2))
            for arrived, pair in zip(d_keys, dkv, strict=True)
            for first, second in [_rows_apart(pair)]
            for to_early, to_late in [_only(is_early, second)]
        ]

    def step(carry: tuple, number: jax.Array) -> tuple[tuple, None]:
        keys, d_keys, d_queries = carry
        following = _sent(pairs, keys)
        d_queries, d_keys = add(d_queries, keys, _sent(pairs, d_keys), number)
        return (following, d_keys, d_queries), None

    moves = jax.lax.axis_size(pairs.axes) - 1
    carry = (_sent(pairs, own_keys), d_keys, _halves(dq.astype(jnp.float32)))
    (keys, d_keys, d_queries), _ = jax.lax.scan(step, carry, jnp.arange(1, moves))
    d_queries, d_keys = add(d_queries, keys, _sent(pairs, d_keys), moves)
    return _joined(*d_queries).astype(dq.dtype), *_sent(pairs, d_keys), None, _of_sinks(sinks, mixed, d_means)


_around.defvjp(_forward, _backward)


def _of_sinks(sinks: jax.Array | None, mixed: Mixed, d_means: jax.Array) -> jax.Array | None:
    if sinks is None:
        return None
    along = jnp.sum(mixed.means.astype(jnp.float32) * d_means.astype(jnp.float32), axis=-1)  # [B, H, T]
    return -jnp.sum(jnp.exp(sinks[:, None] - mixed.log_total) * along, axis=(0, 2))


def _is_early(pairs: Pairs, step: jax.Array | int) -> jax.Array:
    return jax.lax.axis_index(pairs.axes) >= step


def _sent(pairs: Pairs, tree: Any) -> Any:
    count = jax.lax.axis_size(pairs.axes)
    ring = [(i, (i + 1) % count) for i in range(count)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, pairs.axes, ring), tree)


def _halves(tree: Any) -> tuple[Any, Any]:
    """Returns the early and the late chunk of arrays [B, H, T, ...]."""
    middle = jax.tree.leaves(tree)[0].shape[2] // 2
    return jax.tree.map(lambda a: a[:, :, :middle], tree), jax.tree.map(lambda a: a[:, :, middle:], tree)


def _joined(early: Any, late: Any) -> Any:
    return jax.tree.map(lambda *both: jnp.concatenate(both, axis=2), early, late)


def _two_pairs(is_early: jax.Array, q: tuple[Queries, Queries], kv: tuple[Keys, Keys]) -> tuple[Queries, Keys]:
    """Returns two pairs as rows: late queries with early keys; both early or both late."""
    return _of_queries(is_early, q), _stacked(kv[0], _where(is_early, *kv))


def _of_queries(is_early: jax.Array, halves: tuple[Any, Any]) -> Any:
    return _stacked(halves[1], _where(is_early, *halves))


def _where(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, condition), yes, no)


def _stacked(one: Any, other: Any) -> Any:
    return jax.tree.map(lambda *both: jnp.concatenate(both, axis=0), one, other)


def _rows_apart(tree: Any) -> tuple[Any, Any]:
    rows = jax.tree.leaves(tree)[0].shape[0] // 2
    return jax.tree.map(lambda a: a[:rows], tree), jax.tree.map(lambda a: a[rows:], tree)


def _only(is_early: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.where(is_early, x, 0), jnp.where(is_early, 0, x)


def _plus(arrived: jax.Array, more: jax.Array) -> jax.Array:
    return (arrived.astype(jnp.float32) + more.astype(jnp.float32)).astype(arrived.dtype)


def _added(one: Mixed, other: Mixed) -> Mixed:
    total = jnp.logaddexp(one.log_total, other.log_total)
    parts = (each.means * jnp.exp(each.log_total - total)[..., None] for each in (one, other))
    return Mixed(sum(parts), total)  # type: ignore[arg-type]  # a sum that starts at 0
