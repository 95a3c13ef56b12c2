"""Selects parameters by patterns over their paths, and applies optimizer rules per layer or per matrix.

A layer stack stores one array [layers, ...] where papers describe one matrix per layer. Rules that use a whole matrix
(its root mean square, its rows and columns, its singular values) are applied to each layer separately, so that training
does not depend on how layers are stored.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from core.errors import UserError
from core.types import Params


def path_name(path: Sequence[Any]) -> str:
    """Formats a key path as `layers/block/query` or `1/mu/layers/block/query`, without Haiku's `~`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path).replace("~/", "")


def names(params: Params) -> list[str]:
    """Returns the path of every parameter."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def matches(params: Params, patterns: Sequence[str], *, where: str = "patterns") -> Any:
    """Returns a tree of booleans: whether the path of each parameter matches one of the patterns.

    Args:
      params: the parameters.
      patterns: shell wildcards.
      where: name of the patterns, for the error.

    Raises:
      UserError: a pattern matches no parameter.
    """
    found = names(params)
    unused = [p for p in patterns if not any(fnmatch.fnmatch(n, p) for n in found)]
    if unused:
        raise UserError(
            f"{where} = {tuple(patterns)}: no parameter matches {', '.join(map(repr, unused))}; the parameters are "
            f"{', '.join(found)}"
        )
    return jax.tree_util.tree_map_with_path(lambda path, _: matches_any(path_name(path), patterns), params)


def present(params: Params, patterns: Sequence[str]) -> list[str]:
    """Returns the patterns that match at least one parameter, for patterns that are allowed to match none."""
    return [p for p in patterns if any(fnmatch.fnmatch(n, p) for n in names(params))]


def by_layer(
    rule: optax.GradientTransformation, is_stacked: Callable[[str], bool], *, in_turn: bool = False
) -> optax.GradientTransformation:
    """Applies `rule` to each layer of a stack separately, as if its layers were separate parameters.

    Args:
      rule: the transformation; its state for a stacked parameter [layers, ...] gains the same leading dimension.
      is_stacked: from the path of a parameter, whether its leading dimension is the layers.
      in_turn: whether to process one layer after the other, for rules whose intermediate results are as large as the
        matrix; otherwise all layers are vectorised.
    """
    update = _in_turn(rule.update) if in_turn else jax.vmap(rule.update)
    each = optax.GradientTransformation(jax.vmap(rule.init), update)

    def grouped(params: Params) -> optax.GradientTransformation:
        labels = jax.tree_util.tree_map_with_path(
            lambda path, p: f"{p.shape[0]} layers" if is_stacked(path_name(path)) else "whole", params
        )
        return optax.partition({n: rule if n == "whole" else each for n in set(jax.tree.leaves(labels))}, labels)

    return optax.GradientTransformation(
        lambda params: grouped(params).init(params),
        lambda updates, state, params=None: grouped(updates).update(updates, state, params),
    )


def as_matrices(
    rule: optax.GradientTransformation, matrices: Mapping[str, str], *, strict: bool
) -> optax.GradientTransformation:
    """Applies `rule` with the parameters that match `matrices` reshaped to [rows, columns].

    Args:
      rule: the transformation; its state has the reshaped form.
      matrices: for each pattern, one letter per dimension: i (rows) or o (columns).
      strict: whether a parameter with another number of dimensions than letters is refused; otherwise it is not
        reshaped.
    """

    def letters(path: Sequence[Any], a: jax.Array) -> str | None:
        found = letters_of(path_name(path), matrices)
        return _letters(path, a, matrices) if strict or found is None or len(found) == len(a.shape) else None

    def joined(tree: Params) -> Params:
        return jax.tree_util.tree_map_with_path(lambda path, a: _matrix(a, letters(path, a)), tree)

    def apart(tree: Params, like: Params) -> Params:
        return jax.tree_util.tree_map_with_path(lambda path, a, of: _from_matrix(a, of, letters(path, of)), tree, like)

    def update(updates: Params, state: Any, params: Params) -> tuple[Params, Any]:
        found, state = rule.update(joined(updates), state, joined(params))
        return apart(found, updates), state

    return optax.GradientTransformation(lambda params: rule.init(joined(params)), update)


def _rows_first(letters: str) -> list[int]:
    return sorted(range(len(letters)), key=lambda i: letters[i])  # i before o, each side in order


def _matrix(a: jax.Array, letters: str | None) -> jax.Array:
    if letters is None:
        return a
    rows = math.prod(size for size, letter in zip(a.shape, letters, strict=True) if letter == "i")
    return a.transpose(_rows_first(letters)).reshape(rows, -1)


def _from_matrix(a: jax.Array, like: jax.Array, letters: str | None) -> jax.Array:
    if letters is None:
        return a
    order = _rows_first(letters)
    turned = a.reshape([like.shape[i] for i in order])
    return turned.transpose([order.index(i) for i in range(len(order))])


def _in_turn(update: Callable) -> Callable:
    return lambda *trees: jax.lax.map(lambda layer: update(*layer), trees)


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Returns True if a path matches one of the patterns."""
    return any(fnmatch.fnmatch(name, p) for p in patterns)


