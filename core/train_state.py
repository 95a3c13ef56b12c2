"""Everything that a training step reads and writes, as one tree: what a checkpoint holds and what a step donates."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from core.optimizers import Optimizer
from core.types import Batch, Carry, Model, Params


class TrainState(NamedTuple):
    """The state behind step `step - 1` and before step `step`.

    Attributes:
      step: [], int32, steps done; in a tree of shapes or layouts, what describes it.
      params: float32 parameters.
      opt_state: the optimizer's.
      carry: the model's, `()` for a language model.
    """

    step: Any
    params: Params
    opt_state: Any
    carry: Carry


def create(model: Model, optimizer: Optimizer, params: Params, batch: Batch) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), model.init_carry(batch))


def initialise(model: Model, optimizer: Optimizer, *, seed: int, batch: Batch) -> TrainState:
    """Fresh parameters from `seed`, equal under every layout, and the state before the first step."""
    return create(model, optimizer, model.init(jax.random.key(seed), batch), batch)
