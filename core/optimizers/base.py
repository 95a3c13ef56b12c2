"""The `Optimizer` that a training step uses, and the steps that all rules share.

An optimizer is first bound to the parameters of a model, because what it does depends on their `ParamSpec`:

    optimizer = adamw(learning_rate=constant(1e-3)).for_model(model, batch)

A rule (`core.optimizers.rules`) converts a gradient to an update direction. `trained_by` turns it into a constructor of
an `Optimizer`, which adds the shared steps:

    clip by global norm  ->  rule  ->  + weight_decay * parameter  ->  * -learning_rate
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from core import logical, parameters
from core.errors import UserError
from core.logical import Axes
from core.optimizers import schedules, stacks
from core.optimizers.schedules import Schedule
from core.parameters import KINDS, ParamSpec, Specs
from core.types import Model, Params

Rule = Callable[[Specs], optax.GradientTransformation]  # made for the parameters of a model
Transformation: TypeAlias = optax.GradientTransformation


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A rule that makes an optax transformation, and what else a training step needs.

    Attributes:
      rule: makes a transformation from the specs of parameters, such as `lambda specs: optax.sgd(0.1)`.
      learning_rate: schedule over applied updates, for reporting; None: only the transformation knows it.
      live: kinds of trained parameters that are not averaged over steps.
      averages: returns the averaged parameters of a state, `optax.MaskedNode` for the others; None: there are none, or
        `optax.contrib.schedule_free` keeps them.
      specs: specs of the bound parameters; None before `bound`.
    """

    rule: Rule
    learning_rate: Schedule | None
    live: tuple[str, ...] = ()
    averages: Callable[[Any], Params] | None = None
    specs: Specs | None = None

    def bound(self, specs: Specs) -> Optimizer:
        """Returns the optimizer for parameters with these specs. Raises UserError if it does not fit them."""
        if not any(spec.trainable for spec in jax.tree.leaves(specs)):
            raise UserError(f"all parameters are frozen ({', '.join(parameters.names(specs))}): leave some to train")
        bound = dataclasses.replace(self, specs=specs)
        _ = bound.transformation
        return bound

    def for_model(self, model: Model, batch: Mapping[str, Any]) -> Optimizer:
        """Binds the optimizer to the parameters of a model, whose `init` is traced.

        `batch` has arrays, or anything with shape and dtype.
        """
        example = {name: jax.ShapeDtypeStruct(field.shape, field.dtype) for name, field in batch.items()}
        return self.bound(logical.abstract_init(model.init, jax.random.key(0), example)[1])

    @functools.cached_property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The optax transformation for the bound parameters."""
        return optax.with_extra_args_support(self.rule(self._specs))

    def trained(self, params: Params) -> Any:
        """Returns a tree of booleans: whether each parameter is trained."""
        return parameters.labeled(trained_of(self._specs))(params)

    @property
    def _specs(self) -> Specs:
        if self.specs is None:
            raise UserError(
                "the optimizer is not bound to the parameters of a model: use optimizer.for_model(model, batch)"
            )
        return self.specs

    def init(self, params: Params) -> Any:
        """Returns the initial state for these parameters."""
        return self.transformation.init(params)

    def update(
        self, grads: Params, state: Any, params: Params, extras: Any = (), *, value: jax.Array | None = None
    ) -> tuple[Params, Any]:
        """Returns the new parameters and state; frozen parameters keep their bits.

        Args:
          extras: `extras` of the model's `LossOutput`.
          value: the mean loss, [], float32, which some transformations of optax need.
        """
        updates, state = self.transformation.update(grads, state, params, extras=extras, value=value)
        after = optax.apply_updates(params, updates)
        trained = self.trained(params)
        return jax.tree.map(lambda new, old, is_trained: new if is_trained else old, after, params, trained), state

    def gradient_norm(self, grads: Params) -> jax.Array:
        """Returns the global norm of the gradients of trained parameters, [], float32."""
        trained = jax.tree.map(lambda g, is_trained: g if is_trained else None, grads, self.trained(grads))
        return optax.tree.norm(trained)

    def rate(self, state: Any, step: jax.Array, *, after: Any) -> jax.Array | None:
        """Returns the learning rate of an update, [], float32; None if only the transformation knows it.

        `step` is the number of steps done; `after` is the state after the update.
        """
        if self.learning_rate is None:
            injected = nodes(after, optax.InjectStatefulHyperparamsState)
            rates = [node.hyperparams["learning_rate"] for node in injected if "learning_rate" in node.hyperparams]
            return jnp.asarray(rates[0], jnp.float32)[(0,) * jnp.ndim(rates[0])] if rates else None  # of any layer
        counted = [node.count for node in nodes(state, optax.ScaleByScheduleState)]
        count = counted[0][(0,) * jnp.ndim(counted[0])] if counted else step  # of any layer
        return jnp.asarray(self.learning_rate(count), jnp.float32)

    def trainable(self, params: Params) -> Params:
        """Returns `params`, with `jax.lax.stop_gradient` applied to the frozen ones."""
        return jax.tree.map(lambda p, on: p if on else jax.lax.stop_gradient(p), params, self.trained(params))

    def evaluated(self, params: Params, state: Any) -> Params:
        """Returns the parameters to evaluate and export: the averaged ones if the optimizer averages."""
        if self.averages is not None:
            found = _merged(self.averages(state), params)  # averages may be wider
            return jax.tree.map(lambda average, p: average.astype(p.dtype), found, params)
        for found in nodes(state, optax.contrib.ScheduleFreeState):
            own = jax.tree.map(lambda z, p: z if _is_masked(z) else p, found.z, params, is_leaf=_is_masked)
            average = optax.contrib.schedule_free_eval_params
            for _ in range(jnp.ndim(found.b1)):  # of layers, each with a state of its own
                average = jax.vmap(average)
            params = _merged(average(found, own), params)
        return params

    def is_averaging(self, state: Any) -> bool:
        """Returns whether the optimizer averages parameters; `state` may be abstract."""
        return self.averages is not None or bool(nodes(state, optax.contrib.ScheduleFreeState))


def nodes(state: Any, kind: type) -> list[Any]:
    """Returns the outermost nodes of a tree that are instances of a class."""
    parts = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [part for part in parts if isinstance(part, kind)]


def _merged(averages: Params, params: Params) -> Params:
    return jax.tree.map(lambda a, p: p if _is_masked(a) else a, averages, params, is_leaf=_is_masked)


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def trained_by(**defaults: Any) -> Callable[[Callable[..., Rule]], Callable[..., Optimizer]]:
    """Returns a decorator that makes a constructor of an `Optimizer` from a function that returns a rule.

    In addition to the keyword arguments of the rule, the constructor takes:
      learning_rate: schedule.
      weight_decay: decoupled weight decay, at least 0, multiplied by the learning rate.
      clip_norm: largest global norm of the gradient, above 0; None: no clipping.
      no_decay: kinds (`core.parameters.KINDS`) or patterns over paths of parameters without weight decay.

    Args:
      **defaults: defaults of these shared arguments; `weight_decay` is required.
    """

    def decorate(rule: Callable[..., Rule]) -> Callable[..., Optimizer]:
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
            schedules.check_ranges(rule.__name__, **{k: v for k, v in bound.arguments.items() if k in schedules.RANGED})
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
    no_decay: Sequence[str] = ("norm", "bias"),
) -> Callable[[Rule], Optimizer]:
    def around(rule: Rule) -> Optimizer:
        def complete(specs: Specs) -> optax.GradientTransformation:
            chain = optax.chain(
                optax.clip_by_global_norm(clip_norm) if clip_norm is not None else optax.identity(),
                rule(specs),
                optax.add_decayed_weights(weight_decay, mask=parameters.labeled(_decayed(specs, no_decay))),
                optax.scale_by_learning_rate(learning_rate),
            )
            return only_trainable(chain, specs)

        return Optimizer(complete, learning_rate)

    return around


def _decayed(specs: Specs, no_decay: Sequence[str]) -> Any:
    if unknown := [entry for entry in no_decay if entry not in KINDS and not parameters.any_matches(specs, entry)]:
        raise UserError(
            f"no_decay = {tuple(no_decay)}: no parameter matches {', '.join(map(repr, unknown))}; expected kinds "
            f"({', '.join(KINDS)}) or patterns over paths; the parameters are {', '.join(parameters.names(specs))}"
        )
    named = parameters.matches(specs, [entry for entry in no_decay if entry not in KINDS])
    return jax.tree.map(lambda spec, spared: not (spared or spec.kind in no_decay), specs, named)


def trained_of(specs: Specs) -> Any:
    """Returns a tree of booleans: whether each parameter is trained."""
    return jax.tree.map(lambda spec: spec.trainable, specs)


def only_trainable(rule: optax.GradientTransformation, specs: Specs) -> optax.GradientTransformation:
    """Returns a transformation that applies `rule` to trained parameters only."""
    labels = jax.tree.map(lambda spec: "trained" if spec.trainable else "frozen", specs)
    if "frozen" not in jax.tree.leaves(labels):
        return rule
    return optax.partition({"trained": rule, "frozen": optax.set_to_zero()}, parameters.labeled(labels))


def from_optax(
    *,
    transformation: Transformation,
    clip_norm: float | None = None,
    by_layer: bool | None = None,
) -> Optimizer:
    """Returns an optimizer that applies a complete optax transformation, such as `optax.adan(1e-3)`.

    The transformation brings its own learning rate, weight decay and masks. Its update gets gradients, parameters and
    `value`, the mean loss. Transformations that evaluate the loss again, as line searches do, are not supported. The
    learning rate is reported if the state contains it (`optax.inject_hyperparams`).

    Args:
      transformation: converts gradients of the mean loss to updates that are added to the parameters.
      clip_norm: largest global norm of the gradient, above 0; None: no clipping is added.
      by_layer: whether each layer of a stack is a separate parameter. None: only if the transformation would otherwise
        treat a stack unlike its layers. Set True for transformations that use norms of a whole parameter (`lamb`,
        `lars`); not for those that combine all parameters (`prodigy`). False: never.

    Raises:
      UserError: `transformation` is of another type, or `clip_norm` is out of range.
    """
    if not isinstance(transformation, optax.GradientTransformation):
        raise UserError(
            f"from_optax: transformation is of type {type(transformation).__name__}, expected an "
            "optax.GradientTransformation, such as optax.adan(1e-3)"
        )
    schedules.check_ranges("from_optax", clip_norm=clip_norm)

    def complete(specs: Specs) -> optax.GradientTransformation:
        own: optax.GradientTransformation = transformation
        if by_layer is None:
            own = stacks.by_layer_where_needed(transformation, specs)
        elif by_layer:
            own = parameters.by_layer(transformation, specs)
        clipped = own if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), own)
        return only_trainable(_checked(clipped), specs)

    return Optimizer(complete, None)


def as_optimizer(given: Optimizer | Transformation) -> Optimizer:
    """Converts an optax transformation to an `Optimizer`; returns an `Optimizer` unchanged."""
    return given if isinstance(given, Optimizer) else from_optax(transformation=given)


def _checked(transformation: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation with an `init` that first traces an update, and raises UserError if that fails."""
    rule = optax.with_extra_args_support(transformation)

    def init(params: Params) -> Any:
        def trial(params: Params) -> tuple[Params, Any, Any]:
            state = rule.init(params)
            updates, after = rule.update(params, state, params, value=jnp.zeros(()))
            return optax.apply_updates(params, updates), after, state

        try:
            _, after, before = jax.eval_shape(trial, params)
        except UserError:
            raise
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UserError(
                f"the optax transformation cannot be applied: {error}. A step gives it gradients, parameters, and "
                "`value`, the mean loss; functions that compute the loss again (value_fn, obj_fn, grad_fn) cannot be "
                "given. Use a transformation without line search or second-order estimates"
            ) from error
        _check_state(before, after)
        if any(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(after)):
            raise UserError(
                "the optax transformation keeps a random key (jax.random.key) in its state, which checkpoints do not "
                "hold, as optax.add_noise and noisy_sgd do: use one without random numbers, or one of your own that "
                "makes its key from a count of steps"
            )
        return rule.init(params)

    def update(grads: Params, state: Any, params: Params, *, value: Any = None, **unused: Any) -> tuple[Params, Any]:
        del unused
        return rule.update(grads, state, params, **({} if value is None else {"value": value}))

    return optax.GradientTransformationExtraArgs(init, update)


