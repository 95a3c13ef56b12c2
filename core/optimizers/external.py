"""Adapter from an optax transformation to an `Optimizer`.

The transformation has its own learning rate, weight decay and masks; clipping and frozen parameters can be added. Its
state is laid out by `core.optimizers.layout`. Of optax's extra arguments of an update, a training step supplies
`value`, the mean loss of the batch. It cannot supply functions that evaluate the loss again (`value_fn`, `obj_fn`,
`grad_fn`), so line searches and second-order methods that need them are refused before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from core import parameters, ranges
from core.errors import UserError
from core.optimizers.base import Optimizer, frozen_of, only_trainable
from core.param_spec import Specs
from core.types import Params

Transformation: TypeAlias = optax.GradientTransformation


def from_optax(
    *,
    transformation: Transformation,
    clip_norm: float | None = None,
    frozen: Sequence[str] = (),
    by_layer: bool = False,
) -> Optimizer:
    """Returns an optimizer that applies a complete optax transformation, such as `optax.adan(1e-3)`.

    The learning rate is reported if the state contains it (`optax.inject_hyperparams`); otherwise it is known only
    inside the transformation, and steps have no metric `learning_rate`. Evaluation uses the averaged parameters of
    `optax.contrib.schedule_free`.

    Args:
      transformation: converts gradients of the mean loss to updates that are added to the parameters.
      clip_norm: largest global norm of the gradient; None: no clipping besides that of the transformation.
      frozen: patterns over paths of parameters that are not trained, besides those whose spec says so.
      by_layer: whether each layer of a stack is treated as a separate parameter. Set it for transformations that use
        norms or factors of a whole parameter (`lamb`, `lars`, `sm3`), so that training does not depend on how layers
        are stored; not for those that combine all parameters (`prodigy`). The transformation then gets no `value`.

    Raises:
      UserError: not a transformation, or a number out of range; in `init`, the transformation cannot be applied.
    """
    if not isinstance(transformation, optax.GradientTransformation):
        raise UserError(
            f"from_optax: transformation is of type {type(transformation).__name__}, expected an "
            "optax.GradientTransformation, such as optax.adan(1e-3)"
        )
    ranges.check("from_optax", clip_norm=clip_norm)

    def complete(specs: Specs) -> optax.GradientTransformation:
        own = parameters.by_layer(transformation, specs) if by_layer else transformation
        clipped = own if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), own)
        return only_trainable(_checked(clipped, by_layer=by_layer), frozen_of(specs, tuple(frozen)))

    return Optimizer(complete, None, tuple(frozen))


def as_optimizer(given: Optimizer | Transformation) -> Optimizer:
    """Converts an optax transformation to an `Optimizer`; returns an `Optimizer` unchanged."""
    return given if isinstance(given, Optimizer) else from_optax(transformation=given)


def _checked(transformation: optax.GradientTransformation, *, by_layer: bool) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation with an `init` that traces an update first, to refuse what a step cannot apply."""
    rule = optax.with_extra_args_support(transformation)

    def init(params: Params) -> Any:
        def trial(params: Params) -> tuple[Params, Any, Any]:
            state = rule.init(params)
            updates, after = rule.update(params, state, params, value=jnp.zeros(()))
            return optax.apply_updates(params, updates), after, state

        given = "gradients and parameters" + ("" if by_layer else ", and `value`, the mean loss")
        try:
            _, after, before = jax.eval_shape(trial, params)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UserError(
                f"the optax transformation cannot be applied: {error}. A step gives it {given}; functions that compute "
                "the loss again (value_fn, obj_fn, grad_fn) cannot be given. Use a transformation without line search "
                "or second-order estimates" + (", or by_layer=False" if by_layer else "")
            ) from error
        _check_state(before, after)
        return rule.init(params)

    def update(grads: Params, state: Any, params: Params, *, value: Any = None, **unused: Any) -> tuple[Params, Any]:
        del unused
        return rule.update(grads, state, params, **({} if value is None else {"value": value}))

    return optax.GradientTransformationExtraArgs(init, update)


def _check_state(before: Any, after: Any) -> None:
    """Raises UserError if an update adds or removes arrays of the state, or changes a shape or dtype."""

    def described(tree: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {parameters.path_name(path): f"{a.dtype.name}{list(a.shape)}" for path, a in leaves}

    old, new = described(before), described(after)
    if old != new:
        changed = [f"{k}: {old.get(k)} becomes {new.get(k)}" for k in old | new if old.get(k) != new.get(k)]
        raise UserError(
            "the optax transformation cannot be applied: an update changes the form of its state "
            f"({'; '.join(changed)}), but every step must return the state in the form of `init`"
        )
