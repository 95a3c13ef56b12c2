"""Assigns logical axes to the optimizer's state, so that a strategy's tables determine its sharding."""

from __future__ import annotations

import math
from typing import Any

import jax

from core import parameters
from core.logical import Axes
from core.optimizers.base import Optimizer
from core.param_spec import ParamSpec
from core.types import Params


def state_axes(optimizer: Optimizer, shapes: Params) -> Any:
    """Returns the logical axes of every leaf of the optimizer's state.

    A leaf belongs to the parameter whose path is the end of its own path. A leaf with the parameter's shape has the
    parameter's axes; one with several entries of that shape (the memory of L-BFGS) has them after its leading
    dimensions. A leaf that lacks a dimension (a factored moment) has the remaining axes. A row or column moment over
    joined dimensions has the axis of the first of them, whose shards are contiguous. All other leaves (counters, and
    the vector that SM3 stores for each dimension) have no named axis, and are replicated. Of two equally long
    dimensions optax drops the later for a row moment and the earlier for a column moment; if that changed, the layout
    would change but not the results.

    Args:
      optimizer: bound to the parameters.
      shapes: tree of `jax.ShapeDtypeStruct` of the parameters.

    Returns:
      A tree like `optimizer.init(params)` with `Axes` leaves.
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
    """Returns the axes of a leaf from the shape and spec of its parameter.

    If the leaf lacks a dimension, it is the last one (or the first, if `first`) without which the sizes match.
    Otherwise the leaf is one side of the parameter as a matrix, whose joined dimensions have the axis of the first.
    """
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
