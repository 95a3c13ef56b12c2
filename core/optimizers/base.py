"""The `Optimizer` that a training step uses, and the steps that all rules share.

Parameters are selected by patterns over their paths, such as `layers/block/query` (shell wildcards: `*norm`,
`layers/*`). A rule (`core.optimizers.rules`) converts a gradient to an update direction. `trained_by` turns it into a
constructor of an `Optimizer`, which adds and documents the shared steps:

    clip by global norm  ->  rule  ->  + weight_decay * parameter  ->  * -learning_rate
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from core import parameters, ranges
from core.optimizers.schedules import Schedule
from core.types import Params

NORMS = ("*norm",)  # the default of `no_decay`; unlike other patterns, it may match no parameter
CONSTANTS = ("h_init", "l_init")  # full paths of the random constants of models.trm, which are never trained


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation, with the information that a training step needs.

    Attributes:
      transformation: converts gradients to updates; its update may take `extras` of the step's `LossOutput`.
      learning_rate: schedule over the number of applied updates, for reporting (`rate`).
      frozen: patterns of parameters that are not trained; they have no gradient and no state, like `CONSTANTS`. A
        parameter that is also in `live` is trained.
      live: patterns of trained parameters that are not averaged over steps.
      averages: returns the averaged parameters of a state, with `optax.MaskedNode` for those without an average.
    """

    transformation: optax.GradientTransformation
    learning_rate: Schedule
    frozen: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    averages: Callable[[Any], Params] | None = None

    def init(self, params: Params) -> Any:
        """Returns the initial state for these parameters."""
        return self.transformation.init(params)

    def update(self, grads: Params, state: Any, params: Params, extras: Any = ()) -> tuple[Params, Any]:
        """Returns the new parameters and state.

        Args:
          grads: gradients of the mean loss.
          state: the previous state.
          params: the previous parameters.
          extras: `extras` of the model's `LossOutput`.
        """
        transformation = optax.with_extra_args_support(self.transformation)
        updates, state = transformation.update(grads, state, params, extras=extras)
        return optax.apply_updates(params, updates), state

    def rate(self, state: Any, step: jax.Array) -> jax.Array:
        """Returns the learning rate of the next update, [], float32.

        A schedule inside the transformation counts applied updates, fewer than the steps if updates were skipped. For
        a transformation without a schedule inside, `step` is used.

        Args:
          state: the optimizer's state before the update.
          step: number of steps done, [], int32.
        """
        counted = [leaf.count for leaf in jax.tree.leaves(state, is_leaf=_is_schedule) if _is_schedule(leaf)]
        return jnp.asarray(self.learning_rate(counted[0] if counted else step), jnp.float32)

    def trainable(self, params: Params) -> Params:
        """Returns `params` with `stop_gradient` applied to the frozen ones.

        Raises:
          UserError: a pattern matches no parameter.
        """
        frozen = frozen_of(params, self.frozen, live=self.live)
        return jax.tree.map(lambda p, stop: jax.lax.stop_gradient(p) if stop else p, params, frozen)

    def evaluated(self, params: Params, state: Any) -> Params:
        """Returns the parameters to evaluate, sample from and export: the averaged ones if the optimizer averages."""
        if self.averages is None:
            return params
        return jax.tree.map(lambda a, p: p if _is_masked(a) else a, self.averages(state), params, is_leaf=_is_masked)


