"""Extracts FLOPs, saved arrays and reductions from traces of a model's loss, for planning.

Dimensions are recognized by their size: the number of rows is a prime that no other size has as a factor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from core import logical, optimizers, random_bits, wrappers
from core.batches import BatchSpec, batch_shapes, row_length
from core.logical import Axes
from core.optimizers import Optimizer
from core.slices import Slice
from core.step import TrainState
from core.types import Batch, ChoosesDtype, ChoosesKernels, CouplesRows, LossOutput, Model, Params, can
from parallel import strategy
from parallel.planning import candidates, kernel_flops

EMBEDDING, OUTPUT = ("vocab", "embed"), ("embed", "vocab")  # axes of the matrices before and after the layers
TABLE = ("vocab",)  # first axis of a table of which a token needs one row: the embedding, and inputs of layers
_CANDIDATE_ROWS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)


class Kept(NamedTuple):
    """An array that is saved for the backward pass.

    Attributes:
      axes: logical axis of each dimension; `batch` is the axis of rows.
      elements: per row, or of the whole array if it has no rows; all copies together.
      copies: number of copies that a loop saves; 1 outside of loops.
    """

    axes: Axes
    elements: float
    itemsize: int
    copies: int
    on_host: bool = False

    @property
    def unstacked(self) -> tuple[str | None, ...]:
        """The names of `axes` without those of stacked layers."""
        return tuple(name for name in self.axes.names if name not in logical.STACKED)

    @property
    def has_rows(self) -> bool:
        """Whether the size of the array grows with the number of rows."""
        return "batch" in self.axes.names

    @property
    def bytes(self) -> float:
        """Bytes of one row, or of the whole array if it has no rows."""
        return self.elements * self.itemsize


class Reduction(NamedTuple):
    """A matrix product that contracts `mlp` or `heads`; its result may be summed over chips.

    Attributes:
      bytes: of the product's results for one row in one forward pass.
    """

    axis: str
    bytes: float


class Exchange(NamedTuple):
    """Tokens of a forward pass that chips exchange if they share experts.

    Attributes:
      bytes: of one row: of the slots of all experts, or of the tokens.
      is_gathered: whether every chip gets all tokens; otherwise each slot goes to the chip of its expert.
    """

    bytes: float
    is_gathered: bool


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one training step for one row; FLOPs of matrix products are without Pallas kernels.

    Attributes:
      flops: of both passes, with recomputation.
      kernel_flops: of Pallas kernels in both passes.
      reductions: products of a forward pass whose results may be summed over chips.
      exchanges: tokens that go to their experts, and come back, in a forward pass.
      gathers_again: whether the backward pass gathers a layer's weights again, instead of saving them.
      looped: share of `flops`, and of `kernel_flops`, in loops.
      chunk_bytes: with more bytes of logits on a chip, the loss is computed in chunks; 0: the size does not matter.
      kept_in_chunks: what is saved if the loss is computed in chunks.
    """

    forward_flops: float
    flops: float
    kernel_flops: float
    forward_kernel_flops: float
    kept: tuple[Kept, ...]
    reductions: tuple[Reduction, ...]
    exchanges: tuple[Exchange, ...] = ()
    gathers_again: bool = True
    looped: tuple[float, float] = (0.0, 0.0)
    chunk_bytes: int = 0
    kept_in_chunks: tuple[Kept, ...] = ()

    def with_padding(self, padding: float) -> Work:
        """Returns the work with the FLOPs of `padding` times as many layers in loops."""
        more, kernels = ((padding - 1) * share for share in self.looped)
        return dataclasses.replace(
            self,
            forward_flops=self.forward_flops * (1 + more),
            flops=self.flops * (1 + more),
            kernel_flops=self.kernel_flops * (1 + kernels),
            forward_kernel_flops=self.forward_kernel_flops * (1 + kernels),
        )

    @functools.cached_property
    def row_bytes(self) -> float:
        """Bytes per row of the saved arrays that have rows."""
        return sum(kept.bytes for kept in self.kept if kept.has_rows)

    @functools.cached_property
    def of_loops(self) -> list[Kept]:
        """The saved arrays of loops that have rows."""
        return [kept for kept in self.kept if kept.copies > 1 and kept.has_rows]


