"""The KV cache of attention: the keys and values of earlier slots.

A cache of R entries has slot s in entry s mod R. With a window, new entries may replace the oldest.

B batch, T new slots, N key/value heads, K head_dim, R entries.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KeysAndValues(NamedTuple):
    """Keys and values of one layer: [B, N, R, K] each in a KV cache, [B, T, N, K] for complete rows."""

    keys: jax.Array
    values: jax.Array


def extended(
    k: jax.Array, v: jax.Array, before: KeysAndValues, start: jax.Array, *, window: int | None
) -> tuple[KeysAndValues, KeysAndValues]:
    """Adds keys and values to a KV cache; returns the S entries for new queries, [B, N, S, K], and the cache.

    Args:
      k, v: [B, T, N, K], of T new slots.
      before: those of earlier slots, each [B, N, R, K].
      start: the first new slot, [] int32.
      window: number of positions that a query attends to; None: all up to its own.
    """
    pairs = [(old, jnp.swapaxes(new, 1, 2)) for old, new in zip(before, (k, v), strict=True)]
    after = KeysAndValues(*(_stored(*pair, start, wraps=_wraps(before, window)) for pair in pairs))
    if not _replaces(before, k.shape[1], window):
        return after, after
    return KeysAndValues(*(jnp.concatenate(pair, axis=2) for pair in pairs)), after


def unseen(before: KeysAndValues, length: int, *, window: int | None) -> KeysAndValues:
    """Returns placeholders in the shapes that `extended` returns for `length` new slots."""
    if not _replaces(before, length, window):
        return before
    return KeysAndValues(*(jnp.pad(old, ((0, 0), (0, 0), (0, length), (0, 0))) for old in before))


def _wraps(before: KeysAndValues, window: int | None) -> bool:
    return window is not None and before.keys.shape[2] >= window


def _replaces(before: KeysAndValues, length: int, window: int | None) -> bool:
    """Returns whether new entries may replace some that the first new query needs."""
    return _wraps(before, window) and length > 1


def held(entries: int, end: jax.Array) -> jax.Array:
    """Returns the slot in each entry, [R], once all slots before `end` are stored; negative for empty entries."""
    return end - 1 - (end - 1 - jnp.arange(entries)) % entries


def _stored(before: jax.Array, new: jax.Array, start: jax.Array, *, wraps: bool) -> jax.Array:
    """Stores new keys or values [B, N, T, K] of slots from `start` on in a cache [B, N, R, K]."""
    entries, length = before.shape[2], new.shape[2]
    if not wraps or length == 1:
        return jax.lax.dynamic_update_slice_in_dim(before, new, start % entries, axis=2)
    index = held(entries, start + length) - start  # index into the new slots; negative: keep the entry
    return jnp.where(index[:, None] >= 0, jnp.take(new, jnp.maximum(index, 0), axis=2), before)
