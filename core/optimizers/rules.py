"""Optimizer rules, parameter averages, and sign updates for tables.

`core.optimizers.base.trained_by` has the arguments that all rules share.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from core import parameters
from core.errors import UserError
from core.optimizers import schedules
from core.optimizers.base import Optimizer, Rule, Transformation, as_optimizer, nodes, trained_by
from core.optimizers.schedules import Schedule
from core.parameters import ParamSpec, Specs
from core.types import Params


@trained_by(weight_decay=0.1)
def adamw(*, b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8) -> Rule:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2).

    Shared arguments: `core.optimizers.base.trained_by`.

    Args:
      b1: decay of the first moment, from 0 to below 1.
      b2: decay of the second moment, from 0 to below 1.
      eps: added to the square root of the second moment; above 0.
    """
    return lambda _: optax.scale_by_adam(b1=b1, b2=b2, eps=eps)


@trained_by(weight_decay=0.0)
def adafactor(
    *,
    decay_rate: float = 0.8,
    clip_update: float = 1.0,
    relative: bool = True,
    min_factored: int = 128,
) -> Rule:
    """Adafactor (Shazeer & Stern 2018, algorithms 4 and 5) without momentum.

    Each layer of a stack is a parameter of its own; input dimensions of a matrix are joined, and so are its output
    dimensions. Shared arguments: `core.optimizers.base.trained_by`.

    Args:
      decay_rate: the decay of the second moment at step t is 1 - t^-decay_rate; above 0.
      clip_update: largest root mean square of an update before `relative` and the learning rate; above 0.
      relative: whether to multiply updates by the root mean square of the parameter; use a learning rate of about 1e-2.
      min_factored: second moments are factored if their two largest dimensions are at least this large; at least 1.
    """
    rule = optax.chain(
        optax.scale_by_factored_rms(decay_rate=decay_rate, min_dim_size_to_factor=min_factored),
        optax.clip_by_block_rms(clip_update),
        optax.scale_by_param_block_rms() if relative else optax.identity(),
    )
    return lambda specs: parameters.by_layer(parameters.as_matrices(rule, specs), specs)


@trained_by(weight_decay=1.0)
def lion(*, b1: float = 0.9, b2: float = 0.99) -> Rule:
    """Lion (Chen et al. 2023, algorithm 2): the sign of an interpolated momentum.

    It needs a learning rate three to ten times smaller than `adamw`, and a weight decay three to ten times larger.
    Shared arguments: `core.optimizers.base.trained_by`.

    Args:
      b1: weight of the momentum in the update, from 0 to below 1.
      b2: decay of the momentum, from 0 to below 1.
    """
    return lambda _: optax.scale_by_lion(b1=b1, b2=b2)


@trained_by(weight_decay=0.1)
def muon(
    *,
    momentum: float = 0.95,
    rms: float = 0.2,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> Rule:
    """Muon (Jordan 2024) for matrices; AdamW for parameters of all other kinds.

    The momentum of a matrix [rows, columns] is nearly orthogonalized by five Newton-Schulz steps, and scaled so that
    the learning rate and weight decay of AdamW can be used (Liu et al. 2025, eq. 4). Several input or output dimensions
    are joined: a query weight [embed, heads, head_dim] is a matrix [embed, heads x head_dim]. Shared arguments:
    `core.optimizers.base.trained_by`.

    Args:
      momentum: decay of Muon's moment (Nesterov's form), from 0 to below 1.
      rms: root mean square of an update before the learning rate; above 0.
      b1, b2, eps: as in `adamw`, for the other parameters.

    Raises:
      UserError: when bound, no parameter is a matrix.
    """

    def rule(specs: Specs) -> optax.GradientTransformation:
        labels = jax.tree.map(lambda spec: "matrix" if spec.kind == "matrix" else "other", specs)
        if "matrix" not in jax.tree.leaves(labels):
            raise UserError(f"muon: no parameter is a matrix; the parameters are {parameters.with_kinds(specs)}")
        of_layer = optax.chain(
            optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=parameters.dimension_numbers(specs)),
            parameters.scale_to_rms(rms, specs),
        )
        return optax.partition(
            {
                "matrix": parameters.by_layer(of_layer, specs, in_turn=True),
                "other": optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
            },
            parameters.labeled(labels),
        )

    return rule


class Atan2State(NamedTuple):
    """The state of `adam_atan2`."""

    count: jax.Array  # type: ignore[assignment]  # [], int32, steps done; hides tuple.count
    mu: Params  # first moments
    nu: Params  # second moments


@trained_by(weight_decay=0.1, clip_norm=None, no_decay=())
def adam_atan2(*, b1: float = 0.9, b2: float = 0.95) -> Rule:
    """Adam with atan2 instead of division (Everett et al. 2024).

        direction = atan2(m, sqrt(v / (1 - b2^t))) / (1 - b1^t)

    The bias of the first moment is corrected outside the arctangent, as in the adam-atan2 package. Shared arguments:
    `core.optimizers.base.trained_by`.

    Args:
      b1: decay of the first moment, from 0 to below 1.
      b2: decay of the second moment, from 0 to below 1.
    """

    def init(params: Params) -> Atan2State:
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))  # two buffers: a step may donate both
        return Atan2State(jnp.zeros((), jnp.int32), mu, nu)

    def update(grads: Params, state: Atan2State, params: Any = None) -> tuple[Params, Atan2State]:
        del params
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state.nu, grads)
        corrected = jnp.sqrt(1 - b2**count)
        direction = jax.tree.map(lambda m, v: jnp.arctan2(m, jnp.sqrt(v) / corrected) / (1 - b1**count), mu, nu)
        return direction, Atan2State(count, mu, nu)

    return lambda _: optax.GradientTransformation(init, update)


