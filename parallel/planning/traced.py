"""What one training step computes and keeps, read from its trace: no formula knows the model.

The one idea: tracing the loss of a few rows says everything that arithmetic needs, in a fraction of a second: the
products of matrices, forward and with what the backward pass computes again, and every array that waits for the
backward pass. A choice of `remat` that nobody here has heard of is measured like the others. Dimensions are recognised
by their size: an odd number of rows, and the sizes that parameters have names for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from core.logical import Axes
from core.types import Model
from parallel.placement import BatchSpec

_CANDIDATE_ROWS = (7, 11, 13, 17, 19, 23)


class Kept(NamedTuple):
    """An array that waits for the backward pass.

    Attributes:
      axes: logical axis of each dimension, None where it has none; `batch` is that of the rows.
      elements: of one row, or of all where it has no rows.
      itemsize: bytes of an element.
      copies: how many of it a loop over layers, or over steps of a recursion, leaves behind; 1 outside of loops.
    """

    axes: Axes
    elements: float
    itemsize: int
    copies: int

    @property
    def has_rows(self) -> bool:
        """Whether there is more of it with more rows."""
        return "batch" in self.axes.names

    @property
    def bytes(self) -> float:
        """Of one row, or of all."""
        return self.elements * self.itemsize


class Reduction(NamedTuple):
    """A product over a dimension that tensor parallelism splits: its result is summed over chips.

    Attributes:
      axis: logical axis of the dimension, such as `mlp`.
      bytes: of the results of one row in one forward pass.
    """

    axis: str
    bytes: float


class Work(NamedTuple):
    """One step of one row.

    Attributes:
      forward_flops, forward_kernel_flops: matrix products of a forward pass, kernels left out, and those of kernels.
      flops: of forward and backward pass and what is computed again; kernels left out.
      kernel_flops: of kernels in the same.
      kept: what waits for the backward pass.
      reductions: of a forward pass.
      gathers_again: whether the backward pass gathers a layer's weights again; else gathered ones wait for it.
    """

    forward_flops: float
    flops: float
    kernel_flops: float
    forward_kernel_flops: float
    kept: tuple[Kept, ...]
    reductions: tuple[Reduction, ...]
    gathers_again: bool = True


def work(model: Model, spec: BatchSpec, params: Any, param_axes: Any) -> Work:
    """Traces a loss.

    Args:
      model: whose loss.
      spec: of a batch; its number of rows does not matter.
      params: tree of `jax.ShapeDtypeStruct`.
      param_axes: tree of `Axes` of the same structure.
    """
    sizes = _Sizes(params, param_axes, spec)
    batch = {k: jax.ShapeDtypeStruct((sizes.rows, *s.shape[1:]), s.dtype) for k, s in spec.items()}
    carry = jax.eval_shape(model.init_carry, batch)
    rng = jax.eval_shape(lambda: jax.random.key(0))

    def loss(params: Any, carry: Any, rng: Any, batch: Any) -> jax.Array:
        return model.loss(params, carry, rng, batch, is_training=True)[1].loss_sum

    def forward(params: Any, carry: Any, rng: Any, batch: Any) -> Any:
        value, back = jax.vjp(lambda p: loss(p, carry, rng, batch), params)
        return value, back  # what waits is what the second closes over

    inputs = params, carry, rng, batch
    traced, (_, waits) = jax.make_jaxpr(forward, return_shape=True)(*inputs)
    products = _flops(traced)
    backward = jax.make_jaxpr(jax.grad(loss))(*inputs)
    both = _flops(backward)
    return Work(
        forward_flops=sum(p.flops for p in products if not p.in_kernel) / sizes.rows,
        flops=sum(p.flops for p in both if not p.in_kernel) / sizes.rows,
        kernel_flops=sum(p.flops for p in both if p.in_kernel) / sizes.rows,
        forward_kernel_flops=sum(p.flops for p in products if p.in_kernel) / sizes.rows,
        kept=tuple(_distinct(k for leaf in jax.tree.leaves(waits) if (k := sizes.kept(leaf)))),
        reductions=tuple(r for p in products if not p.in_kernel and (r := sizes.reduction(p))),
        gathers_again=_computes_again(backward.jaxpr),
    )


class _Product(NamedTuple):
    """Executions of one matrix product."""

    flops: float
    contracted: tuple[int, ...]
    result_bytes: float
    in_kernel: bool


def _flops(traced: ClosedJaxpr) -> list[_Product]:
    return list(_products(traced.jaxpr, 1.0, False))


def _products(jaxpr: Jaxpr, times: float, in_kernel: bool) -> Iterator[_Product]:
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            yield _product(equation, times, in_kernel)
        elif name == "cond":
            runs = [list(_products(branch.jaxpr, times, in_kernel)) for branch in params["branches"]]
            yield from max(runs, key=lambda run: sum(p.flops for p in run))
        elif name == "pallas_call":
            # Every block of the grid is counted; under a causal mask half of them are left out.
            grid = math.prod(n for n in params["grid_mapping"].grid if isinstance(n, int))
            yield from _products(_bare(params["jaxpr"]), times * grid / 2, True)
        else:
            turns = params["length"] if name == "scan" else 1
            for inner in _inner(params):
                yield from _products(inner, times * turns, in_kernel)


def _computes_again(jaxpr: Jaxpr) -> bool:
    """Whether any of it is under a choice of what to keep: what such a region closes over lies as it is stored."""
    return any(
        equation.primitive.name in ("checkpoint", "remat", "remat2")
        or any(_computes_again(inner) for inner in _inner(equation.params))
        for equation in jaxpr.eqns
    )


def _inner(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, (Jaxpr, ClosedJaxpr)):
                yield _bare(one)


def _bare(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _product(equation: Any, times: float, in_kernel: bool) -> _Product:
    left, result = equation.invars[0].aval, equation.outvars[0].aval
    (contracting, _), _ = equation.params["dimension_numbers"]
    contracted = tuple(left.shape[i] for i in contracting)
    flops = 2.0 * result.size * math.prod(contracted) * times
    return _Product(flops, contracted, result.size * result.dtype.itemsize * times, in_kernel)


class _Sizes:
    """What a number among the dimensions of an array stands for."""

    def __init__(self, params: Any, param_axes: Any, spec: BatchSpec):
        leaves = jax.tree.leaves(params)
        named = jax.tree.leaves(param_axes, is_leaf=lambda a: isinstance(a, Axes))
        pairs = zip(leaves, named, strict=True)
        sizes = {pair for leaf, of in pairs for pair in zip(leaf.shape, of.names, strict=True)}
        self._layers = {size for size, name in sizes if name == "layers"}
        self._by_size = {size: name for size, name in sorted(sizes, key=_preference) if name not in (None, "layers")}
        self._params = {(leaf.shape, leaf.dtype) for leaf in leaves}
        self._weights = {leaf.shape: of for leaf, of in zip(leaves, named, strict=True)}
        self._length = max((s.shape[1] for s in spec.values() if len(s.shape) > 1), default=0)
        taken = {size for leaf in leaves for size in leaf.shape} | {self._length}
        self.rows = next(n for n in _CANDIDATE_ROWS if n not in taken)

    def kept(self, leaf: Any) -> Kept | None:
        """None for a parameter itself, which is there anyway, and for what is too small to count."""
        if (leaf.shape, leaf.dtype) in self._params or leaf.size < 2**10 or not hasattr(leaf.dtype, "itemsize"):
            return None
        if leaf.shape in self._weights:
            axes = self._weights[leaf.shape]
        elif self.rows in leaf.shape:
            axes = self._of_rows(leaf.shape)
        else:
            axes = Axes((None,) * len(leaf.shape))
        has_rows = "batch" in axes.names
        before = leaf.shape[: axes.names.index("batch")] if has_rows else leaf.shape[: axes.names[:1] == ("layers",)]
        rows = self.rows if has_rows else 1
        return Kept(axes, leaf.size / rows, leaf.dtype.itemsize, math.prod(before))

    def _of_rows(self, shape: tuple[int, ...]) -> Axes:
        at = shape.index(self.rows)
        before = ["layers" if size in self._layers else None for size in shape[:at]]
        after = [self._by_size.get(size) for size in shape[at + 1 :]]
        places = [i for i, size in enumerate(shape[at + 1 :]) if size == self._length]
        if places:
            after[places[0]] = "residual_length" if after[places[0] + 1 :] == ["embed"] else "length"
        names = _once([*before, "batch", *after])
        return Axes(tuple(names))

    def reduction(self, product: _Product) -> Reduction | None:
        """Of a product over hidden units or heads, whose operand tensor parallelism splits."""
        for size in product.contracted:
            if (name := self._by_size.get(size)) in ("mlp", "heads"):
                return Reduction(name, product.result_bytes / self.rows)
        return None


def _preference(of: tuple[int, str | None]) -> tuple[int, str]:
    """Later wins: a size that two axes share goes to the one that strategies split."""
    order = (None, "norm", "head_dim", "puzzles", "vocab", "embed", "kv_heads", "heads", "mlp")
    return (order.index(of[1]) if of[1] in order else 0, str(of[1]))


def _once(names: list[str | None]) -> list[str | None]:
    """A table lays an axis out once in an array."""
    return [name if name not in names[:i] else None for i, name in enumerate(names)]


def _distinct(kept: Iterator[Kept]) -> Iterator[Kept]:
    """Outside of loops the compiler makes one array from another again, so that one of each shape remains."""
    largest: dict[Any, Kept] = {}
    for k in kept:
        if k.copies > 1:
            yield k
        elif (key := (k.axes, k.elements)) not in largest or largest[key].itemsize < k.itemsize:
            largest[key] = k
    yield from largest.values()
