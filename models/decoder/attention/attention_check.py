"""Compares the splash kernel with the plain implementation on the first chip of this host.

If that is not a TPU, the kernel runs in Pallas's interpreter.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from models.decoder.attention import attention

HEADS, KEY_HEADS, HEAD_DIM = 2, 1, 128
LENGTH, INTERPRETED_LENGTH = 512, 128
# Relative to the largest element. bfloat16 has 8 bits, and sums have hundreds of terms; a TPU multiplies float32 in
# bfloat16 parts.
TOLERANCE = {"bfloat16": 0.04, "float32": 0.02}
INTERPRETED = {"bfloat16": 0.04, "float32": 2e-5}


def compare(*, dtype: str, interpret: bool) -> dict[str, Any]:
    """Compares the kernel with the plain implementation in one dtype, "float32" or "bfloat16".

    Returns:
      {dtype, apart, tolerance}; apart: the largest differences of the output and of gradients, relative to the largest
        element.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    length = INTERPRETED_LENGTH if interpret else LENGTH
    shapes = [(1, length, heads, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    q, k, v, weight = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))
    segments = (jnp.arange(length) // 100)[None].astype(jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def both(form, q, k, v):
        out, back = jax.vjp(lambda *a: form(*a, segments), q, k, v)
        return [array.astype(jnp.float32) for array in (out, *back(weight))]

    kernel = both(functools.partial(attention.splash_attention, interpret=interpret), q, k, v)
    pairs = zip(("output", "d query", "d key", "d value"), kernel, both(attention.plain, q, k, v), strict=True)
    apart = {name: float(jnp.abs(a - b).max() / jnp.abs(b).max()) for name, a, b in pairs}
    return {"dtype": dtype, "apart": apart, "tolerance": (INTERPRETED if interpret else TOLERANCE)[dtype]}


def look() -> dict[str, Any]:
    """Compares the splash kernel with plain attention in float32 and bfloat16.

    Returns:
      {platform, kernel, compared, ok}; ok: whether all differences are within tolerance.
    """
    device = jax.local_devices()[0]
    interpret = device.platform != "tpu"
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        found = [compare(dtype=dtype, interpret=interpret) for dtype in TOLERANCE]
    is_right = all(value <= f["tolerance"] for f in found for value in f["apart"].values())
    how = "interpreted: this is no TPU" if interpret else f"on {device.device_kind}"
    return {"platform": device.platform, "kernel": how, "compared": found, "ok": is_right}
