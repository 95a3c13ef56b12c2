"""Draws tokens from logits.

B rows, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from core.errors import check_integer, check_number

MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Raises UserError if a number is outside its range.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draws from this many of the most likely tokens; 0: from all.
      top_p: of these, draws from the most likely ones that together reach this probability (Holtzman et al. 2020); 1:
        from all.
      min_p: of these, draws from tokens with at least this fraction, from 0 to 1, of the largest probability (Nguyen et
        al. 2024); 0: from all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        check_number(self.temperature, where="temperature", least=0.0)
        check_integer(self.top_k, where="top_k", least=0)
        check_number(self.top_p, where="top_p", least=0.0, most=1.0)
        check_number(self.min_p, where="min_p", least=0.0, most=1.0)


GREEDY = Sampling(temperature=0.0)


def draw(logits: jax.Array, key: jax.Array, rows: jax.Array, positions: jax.Array, sampling: Sampling) -> jax.Array:
    """Draws a token for each row; returns ids [B], int32.

    Args:
      logits: [B, V], float32.
      rows, positions: [B], int32, folded into the key of each row's draw.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    keys = jax.vmap(lambda row, at: jax.random.fold_in(jax.random.fold_in(key, row), at))(rows, positions)
    logits = kept(logits / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def kept(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns logits [B, V] with MASKED in place of those that `sampling` excludes."""
    if sampling.top_k:
        ordered = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[1]))[0]  # [B, top_k]
        least = ordered[:, -1]
    elif sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)  # [B, V]
        least = ordered[:, -1]
    elif sampling.min_p > 0:
        ordered = jnp.max(logits, axis=-1, keepdims=True)  # [B, 1]
        least = jnp.full(logits.shape[:1], -jnp.inf)
    else:
        return logits
    if sampling.top_p < 1:
        before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)  # of more likely tokens
        last = jnp.maximum(jnp.sum(before < sampling.top_p, axis=-1) - 1, 0)  # the most likely token always stays
        least = jnp.maximum(least, jnp.take_along_axis(ordered, last[:, None], axis=1)[:, 0])
    if sampling.min_p > 0:
        least = jnp.maximum(least, ordered[:, 0] + jnp.log(sampling.min_p))
    return jnp.where(logits >= least[:, None], logits, MASKED)