def _is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def trained_by(**defaults: Any) -> Callable[[Callable], Callable[..., Optimizer]]:
    """Turns a function that returns a rule into a constructor `(learning_rate, …) -> Optimizer`.

    In addition to the keyword arguments of the rule, the constructor takes:
      learning_rate: schedule.
      weight_decay: decoupled weight decay, multiplied by the learning rate.
      clip_norm: largest global norm of the gradient; None: no clipping.
      no_decay: patterns of parameters without weight decay.
      frozen: patterns of parameters that are not trained.

    It raises UserError for a number out of range (`core.ranges`), and at `init` for a pattern that matches no
    parameter.

    Args:
      **defaults: defaults of the shared arguments for this rule; `weight_decay` is required.
    """

    def decorate(rule: Callable[..., optax.GradientTransformation]) -> Callable[..., Optimizer]:
        signature = inspect.signature(rule)
        shared = [
            p if p.name not in defaults else p.replace(default=defaults[p.name])
            for p in inspect.signature(_shared).parameters.values()
        ]

        complete = signature.replace(
            parameters=[shared[0], *signature.parameters.values(), *shared[1:]], return_annotation=Optimizer
        )

        @functools.wraps(rule)
        def construct(**given: Any) -> Optimizer:
            bound = complete.bind(**given)
            bound.apply_defaults()
            ranges.check(rule.__name__, **{k: v for k, v in bound.arguments.items() if k in ranges.NAMES})
            own = {k: v for k, v in bound.arguments.items() if k in signature.parameters}
            return _shared(**{k: v for k, v in bound.arguments.items() if k not in own})(rule(**own))

        vars(construct)["__signature__"] = complete
        construct.__annotations__ = typing.get_type_hints(_shared) | typing.get_type_hints(rule) | {"return": Optimizer}
        del construct.__wrapped__  # otherwise gin would see only the rule's own arguments
        return construct

    return decorate


def _shared(
    *,
    learning_rate: Schedule,
    weight_decay: float,
    clip_norm: float | None = 1.0,
    no_decay: Sequence[str] = NORMS,
    frozen: Sequence[str] = (),
) -> Callable[[optax.GradientTransformation], Optimizer]:
    """Adds clipping, weight decay, the learning rate and frozen parameters to a rule."""

    def around(rule: optax.GradientTransformation) -> Optimizer:
        chain = optax.chain(
            optax.clip_by_global_norm(clip_norm) if clip_norm is not None else optax.identity(),
            rule,
            optax.add_decayed_weights(weight_decay, mask=lambda p: _decayed(p, tuple(no_decay))),
            optax.scale_by_learning_rate(learning_rate),
        )
        trained = only_trainable(chain, tuple(frozen))

        def init(params: Params) -> Any:
            if tuple(no_decay) != NORMS:
                parameters.matches(params, no_decay, where="no_decay")
            return trained.init(params)

        return Optimizer(optax.GradientTransformationExtraArgs(init, trained.update), learning_rate, tuple(frozen))

    return around


def _decayed(params: Params, no_decay: tuple[str, ...]) -> Any:
    spared = parameters.matches(params, parameters.present(params, no_decay))  # all matches may be frozen
    return jax.tree.map(lambda yes: not yes, spared)


def frozen_of(params: Params, frozen: tuple[str, ...], *, live: tuple[str, ...] = ()) -> Any:
    """Returns a tree of booleans: True for parameters in `frozen` or `CONSTANTS` that are not in `live`.

    Raises:
      UserError: a pattern of `frozen` matches no parameter.
    """
    parameters.matches(params, frozen, where="frozen")
    stopped = parameters.matches(params, (*frozen, *parameters.present(params, CONSTANTS)))
    return jax.tree.map(lambda stop, keep: stop and not keep, stopped, parameters.matches(params, live, where="live"))


def only_trainable(rule: optax.GradientTransformation, frozen: tuple[str, ...]) -> optax.GradientTransformation:
    """Applies `rule` to trained parameters; frozen ones and constants get no update and no state."""

    def of(params: Params) -> optax.GradientTransformationExtraArgs:
        labels = jax.tree.map(lambda f: "frozen" if f else "trained", frozen_of(params, frozen))
        if "frozen" not in jax.tree.leaves(labels):
            return optax.with_extra_args_support(rule)
        return optax.partition({"trained": rule, "frozen": optax.set_to_zero()}, labels)

    return optax.GradientTransformationExtraArgs(
        lambda params: of(params).init(params),
        lambda updates, state, params=None, **extra: of(updates).update(updates, state, params, **extra),
    )
