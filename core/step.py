"""The training state, and the training and evaluation steps as pure functions of state and batch.

A microbatch contributes sums (of the loss, its gradient and its weight), which are divided at the end, so that
`accum_steps` microbatches with uneven padding equal one large batch:

    g = sum_m grad(loss_sum_m) / sum_m weight_m

Every microbatch has the same random key; random bits of different rows differ by the batch's `row_ids`, the indices of
the rows in the global batch (`core.random_bits`).
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from core import parameters, random_bits
from core.errors import UserError
from core.optimizers import Optimizer
from core.types import Batch, Carry, CouplesRows, Evaluates, LossOutput, Model, Params, WeightedSum, can

STATISTICS = "statistics"  # name of the metric that is `UpdateStatistics`


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rms"], meta_fields=["groups"])
@dataclasses.dataclass(frozen=True)
class UpdateStatistics:
    """Root mean squares of parameters, gradients and updates, by group of parameters.

    Attributes:
      rms: [3, number of groups], float32: of parameters, of gradients, of updates.
      groups: names of the groups: paths of the trained parameters with `*` for every number, so that the layers of a
        model are one group, however they are stored.
    """

    rms: jax.Array
    groups: tuple[str, ...]

    def named(self) -> dict[str, WeightedSum]:
        """Returns one metric for each RMS, and update_ratio: the RMS of the update divided by that of the parameter.

        The ratio is left out where the parameter's RMS is 0.
        """
        found: dict[str, np.floating] = {}
        for name, (param, grad, update) in zip(self.groups, np.asarray(self.rms, np.float64).T, strict=True):
            found |= {f"param_rms/{name}": param, f"gradient_rms/{name}": grad, f"update_rms/{name}": update}
            found |= {f"update_ratio/{name}": update / param} if param else {}
        return {f"{STATISTICS}/{name}": WeightedSum(value, np.float64(1.0)) for name, value in found.items()}


# name -> [], float32, or a sum with its weight; under STATISTICS, if the step computes them, UpdateStatistics
Metrics = Mapping[str, jax.Array | WeightedSum | UpdateStatistics]
Grad = Callable[[Params, Batch], tuple[Params, LossOutput]]  # gradient of the loss sum, and the sums
SumGradients = Callable[[Grad, Params, Batch, int], tuple[Params, LossOutput]]


class TrainState(NamedTuple):
    """The state after `step` training steps.

    Attributes:
      step: [], int32, number of steps done; in a tree of shapes or shardings, its shape or sharding.
      params: the parameters, in the dtypes in which they are stored.
      opt_state: state of the optimizer.
      carry: what the model passes from step to step; `()` for a language model.
    """

    step: Any
    params: Params
    opt_state: Any
    carry: Carry


def create(model: Model, optimizer: Optimizer, params: Params, batch: Batch) -> TrainState:
    """Returns the state before the first step, with the given parameters.

    Args:
      model: the model.
      optimizer: the optimizer.
      params: the parameters.
      batch: a batch, or its shapes, from which the model's carry follows.
    """
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), model.init_carry(batch))


def sum_gradients(grad: Grad, params: Params, batch: Batch, accum_steps: int) -> tuple[Params, LossOutput]:
    """Runs `accum_steps` microbatches one after the other; returns the sums of their gradients and of their outputs.

    Args:
      grad: `grad(params, microbatch)` returns gradients and sums.
      params: the parameters.
      batch: {name: [B, ...]}; B is divisible by `accum_steps`.
      accum_steps: the number of microbatches.
    """
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
    with_statistics: bool = False,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the training step, `(state, batch) -> (state, metrics)`.

    Args:
      model, optimizer: what is trained, and how.
      seed: random bits are keyed by (seed, step), and by global row if the model uses `row_ids`.
      accum_steps: microbatches per step. Microbatch m has rows m, m + accum_steps, …, so that rows do not move between
        devices.
      sum_gradients: adds gradients over microbatches if `accum_steps` is above 1.
      skip_non_finite: whether a non-finite loss or gradient leaves parameters, optimizer state and carry unchanged and
        sets the metric `skipped_updates` to 1. The step is counted, because its batch was used; the learning rate
        schedule counts only applied updates.
      with_statistics: whether the step also computes `UpdateStatistics`, which become a metric.

    Returns:
      A pure function. Its metrics are, for this step: loss (the mean), learning_rate (of this update, even if it is
      skipped; absent if only the transformation knows it), gradient_norm (before clipping, over trained parameters),
      weight (`LossOutput.weight_sum`); and the model's own metrics as sums with weights, which may be 0. Called with
      microbatches, it raises UserError if the model has a carry or the rows do not divide.
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
        grads, loss = _means(grads, out)
        found, grads = _statistics(optimizer, grads, state, out.extras, loss) if with_statistics else ({}, grads)
        params, opt_state = optimizer.update(grads, state.opt_state, state.params, out.extras, value=loss)
        metrics = {
            **out.metrics,
            **found,
            "loss": loss,
            **_learning_rate(optimizer, state, opt_state),
            "gradient_norm": optimizer.gradient_norm(grads),
            "weight": out.weight_sum,
        }
        after = TrainState(state.step + 1, params, opt_state, carry)
        return _unless_non_finite(state, after, metrics) if skip_non_finite else (after, metrics)

    return run


def _means(grads: Params, out: LossOutput) -> tuple[Params, jax.Array]:
    """Divides the sums of gradients and losses by the sum of weights, which may be below 1; without weight, by 1."""
    weight = jnp.where(out.weight_sum > 0, out.weight_sum, 1.0)
    return jax.tree.map(lambda g: g / weight, grads), out.loss_sum / weight


def _learning_rate(optimizer: Optimizer, state: TrainState, after: Any) -> dict[str, jax.Array]:
    rate = optimizer.rate(state.opt_state, state.step, after=after)
    return {} if rate is None else {"learning_rate": rate}


def _statistics(
    optimizer: Optimizer, grads: Params, state: TrainState, extras: Any, loss: jax.Array
) -> tuple[Metrics, Params]:
    """Returns the statistics of an update, and the gradients, which are ready only when the statistics are.

    The update is computed twice, first for the statistics: nothing is kept of it, and the second one can still replace
    the parameters in place.
    """
    groups: dict[str, list[int]] = {}
    is_trained = jax.tree.leaves(optimizer.trained(state.params))
    for index, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(state.params)):
        if is_trained[index]:
            groups.setdefault(re.sub(r"\d+", "*", parameters.path_name(path)), []).append(index)

    def sizes(leaves: Sequence[jax.Array]) -> np.ndarray:  # may exceed int32
        return np.asarray([sum(leaves[i].size for i in group) for group in groups.values()], np.float32)

    def rms(tree: Params) -> jax.Array:
        leaves = jax.tree.leaves(tree)
        squares = [sum(jnp.sum(jnp.square(leaves[i].astype(jnp.float32))) for i in group) for group in groups.values()]
        return jnp.sqrt(jnp.stack(squares) / sizes(leaves))

    after, _ = optimizer.update(grads, state.opt_state, state.params, extras, value=loss)
    updates = jax.tree.map(jnp.subtract, after, state.params)
    found = jnp.stack([rms(state.params), rms(grads), rms(updates)])
    found, grads = jax.lax.optimization_barrier((found, grads))
    return {STATISTICS: UpdateStatistics(found, tuple(groups))}, grads


def _unless_non_finite(before: TrainState, after: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """Returns `after` and the metrics with `skipped_updates`, 0 or 1.

    If the loss or the gradient norm is not finite, the state is `before` with the step counted.
    """
    loss, norm = metrics["loss"], metrics["gradient_norm"]
    assert isinstance(loss, jax.Array)
    assert isinstance(norm, jax.Array)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
    return kept._replace(step=after.step), {**metrics, "skipped_updates": 1.0 - finite.astype(jnp.float32)}


def eval_step(
    model: Model, optimizer: Optimizer, *, seed: int
) -> Callable[[TrainState, Batch], Mapping[str, WeightedSum]]:
    """Returns the evaluation step, `(state, batch) -> sums`, to be added over batches and divided once.

    It uses averaged parameters if the optimizer averages, and the model's `evaluate` if it has one, otherwise its
    `loss` with `is_training=False`. Its random key is that of `seed` and the state's step.
    """
    answer = answer_step(model, optimizer, seed=seed)

    def run(state: TrainState, batch: Batch) -> Mapping[str, WeightedSum]:
        return answer(state, batch)[0]

    return run


def answer_step(
    model: Model, optimizer: Optimizer, *, seed: int
) -> Callable[[TrainState, Batch], tuple[Mapping[str, WeightedSum], Mapping[str, jax.Array]]]:
    """Returns an evaluation step `(state, batch) -> (sums, answers)`, with the model's answers `{name: [B, ...]}`.

    Parameters and random key are those of `eval_step`. A model without `evaluate` gives no answers.
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
    return grads, out._replace(extras=())  # the rows used by a microbatch cannot be summed


