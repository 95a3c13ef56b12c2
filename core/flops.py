"""The FLOPs of training a model, some of whose matrices the user may freeze."""

import math
from collections.abc import Iterator, Mapping, Sequence

import jax

from core import logical, parameters
from core.types import CountsFlops, Generates, Model, can


def per_token(
    model: Model, batch: Mapping[str, jax.ShapeDtypeStruct], *, length: int, frozen: Sequence[str]
) -> float | None:
    """Returns the FLOPs of a training step per token, without recomputation.

    For the gradient of every matrix that it trains, the model counts 2 FLOPs per entry and token. Those of the matrices
    in `frozen` are subtracted, except for experts.

    Args:
      model: the model.
      batch: shapes of a batch.
      length: tokens per row.
      frozen: shell wildcards over the paths of parameters that are not trained, besides those that the model freezes.

    Returns:
      The FLOPs; None for a model without `flops_per_token`.

    Raises:
      UserError: a pattern of `frozen` matches no parameter, or a parameter has no named axes.
    """
    counted = model.flops_per_token(length) if can(model, CountsFlops) else None
    return None if counted is None else counted - 2.0 * sum(_products(model, batch, frozen) if frozen else ())


def _products(model: Model, batch: Mapping[str, jax.ShapeDtypeStruct], frozen: Sequence[str]) -> Iterator[int]:
    """Yields the sizes of the matrices that multiply every token and that `frozen` freezes in addition to the model.

    Experts are left out.
    """
    shapes, specs = logical.abstract_init(model.init, jax.random.key(0), batch)
    chosen = parameters.matches(specs, frozen, where="frozen")
    has_output = any(spec.axes[-1:] == ("vocab",) for spec in jax.tree.leaves(specs))
    is_tied = can(model, Generates) and not has_output  # the embedding is also the output matrix
    for shape, spec, is_chosen in zip(*map(jax.tree.leaves, (shapes, specs, chosen)), strict=True):
        is_output = "vocab" in (spec.axes if is_tied else spec.axes[-1:])
        is_product = (spec.kind == "matrix" or is_output) and {*logical.STACKED, None}.issuperset(
            spec.axes[: spec.stacked]
        )
        if is_chosen and spec.trainable and is_product:
            yield math.prod(shape.shape)
