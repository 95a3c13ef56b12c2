"""Parameters from NumPy: to compile the draws of `init` takes longer than all else of a test of a small model."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STILL = {"norm": 1.0, "bias": 0.0, "gain": 0.0, "lora_b": 0.0}  # the first value of leaves whose names end so


def drawn(init: Callable[..., Any], *inputs: Any, seed: int = 0) -> dict[str, dict[str, jax.Array]]:
    """Returns parameters of the shapes that `init(key, *inputs)` has, drawn from normal distributions."""
    random = np.random.default_rng(seed)

    def values(path, leaf):
        module, name = (step.key for step in path)
        for end, value in STILL.items():
            if name.endswith(end):
                return jnp.full(leaf.shape, value, leaf.dtype)
        first = 1 if "layers" in module else 0  # of one layer
        fan_in = math.prod(leaf.shape[first:-1])
        return jnp.asarray(random.normal(0, fan_in**-0.5, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(values, jax.eval_shape(init, jax.random.key(0), *inputs))
