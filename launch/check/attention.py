"""The attention kernel held against the plain form, forward and backward, on the chip of this host.

Off a TPU the kernel's own definition is interpreted, which shows that the two agree, and nothing of a TPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from models import attention

HEADS, KEY_HEADS, HEAD_DIM = 2, 1, 128
LENGTH, INTERPRETED_LENGTH = 512, 128
# Of the largest element. A bfloat16 has 8 bits, and sums are of hundreds; a TPU multiplies float32 in bfloat16 parts.
TOLERANCE = {"bfloat16": 0.04, "float32": 0.02}
INTERPRETED = {"bfloat16": 0.04, "float32": 2e-5}


def compare(*, dtype: str, interpret: bool) -> dict[str, Any]:
    """The largest difference of output and of gradients, as a share of the largest element."""
    keys = jax.random.split(jax.random.key(0), 4)
    length = INTERPRETED_LENGTH if interpret else LENGTH
    shapes = [(1, length, heads, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    q, k, v, weight = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))
    segments = (jnp.arange(length) // 100)[None].astype(jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def both(form, q, k, v):
        out, back = jax.vjp(lambda *a: form(*a, segments), q, k, v)
        return [out, *back(weight)]

    kernel = both(functools.partial(attention.splash_attention, interpret=interpret), q, k, v)
    plain = both(attention.plain, q, k, v)
    names = ("output", "d query", "d key", "d value")
    apart = {name: _apart(a, b) for name, a, b in zip(names, kernel, plain, strict=True)}
    return {"dtype": dtype, "apart": apart, "tolerance": (INTERPRETED if interpret else TOLERANCE)[dtype]}


def _apart(a: jax.Array, b: jax.Array) -> float:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.abs(a - b).max() / jnp.abs(b).max())


def look() -> dict[str, Any]:
    """The comparison in both dtypes, with how the kernel ran; on the first chip of this host."""
    device = jax.local_devices()[0]
    interpret = device.platform != "tpu"
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        found = [compare(dtype=dtype, interpret=interpret) for dtype in ("bfloat16", "float32")]
    is_right = all(value <= f["tolerance"] for f in found for value in f["apart"].values())
    how = "interpreted: this is no TPU" if interpret else f"on {device.device_kind}"
    return {"platform": device.platform, "kernel": how, "compared": found, "ok": is_right}
