"""Matrix products in int8, by qwix: the peak of v5e, v5p and v6e is twice that of bfloat16.

Each row of activations and each output column of a weight is scaled by its largest absolute value to integers from
-128 to 127 (symmetric, computed anew in every step); the products are summed in int32. The gradient of the activations
is computed in the same way, from rows of the incoming gradient; the gradient of the weights is a product in the compute
dtype, because it is summed over all tokens of a chip, where rounding to nearest would lose the many small terms. The
gradients pass through the rounding as if it were the identity (straight-through estimator, Bengio et al. 2013).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from core import extras, logical

CHOICES = ("none", "int8")


def check(choice: str) -> None:
    """Raises UserError if the library for quantized products is not installed."""
    if choice != "none":
        extras.require("qwix", extra="int8", what=f"Transformer.quantization = {choice!r}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(subscripts: str, axes: tuple[str, ...], x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `einsum(subscripts, x, weight)` in the dtype of x, computed in int8.

    Args:
      subscripts: of two operands, with every dimension named.
      axes: logical axes of the weight.
      x: activations.
      weight: a matrix in the dtype of x, laid out as stored: each chip rounds its own part, and integers are gathered.
    """
    return _forward(subscripts, axes, x, weight)


def _forward(subscripts: str, axes: tuple[str, ...], x: jax.Array, weight: jax.Array) -> jax.Array:
    left, right, _ = _parts(subscripts)
    rounded = _rounded(weight, right, left)
    rounded = dataclasses.replace(
        rounded, qvalue=logical.constrain(jax.lax.optimization_barrier(rounded.qvalue), *axes)
    )
    import qwix

    return qwix.einsum(subscripts, _rounded(x, left, right), rounded).astype(x.dtype)


def _parts(subscripts: str) -> tuple[str, str, str]:
    operands, out = subscripts.split("->")
    left, right = operands.split(",")
    return left, right, out


def _rounded(x: jax.Array, names: str, others: str) -> Any:
    """Returns x as integers with one scale for every index of the dimensions that the product does not sum over."""
    kept = [i for i, name in enumerate(names) if name not in others]
    import qwix

    return qwix.quantize(x.astype(jnp.float32), "int8", channelwise_axes=kept)


def _back(
    subscripts: str, axes: tuple[str, ...], saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    left, right, out = _parts(subscripts)
    dy = dy.astype(x.dtype)
    dx = _forward(f"{out},{right}->{left}", axes, dy, weight)
    return dx, logical.constrain(jnp.einsum(f"{left},{out}->{right}", x, dy), *axes)


product.defvjp(lambda subscripts, axes, x, weight: (_forward(subscripts, axes, x, weight), (x, weight)), _back)