def letters_of(name: str, matrices: Mapping[str, str]) -> str | None:
    """Returns the letters of the first pattern that the path matches; None if none does."""
    return next((letters for pattern, letters in matrices.items() if fnmatch.fnmatch(name, pattern)), None)


def of_one_layer(matrices: Mapping[str, str]) -> dict[str, str]:
    """Returns the letters for a single layer, as `by_layer` passes it: without the leading l."""
    return {pattern: letters.removeprefix("l") for pattern, letters in matrices.items()}


def check_letters(matrices: Mapping[str, str]) -> None:
    """Raises UserError for a pattern whose letters do not describe a matrix."""
    for pattern, letters in matrices.items():
        if not set("io") <= set(letters) <= set("lio"):
            raise UserError(
                f"matrices[{pattern!r}] = {letters!r}: expected a letter for each dimension, l (layer), i (input) or "
                "o (output), with at least one i and one o, such as 'lio'"
            )


def matrix_labels(params: Params, matrices: Mapping[str, str]) -> Any:
    """Labels each parameter "matrix" or "other".

    Raises:
      UserError: no parameter is a matrix, or a parameter has another number of dimensions than letters.
    """
    labels = jax.tree_util.tree_map_with_path(
        lambda path, p: "other" if _letters(path, p, matrices) is None else "matrix", params
    )
    if "matrix" not in jax.tree.leaves(labels):
        raise UserError(
            f"matrices = {dict(matrices)}: no parameter matches; the parameters are {', '.join(names(params))}"
        )
    return labels


def dimension_numbers(params: Params, matrices: Mapping[str, str]) -> Any:
    """Returns which dimensions of each parameter are the rows and the columns of its matrix; others are batched."""

    def of(path, p) -> MuonDimensionNumbers:
        letters = _matrix_letters(path, p, matrices)
        rows, columns = ([i for i, letter in enumerate(letters) if letter == which] for which in "io")
        return MuonDimensionNumbers(tuple(rows), tuple(columns))

    return jax.tree_util.tree_map_with_path(of, params)


def _letters(path: Sequence[Any], p: jax.Array, matrices: Mapping[str, str]) -> str | None:
    letters = letters_of(path_name(path), matrices)
    if letters is not None and len(letters) != len(p.shape):
        raise UserError(
            f"matrices: {path_name(path)} has shape {tuple(p.shape)}, and {letters!r} names {len(letters)} dimensions; "
            "give one letter for each: l (layer), i (input), o (output)"
        )
    return letters


def _matrix_letters(path: Sequence[Any], p: jax.Array, matrices: Mapping[str, str]) -> str:
    letters = _letters(path, p, matrices)
    assert letters is not None, f"{path_name(path)} is no matrix"
    return letters


def scale_to_rms(rms: float, matrices: Mapping[str, str]) -> optax.GradientTransformation:
    """Scales an orthogonal update [rows, columns] so that its entries have root mean square `rms` for any shape."""

    def scaled(path, update: jax.Array) -> jax.Array:
        sides = {"i": 1, "o": 1, "l": 1}
        for letter, size in zip(_matrix_letters(path, update, matrices), update.shape, strict=True):
            sides[letter] *= size
        return update * (rms * jnp.sqrt(max(sides["i"], sides["o"])))

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates))
