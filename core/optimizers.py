"""Optimizers from optax, with what training adds: clipping, a decay mask, frozen groups, and named axes of the state.

Parameters are picked by pattern over their path, `layers/block/query` (shell wildcards: `*norm`, `layers/*`). The one
idea beyond optax: `state_axes` gives every leaf of the optimizer's state the logical axes of its parameter, so that a
strategy's tables decide where it lives.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from core.logical import Axes
from core.types import Params

Schedule = Callable[[jax.Array], jax.Array]  # step counted from 0 -> learning rate


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation and what the step must know of it.

    Attributes:
      transformation: from gradients to updates.
      learning_rate: schedule, for reporting.
      frozen: patterns of parameters that never change; they get no gradient and no state.
    """

    transformation: optax.GradientTransformation
    learning_rate: Schedule
    frozen: tuple[str, ...] = ()

    def init(self, params: Params) -> Any:
        """The state for these parameters."""
        return self.transformation.init(params)

    def trainable(self, params: Params) -> Params:
        """`params` with the gradient stopped at the frozen ones.

        Raises:
          ValueError: a pattern matches no parameter.
        """
        frozen = matches(params, self.frozen)
        return jax.tree.map(lambda p, stop: jax.lax.stop_gradient(p) if stop else p, params, frozen)


def path_name(path: Sequence[Any]) -> str:
    """`layers/block/query` of a key path in a parameter tree; the root module has no name."""
    return "/".join(str(k.key) for k in path).removeprefix("~/")


def matches(params: Params, patterns: Sequence[str]) -> Any:
    """A tree of booleans: whether the path of each parameter matches one of the patterns.

    Raises:
      ValueError: a pattern matches no parameter.
    """
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    idle = [p for p in patterns if not any(fnmatch.fnmatch(n, p) for n in names)]
    if idle:
        raise ValueError(f"no parameter matches {', '.join(map(repr, idle))}; the parameters are {', '.join(names)}")
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(fnmatch.fnmatch(path_name(path), p) for p in patterns), params
    )


def constant(value: float) -> Schedule:
    """The same rate at every step."""
    return lambda step: jnp.full((), value, jnp.float32) + 0 * step


def warmup_linear(*, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.0) -> Schedule:
    """Up to `peak` over the warm-up, then in a straight line to `peak * final_fraction` at the last step."""
    return _warmup_then(lambda progress: 1 - progress, peak, warmup_steps, total_steps, final_fraction)


def warmup_cosine(*, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.1) -> Schedule:
    """Up to `peak` over the warm-up, then half a cosine to `peak * final_fraction`. Loshchilov & Hutter 2017, eq. 5."""
    return _warmup_then(lambda p: 0.5 * (1 + jnp.cos(jnp.pi * p)), peak, warmup_steps, total_steps, final_fraction)


def _warmup_then(decay: Callable, peak: float, warmup_steps: int, total_steps: int, final_fraction: float) -> Schedule:
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps = {warmup_steps}: expected from 0 to total_steps - 1 = {total_steps - 1}")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction = {final_fraction}: expected from 0 to 1")

    def schedule(step: jax.Array) -> jax.Array:
        warm = (step + 1) / max(warmup_steps, 1)
        progress = jnp.clip((step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1), 0, 1)
        return peak * jnp.minimum(warm, final_fraction + (1 - final_fraction) * decay(progress))

    return schedule


def adamw(
    *,
    learning_rate: Schedule,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    clip_norm: float | None = 1.0,
    no_decay: Sequence[str] = ("*norm",),
    frozen: Sequence[str] = (),
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) behind a clip of the global gradient norm.

    Args:
      learning_rate: schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled; multiplied by the learning rate.
      clip_norm: largest global norm of the gradient; None leaves it alone.
      no_decay: patterns of parameters that are not decayed.
      frozen: patterns of parameters that are not trained.
    """
    rule = optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm is not None else optax.identity(),
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay, mask=lambda p: _decayed(p, tuple(no_decay))),
        optax.scale_by_learning_rate(learning_rate),
    )
    return Optimizer(_only_trainable(rule, tuple(frozen)), learning_rate, tuple(frozen))


def _decayed(params: Params, no_decay: tuple[str, ...]) -> Any:
    present = [p for p in no_decay if any(fnmatch.fnmatch(n, p) for n in _names(params))]
    return jax.tree.map(lambda spared: not spared, matches(params, present))


def _names(params: Params) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def _only_trainable(rule: optax.GradientTransformation, frozen: tuple[str, ...]) -> optax.GradientTransformation:
    if not frozen:
        return rule
    return optax.multi_transform(
        {"trained": rule, "frozen": optax.set_to_zero()},
        lambda params: jax.tree.map(lambda f: "frozen" if f else "trained", matches(params, frozen)),
    )


def state_axes(optimizer: Optimizer, shapes: Params, axes: Any) -> Any:
    """Logical axes of every leaf of the optimizer's state.

    A leaf that belongs to a parameter and has its shape has its axes; one that lacks a dimension (a factored moment)
    has the axes that remain; everything else (counters) has no named axis, hence is replicated. A leaf belongs to the
    parameter whose path its own path ends with. Where two dimensions of a parameter are equally long, a factored moment
    gets the axes of the first that fits; that is a layout, never a number.

    Args:
      optimizer: whose state.
      shapes: tree of `jax.ShapeDtypeStruct`, the parameters.
      axes: tree of `Axes` of the same structure.

    Returns:
      A tree like `optimizer.init(params)` with `Axes` leaves.
    """
    by_path = {
        tuple(path): (leaf.shape, named.names)
        for (path, leaf), named in zip(
            jax.tree_util.tree_leaves_with_path(shapes),
            jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, Axes)),
            strict=True,
        )
    }

    def of_leaf(path, leaf) -> Axes:
        owner = next((by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path), None)
        return Axes(_surviving_axes(leaf.shape, *owner) if owner else (None,) * len(leaf.shape))

    return jax.tree_util.tree_map_with_path(of_leaf, jax.eval_shape(optimizer.init, shapes))


def _surviving_axes(leaf: tuple[int, ...], param: tuple[int, ...], names: tuple[str | None, ...]) -> tuple:
    if leaf == param:
        return names
    for dropped in reversed(range(len(param))):
        if leaf == param[:dropped] + param[dropped + 1 :]:
            return names[:dropped] + names[dropped + 1 :]
    return (None,) * len(leaf)
