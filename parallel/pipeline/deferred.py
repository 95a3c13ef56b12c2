"""Splits the backward pass of a layer: the gradient of its input first, the gradients of its matrices later.

A zero-bubble schedule computes the gradients of matrices (parameters with more than one dimension) at a later tick:

    first     weights, saved values, side, dy          ->  dx, gradients of vectors, values that wait
    second    weights, saved values, side, these       ->  gradients of matrices

An operation belongs to the second part if only gradients of matrices need it, except for costly operations (such as
products, loops and kernels) of the recomputed forward pass. If the second part reads values of the first that follow
from its other inputs without costly operations, it computes them again. The others wait.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from core import jax_internals
from core.stack import Kind, Layer, Side
from parallel.pipeline import residuals
from parallel.pipeline.residuals import Residuals, Slots

_INLINED = ("jit", "checkpoint", "remat2")  # operations that consist of others
_COSTLY = {"conv_general_dilated", "dot_general", "optimization_barrier", "ragged_dot_general", "sort"}


class Split(NamedTuple):
    """The backward pass of a layer of one kind, as operations on the leaves of `(layer, slots, side), dy`.

    Attributes:
      first, second: operations of the two parts.
      dw, dx: variables of the gradients.
      is_matrix: which of `dw` the second part computes.
    """

    constants: Mapping[Var, Any]
    inputs: Sequence[Var]
    first: Sequence[JaxprEqn]
    second: Sequence[JaxprEqn]
    dw: Sequence[Any]
    dx: Sequence[Any]
    is_matrix: Sequence[bool]
    waiting: Sequence[Var]


class Deferred(NamedTuple):
    """The backward passes of layers of all kinds.

    Attributes:
      shapes: of the values that wait, by slot; kinds share slots.
      slots: for each kind, the slot of each value that waits.
    """

    layers: Residuals
    splits: Mapping[Kind, Split]
    shapes: tuple[Any, ...]
    slots: Mapping[Kind, list[int]]

    def first(self, kind: Kind, layer: Layer, saved: Slots, side: Side, dy: Any) -> tuple[list, Any, Slots]:
        """Returns gradients of trained parameters (None for matrices) and of the input, and the values that wait.

        Args:
          kind, layer, side: as in the forward pass.
          saved: what the forward pass saved, by slot.
          dy: gradients of the output and of the summed outputs.
        """
        split = self.splits[kind]
        env = _run(split.first, _given(split, (layer, saved, side), dy))
        waiting = [residuals.zeros(a) for a in self.shapes]
        for slot, variable in zip(self.slots[kind], split.waiting, strict=True):
            waiting[slot] = env[variable]
        dw = [None if later else _read(env, v) for v, later in zip(split.dw, split.is_matrix, strict=True)]
        dx = jax.tree.unflatten(jax.tree.structure(self.layers.x), [_read(env, v) for v in split.dx])
        return dw, dx, tuple(waiting)

    def second(self, kind: Kind, layer: Layer, saved: Slots, side: Side, waiting: Slots) -> list:
        """Returns the gradients of matrices, and None for vectors.

        Args:
          kind, layer, saved, side: as in `first`.
          waiting: from `first`.
        """
        split = self.splits[kind]
        values = [waiting[slot] for slot in self.slots[kind]]
        env = _given(split, (layer, saved, side), ()) | dict(zip(split.waiting, values, strict=True))
        env = _run(split.second, env)
        return [_read(env, v) if later else None for v, later in zip(split.dw, split.is_matrix, strict=True)]


def of_layers(layers: Residuals, layer: Layer, side: Side) -> Deferred:
    """Splits the backward pass of layers of every kind."""
    splits = {kind: _split(layers, kind, layer, side) for kind in dict.fromkeys(layers.fn.kinds)}
    shapes: list[Any] = []
    slots = {kind: residuals.share(shapes, [v.aval for v in split.waiting]) for kind, split in splits.items()}
    return Deferred(layers, splits, tuple(shapes), slots)


def _split(layers: Residuals, kind: Kind, layer: Layer, side: Side) -> Split:
    given, dy = (layer, layers.shapes, side), (layers.x, layers.fn.outputs.summed)

    def backward(given: tuple, dy: Any) -> tuple[list, Any]:
        layer, saved, side = given
        return layers.backward(kind, layer, saved, side, dy)

    traced = jax.make_jaxpr(backward)(given, dy)
    leaves = jax.tree.leaves((given, dy))

    def inlined(*values: Any) -> list:
        constants = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        env = _run(traced.jaxpr.eqns, constants | dict(zip(traced.jaxpr.invars, values, strict=True)), inline=True)
        return [_read(env, v) for v in traced.jaxpr.outvars]

    flat = jax.make_jaxpr(inlined)(*leaves)
    jaxpr, trained = flat.jaxpr, len(flat.jaxpr.outvars) - len(jax.tree.leaves(layers.x))
    dw, dx = jaxpr.outvars[:trained], jaxpr.outvars[trained:]
    is_matrix = [v.aval.ndim > 1 for v in dw]
    now = [v for v, later in zip(dw, is_matrix, strict=True) if not later]
    matrices = list(itertools.compress(dw, is_matrix))
    first, given_leaves = _needed(jaxpr, [*now, *dx]), len(jax.tree.leaves(given))
    recomputed = [jaxpr.eqns[i] for i in _needed(jaxpr, matrices) - _following(jaxpr, jaxpr.invars[given_leaves:])]
    first |= _needed(jaxpr, [v for equation in recomputed if _is_costly(equation) for v in equation.outvars])
    later = [i for i in _needed(jaxpr, matrices) if i not in first]
    again, waiting = _cut(jaxpr, first, later, matrices, given_leaves)
    return Split(
        dict(zip(jaxpr.constvars, flat.consts, strict=True)),
        jaxpr.invars,
        [jaxpr.eqns[i] for i in sorted(first)],
        [jaxpr.eqns[i] for i in sorted({*later, *again})],
        dw,
        dx,
        is_matrix,
        waiting,
    )


def _cut(
    jaxpr: Jaxpr, first: set[int], later: Sequence[int], results: Iterable[Any], given: int
) -> tuple[set[int], list[Var]]:
    """Returns the operations that the second part repeats, and the variables that wait."""
    maker: dict[Any, int] = {v: i for i, equation in enumerate(jaxpr.eqns) for v in equation.outvars}
    free = {*jaxpr.invars[:given], *jaxpr.constvars}
    waiting: dict[Any, None] = {}
    again: set[int] = set()

    reads = [v for i in later for v in jaxpr.eqns[i].invars]
    reads = [v for v in (*reads, *results) if not isinstance(v, Literal)]
    for v in sorted(dict.fromkeys(reads), key=lambda v: maker.get(v, -1)):
        repeated = _repeatable(jaxpr, maker, v, first, known={*free, *waiting})
        if repeated is None:
            waiting[v] = None
        else:
            again |= repeated
    return again, list(waiting)


def _repeatable(jaxpr: Jaxpr, maker: Mapping[Any, int], v: Any, first: set[int], *, known: set[Any]) -> set[int] | None:
    """Returns operations of the first part that compute `v` from known variables; None if `v` must wait."""
    found: set[int] = set()
    open_ = [v]
    while open_:
        v = open_.pop()
        if isinstance(v, Literal) or v in known:
            continue
        if v not in maker:
            return None
        if (at := maker[v]) not in first or at in found:
            continue
        if _is_costly(jaxpr.eqns[at]):
            return None
        found.add(at)
        open_ += jaxpr.eqns[at].invars
    return found


def _is_costly(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    return name in _COSTLY or any(isinstance(p, Jaxpr) or hasattr(p, "jaxpr") for p in equation.params.values())


def _needed(jaxpr: Jaxpr, results: Iterable[Any]) -> set[int]:
    wanted = {v for v in results if not isinstance(v, Literal)}
    found = set()
    for i, equation in reversed(list(enumerate(jaxpr.eqns))):
        if not wanted.isdisjoint(equation.outvars):
            found.add(i)
            wanted.update(v for v in equation.invars if not isinstance(v, Literal))
    return found


def _following(jaxpr: Jaxpr, inputs: Iterable[Var]) -> set[int]:
    known: set[Any] = set(inputs)
    found = set()
    for i, equation in enumerate(jaxpr.eqns):
        if any(not isinstance(v, Literal) and v in known for v in equation.invars):
            found.add(i)
            known.update(equation.outvars)
    return found


def _given(split: Split, given: tuple, dy: Any) -> dict[Var, Any]:
    return dict(split.constants) | dict(zip(split.inputs, jax.tree.leaves((given, dy)), strict=False))


def _run(equations: Iterable[JaxprEqn], env: dict[Var, Any], *, inline: bool = False) -> dict[Var, Any]:
    env = dict(env)
    for equation in equations:
        values = [_read(env, v) for v in equation.invars]
        if inline and equation.primitive.name in _INLINED:
            inner = equation.params["jaxpr"]
            jaxpr, constants = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            own = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *values), strict=True))
            own = _run(jaxpr.eqns, own, inline=True)
            results = [_read(own, v) for v in jaxpr.outvars]
        else:
            results = jax_internals.run_equation(equation, values)
        env.update(zip(equation.outvars, results, strict=True))
    return env


def _read(env: Mapping[Var, Any], v: Any) -> Any:
    return v.val if isinstance(v, Literal) else env[v]
