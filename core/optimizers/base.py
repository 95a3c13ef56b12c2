"""What an optimizer is to a training step, and what all of them share: a clip, decoupled decay, frozen groups.

Parameters are picked by pattern over their path, `layers/block/query` (shell wildcards: `*norm`, `layers/*`). A rule
(`core.optimizers.rules`) says how a gradient becomes a direction; `trained_by` makes a constructor of it that takes,
and documents once, what stands around every rule:

    clip of the global norm  ->  rule  ->  + weight_decay * parameter  ->  * -learning_rate
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

NORMS = ("*norm",)  # the default of `no_decay`, and the one choice of which a model may have none
CONSTANTS = ("h_init", "l_init")  # full paths: what models.trm draws once and nothing trains, where a model has it


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation and what the step must know of it.

    Attributes:
      transformation: from gradients to updates; its update may take `extras`, those of the step's `LossOutput`.
      learning_rate: schedule, by the number of updates applied; for reporting (`rate`).
      frozen: patterns of parameters that never change; they get no gradient and no state. So do `CONSTANTS`. What is
        `live` is trained all the same: these are patterns of the rule for everything else.
      live: patterns of trained parameters that an average over steps leaves out.
      averages: the averaged parameters of a state, with `optax.MaskedNode` for those that have none.
    """

    transformation: optax.GradientTransformation
    learning_rate: Schedule
    frozen: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    averages: Callable[[Any], Params] | None = None

    def init(self, params: Params) -> Any:
        """The state for these parameters."""
        return self.transformation.init(params)

    def update(self, grads: Params, state: Any, params: Params, extras: Any = ()) -> tuple[Params, Any]:
        """New parameters and state.

        Args:
          grads: of the mean loss.
          state: of the step before.
          params: of the step before.
          extras: what the model's `LossOutput` holds beside sums.
        """
        transformation = optax.with_extra_args_support(self.transformation)
        updates, state = transformation.update(grads, state, params, extras=extras)
        return optax.apply_updates(params, updates), state

    def rate(self, state: Any, step: jax.Array) -> jax.Array:
        """The learning rate of the next update: [], float32.

        A schedule inside the transformation counts the updates that were applied, which falls behind the step where
        updates are skipped. A transformation without a schedule inside is reported by `step`.

        Args:
          state: the optimizer's, before the update.
          step: steps done, [], int32.
        """
        counted = [leaf.count for leaf in jax.tree.leaves(state, is_leaf=_is_schedule) if _is_schedule(leaf)]
        return jnp.asarray(self.learning_rate(counted[0] if counted else step), jnp.float32)

    def trainable(self, params: Params) -> Params:
        """`params` with the gradient stopped at the frozen ones.

        Raises:
          ValueError: a pattern matches no parameter.
        """
        frozen = frozen_of(params, self.frozen, live=self.live)
        return jax.tree.map(lambda p, stop: jax.lax.stop_gradient(p) if stop else p, params, frozen)

    def evaluated(self, params: Params, state: Any) -> Params:
        """The parameters to evaluate, sample from and export: the averaged ones where the optimizer averages."""
        if self.averages is None:
            return params
        return jax.tree.map(lambda a, p: p if _is_masked(a) else a, self.averages(state), params, is_leaf=_is_masked)


def _is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def trained_by(**defaults: Any) -> Callable[[Callable], Callable[..., Optimizer]]:
    """Makes a constructor `(learning_rate, …) -> Optimizer` of a function that returns a rule.

    The constructor takes, beside the keyword arguments of the rule:
      learning_rate: schedule.
      weight_decay: decoupled; multiplied by the learning rate.
      clip_norm: largest global norm of the gradient; None leaves it alone.
      no_decay: patterns of parameters that are not decayed.
      frozen: patterns of parameters that are not trained.

    It raises ValueError for a number out of its range (`core.ranges`), and at `init` for a pattern that matches no
    parameter.

    Args:
      **defaults: of the shared arguments, for this rule; `weight_decay` has to be given.
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
        del construct.__wrapped__  # gin would bind to the rule's own arguments alone
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
    """What stands around a rule."""

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
    spared = parameters.matches(params, parameters.present(params, no_decay))  # of the trained ones: none may be left
    return jax.tree.map(lambda yes: not yes, spared)


def frozen_of(params: Params, frozen: tuple[str, ...], *, live: tuple[str, ...] = ()) -> Any:
    """A tree of booleans: what never changes; nothing of `live`.

    Raises:
      ValueError: a pattern of `frozen` matches no parameter.
    """
    parameters.matches(params, frozen, where="frozen")
    stopped = parameters.matches(params, (*frozen, *parameters.present(params, CONSTANTS)))
    return jax.tree.map(lambda stop, keep: stop and not keep, stopped, parameters.matches(params, live, where="live"))


def only_trainable(rule: optax.GradientTransformation, frozen: tuple[str, ...]) -> optax.GradientTransformation:
    """`rule` for what is trained; nothing, and no state, for what is frozen or a constant."""

    def of(params: Params) -> optax.GradientTransformationExtraArgs:
        labels = jax.tree.map(lambda f: "frozen" if f else "trained", frozen_of(params, frozen))
        if "frozen" not in jax.tree.leaves(labels):
            return optax.with_extra_args_support(rule)
        return optax.partition({"trained": rule, "frozen": optax.set_to_zero()}, labels)

    return optax.GradientTransformationExtraArgs(
        lambda params: of(params).init(params),
        lambda updates, state, params=None, **extra: of(updates).update(updates, state, params, **extra),
    )
