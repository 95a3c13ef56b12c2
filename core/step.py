"""The training state, and the training and evaluation steps as pure functions of state and batch.

A microbatch contributes sums (of the loss, its gradient and its weight), which are divided at the end, so that
microbatches with uneven padding equal one large batch up to rounding:

    g = sum_m grad(loss_sum_m) / sum_m weight_m

Microbatches have the same random key; random bits of rows differ by `row_ids` (`core.random_bits`).
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
      groups: paths of the trained parameters, with `*` for numbers.
    """

    rms: jax.Array
    groups: tuple[str, ...]

    def named(self) -> dict[str, WeightedSum]:
        """Returns the RMSs as metrics, and `update_ratio`, the update's over the parameter's where that is not 0."""
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
      step: [], int32.
      carry: what the model passes from step to step; `()`: nothing.
    """

    step: Any
    params: Params
    opt_state: Any
    carry: Carry


def create(model: Model, optimizer: Optimizer, params: Params, batch: Batch) -> TrainState:
    """Returns the state before the first step.

    Args:
      batch: a batch, or its shapes.
    """
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), model.init_carry(batch))


def sum_gradients(grad: Grad, params: Params, batch: Batch, accum_steps: int) -> tuple[Params, LossOutput]:
    """Runs microbatches one after the other; returns sums of their gradients and of their outputs.

    Args:
      grad: `grad(params, microbatch)` returns gradients and sums.
      batch: {name: [B, ...]}; B is divisible by `accum_steps`.
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
    """Returns the training step, a pure function `(state, batch) -> (state, metrics)`.

    Its metrics are loss (the mean), learning_rate (absent if unknown), gradient_norm (before clipping), weight
    (`LossOutput.weight_sum`), and the model's own as sums with weights.

    Args:
      model, optimizer: what is trained, and how.
      seed: random bits are keyed by (seed, step), and by global row if the model uses `row_ids`.
      accum_steps: microbatches per step; above 1, the model may not have a carry, nor the optimizer live tables.
      sum_gradients: adds gradients over microbatches.
      skip_non_finite: whether a non-finite loss or gradient norm leaves all but the step unchanged, and the metric
        `skipped_updates` is 1; learning rates count applied updates.
      with_statistics: whether `UpdateStatistics` are a metric.
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
            refuse_tables(optimizer, accum_steps)
            carry = state.carry
            grads, out = sum_gradients(lambda p, b: _without_carry(grad(p, b)), state.params, batch, accum_steps)
        grads, loss = _means(grads, out)
        found, grads = _statistics(optimizer, grads, state, out.extras, loss) if with_statistics else ({}, grads)
        params, opt_state = optimizer.update(grads, state.opt_state, state.params, out.extras, value=loss)
        metrics = {
            **_require_sums(out.metrics),
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
    """The divisor is the sum of weights, or 1 without weight."""
    weight = jnp.where(out.weight_sum > 0, out.weight_sum, 1.0)
    return jax.tree.map(lambda g: (g / weight).astype(g.dtype), grads), out.loss_sum / weight


def _learning_rate(optimizer: Optimizer, state: TrainState, after: Any) -> dict[str, jax.Array]:
    rate = optimizer.rate(state.opt_state, state.step, after=after)
    return {} if rate is None else {"learning_rate": rate}


def _statistics(
    optimizer: Optimizer, grads: Params, state: TrainState, extras: Any, loss: jax.Array
) -> tuple[Metrics, Params]:
    """Computes an update for its statistics and drops it; the gradients that it returns wait for them."""
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
    """If loss or gradient norm is not finite, the state is `before` with the step counted."""
    loss, norm = metrics["loss"], metrics["gradient_norm"]
    assert isinstance(loss, jax.Array)
    assert isinstance(norm, jax.Array)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
    return kept._replace(step=after.step), {**metrics, "skipped_updates": 1.0 - finite.astype(jnp.float32)}


def eval_step(
    model: Model, optimizer: Optimizer, *, seed: int
) -> Callable[[TrainState, Batch], Mapping[str, WeightedSum]]:
    """Returns the evaluation step, `(state, batch) -> sums`, to be added over batches and divided once."""
    answer = answer_step(model, optimizer, seed=seed)

    def run(state: TrainState, batch: Batch) -> Mapping[str, WeightedSum]:
        return answer(state, batch)[0]

    return run


def answer_step(
    model: Model, optimizer: Optimizer, *, seed: int
) -> Callable[[TrainState, Batch], tuple[Mapping[str, WeightedSum], Mapping[str, jax.Array]]]:
    """Returns an evaluation step `(state, batch) -> (sums, answers)`, with answers `{name: [B, ...]}`."""

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
        return {**_require_sums(out.metrics), "loss": WeightedSum(out.loss_sum, out.weight_sum)}, answers

    return run


_RESERVED = ("step", "tag", "text", "time_seconds")  # keys of lines in metrics.jsonl


def _require_sums(metrics: Mapping[str, Any]) -> Mapping[str, WeightedSum]:
    """Raises UserError if a model's metrics are not weighted sums of scalars, or have a reserved name."""
    for name, value in metrics.items():
        if not isinstance(value, WeightedSum) or any(jnp.shape(part) for part in value):
            raise UserError(
                f"the model's metric {name!r} is {type(value).__name__}, expected WeightedSum(total, weight) of two "
                "scalars: sums over the rows of the batch, whose quotient is the mean"
            )
        if name in _RESERVED:
            raise UserError(f"the model's metric {name!r} has a reserved name: choose another than {_RESERVED}")
    return metrics


