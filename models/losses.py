"""Token losses in float32 that keep a vocabulary split over chips where it is.

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


def log_stablemax(logits: jax.Array, *, vocab_size: int) -> jax.Array:
    """log(s(x) / sum s(x)) with s(x) = x + 1 for x >= 0 and 1 / (1 - x) below, in float32.

    Prieto et al. 2025, eq. 5. Each branch sees only arguments of its own side: the gradient of the other one, which is
    not selected, would be infinite at x = 1 and make the sum NaN.

    Args:
      logits: [..., V].
      vocab_size: entries that exist; those from here to V are padding and get no probability.

    Returns:
      [..., V], float32; meaningless for padding.
    """
    x = logits.astype(jnp.float32)
    positive = x >= 0
    above, below = jnp.where(positive, x, 0.0), jnp.where(positive, 0.0, x)
    log_s = jnp.where(positive, jnp.log1p(above), -jnp.log1p(-below))
    s = jnp.where(positive, above + 1, 1 / (1 - below))
    exists = jnp.arange(x.shape[-1]) < vocab_size
    return log_s - jnp.log(jnp.sum(jnp.where(exists, s, 0.0), axis=-1, keepdims=True))


def log_softmax(logits: jax.Array, *, vocab_size: int) -> jax.Array:
    """As `log_stablemax`, of the usual softmax."""
    exists = jnp.arange(logits.shape[-1]) < vocab_size
    return jax.nn.log_softmax(jnp.where(exists, logits.astype(jnp.float32), -1e30), axis=-1)


def negative_log_likelihood(log_probabilities: jax.Array, labels: jax.Array) -> jax.Array:
    """-log p(label), selected by comparison; 0 where the label is `core.types.IGNORED`. [..., V], [...] -> [...]."""
    chosen = jnp.arange(log_probabilities.shape[-1]) == labels[..., None]
    return -jnp.sum(jnp.where(chosen, log_probabilities, 0.0), axis=-1)


def binary_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log sigmoid(x) where the target is true, -log sigmoid(-x) where it is not; float32, of the same shape."""
    x = logits.astype(jnp.float32)
    return jax.nn.softplus(x) - jnp.where(targets, x, 0.0)
