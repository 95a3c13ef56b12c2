"""Selects parameters by path or by `ParamSpec`, and applies optimizer rules per layer or per matrix.

A layer stack stores one array [layers, ...] where papers describe one matrix per layer. Rules that use a whole matrix
(its root mean square, its rows and columns, its singular values) are applied to each layer separately, so that training
does not depend on how layers are stored. The same holds for other stacked dimensions, such as experts.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from core.errors import UserError
from core.param_spec import ParamSpec, Specs
from core.types import Params


def path_name(path: Sequence[Any]) -> str:
    """Formats a key path as `layers/block/query` or `1/mu/layers/block/query`, without Haiku's `~`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path).replace("~/", "")


def names(params: Params | Specs) -> list[str]:
    """Returns the path of every parameter."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def matches(params: Params | Specs, patterns: Sequence[str], *, where: str = "patterns") -> Any:
    """Returns a tree of booleans: whether the path of each parameter matches one of the patterns.

    Args:
      params: the parameters, or their specs.
      patterns: shell wildcards.
      where: name of the patterns, for the error.

    Raises:
      UserError: a pattern matches no parameter.
    """
    unused = [p for p in patterns if not any_matches(params, p)]
    if unused:
        raise UserError(
            f"{where} = {tuple(patterns)}: no parameter matches {', '.join(map(repr, unused))}; the parameters are "
            f"{', '.join(names(params))}"
        )
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(fnmatch.fnmatch(path_name(path), p) for p in patterns), params
    )


def any_matches(params: Params | Specs, pattern: str) -> bool:
    """Returns True if a pattern matches the path of at least one parameter."""
    return any(fnmatch.fnmatch(name, pattern) for name in names(params))


def with_kinds(specs: Specs) -> str:
    """Lists parameters with their kinds, for messages."""
    return ", ".join(f"{path_name(path)} ({spec.kind})" for path, spec in jax.tree_util.tree_leaves_with_path(specs))


def lookup(tree: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns a function from the path of a parameter to the leaf of `tree` (such as its spec) at that path.

    It serves trees that lack some of the parameters, as optax passes them to masked transformations.
    """
    leaves = dict(jax.tree_util.tree_leaves_with_path(tree))

    def at(path: Sequence[Any]) -> Any:
        if tuple(path) not in leaves:
            raise UserError(
                f"the optimizer is bound to the parameters of another model: {path_name(path)} is not among "
                f"{', '.join(names(tree))}"
            )
        return leaves[tuple(path)]

    return at


def labelled(tree: Any) -> Callable[[Params], Any]:
    """Returns a function that maps a tree of some parameters to the leaves of `tree` at their paths."""
    at = lookup(tree)
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: at(path), params)


def by_layer(
    rule: optax.GradientTransformation, specs: Specs, *, in_turn: bool = False
) -> optax.GradientTransformation:
    """Applies `rule` to each layer of a stack separately, as if its layers were separate parameters.

    Args:
      rule: the transformation; its state for a stacked parameter [layers, ...] gains the same leading dimensions.
      specs: specs of the parameters; `ParamSpec.stacked` dimensions count layers, or other independent parameters.
      in_turn: whether to process one layer after the other, for rules whose intermediate results are as large as the
        matrix; otherwise, and over declared axes such as experts, all are vectorised.
    """
    spec_at = lookup(specs)

    def stack_of(path: Sequence[Any], p: jax.Array) -> str:
        stacked = spec_at(path).axes[: spec_at(path).stacked]
        return " x ".join(f"{n} {axis or 'layers'}" for n, axis in zip(p.shape, stacked, strict=False)) or "whole"

    def each(stack: str) -> optax.GradientTransformation:
        init, update = rule.init, rule.update
        for dimension in reversed(stack.split(" x ")):
            one_by_one = in_turn and dimension.endswith(" layers")
            init, update = jax.vmap(init), _in_turn(update) if one_by_one else jax.vmap(update)
        return optax.GradientTransformation(init, update)

    def grouped(params: Params) -> optax.GradientTransformation:
        labels = jax.tree_util.tree_map_with_path(stack_of, params)
        return optax.partition({n: rule if n == "whole" else each(n) for n in set(jax.tree.leaves(labels))}, labels)

    return optax.GradientTransformation(
        lambda params: grouped(params).init(params),
        lambda updates, state, params=None: grouped(updates).update(updates, state, params),
    )


def _in_turn(update: Callable) -> Callable:
    return lambda *trees: jax.lax.map(lambda layer: update(*layer), trees)


def as_matrices(rule: optax.GradientTransformation, specs: Specs) -> optax.GradientTransformation:
    """Applies `rule` with every matrix reshaped to [rows, columns]; for use within `by_layer`.

    The state of the rule has the reshaped form. Other parameters keep their shape.
    """
    spec_at = lookup(specs)

    def joined(tree: Params) -> Params:
        def one(path, a: jax.Array) -> jax.Array:
            spec: ParamSpec = spec_at(path)
            return a.reshape(spec.sides(a.shape)) if spec.kind == "matrix" else a

        return jax.tree_util.tree_map_with_path(one, tree)

    def update(updates: Params, state: Any, params: Params) -> tuple[Params, Any]:
        found, state = rule.update(joined(updates), state, joined(params))
        return jax.tree.map(lambda a, like: a.reshape(like.shape), found, updates), state

    return optax.GradientTransformation(lambda params: rule.init(joined(params)), update)


def dimension_numbers(specs: Specs) -> Callable[[Params], Any]:
    """Returns a function from matrices (within `by_layer`) to the dimensions of their rows and columns."""
    spec_at = lookup(specs)

    def of(path, p: jax.Array) -> MuonDimensionNumbers:
        dims = tuple(range(len(p.shape)))
        return MuonDimensionNumbers(dims[: spec_at(path).in_dims], dims[spec_at(path).in_dims :])

    return lambda params: jax.tree_util.tree_map_with_path(of, params)


def scale_to_rms(rms: float, specs: Specs) -> optax.GradientTransformation:
    """Scales orthogonal updates, within `by_layer`, so that their entries have root mean square `rms` in any shape."""
    spec_at = lookup(specs)

    def scaled(path, update: jax.Array) -> jax.Array:
        return update * (rms * jnp.sqrt(max(spec_at(path).sides(update.shape))))

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates))