def refuse_carry(carry: Any, accum_steps: int) -> None:
    """Raises UserError for a carry (or its shapes) if `accum_steps` is above 1: a carry cannot be split."""
    if accum_steps > 1 and jax.tree.leaves(carry):
        raise UserError(
            f"accum_steps = {accum_steps}: a model whose carry belongs to the rows of a batch cannot accumulate; "
            "use accum_steps = 1"
        )


def refuse_coupled_rows(model: Any, division: str) -> None:
    """Raises UserError for a model whose loss couples rows; `division` names the setting that divides the rows."""
    if can(model, CouplesRows) and model.couples_rows:
        raise UserError(
            f"{division} divides the rows of a batch, but the loss of {type(model).__name__} couples them "
            "(couples_rows = True): each part would have a loss of its own rows alone. Use ACCUM_STEPS = 1 and a "
            "strategy without a pipeline and overlap_reduction; rematerialization saves memory, too"
        )


def rows_are_coupled(
    model: Model, params: Params, batch: Batch, *, compiler_options: Any = None
) -> tuple[float, float] | None:
    """Returns the mean loss of a batch, and that of its halves together; None if they agree within 0.1%.

    Args:
      model: without a carry.
      params: its parameters.
      batch: an even number of rows, without `row_ids`.
      compiler_options: as in `jax.jit`.
    """

    def sums(params: Params, batch: Batch) -> jax.Array:
        _, out = model.loss(params, model.init_carry(batch), jax.random.key(0), batch, is_training=True)
        return jnp.stack([out.loss_sum, out.weight_sum])

    batch = random_bits.with_row_ids(batch)
    halves = jax.tree.map(lambda x: _split_rows(x, 2), batch)
    run = jax.jit(sums, compiler_options=compiler_options)
    whole = run(params, batch)
    parts = sum(run(params, jax.tree.map(lambda x, i=i: x[i], halves)) for i in range(2))
    found = float(whole[0] / whole[1]), float(parts[0] / parts[1])
    return None if np.isclose(*found, rtol=1e-3, atol=1e-6, equal_nan=True) else found


def _split_rows(x: jax.Array, accum_steps: int) -> jax.Array:
    """Reshapes [B, ...] to [accum_steps, B / accum_steps, ...]; microbatch m has rows m, m + accum_steps, …

    Raises:
      UserError: the rows do not divide.
    """
    if x.shape[0] % accum_steps:
        raise UserError(f"batch_size = {x.shape[0]} does not divide into accum_steps = {accum_steps} microbatches")
    return x.reshape(x.shape[0] // accum_steps, accum_steps, *x.shape[1:]).swapaxes(0, 1)
