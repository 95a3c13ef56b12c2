"""Prefix-LM attention: the prefix of each segment attends in both directions, and the rest causally.

A query sees the keys of its segment up to the position `until`: the last one of its prefix, or its own. This is the
causal mask with other positions of queries. The splash kernel has no input for a bias of keys, so heads get another
dimension, in which queries are 1 and keys have their bias.

B batch, T length, S positions of keys, H query heads, N key/value heads, K head_dim.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from core.errors import UserError

HIDDEN = -1e9  # the bias that hides a key
_OWN_BITS = 16  # bits of a query's own position, which a window needs in addition to `until`
_BIAS_DIMS = 8  # dimensions added to heads: the kernel reads whole sublanes, so all but one are 0


class Prefix(NamedTuple):
    """Which positions attend in both directions.

    Attributes:
      until: [B, T] int32, the last position that each one attends to, at or after its own.
      key_bias: [B, T] float32, added to all scores of each key; None: no bias.
    """

    until: jax.Array
    key_bias: jax.Array | None = None


def visible(until: jax.Array, *, window: int | None) -> jax.Array:
    """Returns whether each query may see each key if segments are ignored, bool [B, T, S].

    With a window, a key must lie less than `window` positions before the query, or after it.
    """
    places = jnp.arange(until.shape[1])
    seen = until[:, :, None] >= places
    return seen if window is None else seen & (places[:, None] - places < window)


def computed_share(length: int, *, window: int | None) -> float:
    """Returns the share of T x T scores that the splash kernel computes: all, or those that a window does not hide."""
    hidden = 0 if window is None else max(length - window, 0)
    return 1 - hidden**2 / (2 * length**2)


class PrefixMask(masks.CausalMask):
    """The splash kernel's mask for `until`, which replaces the positions of queries.

    The kernel indexes it before `until` is known, to find blocks that need no mask or no computation. Blocks after the
    diagonal must be neither, so every other key in them is visible here.
    """

    def __init__(self, length: int, *, window: int | None, shard_count: int):
        super().__init__((length, length), shard_count=shard_count)
        self.window = window
        if window is not None:
            self.mask_function = self._in_window

    def _in_window(self, queries: Any, keys: Any) -> Any:
        assert self.window is not None
        own = queries & ((1 << _OWN_BITS) - 1)
        return ((queries >> _OWN_BITS) >= keys) & (own - keys < self.window)

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (np.arange(length)[part] for length, part in zip(self.shape, idx, strict=True))
        queries, keys = rows[:, None], columns[None, :]
        seen = (queries >= keys) | (keys % 2 == 0)
        return seen if self.window is None else seen & (queries - keys < self.window)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixMask) and (self.shape, self.window) == (other.shape, other.window)

    def __hash__(self) -> int:
        return hash((type(self), self.shape, self.window))


def sequence(until: jax.Array, *, window: int | None) -> jax.Array:
    """Returns the positions of queries that `PrefixMask` compares, [B, T] int32.

    Raises:
      UserError: rows are too long for a prefix with a window.
    """
    if window is not None and until.shape[1] > (most := 1 << (31 - _OWN_BITS)):
        raise UserError(
            f"attention = 'splash' with a prefix and a window: {until.shape[1]} positions; expected at most {most}. "
            "Choose attention = 'plain', or a decoder without windows"
        )
    return until if window is None else (until << _OWN_BITS) | jnp.arange(until.shape[1], dtype=until.dtype)


def with_sequence(kernel: Any, queries: jax.Array) -> Any:
    """Returns a splash kernel with the given positions [T] of its queries."""
    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    replaced = (info and info._replace(q_sequence=queries) for info in infos)
    return type(kernel)(*replaced, **kernel.kwargs)


def with_bias(q: jax.Array, k: jax.Array, key_bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Appends dimensions to queries and keys, so that their products include a bias of the keys.

    Args:
      q: scaled queries [B, T, H, K].
      k: keys [B, S, N, K].
      key_bias: [B, S]; None: no change.
    """
    if key_bias is None:
        return q, k
    ones = jnp.zeros((*q.shape[:3], _BIAS_DIMS), q.dtype).at[..., 0].set(1)
    biases = jnp.zeros((*k.shape[:3], _BIAS_DIMS), k.dtype).at[..., 0].set(key_bias[:, :, None].astype(k.dtype))
    return jnp.concatenate([q, ones], axis=-1), jnp.concatenate([k, biases], axis=-1)