@dataclasses.dataclass(frozen=True)
class ModelTrace:
    """The properties of a training program that do not depend on its layout.

    Attributes:
      shapes, axes: of the training state.
      works: by choice of `remat`.
      itemsize: bytes of a number in the dtype that the model computes in.
      trained: whether each parameter is trained, in the order of the leaves.
      couples_rows: whether the model says that its loss couples the rows of a batch.
    """

    slice: Slice
    shapes: TrainState
    axes: TrainState
    spec: BatchSpec
    works: Mapping[str | None, Work]
    itemsize: int
    trained: tuple[bool, ...]
    couples_rows: bool = False

    @functools.cached_property
    def length(self) -> int:
        """Number of positions of a row."""
        return row_length(self.spec)

    @functools.cached_property
    def saves_least(self) -> Work:
        """The work with the choice of `remat` that saves the fewest bytes per row."""
        return min(self.works.values(), key=lambda work: work.row_bytes)

    @functools.cached_property
    def saves_most(self) -> Work:
        """The work with the choice of `remat` that saves the most bytes per row."""
        return max(self.works.values(), key=lambda work: work.row_bytes)

    @functools.cached_property
    def recomputes_least(self) -> Work:
        """The work of those with the fewest FLOPs that saves the fewest bytes per row."""
        least = min(work.flops for work in self.works.values())
        few = [work for work in self.works.values() if work.flops <= 1.01 * least]
        return min(few, key=lambda work: work.row_bytes)

    def distinct_remats(self, own: str | None) -> tuple[str | None, ...]:
        """Returns one choice of `remat` for each different work; preferably `own`."""
        chosen: dict[Work, str | None] = {}
        for remat in sorted(self.works, key=lambda remat: remat != own):
            chosen.setdefault(self.works[remat], remat)
        return tuple(chosen.values())


def trace(
    model: Model,
    optimizer: Optimizer,
    spec: BatchSpec,
    *,
    slice: Slice,
    seed: int = 0,
    remats: Sequence[str | None] | None = None,
    frozen: Sequence[str] = (),
    frozen_dtype: str = "bfloat16",
) -> ModelTrace:
    """Traces a model and its optimizer, without compiling them or creating their state.

    Args:
      slice: for which layouts are estimated.
      remats: choices of `remat` to trace; None: all that the model offers.
      frozen, frozen_dtype: as in `parallel.partitioner.Partitioner.program`.

    Raises:
      UserError: a parameter has no named axes, or `frozen` or the optimizer does not fit the parameters.
    """
    example = batch_shapes(spec)

    def created(rng: jax.Array, batch: Batch) -> Params:
        return logical.frozen(model.init(rng, batch), frozen, frozen_dtype)

    params, specs = logical.abstract_init(created, jax.random.key(seed), example)
    axes, optimizer = logical.axes_of(specs), optimizer.bound(specs)
    carry = jax.eval_shape(model.init_carry, example)
    shapes = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(optimizer.init, params), carry)
    named = TrainState(
        Axes(()),
        axes,
        optimizers.state_axes(optimizer, params),
        jax.tree.map(lambda s: strategy.row_axes(s.shape), carry),
    )
    works: dict[str | None, Work] = {}
    in_chunks: tuple[Kept, ...] | None = None
    kernel = _with_tpu_attention(model, params, example)
    for remat in candidates.remats(model) if remats is None else remats:
        changed: Any = kernel
        if remat not in (None, candidates.remat_of(model)):
            changed = wrappers.with_field(changed, "remat", remat)
        works[remat] = work(changed, spec, params, axes, trainable=optimizer.trainable, in_chunks=in_chunks)
        in_chunks = works[remat].kept_in_chunks  # outside of loops, which are all that `remat` changes
    itemsize = jnp.dtype(model.dtype if can(model, ChoosesDtype) else jnp.float32).itemsize
    trained = tuple(spec.trainable for spec in jax.tree.leaves(specs))
    couples_rows = can(model, CouplesRows) and model.couples_rows
    return ModelTrace(slice, shapes, named, dict(spec), works, itemsize, trained, couples_rows)


