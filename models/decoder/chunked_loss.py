"""Computes a loss in chunks of positions, so that the logits of all positions never exist at once.

A loss is a sum over positions, so a loop over chunks computes it with the logits of one chunk at a time. Under
differentiation, the same loop also computes the gradient:

    for chunk c:  sums += fn(params, x[c]);   d params += d fn / d params;   d x[c] = d fn / d x[c]

The loop runs in a `shard_map` region in which the mesh axes that shard rows and positions are manual. A chip adds up
its own gradient of the parameters in float32; the gradients of the chips are summed once.

B batch, T length, D embed, C positions per chunk.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from core import logical
from core.types import LossOutput

Sums = Callable[[Any, jax.Array, Any], LossOutput]

CHUNK_BYTES = 2 * 2**30  # bytes of float32 logits that a chip computes at once by default


class _Layout(NamedTuple):
    """Spec of [B, T], its manual mesh axes, and the number of shards of positions over other axes (`pieces`)."""

    rows: PartitionSpec
    manual: tuple[str, ...]
    pieces: int


def default_positions(rows: int, length: int, vocab: int) -> int | None:
    """Returns the positions per row and chunk on a chip; None: one chunk is enough.

    `rows`, `length`, `vocab` are the shape of the logits, before automatic mesh axes shard them.
    """
    spec, sizes = logical.activation_spec("batch", "length", "vocab"), jax.sharding.get_abstract_mesh().shape
    shards = [logical.shards(entry, sizes) for entry in spec or ()] or [1, 1, 1]
    rows, length, vocab = (n // shard for n, shard in zip((rows, length, vocab), shards, strict=True))
    chunks = math.ceil(4 * rows * length * vocab / CHUNK_BYTES)
    return math.ceil(length / chunks) if chunks > 1 else None


def total(fn: Sums, params: Any, x: jax.Array, side: Any, *, positions: int) -> LossOutput:
    """Computes `fn(params, x, side)` in chunks of positions.

    `params` and `x` have gradients, only through `loss_sum`; `side` has none.

    Args:
      fn: returns sums over positions, 0 where `x` and `side` are 0; must not close over arrays.
      x: [B, T, D], with the logical axes batch, residual_length and embed.
      side: a tree of arrays [B, T].
      positions: C, the most positions of a row that a chip computes at a time.
    """
    layout = _layout()

    @jax.custom_vjp
    def run(params: Any, x: jax.Array, side: Any) -> LossOutput:
        def local(params: Any, x: jax.Array, side: Any) -> LossOutput:
            chunks = _split((x, side), layout.pieces, positions)
            each = jax.lax.map(lambda chunk: fn(params, *chunk), chunks)
            return _summed(jax.tree.map(lambda a: jnp.sum(a, axis=0), each), layout)

        return _on_chips(local, layout, PartitionSpec())(params, x, side)

    def forward(*operands: Any) -> tuple[LossOutput, tuple]:
        params, x, side = (jax.tree.map(lambda a: a.value, operand) for operand in operands)
        trained = [a.perturbed for a in jax.tree.leaves(operands[0])]  # a frozen output matrix gets no gradient

        def local(params: Any, x: jax.Array, side: Any) -> tuple[LossOutput, list[jax.Array], jax.Array]:
            sums, grads, dx = _with_gradients(fn, params, trained, _split((x, side), layout.pieces, positions))
            return _summed(sums, layout), [g[None] for g in grads], _joined(dx, layout.pieces, x.shape[1])

        out = (PartitionSpec(), PartitionSpec(layout.manual or None), layout.rows)
        sums, grads, dx = _on_chips(local, layout, out)(params, x, side)
        return sums, (params, _placed(grads, trained), dx)

    def back(saved: tuple, d_sums: LossOutput) -> tuple[Any, jax.Array, None]:
        (params, grads, dx), scale = saved, d_sums.loss_sum
        if isinstance(scale, SymbolicZero):
            scale = jnp.zeros((), scale.dtype)
        leaves, structure = jax.tree.flatten(params)
        d_params = [
            g if g is None else _over_chips((g * scale).astype(a.dtype)) for g, a in zip(grads, leaves, strict=True)
        ]
        dx = (dx.astype(jnp.float32) * scale).astype(dx.dtype)
        return jax.tree.unflatten(structure, d_params), logical.constrain(dx, "batch", "residual_length", "embed"), None

    run.defvjp(forward, back, symbolic_zeros=True)
    return run(params, x, side)


def _layout() -> _Layout:
    spec, sizes = logical.activation_spec("batch", "length"), jax.sharding.get_abstract_mesh().shape
    if spec is None:
        return _Layout(PartitionSpec(), (), 1)
    entries = [tuple(axis for axis in logical.mesh_axes(entry) if sizes[axis] > 1) for entry in spec]
    manual = tuple(axis for entry in entries for axis in entry)
    residual = logical.activation_spec("residual_length")
    assert residual is not None
    between = logical.mesh_axes(residual[0])
    pieces = logical.shards(tuple(axis for axis in between if axis not in manual), sizes)
    return _Layout(PartitionSpec(*(entry or None for entry in entries)), manual, pieces)


def _on_chips(local: Callable, layout: _Layout, out_specs: Any) -> Callable:
    if not layout.manual:  # an empty `axis_names` would mean all axes
        return local
    return jax.shard_map(
        local,
        in_specs=(PartitionSpec(), layout.rows, layout.rows),
        out_specs=out_specs,
        axis_names=set(layout.manual),
        check_vma=False,
    )


def _with_gradients(
    fn: Sums, params: Any, trained: Sequence[bool], chunks: tuple[jax.Array, Any]
) -> tuple[LossOutput, list[jax.Array], jax.Array]:
    """Returns the sums, float32 gradients of the `trained` leaves of `params`, and that of x, [n, B, pieces C, D]."""
    leaves, structure = jax.tree.flatten(params)

    def loss_sum(learned: list[jax.Array], x: jax.Array, side: Any) -> tuple[jax.Array, LossOutput]:
        given = [a if b is None else b for a, b in zip(leaves, _placed(learned, trained), strict=True)]
        out = fn(jax.tree.unflatten(structure, given), x, side)
        return out.loss_sum, out

    learned = [a for a, is_trained in zip(leaves, trained, strict=True) if is_trained]

    def add(total: tuple, chunk: tuple[jax.Array, Any]) -> tuple[tuple, jax.Array]:
        (grads, dx), out = jax.grad(loss_sum, argnums=(0, 1), has_aux=True)(learned, *chunk)
        return jax.tree.map(lambda a, new: a + new.astype(a.dtype), total, (out, grads)), dx

    one = jax.eval_shape(fn, params, *jax.tree.map(lambda a: a[0], chunks))
    sums = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), one)
    (sums, grads), dx = jax.lax.scan(add, (sums, [jnp.zeros(a.shape, jnp.float32) for a in learned]), chunks)
    return sums, grads, dx


def _placed(chosen: Sequence[jax.Array], places: Sequence[bool]) -> list[jax.Array | None]:
    """Returns the arrays of `chosen`, in order, where `places` is true, and None elsewhere."""
    arrays = iter(chosen)
    return [next(arrays) if here else None for here in places]


def _summed(sums: LossOutput, layout: _Layout) -> LossOutput:
    return jax.lax.psum(sums, layout.manual) if layout.manual else sums


def _over_chips(gradients: jax.Array) -> jax.Array:
    """Sums over chips in the gradients' dtype; `jnp.sum` would send float32."""
    return jax.lax.reduce(gradients, jnp.zeros((), gradients.dtype), jax.lax.add, (0,))


def _split(tree: Any, pieces: int, positions: int) -> Any:
    """Splits leaves [B, T, ...] into chunks [n, B, pieces C, ...], padded with zeros; C is at most `positions`."""

    def one(a: jax.Array) -> jax.Array:
        rows, length, *rest = a.shape
        part = length // pieces
        chunks = math.ceil(part / positions)
        size = math.ceil(part / chunks)
        a = a.reshape(rows, pieces, part, *rest)
        a = jnp.pad(a, ((0, 0), (0, 0), (0, chunks * size - part), *((0, 0) for _ in rest)))
        a = jnp.moveaxis(a.reshape(rows, pieces, chunks, size, *rest), 2, 0)
        return a.reshape(chunks, rows, pieces * size, *rest)

    return jax.tree.map(one, tree)


def _joined(a: jax.Array, pieces: int, length: int) -> jax.Array:
    """Reverses `_split` for one array: [n, B, pieces C, D] -> [B, T, D]."""
    chunks, rows, _, width = a.shape
    a = jnp.moveaxis(a.reshape(chunks, rows, pieces, -1, width), 0, 2)
    return a.reshape(rows, pieces, -1, width)[:, :, : length // pieces].reshape(rows, length, width)
