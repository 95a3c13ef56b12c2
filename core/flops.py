"""FLOPs of training a model, some of whose matrices may be frozen."""

import math
from collections.abc import Iterator, Mapping, Sequence

import jax

from core import logical, parameters
from core.types import CountsFlops, Generates, Model, can


def per_token(
    model: Model, batch: Mapping[str, jax.ShapeDtypeStruct], *, length: int, frozen: Sequence[str]
) -> float | None:
    """Returns the FLOPs of a training step per token; None for a model without `flops_per_token`.

    Recomputation is not counted, nor are gradients of matrices in `frozen`. Gradients of experts always are counted.

    Args:
      batch: its shapes.
      length: tokens per row.
      frozen: shell wildcards over paths of parameters.
    """
    counted = model.flops_per_token(length) if can(model, CountsFlops) else None
    return None if counted is None else counted - 2.0 * sum(_products(model, batch, frozen) if frozen else ())


def _products(model: Model, batch: Mapping[str, jax.ShapeDtypeStruct], frozen: Sequence[str]) -> Iterator[int]:
    """Matrices that the model itself freezes, and experts, are left out."""
    shapes, specs = logical.abstract_init(model.init, jax.random.key(0), batch)
    chosen = parameters.matches(specs, frozen, where="frozen")
    has_output = any(spec.axes[-1:] == ("vocab",) for spec in jax.tree.leaves(specs))
    is_tied = can(model, Generates) and not has_output  # the embedding is also the output matrix
    for shape, spec, is_chosen in zip(*map(jax.tree.leaves, (shapes, specs, chosen)), strict=True):
        is_output = spec.axes == ("vocab", "embed") if is_tied else spec.axes[-1:] == ("vocab",)
        is_product = (spec.kind == "matrix" or is_output) and {*logical.STACKED, None}.issuperset(
            spec.axes[: spec.stacked]
        )
        if is_chosen and spec.trainable and is_product:
            yield math.prod(shape.shape)
