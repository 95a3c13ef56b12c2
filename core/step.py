"""One training step and one evaluation step, as pure functions of state and batch.

The one idea: a microbatch contributes sums (of the loss, of its gradient, of its weight) and the division comes last,
so that `accum_steps` microbatches with uneven padding equal one big batch.

    g = sum_m grad(loss_sum_m) / sum_m weight_m

Every microbatch has the same random key; what a model draws for a row is told apart by the batch's `row_ids`, the rows
of the global batch that its rows are (`core.random_bits`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from core import random_bits
from core.errors import UserError
from core.optimizers import Optimizer
from core.train_state import TrainState
from core.types import Batch, Evaluates, LossOutput, Model, Params, WeightedSum, can

Metrics = Mapping[str, jax.Array | WeightedSum]  # name -> [], float32, or a mean that has not been taken yet


Grad = Callable[[Params, Batch], tuple[Params, LossOutput]]  # gradient of the loss sum, and the sums
SumGradients = Callable[[Grad, Params, Batch, int], tuple[Params, LossOutput]]


def sum_gradients(grad: Grad, params: Params, batch: Batch, accum_steps: int) -> tuple[Params, LossOutput]:
    """Gradients and sums added over `accum_steps` microbatches, one after the other."""
    if accum_steps == 1:
        return grad(params, batch)
    microbatches = jax.tree.map(lambda x: _split_rows(x, accum_steps), batch)
    shapes = jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], microbatches))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(total, microbatch):
        return jax.tree.map(jnp.add, total, grad(params, microbatch)), None

    return jax.lax.scan(add, zeros, microbatches)[0]


def train_step(
    model: Model,
    optimizer: Optimizer,
    *,
    seed: int,
    accum_steps: int = 1,
    sum_gradients: SumGradients = sum_gradients,
    skip_non_finite: bool = False,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The function `(state, batch) -> (state, metrics)`.

    Args:
      model: what to train.
      optimizer: how.
      seed: random bits are keyed by (seed, step), and by global row where the model uses `row_ids`.
      accum_steps: microbatches per step. Microbatch m takes rows m, m + accum_steps, …, so that every device keeps
        the rows it has.
      sum_gradients: how gradients are added over microbatches, where `accum_steps` is above 1.
      skip_non_finite: where the loss or the gradient is no number, parameters, optimizer state and carry keep their
        values, and the metric `skipped_updates` is 1. The step counts all the same, for its batch is spent; the
        learning rate's schedule counts applied updates only.

    Returns:
      A pure function; metrics are numbers of this step: loss (the mean), learning_rate (that of this update, or
      the one that a skipped update would have had), gradient_norm (before clipping, over trained parameters), weight
      (supervised items); and the model's own, as sums: a step may have nothing that one of them is a mean of.
    """

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(jax.random.key(seed), state.step)
        batch = random_bits.with_row_ids(batch)

        def loss_sum(params, batch):
            carry, out = model.loss(optimizer.trainable(params), state.carry, rng, batch, is_training=True)
            return out.loss_sum, (carry, out)

        grad = jax.grad(loss_sum, has_aux=True)
        if accum_steps == 1:
            grads, (carry, out) = grad(state.params, batch)
        else:
            refuse_carry(state.carry, accum_steps)
            carry = state.carry
            grads, out = sum_gradients(lambda p, b: _without_carry(grad(p, b)), state.params, batch, accum_steps)
        items = jnp.maximum(out.weight_sum, 1.0)
        grads = jax.tree.map(lambda g: g / items, grads)
        params, opt_state = optimizer.update(grads, state.opt_state, state.params, out.extras)
        metrics = {
            **out.metrics,
            "loss": out.loss_sum / items,
            "learning_rate": optimizer.rate(state.opt_state, state.step),
            "gradient_norm": optax.global_norm(grads),
            "weight": out.weight_sum,
        }
        after = TrainState(state.step + 1, params, opt_state, carry)
        return _unless_non_finite(state, after, metrics) if skip_non_finite else (after, metrics)

    return run


def _unless_non_finite(before: TrainState, after: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """The state behind a step that may have to leave its update out."""
    loss, norm = metrics["loss"], metrics["gradient_norm"]
    assert not isinstance(loss, WeightedSum)
    assert not isinstance(norm, WeightedSum)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
    return kept._replace(step=after.step), {**metrics, "skipped_updates": 1.0 - finite.astype(jnp.float32)}


def eval_step(
    model: Model, optimizer: Optimizer, *, seed: int
) -> Callable[[TrainState, Batch], Mapping[str, WeightedSum]]:
    """The function `(state, batch) -> sums`, to be added up over batches and divided once.

    It reads the parameters that the optimizer averages, where it does, and calls the model's own `evaluate`, where it
    has one, or its `loss` with `is_training=False`.
    """
    answer = answer_step(model, optimizer, seed=seed)

    def run(state: TrainState, batch: Batch) -> Mapping[str, WeightedSum]:
        return answer(state, batch)[0]

    return run


def answer_step(
    model: Model, optimizer: Optimizer, *, seed: int
) -> Callable[[TrainState, Batch], tuple[Mapping[str, WeightedSum], Mapping[str, jax.Array]]]:
    """As `eval_step`, `(state, batch) -> (sums, answers)`: also what the model answers, `{name: [B, ...]}`.

    Of a model without `evaluate`, no answers.
    """

    def run(state: TrainState, batch: Batch) -> tuple[Mapping[str, WeightedSum], Mapping[str, jax.Array]]:
        rng = jax.random.fold_in(jax.random.key(seed), state.step)
        batch = random_bits.with_row_ids(batch)
        params = optimizer.evaluated(state.params, state.opt_state)
        if can(model, Evaluates):
            out = model.evaluate(params, rng, batch)
            answers = dict(out.extras)
        else:
            _, out = model.loss(params, model.init_carry(batch), rng, batch, is_training=False)
            answers = {}
        return {"loss": WeightedSum(out.loss_sum, out.weight_sum), **out.metrics}, answers

    return run


def _without_carry(result: tuple[Params, tuple[Any, LossOutput]]) -> tuple[Params, LossOutput]:
    grads, (_, out) = result
    return grads, out._replace(extras=())  # rows touched in one microbatch are no sum


def refuse_carry(carry: Any, accum_steps: int) -> None:
    """Raises ValueError for a carry, or its shapes, that cannot be cut into microbatches."""
    if accum_steps > 1 and jax.tree.leaves(carry):
        raise UserError(
            f"accum_steps = {accum_steps}: a model whose carry belongs to the rows of a batch cannot accumulate; "
            "use accum_steps = 1"
        )


def _split_rows(x: jax.Array, accum_steps: int) -> jax.Array:
    """[B, ...] -> [accum_steps, B / accum_steps, ...]; microbatch m holds rows m, m + accum_steps, …"""
    if x.shape[0] % accum_steps:
        raise UserError(f"batch_size = {x.shape[0]} does not divide into accum_steps = {accum_steps} microbatches")
    return x.reshape(x.shape[0] // accum_steps, accum_steps, *x.shape[1:]).swapaxes(0, 1)
