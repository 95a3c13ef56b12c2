"""An exponential moving average of the parameters, kept with the optimizer's state and read in evaluation.

    average <- decay * average + (1 - decay) * parameters        after every step; it starts at the first parameters

There is no correction of a bias: the average starts where training does. What is frozen, and what an optimizer calls
`live` (a table of which each step touches a few rows), is not averaged; evaluation reads it as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from core import parameters, ranges
from core.optimizers.base import Optimizer, frozen_of
from core.types import Params


class AverageState(NamedTuple):
    """The state of the optimizer that is averaged over, and the average."""

    inner: Any
    average: Params


def averaged(*, optimizer: Optimizer, decay: float = 0.999) -> Optimizer:
    """`optimizer`, and an average of what it trains, which `Optimizer.evaluated` reads.

    Args:
      optimizer: trains.
      decay: what a step keeps of the average.

    Raises:
      ValueError: decay out of its range.
    """
    ranges.check("averaged", decay=decay)
    rule = optax.with_extra_args_support(optimizer.transformation)

    def kept(params: Params) -> Params:
        live = parameters.matches(params, optimizer.live, where="live")
        left_out = jax.tree.map(lambda a, b: a or b, live, frozen_of(params, optimizer.frozen))
        return jax.tree.map(lambda out, p: optax.MaskedNode() if out else p, left_out, params)

    def init(params: Params) -> AverageState:
        return AverageState(rule.init(params), kept(params))

    def update(grads: Params, state: AverageState, params: Params, **extra: Any) -> tuple[Params, AverageState]:
        updates, inner = rule.update(grads, state.inner, params, **extra)
        changed = kept(optax.apply_updates(params, updates))
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.average, changed)
        return updates, AverageState(inner, average)

    return dataclasses.replace(
        optimizer,
        transformation=optax.GradientTransformationExtraArgs(init, update),
        averages=lambda state: state.average,
    )
