"""Prefix-LM attention: the prefix of each segment attends in both directions, and the rest causally.

A query sees every key of its segment up to the position `until`: the last one of its prefix, or its own. This is the
causal mask with other positions of queries, which the splash kernel reads as an array.

A bias of keys, which is added to all scores of a key, lets a model weigh or hide positions. The kernel has no such
input. So heads get another dimension, in which queries are 1 and keys have their bias.

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
      until: [B, T] int32, the last position that each position attends to, at or after its own.
      key_bias: [B, T] float32, added to all scores of each key; None: no bias.
    """

    until: jax.Array
    key_bias: jax.Array | None = None


def visible(until: jax.Array, *, window: int | None) -> jax.Array:
    """Returns whether each query may see each key if segments are ignored, bool [B, T, S]; `until` is that of `Prefix`.

    With a window, a query sees only its own and the `window - 1` positions before it, and those after it up to `until`.
    """
    places = jnp.arange(until.shape[1])
    seen = until[:, :, None] >= places
    return seen if window is None else seen & (places[:, None] - places < window)


class PrefixMask(masks.CausalMask):
    """The splash kernel's mask, which depends on `until` because `until` replaces the positions of queries.

    The kernel skips blocks that no query sees, and applies no mask to blocks that all queries see. It finds both by
    indexing this object, before `until` is known. Blocks after the diagonal must be neither, so this object says that
    every other key in them is visible.
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
      UserError: there is a window, and rows are too long to put two positions into one number.
    """
    if window is not None and until.shape[1] > (most := 1 << (31 - _OWN_BITS)):
        raise UserError(
            f"attention = 'splash' with a prefix and a window: {until.shape[1]} positions; expected at most {most}. "
            "Choose attention = 'plain', or a decoder without windows"
        )
    return until if window is None else (until << _OWN_BITS) | jnp.arange(until.shape[1], dtype=until.dtype)


def with_sequence(kernel: Any, queries: jax.Array) -> Any:
    """Returns a splash kernel with the given positions [T] of its shard's queries."""
    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    replaced = (info and info._replace(q_sequence=queries) for info in infos)
    return type(kernel)(*replaced, **kernel.kwargs)


def with_bias(q: jax.Array, k: jax.Array, key_bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Appends 8 dimensions to queries and keys, so that their products include a bias of the keys.

    Args:
      q: queries [B, T, H, K], already scaled.
      k: keys [B, S, N, K].
      key_bias: [B, S]; None: both arrays are returned unchanged.

    Returns:
      Queries [B, T, H, K + 8] and keys [B, S, N, K + 8].
    """
    if key_bias is None:
        return q, k
    ones = jnp.zeros((*q.shape[:3], _BIAS_DIMS), q.dtype).at[..., 0].set(1)
    biases = jnp.zeros((*k.shape[:3], _BIAS_DIMS), k.dtype).at[..., 0].set(key_bias[:, :, None].astype(k.dtype))
    return jnp.concatenate([q, ones], axis=-1), jnp.concatenate([k, biases], axis=-1)
