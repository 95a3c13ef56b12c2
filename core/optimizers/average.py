"""Exponential moving average of the parameters, stored in the optimizer's state and used in evaluation.

    average <- decay * average + (1 - decay) * parameters        after every step; starts at the initial parameters

No bias correction is needed, because the average starts at the initial parameters. Frozen parameters and those of a
kind that an optimizer lists as `live` (a table of which each step changes a few rows) are not averaged; evaluation uses
their current values.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib

from core import parameters, ranges
from core.errors import UserError
from core.optimizers.base import Optimizer, frozen_of, nodes
from core.param_spec import Specs
from core.types import Params


class AverageState(NamedTuple):
    """The state of the inner optimizer, and the averaged parameters."""

    inner: Any
    average: Params


def averaged(*, optimizer: Optimizer, decay: float = 0.999) -> Optimizer:
    """Adds an average of the trained parameters to an optimizer, which `Optimizer.evaluated` returns.

    Args:
      optimizer: the optimizer that trains.
      decay: weight of the previous average in each update.

    Raises:
      UserError: decay is out of range; in `init`, the optimizer averages already.
    """
    ranges.check("averaged", decay=decay)

    def complete(specs: Specs) -> optax.GradientTransformationExtraArgs:
        rule = optax.with_extra_args_support(optimizer.rule(specs))
        stopped = frozen_of(specs, optimizer.frozen)
        left_out = parameters.labelled(
            jax.tree.map(lambda spec, stop: stop or spec.kind in optimizer.live, specs, stopped)
        )

        def kept(params: Params) -> Params:
            return jax.tree.map(lambda out, p: optax.MaskedNode() if out else p, left_out(params), params)

        def init(params: Params) -> AverageState:
            inner = rule.init(params)
            if nodes(inner, optax.contrib.ScheduleFreeState):
                raise UserError("averaged: the optimizer already averages its parameters (schedule_free); use it alone")
            return AverageState(inner, kept(params))

        def update(grads: Params, state: AverageState, params: Params, **extra: Any) -> tuple[Params, AverageState]:
            updates, inner = rule.update(grads, state.inner, params, **extra)
            changed = kept(optax.apply_updates(params, updates))
            average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.average, changed)
            return updates, AverageState(inner, average)

        return optax.GradientTransformationExtraArgs(init, update)

    return dataclasses.replace(optimizer, rule=complete, averages=lambda state: state.average)
