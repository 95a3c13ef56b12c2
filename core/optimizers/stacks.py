"""Finds out whether a transformation of optax treats a layer of a stack as a parameter of its own.

A stack holds the norms of its layers in one array [layers, width], which a mask `p.ndim > 1` or `optax.contrib.muon`
mistakes for a matrix. So an update is traced once with stacked parameters and once with a single layer of each. A value
is represented by a hash of the operations that compute it, and by the parameters on which it depends.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from core import parameters
from core.errors import UserError
from core.parameters import Specs
from core.types import Params

_LAYOUTS = ("broadcast_in_dim", "reshape", "squeeze", "copy")  # of scalars and arrays of any rank
_LOOPS = ("scan", "while")
_INDEXED = ("dynamic_slice", "dynamic_update_slice")  # they have an index for each dimension, mostly a constant 0


class Treatment(NamedTuple):
    """How a transformation treats stacked parameters.

    Attributes:
      otherwise: paths of stacked parameters whose update differs from that of single layers.
      combines: whether an update depends on other parameters, as after clipping by the global norm.
    """

    otherwise: tuple[str, ...]
    combines: bool


class _Value(NamedTuple):
    graph: int  # the operations that computed it
    of: frozenset[str]  # the parameters on which it depends, by path
    is_constant: bool = False


class _Update(NamedTuple):
    """A traced update, by path; `owners` has "" for arrays of no parameter."""

    updates: Mapping[str, _Value]
    state: Mapping[str, tuple[int, ...]]
    owners: Mapping[str, str]
    shared: Sequence[_Value]


def by_layer_where_needed(rule: optax.GradientTransformation, specs: Specs) -> optax.GradientTransformationExtraArgs:
    """Returns `rule`, applied to each layer if it would otherwise treat a stack unlike its layers.

    Its `init` raises UserError if that is not possible.
    """
    plain, separate = optax.with_extra_args_support(rule), parameters.by_layer(rule, specs)
    chosen: dict[Any, optax.GradientTransformationExtraArgs] = {}

    def choose(params: Params) -> optax.GradientTransformationExtraArgs:
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        leaves, structure = jax.tree.flatten(shapes)
        key = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in chosen:
            chosen[key] = separate if _needs_layers(rule, specs, shapes) else plain
        return chosen[key]

    return optax.GradientTransformationExtraArgs(
        lambda params: choose(params).init(params),
        lambda updates, state, params=None, **extra: choose(updates).update(updates, state, params, **extra),
    )


def _needs_layers(rule: optax.GradientTransformation, specs: Specs, shapes: Params) -> bool:
    single = _single(shapes, specs)
    try:
        state = jax.eval_shape(rule.init, single)
        found = treatment(rule, specs, shapes)
    except (TypeError, ValueError, NotImplementedError):
        return False  # it cannot be applied to layers; its own error follows if it cannot be applied at all
    _check_muon(state, specs, single)
    if found.otherwise and found.combines:
        raise UserError(
            f"from_optax: the transformation would update {', '.join(found.otherwise)} in another way than a single "
            "layer of them, because it looks at dimensions (as a mask `p.ndim > 1` does) and a stack has one more, for "
            "its layers. It also combines parameters, so it cannot be applied to each layer separately. Clip with "
            "from_optax(clip_norm=…) in place of optax.clip_by_global_norm, or choose parameters by kind "
            "(docs/how-to/own-optimizer.md). by_layer=False applies it to stacks as they are, by_layer=True to each "
            "layer, where it combines the parameters of equally deep stacks only"
        )
    return bool(found.otherwise)


def _check_muon(state: Any, specs: Specs, single: Params) -> None:
    states = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.contrib.MuonState))
    chosen = [name for s in states if isinstance(s, optax.contrib.MuonState) for name in parameters.names(s.mu)]
    if not chosen:
        return
    spec_at, wrong = parameters.lookup(specs), []
    for path, leaf in jax.tree_util.tree_leaves_with_path(single):
        name, kind = parameters.path_name(path), spec_at(path).kind
        if name in chosen and kind != "matrix":
            wrong.append(f"Muon for {name} (kind {kind})")
        elif name not in chosen and kind == "matrix" and len(leaf.shape) != 2:
            wrong.append(f"Adam for {name} (a matrix of {len(leaf.shape)} dimensions)")
    if wrong:
        raise UserError(
            f"from_optax: optax.contrib.muon tells matrices by their two dimensions, which gives {'; '.join(wrong)}. "
            "Use optimizers.muon (gin/optimizers/muon.gin), or a rule that tells them by kind "
            "(docs/how-to/own-optimizer.md). from_optax(…, by_layer=True) applies it to each layer as it is; "
            "by_layer=False applies it to stacks, which continues a run that began so"
        )


def _single(params: Params, specs: Specs) -> Params:
    spec_at = parameters.lookup(specs)

    def layer(path: Sequence[Any], p: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(p.shape[spec_at(path).stacked :], p.dtype)

    return jax.tree_util.tree_map_with_path(layer, params)


def treatment(rule: optax.GradientTransformation, specs: Specs, shapes: Params) -> Treatment:
    """Returns how a transformation treats stacked parameters."""
    spec_at = parameters.lookup(specs)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    stacks = {parameters.path_name(path): p.shape[: spec_at(path).stacked] for path, p in leaves}
    stacked_names = [name for name, stack in stacks.items() if stack]
    single = _update(rule, _single(shapes, specs))
    combines = any(value.of - {name} for name, value in single.updates.items()) or any(v.of for v in single.shared)
    try:
        stacked = _update(rule, shapes)
    except (TypeError, ValueError):  # such as a number of dimensions that it does not accept
        return Treatment(tuple(stacked_names), combines)

    def is_equal(name: str) -> bool:
        same_graph = stacked.updates[name].graph == single.updates[name].graph
        return same_graph and _fits(stacked, single, name, stacks[name])

    return Treatment(tuple(name for name in stacked_names if not is_equal(name)), combines)


def _fits(stacked: _Update, single: _Update, name: str, stack: tuple[int, ...]) -> bool:
    def shapes(update: _Update) -> dict[str, tuple[int, ...]]:
        return {path: shape for path, shape in update.state.items() if update.owners[path] == name}

    ours, theirs = shapes(stacked), shapes(single)
    return ours.keys() == theirs.keys() and all(
        any(shape == theirs[path][:at] + stack + theirs[path][at:] for at in range(len(theirs[path]) + 1))
        for path, shape in ours.items()
    )


def _update(rule: optax.GradientTransformation, params: Params) -> _Update:
    rule = optax.with_extra_args_support(rule)
    state, value = jax.eval_shape(rule.init, params), jax.ShapeDtypeStruct((), jnp.float32)

    def run(params: Params, grads: Params, state: Any, value: jax.Array) -> tuple[Params, Any]:
        return rule.update(grads, state, params, value=value)

    traced, (updates, after) = jax.make_jaxpr(run, return_shape=True)(params, params, state, value)
    names = parameters.names(params)
    owner = functools.partial(_owner, {path for path, _ in jax.tree_util.tree_leaves_with_path(params)})
    state_paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    inputs = [_input(kind, name, name) for kind in ("parameter", "gradient") for name in names]
    inputs += [_input("state", parameters.path_name(path), owner(path)) for path in state_paths]
    outputs = _evaluated(traced, [*inputs, _input("value", "", "")])
    after_paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(after)]
    shared = [v for path, v in zip(after_paths, outputs[len(names) :], strict=True) if not owner(path)]
    return _Update(
        dict(zip(parameters.names(updates), outputs, strict=False)),
        {parameters.path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(state)},
        {parameters.path_name(path): owner(path) for path in state_paths},
        shared,
    )


def _owner(params: set[Sequence[Any]], path: Sequence[Any]) -> str:
    ends = ((start, end) for end in range(len(path), 0, -1) for start in range(end))
    return next((parameters.path_name(path[start:end]) for start, end in ends if path[start:end] in params), "")


def _input(kind: str, name: str, owner: str) -> _Value:
    return _Value(hash((kind, name)), frozenset({owner} - {""}))


def _evaluated(traced: ClosedJaxpr, inputs: Sequence[_Value]) -> list[_Value]:
    return _run(traced.jaxpr, [_constant(c) for c in traced.consts], inputs)


def _constant(value: Any) -> _Value:
    small = np.size(value) <= 64
    return _Value(hash(("constant", np.asarray(value).tobytes() if small else "")), frozenset(), is_constant=True)


def _run(jaxpr: Jaxpr, constants: Sequence[_Value], inputs: Sequence[_Value]) -> list[_Value]:
    found = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))

    def read(atom: Any) -> _Value:
        return _constant(atom.val) if isinstance(atom, Literal) else found[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        found.update(zip(equation.outvars, _results(equation, given), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(equation: JaxprEqn, given: Sequence[_Value]) -> list[_Value]:
    """Returns the results of one equation; a loop counts as if it ran once."""
    name = equation.primitive.name
    if name in _LAYOUTS and given:
        return [given[0]]
    if name == "cond":
        branches = [_inner(branch, given[1:]) for branch in equation.params["branches"]]
        return [_joined((name, i), [given[0], *of_each]) for i, of_each in enumerate(zip(*branches, strict=True))]
    if name in _INDEXED:
        given = [value for value in given if not value.is_constant]
    called = [p for p in equation.params.values() if isinstance(p, ClosedJaxpr | Jaxpr)]
    if len(called) == 1 and len(_program(called[0]).invars) == len(given) and name not in _LOOPS:
        return _inner(called[0], given)
    inside = [
        v.graph
        for one in called
        for v in _inner(one, [_input("loop", str(i), "") for i in range(len(_program(one).invars))])
    ]
    return [_joined((name, *inside, _reduced(equation), i), given) for i in range(len(equation.outvars))]


def _reduced(equation: JaxprEqn) -> Any:
    """Returns the axes of a reduction, counted from the last; "all" for all axes, () for other operations."""
    axes = equation.params.get("axes")
    if not isinstance(axes, tuple) or not equation.invars:
        return ()
    array: Any = equation.invars[0].aval
    rank = len(array.shape)
    return "all" if len(axes) == rank else tuple(axis - rank for axis in axes)


def _program(called: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return called.jaxpr if isinstance(called, ClosedJaxpr) else called


def _inner(called: ClosedJaxpr | Jaxpr, given: Sequence[_Value]) -> list[_Value]:
    return _evaluated(called, given) if isinstance(called, ClosedJaxpr) else _run(called, (), given)


def _joined(key: tuple, given: Sequence[_Value]) -> _Value:
    graph, of = hash((*key, *(v.graph for v in given))), frozenset().union(*(v.of for v in given))
    return _Value(graph, of, bool(given) and all(v.is_constant for v in given))