def _with_tpu_attention(model: Any, params: Any, example: Any) -> Any:
    chosen = model.attention if can(model, ChoosesKernels) else ""
    if chosen != "auto" or wrappers.field_path(model, "attention") is None:
        return model
    kernel = wrappers.with_field(model, "attention", "splash")
    try:
        jax.eval_shape(lambda p, b: _trained(kernel, p, (), jax.random.key(0), b), params, example)
    except ValueError:  # from JAX's kernel: its tiles do not fit the length
        return model
    return kernel


def _trained(model: Model, params: Any, carry: Any, rng: Any, batch: Any) -> LossOutput:
    return model.loss(params, carry, rng, random_bits.with_row_ids(batch), is_training=True)[1]


def _chooses_chunks(model: Any) -> bool:
    has_field = can(model, ChoosesKernels) and wrappers.field_path(model, "loss_chunk") is not None
    return has_field and model.loss_chunk is None


def work(
    model: Model,
    spec: BatchSpec,
    params: Any,
    param_axes: Any,
    *,
    trainable: Callable[[Params], Params],
    in_chunks: tuple[Kept, ...] | None = None,
) -> Work:
    """Returns the work of a training step for one row, from traces of the loss and its gradient.

    Args:
      spec: fields of a batch; the number of rows does not matter.
      params, param_axes: shapes and `Axes` of the parameters.
      trainable: stops the gradient at frozen parameters.
      in_chunks: `Work.kept_in_chunks`; None: traced if needed.
    """
    sizes = _Sizes(params, param_axes, spec)
    batch = batch_shapes(spec, rows=sizes.rows)
    chooses = _chooses_chunks(model)
    whole: Any = wrappers.with_field(model, "loss_chunk", 0) if chooses else model
    inputs = params, jax.eval_shape(model.init_carry, batch), jax.eval_shape(lambda: jax.random.key(0)), batch

    def loss(model: Model, params: Any, carry: Any, rng: Any, batch: Any) -> jax.Array:
        return _trained(model, trainable(params), carry, rng, batch).loss_sum

    def forward(model: Model, params: Any, *others: Any) -> Any:
        value, back = jax.vjp(lambda p: loss(model, p, *others), params)
        return value, back  # what is kept is what `back` closes over

    traced, (value, kept) = jax.make_jaxpr(functools.partial(forward, whole), return_shape=True)(*inputs)
    backward = jax.make_jaxpr(lambda back: back(jnp.ones(value.shape, value.dtype)))(kept)
    on_host = [aval.memory_space == jax.memory.Space.Host for aval in traced.out_avals]
    again = _computes_again(backward.jaxpr)
    ahead = list(_products(traced.jaxpr))
    both = [*ahead, *_products(backward.jaxpr)]

    if chooses and in_chunks is None:
        chunked: Any = wrappers.with_field(model, "loss_chunk", row_length(spec))
        in_chunks = sizes.all_kept(jax.eval_shape(functools.partial(forward, chunked), *inputs)[1])

    def flops(products: Sequence[_Product], *, in_kernel: bool) -> float:
        return sum(p.flops for p in products if p.in_kernel == in_kernel) / sizes.rows

    def looped(*, in_kernel: bool) -> float:
        return flops([p for p in both if p.in_loop], in_kernel=in_kernel) / (flops(both, in_kernel=in_kernel) or 1.0)

    return Work(
        forward_flops=flops(ahead, in_kernel=False),
        flops=flops(both, in_kernel=False),
        kernel_flops=flops(both, in_kernel=True),
        forward_kernel_flops=flops(ahead, in_kernel=True),
        kept=sizes.all_kept(kept, on_host[1:]),  # the first is the loss
        reductions=tuple(r for p in ahead if not p.in_kernel and (r := sizes.reduction(p))),
        exchanges=tuple(e for p in ahead if (e := sizes.exchange(p))),
        gathers_again=again,
        looped=(looped(in_kernel=False), looped(in_kernel=True)),
        chunk_bytes=whole.chunk_bytes if chooses else 0,
        kept_in_chunks=in_chunks or (),
    )


class _Product(NamedTuple):
    """`batch`: sizes of dimensions that both operands and the result have; `grouped_rows`: of a product by groups."""

    flops: float
    contracted: tuple[int, ...]
    result_bytes: float
    in_kernel: bool
    in_loop: bool
    batch: tuple[int, ...] = ()
    grouped_rows: int = 0


