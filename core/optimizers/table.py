"""A table of which each batch touches a few rows: signs in place of moments, and decay for the touched rows alone.

An embedding per puzzle may have a million rows, of which a step reads a few hundred. Moments would triple it, and decay
of every row at every step would wear away what no batch asked for. So a row changes only when the model says in
`LossOutput.extras` that it was touched:

    E[i] <- E[i] * (1 - rate * decay) - rate * sign(sum of the gradients of row i)     for touched i

Rows that occur several times in a batch, on whatever chips, are summed before the sign: they are by the time that the
gradient of the table exists. The table itself may be split over chips by its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from core import parameters, ranges
from core.errors import UserError
from core.optimizers.base import Optimizer
from core.optimizers.schedules import Schedule
from core.types import Params


class SignState(NamedTuple):
    """What the rule keeps: nothing of the table."""

    count: jax.Array  # type: ignore[assignment]  # [], int32, steps done; hides tuple.count


def with_table(
    *, dense: Optimizer, learning_rate: Schedule, weight_decay: float = 1.0, table: str = "puzzle_table"
) -> Optimizer:
    """`dense` for everything but one table, which is updated by sign where it was touched.

    Args:
      dense: of all other parameters, and so are its `frozen`: with all of them frozen the table alone is trained. Its
        learning rate is the one that is reported.
      learning_rate: schedule, of the table.
      weight_decay: of touched rows; multiplied by the table's learning rate.
      table: path of the table, [rows, width]. The model gives `extras = {table: rows that it read [N], int32}`.

    Raises:
      ValueError: decay out of range, or an average inside; at `init`, no parameter of that path; in a step, a model
        that names no rows.
    """
    ranges.check("with_table", weight_decay=weight_decay)
    if dense.averages is not None:
        raise UserError("with_table: dense averages; put it the other way round, averaged(optimizer=with_table(…))")
    split = optax.partition(
        {"table": _by_sign(learning_rate, weight_decay), "dense": dense.transformation},
        lambda params: jax.tree.map(
            lambda found: "table" if found else "dense", parameters.matches(params, (table,), where="table")
        ),
    )
    return dataclasses.replace(dense, transformation=split, live=(*dense.live, table))


def _by_sign(learning_rate: Schedule, weight_decay: float) -> optax.GradientTransformationExtraArgs:
    def init(params: Params) -> SignState:
        del params
        return SignState(jnp.zeros((), jnp.int32))

    def update(grads: Params, state: SignState, params: Params, *, extras: Any = ()) -> tuple[Params, SignState]:
        rate = learning_rate(state.count)

        def one(path: Any, p: jax.Array, g: jax.Array) -> jax.Array:
            rows = _rows(parameters.path_name(path), extras)
            touched = jnp.zeros(p.shape[0], bool).at[rows].set(True)
            changed = p * (1 - rate * weight_decay) - rate * jnp.sign(g)
            # Added to p, this is `changed` up to a rounding of the larger of the two; untouched rows keep their bits.
            return jnp.where(touched[:, None], changed - p, 0.0)

        return jax.tree_util.tree_map_with_path(one, params, grads), SignState(state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _rows(name: str, extras: Any) -> jax.Array:
    if not isinstance(extras, Mapping) or name not in extras:
        raise UserError(
            f"with_table: the model does not say which rows of {name!r} a step touched; give them in "
            f"LossOutput.extras = {{{name!r}: rows [N], int32}}, or take the optimizer inside with_table alone"
        )
    return extras[name]
