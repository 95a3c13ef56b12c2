"""How attention scores are computed, and which positions a query attends to: one value for all implementations."""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of a layer's attention, and its window.

    Attributes:
      scale: factor of the products of queries and keys; None: 1 / sqrt(K).
      softcap: scores s become softcap tanh(s / softcap) (Gemma 2); None: they are not bounded.
      window: a query attends to this many positions, its own being the last; None: to all positions up to its own.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None

    def factor(self, head_dim: int) -> float:
        """Returns the factor of the products of queries and keys of K = `head_dim`."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def bounded(self, scores: jax.Array) -> jax.Array:
        """Returns scores, bounded by `softcap` if there is one."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)


USUAL = Scores()