class AverageState(NamedTuple):
    """The state of `averaged`; `average` has `optax.MaskedNode` for parameters that are not averaged."""

    inner: Any
    average: Params


def averaged(*, optimizer: Optimizer | Transformation, decay: float = 0.999) -> Optimizer:
    """Adds an average of the trained parameters to an optimizer; `evaluated` returns the averages.

        average <- decay * average + (1 - decay) * parameters        after every update

    The average starts at the initial parameters. Kinds in `optimizer.live` are not averaged.

    Args:
      decay: weight of the previous average, from 0 to below 1.

    Raises:
      UserError: decay is out of range; in `init`, the optimizer averages already.
    """
    schedules.check_ranges("averaged", decay=decay)
    optimizer = as_optimizer(optimizer)

    def complete(specs: Specs) -> optax.GradientTransformationExtraArgs:
        rule = optax.with_extra_args_support(optimizer.rule(specs))
        left_out = parameters.labeled(
            jax.tree.map(lambda spec: not spec.trainable or spec.kind in optimizer.live, specs)
        )

        def kept(params: Params) -> Params:
            return jax.tree.map(lambda out, p: optax.MaskedNode() if out else p, left_out(params), params)

        def init(params: Params) -> AverageState:
            inner = rule.init(params)
            averages = {"schedule_free": optax.contrib.ScheduleFreeState, "averaged": AverageState}
            if found := [name for name, kind in averages.items() if nodes(inner, kind)]:
                raise UserError(
                    f"averaged: the optimizer already averages its parameters ({found[0]}); use it alone, because "
                    "evaluation reads one average"
                )
            return AverageState(inner, jax.tree.map(jnp.copy, _widened(kept(params))))  # a step may donate both

        def update(grads: Params, state: AverageState, params: Params, **extra: Any) -> tuple[Params, AverageState]:
            updates, inner = rule.update(grads, state.inner, params, **extra)
            changed = _widened(kept(optax.apply_updates(params, updates)))
            average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.average, changed)
            return updates, AverageState(inner, average)

        return optax.GradientTransformationExtraArgs(init, update)

    return dataclasses.replace(optimizer, rule=complete, averages=lambda state: state.average)


def _widened(params: Params) -> Params:
    """Returns parameters in at least float32, because an average moves by small parts of them."""

    def wide(value: jax.Array) -> jax.Array:
        is_floating = jnp.issubdtype(value.dtype, jnp.floating)
        return value.astype(jnp.promote_types(value.dtype, jnp.float32)) if is_floating else value

    return jax.tree.map(wide, params)


class SignState(NamedTuple):
    """The state of the rule for tables."""

    count: jax.Array  # type: ignore[assignment]  # [], int32, steps done; hides tuple.count


def with_table(*, dense: Optimizer | Transformation, learning_rate: Schedule, weight_decay: float = 1.0) -> Optimizer:
    """Uses sign updates for the touched rows of trained parameters of kind "table", `dense` for others.

    A table may have a million rows, of which a step uses a few hundred. Moments would triple its memory, and weight
    decay of every row would erase rows that are rarely used. So only rows that the model lists as used (touched) are
    updated:

        E[i] <- E[i] * (1 - rate * decay) - rate * sign(sum of the gradients of row i)     for touched i

    The model must return `LossOutput.extras = {path of the table: rows that it used [N], int32}`.

    Args:
      dense: optimizer of all other parameters; its learning rate is reported.
      learning_rate: schedule of tables.
      weight_decay: of touched rows, at least 0; multiplied by the learning rate of tables.

    Raises:
      UserError: `dense` averages, an argument is wrong, or, when bound, no table is trained.
    """
    schedules.check_ranges("with_table", learning_rate=learning_rate, weight_decay=weight_decay)
    dense = as_optimizer(dense)
    if dense.averages is not None:
        raise UserError("with_table: `dense` averages; reverse the order: averaged(optimizer=with_table(…))")

    def split(specs: Specs) -> optax.GradientTransformationExtraArgs:
        def is_table(spec: ParamSpec) -> bool:
            return spec.kind == "table" and spec.trainable

        labels = jax.tree.map(lambda spec: "table" if is_table(spec) else "dense", specs)
        if "table" not in jax.tree.leaves(labels):
            raise UserError(
                "with_table: no trained parameter is a table (`logical.param(…, kind='table')`); the parameters are "
                f"{', '.join(parameters.names(specs))}. Use the inner optimizer without with_table"
            )
        others = {module: {n: s for n, s in leaves.items() if not is_table(s)} for module, leaves in specs.items()}
        rules = {"table": _by_sign(learning_rate, weight_decay), "dense": dense.rule(others)}
        return optax.partition(rules, parameters.labeled(labels))

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
