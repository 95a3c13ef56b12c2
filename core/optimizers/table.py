"""Sign updates for embedding tables of which each batch uses a few rows.

An embedding per puzzle may have a million rows, of which a step uses a few hundred. Moments would triple its memory,
and weight decay of every row at every step would erase rows that are rarely used. Therefore a row is updated only if
the model lists it as used (touched) in `LossOutput.extras`, and without moments:

    E[i] <- E[i] * (1 - rate * decay) - rate * sign(sum of the gradients of row i)     for touched i

The gradient of the table already sums all uses of a row in a batch, on all chips, before the sign is taken. The table
may be sharded over its rows.
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
from core.param_spec import Specs
from core.types import Params


class SignState(NamedTuple):
    """The state of the rule: only a step counter."""

    count: jax.Array  # type: ignore[assignment]  # [], int32, steps done; hides tuple.count


def with_table(*, dense: Optimizer, learning_rate: Schedule, weight_decay: float = 1.0) -> Optimizer:
    """Uses sign updates for the touched rows of parameters of kind "table", and `dense` for all others.

    The model must return `LossOutput.extras = {path of the table: rows that it used [N], int32}`.

    Args:
      dense: optimizer of all other parameters, to which its `frozen` applies; with all of them frozen, only tables are
        trained. Its learning rate is the one that is reported.
      learning_rate: schedule of tables.
      weight_decay: weight decay of touched rows; multiplied by the learning rate of tables.

    Raises:
      UserError: the decay is out of range, or `dense` averages; when bound, no parameter is a table; in a step, the
        model does not list the used rows.
    """
    ranges.check("with_table", weight_decay=weight_decay)
    if dense.averages is not None:
        raise UserError("with_table: `dense` averages; reverse the order: averaged(optimizer=with_table(…))")

    def split(specs: Specs) -> optax.GradientTransformationExtraArgs:
        labels = jax.tree.map(lambda spec: "table" if spec.kind == "table" else "dense", specs)
        if "table" not in jax.tree.leaves(labels):
            raise UserError(
                "with_table: no parameter is a table (an axis `puzzles`, or kind='table'); the parameters are "
                f"{', '.join(parameters.names(specs))}. Use the inner optimizer without with_table"
            )
        others = {module: {n: s for n, s in leaves.items() if s.kind != "table"} for module, leaves in specs.items()}
        rules = {"table": _by_sign(learning_rate, weight_decay), "dense": dense.rule(others)}
        return optax.partition(rules, parameters.labelled(labels))

    return dataclasses.replace(dense, rule=split, live=(*dense.live, "table"))


def _by_sign(learning_rate: Schedule, weight_decay: float) -> optax.GradientTransformationExtraArgs:
    def init(params: Params) -> SignState:
        del params
        return SignState(jnp.zeros((), jnp.int32))

    def update(
        grads: Params, state: SignState, params: Params, *, extras: Any = (), **unused: Any
    ) -> tuple[Params, SignState]:
        del unused
        rate = learning_rate(state.count)

        def one(path: Any, p: jax.Array, g: jax.Array) -> jax.Array:
            rows = _rows(parameters.path_name(path), extras)
            touched = jnp.zeros(p.shape[0], bool).at[rows].set(True)
            changed = p * (1 - rate * weight_decay) - rate * jnp.sign(g)
            # p + (changed - p) equals `changed` up to rounding; untouched rows keep their exact bits.
            return jnp.where(touched[:, None], changed - p, 0.0)

        return jax.tree_util.tree_map_with_path(one, params, grads), SignState(state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _rows(name: str, extras: Any) -> jax.Array:
    if not isinstance(extras, Mapping) or name not in extras:
        raise UserError(
            f"with_table: the model does not list the rows of {name!r} that a step used; return them as "
            f"LossOutput.extras = {{{name!r}: rows [N], int32}}, or use the inner optimizer without with_table"
        )
    return extras[name]
