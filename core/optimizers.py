"""Optimizers from optax, with what training adds: clipping, a decay mask, frozen groups, and named axes of the state.

Parameters are picked by pattern over their path, `layers/block/query` (shell wildcards: `*norm`, `layers/*`). The one
idea beyond optax: `state_axes` gives every leaf of the optimizer's state the logical axes of its parameter, so that a
strategy's tables decide where it lives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from core import parameters, ranges
from core.logical import Axes
from core.types import Params

Schedule = Callable[[jax.Array], jax.Array]  # step counted from 0 -> learning rate

NORMS = ("*norm",)  # the default of `no_decay`, and the one choice of which a model may have none

MATRICES: Mapping[str, str] = MappingProxyType(  # of models.transformer; the letters: see `muon`
    {
        "layers/*/query": "lioo",
        "layers/*/key": "lioo",
        "layers/*/value": "lioo",
        "layers/*/output": "liio",
        "layers/*/gate": "lio",
        "layers/*/up": "lio",
        "layers/*/down": "lio",
    }
)


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
        frozen = parameters.matches(params, self.frozen, where="frozen")
        return jax.tree.map(lambda p, stop: jax.lax.stop_gradient(p) if stop else p, params, frozen)


def constant(value: float) -> Schedule:
    """The same rate at every step."""
    ranges.check("constant", value=value)
    return lambda step: jnp.full((), value, jnp.float32) + 0 * step


def warmup_linear(*, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.0) -> Schedule:
    """Up to `peak` over the warm-up, then in a straight line to `peak * final_fraction` at the last step."""
    return _warmup_then(lambda progress: 1 - progress, peak, warmup_steps, total_steps, final_fraction)


def warmup_cosine(*, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.1) -> Schedule:
    """Up to `peak` over the warm-up, then half a cosine to `peak * final_fraction`. Loshchilov & Hutter 2017, eq. 5."""
    return _warmup_then(lambda p: 0.5 * (1 + jnp.cos(jnp.pi * p)), peak, warmup_steps, total_steps, final_fraction)


def _warmup_then(decay: Callable, peak: float, warmup_steps: int, total_steps: int, final_fraction: float) -> Schedule:
    ranges.check("learning rate", peak=peak)
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
    no_decay: Sequence[str] = NORMS,
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

    Raises:
      ValueError: a number out of its range; at `init`, a pattern that matches no parameter.
    """
    ranges.check("adamw", b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, clip_norm=clip_norm)
    rule = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    chain = _chain(rule, learning_rate, weight_decay, clip_norm=clip_norm, no_decay=no_decay)
    return _optimizer(chain, learning_rate, no_decay=no_decay, frozen=frozen)


def adafactor(
    *,
    learning_rate: Schedule,
    decay_rate: float = 0.8,
    clip_update: float = 1.0,
    relative: bool = True,
    min_factored: int = 128,
    weight_decay: float = 0.0,
    clip_norm: float | None = 1.0,
    no_decay: Sequence[str] = NORMS,
    stacked: Sequence[str] = ("layers/*",),
    frozen: Sequence[str] = (),
) -> Optimizer:
    """Adafactor (Shazeer & Stern 2018, algorithms 4 and 5) without momentum: a row and a column in place of a moment.

    Args:
      learning_rate: schedule; with `relative` a fraction of the parameter, about 1e-2.
      decay_rate: the second moment of step t decays by 1 - t^-decay_rate.
      clip_update: largest root mean square of an update, before the learning rate.
      relative: multiply an update by the root mean square of its parameter.
      min_factored: moments of parameters with two dimensions of at least this size are factored over the two largest.
      weight_decay, clip_norm, no_decay, frozen: as in `adamw`.
      stacked: patterns of parameters with a leading dimension of layers; each layer is a parameter of its own.
    """
    ranges.check("adafactor", decay_rate=decay_rate, clip_update=clip_update, min_factored=min_factored)
    ranges.check("adafactor", weight_decay=weight_decay, clip_norm=clip_norm)
    rule = optax.chain(
        optax.scale_by_factored_rms(decay_rate=decay_rate, min_dim_size_to_factor=min_factored),
        optax.clip_by_block_rms(clip_update),
        optax.scale_by_param_block_rms() if relative else optax.identity(),
    )
    chain = _chain(
        parameters.by_layer(rule, lambda name: parameters.matches_any(name, tuple(stacked))),
        learning_rate,
        weight_decay,
        clip_norm=clip_norm,
        no_decay=no_decay,
    )
    return _optimizer(chain, learning_rate, no_decay=no_decay, frozen=frozen)


def lion(
    *,
    learning_rate: Schedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1.0,
    clip_norm: float | None = 1.0,
    no_decay: Sequence[str] = NORMS,
    frozen: Sequence[str] = (),
) -> Optimizer:
    """Lion (Chen et al. 2023, algorithm 2): the sign of an interpolated momentum; one moment in place of two.

    Args:
      learning_rate: schedule; three to ten times smaller than for `adamw`.
      b1: weight of the momentum in the update.
      b2: decay of the momentum.
      weight_decay: three to ten times larger than for `adamw`.
      clip_norm, no_decay, frozen: as in `adamw`.
    """
    ranges.check("lion", b1=b1, b2=b2, weight_decay=weight_decay, clip_norm=clip_norm)
    rule = optax.scale_by_lion(b1=b1, b2=b2)
    chain = _chain(rule, learning_rate, weight_decay, clip_norm=clip_norm, no_decay=no_decay)
    return _optimizer(chain, learning_rate, no_decay=no_decay, frozen=frozen)


