"""The training state: everything that a training step reads and writes and that a checkpoint stores."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from core.optimizers import Optimizer
from core.types import Batch, Carry, Model, Params


class TrainState(NamedTuple):
    """The state after `step` training steps.

    Attributes:
      step: [], int32, number of steps done; in a tree of shapes or shardings, its shape or sharding.
      params: float32 parameters.
      opt_state: state of the optimizer.
      carry: state of the model, `()` for a language model.
    """

    step: Any
    params: Params
    opt_state: Any
    carry: Carry


def create(model: Model, optimizer: Optimizer, params: Params, batch: Batch) -> TrainState:
    """Returns the state before the first step, with the given parameters."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), model.init_carry(batch))


def initialise(model: Model, optimizer: Optimizer, *, seed: int, batch: Batch) -> TrainState:
    """Returns the state before the first step, with parameters from `seed` that are equal under every layout."""
    return create(model, optimizer, model.init(jax.random.key(seed), batch), batch)
