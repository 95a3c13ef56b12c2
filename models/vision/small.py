"""Small layers of the selector, with replicated parameters."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical
from models import derivatives

NAME = "selector"  # first part of the paths of all parameters


def unit(x: jax.Array) -> jax.Array:
    """Normalizes the last dimension of x, in float32, without parameters."""
    width = x.shape[-1]
    return derivatives.layer_norm(x.astype(jnp.float32), jnp.ones(width), jnp.zeros(width), 1e-6)


def dense(name: str, x: jax.Array, width: int, activation: str | None = None) -> jax.Array:
    """Returns x W + b, [..., width].

    Args:
      activation: one of `models.derivatives.ACTIVATIONS`; None: linear.
    """
    init = hk.initializers.TruncatedNormal(x.shape[-1] ** -0.5)
    w = logical.param(f"{NAME}_{name}", (x.shape[-1], width), (None, None), init)
    y = x @ w + logical.param(f"{NAME}_{name}_bias", (width,), (None,), jnp.zeros, kind="bias")
    return y if activation is None else derivatives.ACTIVATIONS[activation](y)