def muon(
    *,
    learning_rate: Schedule,
    momentum: float = 0.95,
    rms: float = 0.2,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    clip_norm: float | None = 1.0,
    no_decay: Sequence[str] = NORMS,
    matrices: Mapping[str, str] = MATRICES,
    frozen: Sequence[str] = (),
) -> Optimizer:
    """Muon (Jordan 2024) for the matrices of the layers, each layer by itself; AdamW for everything else.

    The momentum of a matrix [rows, columns] is made nearly orthogonal by five Newton-Schulz steps, and scaled so that
    learning rate and decay are those of AdamW (Liu et al. 2025, eq. 4).

    Args:
      learning_rate: schedule, of both.
      momentum: decay of Muon's moment (Nesterov's form).
      rms: root mean square of an update before the learning rate.
      b1, b2, eps: of AdamW.
      weight_decay, clip_norm, no_decay, frozen: as in `adamw`.
      matrices: by pattern, a letter for each dimension: l (layer: a matrix each; layers take turns, so that one at a
        time is gathered), i (inputs: rows), o (outputs: columns). Several i or o are one side together: query
        [l, i, o, o] is a matrix [embed, heads x head_dim].

    Raises:
      ValueError: letters that make no matrix; at `init`, a parameter with another number of dimensions, or no matrix.
    """
    ranges.check(
        "muon", momentum=momentum, rms=rms, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, clip_norm=clip_norm
    )
    parameters.check_letters(matrices)
    layer = parameters.of_one_layer(matrices)
    of_layer = optax.chain(
        optax.contrib.scale_by_muon(
            beta=momentum, weight_dimension_numbers=lambda p: parameters.dimension_numbers(p, layer)
        ),
        parameters.scale_to_rms(rms, layer),
    )
    orthogonal = parameters.by_layer(
        of_layer, lambda name: parameters.letters_of(name, matrices).startswith("l"), in_turn=True
    )
    rule = optax.partition(
        {"matrix": orthogonal, "other": optax.scale_by_adam(b1=b1, b2=b2, eps=eps)},
        lambda params: parameters.matrix_labels(params, matrices),
    )
    chain = _chain(rule, learning_rate, weight_decay, clip_norm=clip_norm, no_decay=no_decay)
    return _optimizer(chain, learning_rate, no_decay=no_decay, frozen=frozen)


def _chain(
    rule: optax.GradientTransformation,
    learning_rate: Schedule,
    weight_decay: float,
    *,
    clip_norm: float | None,
    no_decay: Sequence[str],
) -> optax.GradientTransformation:
    """`rule` between what all optimizers share: the clip before it, decoupled decay and the learning rate behind."""
    return optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm is not None else optax.identity(),
        rule,
        optax.add_decayed_weights(weight_decay, mask=lambda p: _decayed(p, tuple(no_decay))),
        optax.scale_by_learning_rate(learning_rate),
    )


def _optimizer(
    chain: optax.GradientTransformation, learning_rate: Schedule, *, no_decay: Sequence[str], frozen: Sequence[str]
) -> Optimizer:
    trained = _only_trainable(chain, tuple(frozen))

    def init(params: Params) -> Any:
        if tuple(no_decay) != NORMS:
            parameters.matches(params, no_decay, where="no_decay")
        return trained.init(params)

    return Optimizer(optax.GradientTransformation(init, trained.update), learning_rate, tuple(frozen))


def _decayed(params: Params, no_decay: tuple[str, ...]) -> Any:
    spared = parameters.matches(params, parameters.present(params, no_decay))  # of the trained ones: none may be left
    return jax.tree.map(lambda yes: not yes, spared)


def _only_trainable(rule: optax.GradientTransformation, frozen: tuple[str, ...]) -> optax.GradientTransformation:
    if not frozen:
        return rule
    return optax.multi_transform(
        {"trained": rule, "frozen": optax.set_to_zero()},
        lambda params: jax.tree.map(
            lambda f: "frozen" if f else "trained", parameters.matches(params, frozen, where="frozen")
        ),
    )


def state_axes(optimizer: Optimizer, shapes: Params, axes: Any) -> Any:
    """Logical axes of every leaf of the optimizer's state.

    A leaf that belongs to a parameter and has its shape has its axes; one that lacks a dimension (a factored moment)
    has the axes that remain; everything else (counters) has no named axis, hence is replicated. A leaf belongs to the
    parameter whose path its own path ends with. Of two equally long dimensions optax drops the later for a row moment
    and the earlier for a column moment; should that change, a layout would, never a number.

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
        is_column = any(getattr(key, "name", None) == "v_col" for key in path)
        return Axes(_surviving_axes(leaf.shape, *owner, first=is_column) if owner else (None,) * len(leaf.shape))

    return jax.tree_util.tree_map_with_path(of_leaf, jax.eval_shape(optimizer.init, shapes))


def _surviving_axes(
    leaf: tuple[int, ...], param: tuple[int, ...], names: tuple[str | None, ...], *, first: bool
) -> tuple:
    """The axes of a leaf that lacks a dimension: the last, or the `first`, without which the sizes are right."""
    if leaf == param:
        return names
    order = range(len(param)) if first else reversed(range(len(param)))
    for dropped in sorted(order, key=lambda i: names[i] == "layers"):  # a layer of a stack keeps moments of its own
        if leaf == param[:dropped] + param[dropped + 1 :]:
            return names[:dropped] + names[dropped + 1 :]
    return (None,) * len(leaf)
