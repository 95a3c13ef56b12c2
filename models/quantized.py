"""Matrix products in int8 or FP8, by the library qwix.

Each row of activations and each output column of a weight is scaled, in every step, by its largest absolute value to
the range of the type. FP8 is float8_e4m3fn, or float8_e5m2 for incoming gradients. The gradient of weights is a product
in the compute dtype, because it sums over many tokens, where rounding would lose small terms. Gradients pass through
the rounding as if it were the identity (straight-through estimator, Bengio et al. 2013).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from core import extras, logical

CHOICES = ("none", "int8", "fp8")
_TYPES = {"int8": ("int8", "int8"), "fp8": ("float8_e4m3fn", "float8_e5m2")}  # type of values, type of gradients


def check(choice: str) -> None:
    """Raises UserError if the library for products in `choice` is not installed."""
    if choice != "none":
        extras.require("qwix", extra="int8", what=f"Transformer.quantization = {choice!r}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def product(choice: str, subscripts: str, axes: tuple[str, ...], x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `einsum(subscripts, x, weight)` in the dtype of x, computed in int8 or FP8.

    Args:
      choice: "int8" or "fp8".
      subscripts: for two operands, with every dimension named.
      axes: logical axes of the weight.
      weight: laid out as stored, in the dtype of x.
    """
    return _forward(_TYPES[choice][:1] * 2, subscripts, axes, x, weight)


def _forward(
    types: tuple[str, ...], subscripts: str, axes: tuple[str, ...], x: jax.Array, weight: jax.Array
) -> jax.Array:
    """Returns the product of x, rounded to `types[0]`, and of the weight, rounded to `types[1]`."""
    left, right, _ = _parts(subscripts)
    rounded = _rounded(weight, types[1], right, left)
    rounded = dataclasses.replace(
        rounded, qvalue=logical.constrain(jax.lax.optimization_barrier(rounded.qvalue), *axes)
    )
    import qwix

    return qwix.einsum(subscripts, _rounded(x, types[0], left, right), rounded).astype(x.dtype)


def _parts(subscripts: str) -> tuple[str, str, str]:
    operands, out = subscripts.split("->")
    left, right = operands.split(",")
    return left, right, out


def _rounded(x: jax.Array, type_: str, names: str, others: str) -> Any:
    """Quantizes x, with one scale for each index of the dimensions that are not in `others`."""
    kept = [i for i, name in enumerate(names) if name not in others]
    import qwix

    return qwix.quantize(x.astype(jnp.float32), type_, channelwise_axes=kept)


def _saved(choice: str, subscripts: str, axes: tuple[str, ...], x: jax.Array, weight: jax.Array):
    return _forward(_TYPES[choice][:1] * 2, subscripts, axes, x, weight), (x, weight)


def _back(
    choice: str, subscripts: str, axes: tuple[str, ...], saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    left, right, out = _parts(subscripts)
    dy = dy.astype(x.dtype)
    dx = _forward(_TYPES[choice][::-1], f"{out},{right}->{left}", axes, dy, weight)
    return dx, logical.constrain(jnp.einsum(f"{left},{out}->{right}", x, dy), *axes)


product.defvjp(_saved, _back)
