"""Token losses as sums, in float32, that keep a vocabulary split over chips where it is.

B batch, T length, V vocab as stored (rounded up; the surplus entries are masked).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from core.types import LossOutput, WeightedSum


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array, *, vocab_size: int) -> LossOutput:
    """Next-token cross-entropy in nats, and accuracy.

    The target's logit is selected by comparison rather than by index: an index into a dimension that is split over
    chips would gather it.

    Args:
      logits: [B, T, V].
      targets: [B, T], int32, below `vocab_size`.
      weights: [B, T], float32; 0 leaves a position out.
      vocab_size: entries that exist; those from here to V are padding and get no probability.
    """
    entries = jnp.arange(logits.shape[-1])  # [V]
    logits = jnp.where(entries < vocab_size, logits.astype(jnp.float32), -1e30)  # [B, T, V]
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)  # [B, T]
    target_logit = jnp.sum(jnp.where(entries == targets[..., None], logits, 0.0), axis=-1)  # [B, T]
    correct = (target_logit >= jnp.max(logits, axis=-1)).astype(jnp.float32)  # [B, T]
    weight_sum = jnp.sum(weights)
    return LossOutput(
        loss_sum=jnp.sum((log_normaliser - target_logit) * weights),
        weight_sum=weight_sum,
        metrics={"accuracy": WeightedSum(jnp.sum(correct * weights), weight_sum)},
    )
