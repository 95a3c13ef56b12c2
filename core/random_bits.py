"""Random keys for the rows of the global batch, independent of the layout.

Bits are keyed by (seed, step, layer, global row), so that a row has the same bits on any chip and in any microbatch.

    rows = row_ids(batch)                                                                 # [B]
    x = dropout(hk.next_rng_key(), 0.1, x, rows)                                          # [B, ...]
    keys = row_keys(hk.next_rng_key(), rows)                                              # [B], for other draws

A block of a layer stack gets the rows through its `side`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var, jaxprs_in_params

from core import jax_internals
from core.batches import ROW_IDS, BatchSpec, batch_shapes, batch_size
from core.errors import UserError
from core.types import Batch, Evaluates, Model, Params, can

_BITS = ("random_bits", "random_gamma")  # JAX primitives; gamma, beta, dirichlet and t use the last
_DRAWS = (*_BITS, "random_split")  # a split key gives bits to whoever draws with its parts


def with_row_ids(batch: Batch) -> Batch:
    """Adds `row_ids` [B], int32, 0 to B - 1, to a global batch."""
    return {**batch, ROW_IDS: jnp.arange(batch_size(batch), dtype=jnp.int32)}


def row_ids(batch: Batch) -> jax.Array:
    """Returns the global row of each row, [B], int32; 0 to B - 1 if the batch has no `row_ids`."""
    return batch[ROW_IDS] if ROW_IDS in batch else jnp.arange(batch_size(batch), dtype=jnp.int32)


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns a key for each row, [B], from one key and the row ids [B]."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def dropout(
    key: jax.Array,
    rate: float,
    x: jax.Array,
    rows: jax.Array,
    *,
    arranged: Callable[[jax.Array], jax.Array] = lambda kept: kept,
) -> jax.Array:
    """Dropout as in `hk.dropout`, with random bits per global row.

    Args:
      key: the key for all rows.
      rate: probability that an entry becomes 0; below 1.
      x: [B, ...].
      rows: [B], the global row of each row of x.
      arranged: brings the mask into the order of x, if x was permuted.

    Raises:
      UserError: `rate` is out of range, or `rows` does not fit `x`.
    """
    if not 0 <= rate < 1:
        raise UserError(f"random_bits.dropout: rate = {rate}: expected from 0 to below 1")
    if rows.shape != x.shape[:1]:
        raise UserError(
            f"random_bits.dropout: rows of shape {rows.shape} for x of shape {x.shape}: expected one id for each row, "
            "random_bits.row_ids(batch), passed to a block through side"
        )
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(row_keys(key, rows))
    return jnp.where(arranged(kept), x / (1 - rate), 0).astype(x.dtype)


def refuse_shared_draws(model: Model, params: Params, spec: BatchSpec) -> None:
    """Raises UserError for a model that draws random bits for all rows with one key.

    Microbatches have the same key, so they would share the bits.
    """
    rows = batch_size(spec)
    if not (found := Counter(_draws(model, params, batch_shapes(spec)))):
        return
    wider = Counter(_draws(model, params, batch_shapes(spec, rows=2 * rows)))
    larger, more = found - wider, wider - found
    listed = [f"{list(shape)} at {where}" for where, shape in larger]
    listed += [
        f"{list(shape)} at {where}, {found[where, shape]} times for {rows} rows"
        for where, shape in more
        if found[where, shape]
    ]
    if listed:
        draws = "\n  ".join(listed)
        raise UserError(
            "random bits for all rows from one key: every microbatch (accum_steps above 1, or a pipeline) or chip "
            f"(overlap_reduction) would draw the same ones, and the result would depend on the layout:\n  {draws}\n"
            "Draw per row instead. In place of hk.dropout(key, rate, x):\n"
            "  x = core.random_bits.dropout(key, rate, x, rows)  # rows: core.random_bits.row_ids(batch)\n"
            "Other draws take a key for each row: core.random_bits.row_keys(key, rows). A block gets rows through its "
            "side. Or use accum_steps = 1 and a strategy without a pipeline and overlap_reduction"
        )


class Uses(NamedTuple):
    """Where a model uses random numbers: for initial parameters, in training, and in evaluation."""

    init: bool
    training: bool
    evaluation: bool


def uses(model: Model, spec: BatchSpec) -> Uses:
    """Returns where a model uses random numbers, by tracing it."""
    key, batch = jax.eval_shape(lambda: jax.random.key(0)), batch_shapes(spec)
    params = jax.eval_shape(model.init, key, batch)

    def draws(is_training: bool) -> bool:
        def sums(params: Params, key: jax.Array, batch: Batch) -> Any:
            if can(model, Evaluates) and not is_training:
                return model.evaluate(params, key, with_row_ids(batch))
            return model.loss(params, model.init_carry(batch), key, with_row_ids(batch), is_training=is_training)

        return _has_draws(jax.make_jaxpr(sums)(params, key, batch).jaxpr)

    return Uses(_is_used(model.init, key, batch), draws(True), draws(False))


def _is_used(function: Callable[..., Any], *args: Any) -> bool:
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    reached = {jaxpr.invars[0]}
    for equation in jaxpr.eqns:
        if any(isinstance(v, Var) and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    return any(isinstance(v, Var) and v in reached for v in jaxpr.outvars)


def _has_draws(jaxpr: Jaxpr) -> bool:
    """Splitting a key does not count as a draw."""
    return any(
        equation.primitive.name in _BITS or any(_has_draws(inner) for inner in jaxprs_in_params(equation.params))
        for equation in jaxpr.eqns
    )


def _draws(
    model: Model, params: Params, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the source and shape of each draw, or split, with a single key."""

    def loss(params: Params, batch: Batch) -> Any:
        return model.loss(params, model.init_carry(batch), jax.random.key(0), with_row_ids(batch), is_training=True)

    bare = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, batch))
    return list(_single_key_draws(jax.make_jaxpr(loss)(*bare).jaxpr))


def _single_key_draws(jaxpr: Jaxpr) -> Iterator[tuple[str, tuple[int, ...]]]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in _DRAWS and not _shape(equation.invars[0]):
            yield jax_internals.source_of(equation), _shape(equation.outvars[0])
        for inner in jaxprs_in_params(equation.params):
            yield from _single_key_draws(inner)


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)