def _check_state(before: Any, after: Any) -> None:
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


def state_axes(optimizer: Optimizer, shapes: Params) -> Any:
    """Returns the logical axes of every leaf of the optimizer's state, a tree of `Axes`.

    A leaf belongs to the parameter whose path is the end of the leaf's path. If its last dimensions are those of the
    parameter, it has the parameter's axes there. A leaf that lacks a dimension (a factored moment) has the remaining
    axes; a moment over joined dimensions has the axis of the first of them. Other leaves have no named axis, and are
    replicated.
    """
    spec_at = parameters.lookup(optimizer.specs)
    by_path = {tuple(path): (leaf.shape, spec_at(path)) for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}

    def of_leaf(path, leaf) -> Axes:
        owner = next((by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path), None)
        is_column = any(getattr(key, "name", None) == "v_col" for key in path)
        return Axes(_surviving_axes(leaf.shape, *owner, first=is_column) if owner else (None,) * len(leaf.shape))

    return jax.tree_util.tree_map_with_path(of_leaf, jax.eval_shape(optimizer.init, shapes))


def _surviving_axes(
    leaf: tuple[int, ...], param: tuple[int, ...], spec: ParamSpec, *, first: bool
) -> tuple[str | None, ...]:
    """Returns a leaf's axes; `first`: of equally long dimensions, the first was dropped, not the last."""
    names, stacked = spec.axes, spec.stacked
    if (leading := len(leaf) - len(param)) >= 0 and leaf[leading:] == param:
        return (None,) * leading + names
    order = range(len(param)) if first else reversed(range(len(param)))
    for dropped in sorted(order, key=lambda i: i < stacked):  # each layer has its own moments
        if leaf == param[:dropped] + param[dropped + 1 :]:
            return names[:dropped] + names[dropped + 1 :]
    if math.prod(leaf) == 1:  # a placeholder of the rule
        return (None,) * len(leaf)
    cuts = range(stacked + 1, len(param))
    sides = [side for cut in cuts for side in ((cut, len(param)), (stacked, cut))[:: 1 if first else -1]]
    for start, end in sides:
        if leaf == (*param[:stacked], math.prod(param[start:end])):
            return (*names[:stacked], names[start])
    return (None,) * len(leaf)