def _products(jaxpr: Jaxpr, times: float = 1.0, scopes: str = "", in_loop: bool = False) -> Iterator[_Product]:
    """Yields the products of a program that runs so many `times`; `scopes`: JAX's names around it."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            left: Any = equation.invars[0].aval
            result: Any = equation.outvars[0].aval
            (contracting, _), (batch, _) = params["dimension_numbers"]
            contracted, shared = (tuple(left.shape[i] for i in dimensions) for dimensions in (contracting, batch))
            flops = 2.0 * result.size * math.prod(contracted) * times
            yield _Product(flops, contracted, result.size * result.dtype.itemsize * times, False, in_loop, shared)
        elif name == "ragged_dot_general":  # as if every row belonged to a group
            yield _grouped_product(equation, times, in_loop)
        elif name == "cond":
            within = f"{scopes}/{equation.source_info.name_stack}"
            runs = [list(_products(branch.jaxpr, times, within, in_loop)) for branch in params["branches"]]
            yield from max(runs, key=lambda run: sum(p.flops for p in run))
        elif name == "pallas_call":
            flops = _kernel_flops(equation, f"{scopes}/{equation.source_info.name_stack}")
            yield _Product(flops * times, (), 0.0, True, in_loop)
        elif inside := list(_inner(params)):
            within, turns = f"{scopes}/{equation.source_info.name_stack}", params["length"] if name == "scan" else 1
            for inner in inside:
                yield from _products(inner, times * turns, within, in_loop or turns > 1)


def _kernel_flops(equation: Any, scopes: str) -> float:
    """Returns the FLOPs of a kernel; of an unknown one, its products for every block of its grid."""
    operands, results = (
        [v.aval.shape if jnp.issubdtype(v.aval.dtype, jnp.floating) else () for v in variables]
        for variables in (equation.invars, equation.outvars)
    )
    known = kernel_flops.of_shapes(equation.params["name"] or "", operands, results, scopes=scopes)
    if known is not None:
        return known
    blocks = math.prod(n for n in equation.params["grid_mapping"].grid if isinstance(n, int))
    inside = _inner({"jaxpr": equation.params["jaxpr"]})
    return blocks * sum(product.flops for inner in inside for product in _products(inner))


def _grouped_product(equation: Any, times: float, in_loop: bool) -> _Product:
    left, result = equation.invars[0].aval, equation.outvars[0].aval
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracting, _), _ = numbers.dot_dimension_numbers
    contracted = tuple(left.shape[i] for i in contracting)
    # Where the groups are of contracted rows, each row contributes to one of the results alone.
    is_of_rows = bool(set(numbers.lhs_ragged_dimensions) & set(contracting))
    size = result.size // result.shape[0] if is_of_rows else result.size
    flops = 2.0 * size * math.prod(contracted) * times
    result_bytes = result.size * result.dtype.itemsize * times
    return _Product(flops, contracted, result_bytes, False, in_loop, (), 0 if is_of_rows else result.shape[0])


def _computes_again(jaxpr: Jaxpr) -> bool:
    """Returns whether any part is rematerialized; weights used there are saved as stored, not gathered."""
    return any(
        equation.primitive.name in ("checkpoint", "remat", "remat2")
        or any(_computes_again(inner) for inner in _inner(equation.params))
        for equation in jaxpr.eqns
    )


def _inner(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, (Jaxpr, ClosedJaxpr)):
                yield one.jaxpr if isinstance(one, ClosedJaxpr) else one


def leaves(shapes: Any, axes: Any) -> list[tuple[Any, Axes]]:
    """Returns every array of a tree with its axes."""
    named = jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, Axes))
    return list(zip(jax.tree.leaves(shapes), named, strict=True))


class _Sizes:
    """Recognizes logical axes by the sizes of dimensions."""

    def __init__(self, params: Any, param_axes: Any, spec: BatchSpec):
        pairs = leaves(params, param_axes)
        sizes = {pair for leaf, of in pairs for pair in zip(leaf.shape, of.names, strict=True)}
        self._layers = {size for size, name in sizes if name in logical.STACKED}
        self._by_size = {
            size: name for size, name in sorted(sizes, key=_preference) if name not in (None, *logical.STACKED)
        }
        self._experts = {size for size, name in sizes if name == "expert"}
        self._before = dict.fromkeys(self._experts, "expert")
        self._params = {(leaf.shape, leaf.dtype) for leaf, _ in pairs}
        self._weights = {leaf.shape: of for leaf, of in pairs}
        self._of_some_layers = {leaf.shape[1:]: of for leaf, of in pairs if logical.is_stacked(of.names)}
        self._length = row_length(spec)
        taken = {size for size, _ in sizes} | {size for field in spec.values() for size in field.shape[1:]}
        self.rows = next(n for n in _CANDIDATE_ROWS if all(size % n or size == 0 for size in taken))

    def all_kept(self, tree: Any, on_host: Sequence[bool] | None = None) -> tuple[Kept, ...]:
        arrays = jax.tree.leaves(tree)
        places = on_host or [False] * len(arrays)
        pairs = zip(map(self.kept, arrays), places, strict=True)
        return tuple(_distinct(k._replace(on_host=is_there) for k, is_there in pairs if k))

    def kept(self, leaf: Any) -> Kept | None:
        """Describes a saved array; None if it looks like a parameter or has under 1,024 elements."""
        if (leaf.shape, leaf.dtype) in self._params or leaf.size < 2**10:
            return None
        if leaf.shape in self._weights:
            axes = self._weights[leaf.shape]
        elif leaf.shape[1:] in self._of_some_layers:  # of one kind of layers
            axes = self._of_some_layers[leaf.shape[1:]]
        elif any(size % self.rows == 0 for size in leaf.shape):  # joined with other dimensions, or alone
            axes = self._of_rows(leaf.shape)
        else:
            axes = Axes((None,) * len(leaf.shape))
        has_rows = "batch" in axes.names
        first = axes.names.index("batch") if has_rows else int(logical.is_stacked(axes.names))
        before = [size for size, name in zip(leaf.shape[:first], axes.names, strict=False) if name != "expert"]
        rows = self.rows if has_rows else 1
        return Kept(axes, leaf.size / rows, leaf.dtype.itemsize, math.prod(before))

    def _of_rows(self, shape: tuple[int, ...]) -> Axes:
        # Rows may be joined with other dimensions, such as the tokens of all rows or their slots of an expert.
        joined = next(i for i, size in enumerate(shape) if size % self.rows == 0)
        at = shape.index(self.rows) if self.rows in shape else joined
        before = ["layers" if size in self._layers else self._before.get(size) for size in shape[:at]]
        after = [self._by_size.get(size) for size in shape[at + 1 :]]
        places = [i for i, size in enumerate(shape[at + 1 :]) if size == self._length > 1]
        if places:
            after[places[0]] = "residual_length" if after[places[0] + 1 :] == ["embed"] else "length"
        names = [*before, "batch", *after]
        return Axes(tuple(name if name not in names[:i] else None for i, name in enumerate(names)))  # each axis once

    def reduction(self, product: _Product) -> Reduction | None:
        for size in product.contracted:
            if (name := self._by_size.get(size)) in ("mlp", "heads"):
                return Reduction(name, product.result_bytes / self.rows)
        return None

    def exchange(self, product: _Product) -> Exchange | None:
        """Returns what is exchanged for the last product of experts; None for other products."""
        if "mlp" not in map(self._by_size.get, product.contracted):
            return None
        if product.grouped_rows:
            tokens = self.rows * self._length
            return Exchange(product.result_bytes * tokens / product.grouped_rows / self.rows, is_gathered=True)
        if any(size in self._experts for size in product.batch):
            return Exchange(product.result_bytes / self.rows, is_gathered=False)
        return None


def _preference(of: tuple[int, str | None]) -> tuple[int, str]:
    """Returns a sort key: of axes of the same size, the one that sorts last is assumed."""
    order = (None, "norm", "head_dim", "vocab", "embed", "kv_heads", "heads", "mlp")
    return (order.index(of[1]) if of[1] in order else 0, str(of[1]))


def _distinct(kept: Iterator[Kept]) -> Iterator[Kept]:
    """Yields arrays of loops; of others with equal axes and size, only the one with the widest dtype."""
    largest: dict[Any, Kept] = {}
    for k in kept:
        if k.copies > 1:
            yield k
        elif (key := (k.axes, k.elements)) not in largest or largest[key].itemsize < k.itemsize:
            largest[key] = k
    yield from largest.values()