def _without_carry(result: tuple[Params, tuple[Any, LossOutput]]) -> tuple[Params, LossOutput]:
    grads, (_, out) = result
    return grads, out._replace(extras=())  # the rows used by a microbatch cannot be summed (`refuse_tables`)


def refuse_carry(carry: Any, accum_steps: int) -> None:
    """Raises UserError for a carry (or its shapes) if `accum_steps` is above 1."""
    if accum_steps > 1 and jax.tree.leaves(carry):
        raise UserError(
            f"accum_steps = {accum_steps}: a model whose carry belongs to the rows of a batch cannot accumulate; "
            "use accum_steps = 1"
        )


def refuse_tables(optimizer: Optimizer, accum_steps: int) -> None:
    """Raises UserError for an optimizer with live tables if `accum_steps` is above 1."""
    if accum_steps > 1 and "table" in optimizer.live:
        raise UserError(
            f"accum_steps = {accum_steps}: the optimizer changes only the rows of a table that a step used "
            "(with_table), and microbatches do not add theirs up; use accum_steps = 1, or the inner optimizer without "
            "with_table"
        )


def refuse_coupled_rows(model: Any, division: str) -> None:
    """Raises UserError for a model whose loss couples rows; `division` names what divides the rows."""
    if can(model, CouplesRows) and model.couples_rows:
        raise UserError(
            f"{division} divides the rows of a batch, but the loss of {type(model).__name__} couples them "
            "(couples_rows = True): each part would have a loss of its own rows alone. Use ACCUM_STEPS = 1 and a "
            "strategy without a pipeline and overlap_reduction; rematerialization saves memory, too"
        )


def rows_are_coupled(
    model: Model, params: Params, batch: Batch, *, compiler_options: Any = None
) -> tuple[float, float] | None:
    """Returns the mean loss of a batch and of its halves together; None if they are close.

    Args:
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
    """Reshapes [B, ...] to [accum_steps, B / accum_steps, ...]; microbatch m has rows m, m + accum_steps, …"""
    if x.shape[0] % accum_steps:
        raise UserError(f"batch_size = {x.shape[0]} does not divide into accum_steps = {accum_steps} microbatches")
    return x.reshape(x.shape[0] // accum_steps, accum_steps, *x.shape[1:]).swapaxes(0, 1)
