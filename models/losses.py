"""Token losses in float32, for a vocabulary that may be sharded over chips.

B batch, T length, V vocab as stored (rounded up; the surplus entries are masked).
"""

import jax
import jax.numpy as jnp

from core.types import LossOutput, WeightedSum


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array, *, vocab_size: int) -> LossOutput:
    """Returns weighted sums over positions: cross-entropy in nats, and the metric `accuracy`.

    The target's logit is selected by comparison, because indexing into a sharded dimension would gather it.

    Args:
      logits: [B, T, V].
      targets: [B, T], int32.
      weights: [B, T], float32; 0 excludes a position.
      vocab_size: number of entries of V that are not padding.
    """
    token_loss, correct = _next_token(logits, targets, vocab_size)
    weight_sum = jnp.sum(weights)
    return LossOutput(
        loss_sum=jnp.sum(token_loss * weights),
        weight_sum=weight_sum,
        metrics={"accuracy": WeightedSum(jnp.sum(correct * weights), weight_sum)},
    )


def token_losses(logits: jax.Array, targets: jax.Array, *, vocab_size: int) -> jax.Array:
    """Returns the cross-entropy of each position in nats, [B, T]; arguments as in `cross_entropy`."""
    return _next_token(logits, targets, vocab_size)[0]


def _next_token(logits: jax.Array, targets: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the loss, and 1 where the target has the largest logit, each [B, T] float32."""
    entries = jnp.arange(logits.shape[-1])  # [V]
    logits = jnp.where(entries < vocab_size, logits.astype(jnp.float32), -1e30)  # [B, T, V]
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)  # [B, T]
    target_logit = jnp.sum(jnp.where(entries == targets[..., None], logits, 0.0), axis=-1)  # [B, T]
    correct = (target_logit >= jnp.max(logits, axis=-1)).astype(jnp.float32)  # [B, T]
    return log_normalizer - target_logit, correct


def log_stablemax(logits: jax.Array, *, vocab_size: int) -> jax.Array:
    """Returns log(s(x) / sum s(x)) of logits x [..., V], in float32.

    Here s(x) = x + 1 for x >= 0 and 1 / (1 - x) for x < 0 (Prieto et al. 2025, eq. 5). Results from entry `vocab_size`
    on have no meaning. Each branch is computed at 0 where the other one is selected; otherwise, at x = 1, the gradient
    would be NaN.
    """
    x = logits.astype(jnp.float32)
    positive = x >= 0
    above, below = jnp.where(positive, x, 0.0), jnp.where(positive, 0.0, x)
    log_s = jnp.where(positive, jnp.log1p(above), -jnp.log1p(-below))
    s = jnp.where(positive, above + 1, 1 / (1 - below))
    exists = jnp.arange(x.shape[-1]) < vocab_size
    return log_s - jnp.log(jnp.sum(jnp.where(exists, s, 0.0), axis=-1, keepdims=True))


def log_softmax(logits: jax.Array, *, vocab_size: int) -> jax.Array:
    """Returns log softmax over the first `vocab_size` entries, in float32, [..., V]."""
    exists = jnp.arange(logits.shape[-1]) < vocab_size
    return jax.nn.log_softmax(jnp.where(exists, logits.astype(jnp.float32), -1e30), axis=-1)


def negative_log_likelihood(log_probabilities: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns -log p(label), or 0 for labels `core.types.IGNORED`; [..., V], [...] -> [...]."""
    chosen = jnp.arange(log_probabilities.shape[-1]) == labels[..., None]
    return -jnp.sum(jnp.where(chosen, log_probabilities, 0.0), axis=-1)


def binary_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns -log sigmoid(x) where the target is true and -log sigmoid(-x) elsewhere; float32, elementwise."""
    x = logits.astype(jnp.float32)
    return jax.nn.softplus(x) - jnp.where(targets, x, 0.0)
