"""Describes parameters, selects them by path or `ParamSpec`, and applies optimizer rules per layer or per matrix.

A `ParamSpec` is what is known of a parameter besides its value. A model states it where it makes the parameter
(`core.logical.param`). Optimizers, layouts and reports read it, so that none of them has to recognize parameters by
name, and a model of any origin is treated alike.

A layer stack stores one array [layers, ...] where papers describe one matrix per layer. Rules that use a whole matrix
(its root mean square, its rows and columns, its singular values) are applied to each layer separately, so that training
does not depend on how layers are stored. The same holds for other stacked dimensions, such as experts.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from core import units
from core.errors import UserError
from core.types import Params

KINDS: Mapping[str, str] = {
    "matrix": "maps inputs to outputs",
    "embedding": "one vector for each entry of a vocabulary or each position, or the transposed output matrix",
    "norm": "scale or offset of a normalization",
    "bias": "a vector or number that is added or multiplied",
    "table": "one vector for each of many items, of which a step uses a few rows",
    "constant": "not trained",
    "router": "maps inputs to scores of experts, in float32 also where matrices are narrower",
}


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Describes one parameter. Not a pytree, so that it is a leaf.

    Attributes:
      axes: logical axis of each dimension, of a stacked parameter including the layers.
      kind: one of `KINDS`. By default it follows from the axes; the first that applies: "constant" if not trainable;
        "norm" with the axis `norm`; "bias" with at most one dimension that is not stacked; "embedding" with the axis
        `vocab`; "matrix". A "table" has one row for each of many items, of which a step reads a few.
      in_dims: number of input dimensions (rows) of a matrix, after the stacked ones; the others are outputs. A
        query weight [embed, heads, head_dim] has 1, an output weight [heads, head_dim, embed] has 2.
      stacked: how many leading dimensions count independent parameters, such as layers or experts. Optimizers treat
        each of them as a parameter of its own.
      trainable: whether the parameter is trained; otherwise it has no optimizer state, and training leaves its bits
        unchanged.
      dtype: dtype of the stored parameter.

    Raises:
      UserError: an unknown kind, "constant" for a trained parameter, or dimensions that do not fit `stacked` or
        `in_dims`.
    """

    axes: tuple[str | None, ...]
    kind: str = ""
    in_dims: int = 1
    stacked: int = 0
    trainable: bool = True
    dtype: str = "float32"

    def __post_init__(self):
        object.__setattr__(self, "axes", tuple(self.axes))
        object.__setattr__(self, "kind", self.kind or self._default_kind())
        if self.kind not in KINDS:
            raise UserError(f"kind = {self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.kind == "constant" and self.trainable:
            raise UserError("kind = 'constant', but trainable = True: give trainable=False alone")
        dims = len(self.axes) - self.stacked
        if not 0 <= self.stacked <= len(self.axes):
            raise UserError(f"stacked = {self.stacked}: expected from 0 to {len(self.axes)}, the number of dimensions")
        if self.kind == "matrix" and not 1 <= self.in_dims < dims:
            fix = f"in_dims from 1 to {dims - 1}" if dims > 1 else "another kind: a matrix has at least two dimensions"
            raise UserError(
                f"kind = 'matrix' with {units.counted(dims, 'dimension')} besides stacked = {self.stacked}, in_dims = "
                f"{self.in_dims}: expected {fix}"
            )

    def _default_kind(self) -> str:
        own = self.axes[self.stacked :]
        if not self.trainable:
            return "constant"
        if "norm" in own:
            return "norm"
        if len(own) <= 1:
            return "bias"
        return "embedding" if "vocab" in own else "matrix"

    def in_stack(self, *layers: str) -> ParamSpec:
        """Returns the spec of the stacked parameter, which gains a leading dimension for each of these logical axes."""
        return dataclasses.replace(self, axes=(*layers, *self.axes), stacked=self.stacked + len(layers))

    def frozen(self, dtype: str) -> ParamSpec:
        """Returns the spec of a frozen parameter: not trained, and stored in the given dtype."""
        return dataclasses.replace(self, trainable=False, dtype=dtype)

    def sides(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the numbers of rows and columns of one layer's matrix, given its shape [inputs ..., outputs ...]."""
        return math.prod(shape[: self.in_dims]), math.prod(shape[self.in_dims :])


Specs = Mapping[str, Mapping[str, ParamSpec]]  # of all parameters of a model


def path_name(path: Sequence[Any]) -> str:
    """Formats a key path as `layers/block/query` or `1/mu/layers/block/query`, without Haiku's `~`.

    The path of a parameter has the names of the stack (or tail) that it is in, of the Haiku modules around it, and its
    own. A block that makes it outside of any module adds none: `layers/query`.
    """
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


def renamed(names: Sequence[str], renames: Mapping[str, str], *, where: str) -> dict[str, str]:
    """Returns the new name of each name; names that no pattern matches keep theirs.

    Args:
      names: such as paths of parameters.
      renames: new pattern by old pattern, such as `{"decoder/*": "layers/*"}`: what `*` stands for in the old name
        replaces `*` in the new one. The first pattern that matches counts.
      where: name of the renames, for the error.

    Raises:
      UserError: a pattern matches no name, two patterns have different numbers of `*`, or two names become equal.
    """
    rules = []
    for old, new in renames.items():
        rule = re.compile("(.*)".join(map(re.escape, old.split("*"))))
        if old.count("*") != new.count("*"):
            raise UserError(f"{where}: {old!r} and {new!r} have different numbers of '*'")
        if not any(rule.fullmatch(name) for name in names):
            raise UserError(f"{where}: nothing is named {old!r}; the names are {', '.join(names)}")
        rules.append((rule, new.split("*")))

    def new_name(name: str) -> str:
        for rule, parts in rules:
            if match := rule.fullmatch(name):
                return "".join(itertools.chain(*zip(parts, (*match.groups(), ""), strict=True)))
        return name

    found = {name: new_name(name) for name in names}
    if twice := [new for new, count in collections.Counter(found.values()).items() if count > 1]:
        raise UserError(f"{where}: several names become {', '.join(twice)}")
    return found


def with_kinds(specs: Specs) -> str:
    """Lists parameters with their kinds, for messages."""
    return ", ".join(f"{path_name(path)} ({spec.kind})" for path, spec in jax.tree_util.tree_leaves_with_path(specs))


def lookup(tree: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns a function from the path of a parameter to the leaf of `tree` (such as its spec) at that path.

    It serves trees that lack some of the parameters, as optax passes them to masked transformations. For a path that is
    not in `tree`, it raises UserError.
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


def labeled(tree: Any) -> Callable[[Params], Any]:
    """Returns a function that maps a tree of some parameters to a like tree of the leaves of `tree` at their paths."""
    at = lookup(tree)
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: at(path), params)


def by_layer(
    rule: optax.GradientTransformation, specs: Specs, *, in_turn: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that applies `rule` to each layer of a stack as if it were a separate parameter.

    Args:
      rule: the transformation; its state for a stacked parameter [layers, ...] gains the same leading dimensions. Other
        arguments of an update, such as the loss, are the same for all layers.
      specs: specs of the parameters; `ParamSpec.stacked` dimensions count layers, or other independent parameters.
      in_turn: whether to process the layers (of the axis `layers`) one after the other, for rules whose intermediate
        results are as large as the matrix. Otherwise, and over other stacked axes such as experts, all are vectorized.
    """
    spec_at, rule = lookup(specs), optax.with_extra_args_support(rule)

    def stack_of(path: Sequence[Any], p: jax.Array) -> str:
        stacked = spec_at(path).axes[: spec_at(path).stacked]
        return " x ".join(f"{n} {axis or 'layers'}" for n, axis in zip(p.shape, stacked, strict=False)) or "whole"

    def each(stack: str) -> optax.GradientTransformationExtraArgs:
        dimensions = stack.split(" x ")
        init = rule.init
        for _ in dimensions:
            init = jax.vmap(init)

        def update(updates: Params, state: Any, params: Any = None, **extra: Any) -> tuple[Params, Any]:
            run: Callable = functools.partial(rule.update, **extra)
            for dimension in reversed(dimensions):
                run = _in_turn(run) if in_turn and dimension.endswith(" layers") else jax.vmap(run)
            return run(updates, state, params)

        return optax.GradientTransformationExtraArgs(init, update)

    def grouped(params: Params) -> optax.GradientTransformationExtraArgs:
        labels = jax.tree_util.tree_map_with_path(stack_of, params)
        return optax.partition({n: rule if n == "whole" else each(n) for n in set(jax.tree.leaves(labels))}, labels)

    return optax.GradientTransformationExtraArgs(
        lambda params: grouped(params).init(params),
        lambda updates, state, params=None, **extra: grouped(updates).update(updates, state, params, **extra),
    )


_OF_LAYERS = re.compile(r"inner_states/(whole|\d+ \w+( x \d+ \w+)*)/inner_state/")  # in names of `by_layer`'s state


def outside_layers(name: str) -> str:
    """Returns a leaf's name in the optimizer state without `by_layer`, given its name with `by_layer`."""
    return _OF_LAYERS.sub("", name)


def _in_turn(update: Callable) -> Callable:
    return lambda *trees: jax.lax.map(lambda layer: update(*layer), trees)


def as_matrices(rule: optax.GradientTransformation, specs: Specs) -> optax.GradientTransformation:
    """Returns a transformation that applies `rule` to matrices reshaped to [rows, columns]; for use within `by_layer`.

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
    """Returns a function from matrices, as `by_layer` passes them, to a tree of their `MuonDimensionNumbers`."""
    spec_at = lookup(specs)

    def of(path, p: jax.Array) -> MuonDimensionNumbers:
        dims = tuple(range(len(p.shape)))
        return MuonDimensionNumbers(dims[: spec_at(path).in_dims], dims[spec_at(path).in_dims :])

    return lambda params: jax.tree_util.tree_map_with_path(of, params)


def scale_to_rms(rms: float, specs: Specs) -> optax.GradientTransformation:
    """Returns a transformation that scales orthogonal updates to a root mean square of `rms`, whatever their shape.

    For use within `by_layer`.
    """
    spec_at = lookup(specs)

    def scaled(path, update: jax.Array) -> jax.Array:
        return update * (rms * jnp.sqrt(max(spec_at(path).sides(update.shape))))

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates))
