"""What arithmetic needs to know of an experiment, found by tracing its model once for each choice of `remat`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from core import logical, optimizers, slices
from core.train_state import TrainState
from core.types import ChoosesAttention, ChoosesDtype, Model, can
from launch.experiment import Experiment
from parallel import rules
from parallel.partitioner import Program
from parallel.planning import arithmetic, candidates, placed, traced
from parallel.planning.arithmetic import Estimate
from parallel.planning.placed import Facts, Placed


def estimate(experiment: Experiment, program: Program) -> Estimate:
    """What a step of the experiment costs a chip, as it is bound."""
    own = placed.step_of(program)
    return arithmetic.estimate(Placed(program.partitioner.strategy, facts(experiment, remats=[own.remat])), own)


def facts(experiment: Experiment, *, remats: Sequence[str | None] | None = None) -> Facts:
    """Traces the model; nothing is compiled and no device is asked for.

    Args:
      experiment: whose model.
      remats: choices of `remat` to trace; all that the model offers where not given.
    """
    model, optimizer = experiment.model, experiment.optimizer
    spec = dict(experiment.task.spec(experiment.batch_size))
    example = {k: jax.ShapeDtypeStruct(s.shape, s.dtype) for k, s in spec.items()}
    params, axes = logical.abstract_init(model.init, jax.random.key(experiment.seed), example)
    carry = jax.eval_shape(model.init_carry, example)
    shapes = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(optimizer.init, params), carry)
    named = TrainState(
        logical.Axes(()),
        axes,
        optimizers.state_axes(optimizer, params, axes),
        jax.tree.map(lambda s: rules.row_axes(s.shape), carry),
    )
    works = {
        remat: traced.work(_on_a_tpu(_with(model, remat), params, example), spec, params, axes)
        for remat in (candidates.remats(model) if remats is None else remats)
    }
    itemsize = jnp.dtype(model.dtype if can(model, ChoosesDtype) else jnp.float32).itemsize
    return Facts(slices.get(experiment.slice), shapes, named, spec, works, itemsize)


def _with(model: Any, remat: str | None) -> Any:
    return model if remat in (None, candidates.remat_of(model)) else dataclasses.replace(model, remat=remat)


def _on_a_tpu(model: Model, params: Any, example: Any) -> Model:
    """The model with the attention that a TPU would take where it chooses by itself: the trace has both ways in it."""
    if not can(model, ChoosesAttention) or model.attention != "auto":
        return model
    kernel = dataclasses.replace(model, attention="splash")
    try:
        jax.eval_shape(lambda p, b: kernel.loss(p, (), jax.random.key(0), b, is_training=True), params, example)
    except ValueError:  # its tiles do not fit the length
        return model
    return kernel
