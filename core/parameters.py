"""Describes parameters, selects them by path or `ParamSpec`, and applies optimizer rules per layer or per matrix.

A layer stack stores one array [layers, ...] where papers describe one matrix per layer. Rules that use a whole matrix
are applied to each layer separately.
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
    """Describes one parameter; a leaf of a pytree.

    Attributes:
      axes: logical axis of each dimension, with the stacked ones.
      kind: one of `KINDS`; "": the first that applies of "constant" if not trainable, "norm" with the axis `norm`,
        "bias" with at most one unstacked dimension, "embedding" with the axis `vocab`, "matrix".
      in_dims: number of input dimensions of a matrix; an output weight [heads, head_dim, embed] has 2.
      stacked: number of leading dimensions that count independent parameters, such as layers or experts.
      trainable: whether the parameter is trained; otherwise it has no optimizer state.
      dtype: stored dtype.
      exchanged: whether its layer exchanges activations between the chips that shard it, so that it is not gathered
        where such a layer runs in a manual region.
      computed: dtype in which layers use it; "": that of the model.
    """

    axes: tuple[str | None, ...]
    kind: str = ""
    in_dims: int = 1
    stacked: int = 0
    trainable: bool = True
    dtype: str = "float32"
    exchanged: bool = False
    computed: str = dataclasses.field(default="", compare=False)

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
        """Returns the spec with a leading stacked dimension for each of these axes."""
        return dataclasses.replace(self, axes=(*layers, *self.axes), stacked=self.stacked + len(layers))

    def frozen(self, dtype: str) -> ParamSpec:
        """Returns the spec with `trainable` False, and this dtype."""
        return dataclasses.replace(self, trainable=False, dtype=dtype)

    def sides(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the numbers of rows and columns of a matrix of shape [inputs ..., outputs ...]."""
        return math.prod(shape[: self.in_dims]), math.prod(shape[self.in_dims :])


Specs = Mapping[str, Mapping[str, ParamSpec]]  # of all parameters of a model


def path_name(path: Sequence[Any]) -> str:
    """Formats a key path as `layers/block/query`, without Haiku's `~`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path).replace("~/", "")


def names(params: Params | Specs) -> list[str]:
    """Returns the path of every parameter."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def where(params: Params | Specs, is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Returns the tree of the parameters whose paths are wanted; modules without one are left out."""
    key = jax.tree_util.DictKey
    found = {
        module: {name: leaf for name, leaf in leaves.items() if is_wanted(path_name((key(module), key(name))))}
        for module, leaves in params.items()
    }
    return {module: leaves for module, leaves in found.items() if leaves}


def matches(params: Params | Specs, patterns: Sequence[str], *, where: str = "patterns") -> Any:
    """Returns a tree of booleans: whether a parameter's path matches a pattern (shell wildcards).

    Raises UserError if a pattern matches no parameter.
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
    """Returns whether a pattern matches the path of a parameter."""
    return any(fnmatch.fnmatch(name, pattern) for name in names(params))


def renamed(names: Sequence[str], renames: Mapping[str, str], *, where: str) -> dict[str, str]:
    """Returns the new name of each name; names that no pattern matches keep theirs.

    `renames` has the new by the old pattern, such as `{"decoder/*": "layers/*"}`; the first that matches counts.

    Raises UserError if a pattern matches nothing, `*` counts differ, or new names coincide.
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
    """Lists parameters with their kinds, as text."""
    return ", ".join(f"{path_name(path)} ({spec.kind})" for path, spec in jax.tree_util.tree_leaves_with_path(specs))


def lookup(tree: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns a function from a parameter's path to the leaf of `tree` at that path."""
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
    """Returns a function that replaces the parameters of a tree by the leaves of `tree` at their paths."""
    at = lookup(tree)
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: at(path), params)


def by_layer(
    rule: optax.GradientTransformation, specs: Specs, *, in_turn: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that applies `rule` to each layer of a stack as a separate parameter.

    Args:
      rule: its state for a parameter [layers, ...] gains the same leading dimensions.
      in_turn: whether the axis `layers` is not vectorized, for rules with large intermediate results.
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
    """Returns a leaf's name in the optimizer state without what `by_layer` adds to it."""
    return _OF_LAYERS.sub("", name)


def _in_turn(update: Callable) -> Callable:
    return lambda *trees: jax.lax.map(lambda layer: update(*layer), trees)


def as_matrices(rule: optax.GradientTransformation, specs: Specs) -> optax.GradientTransformation:
    """Returns a transformation that applies `rule` to matrices reshaped to [rows, columns].

    For use within `by_layer`.
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
    """Returns a function from matrices, as `by_layer` passes them, to their `MuonDimensionNumbers`."""
    spec_at = lookup(specs)

    def of(path, p: jax.Array) -> MuonDimensionNumbers:
        dims = tuple(range(len(p.shape)))
        return MuonDimensionNumbers(dims[: spec_at(path).in_dims], dims[spec_at(path).in_dims :])

    return lambda params: jax.tree_util.tree_map_with_path(of, params)


def scale_to_rms(rms: float, specs: Specs) -> optax.GradientTransformation:
    """Returns a transformation that scales orthogonal updates to a root mean square of `rms`.

    For use within `by_layer`.
    """
    spec_at = lookup(specs)

    def scaled(path, update: jax.Array) -> jax.Array:
        return update * (rms * jnp.sqrt(max(spec_at(path).sides(update.shape))))

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates))
