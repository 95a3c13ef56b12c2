"""How attention scores are computed, for all implementations."""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Scores:
    """How a layer computes attention scores, and its window.

    Attributes:
      scale: factor of the products of queries and keys; None: 1 / sqrt(K).
      softcap: scores s become softcap tanh(s / softcap) (Gemma 2); None: no bound.
      window: number of positions that a query attends to, its own being the last; None: all up to its own.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None

    def factor(self, head_dim: int) -> float:
        """Returns the factor that multiplies the products of queries and keys with K = `head_dim`."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def bounded(self, scores: jax.Array) -> jax.Array:
        """Returns the scores, bounded by `softcap` if there is one."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)


USUAL = Scores()
