"""Matrix products in int8 or FP8, by the library qwix.

The peak of int8 is twice that of bfloat16 on v5e, v5p and v6e, and that of FP8 on chips with
`core.slices.Chip.has_fp8`.

Each row of activations and each output column of a weight is scaled by its largest absolute value to the range of the
type (symmetric, computed anew in every step). That is -128 to 127 for int8, whose products are summed in int32. For FP8
it is that of float8_e4m3fn (448, 3 bits of mantissa), and of float8_e5m2 (57,344, 2 bits) for incoming gradients, as in
qwix's recipes; products are summed in float32. The gradient of the activations is computed in the same way, from rows
of the incoming gradient; the gradient of the weights is a product in the compute dtype, because it is summed over all
tokens of a device, where rounding to nearest would lose the many small terms. Gradients pass through the rounding as if
it were the identity (straight-through estimator, Bengio et al. 2013).
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
    """Raises UserError if the library for products in `choice`, "int8" or "fp8", is not installed."""
    if choice != "none":
        extras.require("qwix", extra="int8", what=f"Transformer.quantization = {choice!r}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def product(choice: str, subscripts: str, axes: tuple[str, ...], x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `einsum(subscripts, x, weight)` in the dtype of x, computed in int8 or FP8.

    Args:
      choice: "int8" or "fp8".
      subscripts: as of `jnp.einsum`, for two operands, with every dimension named.
      axes: logical axes of the weight.
      x: activations.
      weight: a matrix in the dtype of x, laid out as stored: each device rounds its own part, so that what is gathered
        is one byte per entry.
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
    """Returns x quantized to a type, with one scale per index of the dimensions that the product does not sum over.

    Args:
      x: one operand of the product.
      type_: the dtype of its quantized values.
      names: the letters of its dimensions in the subscripts of the product.
      others: the letters of the other operand's dimensions; the product sums over those that both have.
    """
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
