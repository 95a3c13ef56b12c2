"""StableAdamW (Wortsman et al. 2023, alg. 2), written for optax alone: it knows nothing of meshes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class StableState(NamedTuple):
    """Steps done, and exponential means of gradients and of their squares."""

    count: jax.Array
    mean: optax.Updates
    square: optax.Updates


def scale_by_stable_adam(*, b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam whose update shrinks where the mean square lags behind the gradient."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return StableState(jnp.zeros([], jnp.int32), zeros, zeros)

    def update(grads, state, params=None):
        count = state.count + 1
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mean, grads)
        square = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g**2, state.square, grads)

        def direction(g, m, s):
            m, s = m / (1 - b1**count), s / (1 - b2**count)
            excess = jnp.sqrt(jnp.mean(g**2 / jnp.maximum(s, eps**2)))  # of the whole parameter
            return m / (jnp.sqrt(s) + eps) / jnp.maximum(1, excess)

        return jax.tree.map(direction, grads, mean, square), StableState(count, mean, square)

    return optax.GradientTransformation(init, update)


def stable_adamw(
    *,
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> optax.GradientTransformation:
    """AdamW without spikes of the loss, and without a clipping threshold to choose."""
    return optax.chain(
        scale_by_stable_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
        optax.scale_by_learning_rate(learning_rate),
    )
