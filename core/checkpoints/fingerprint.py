"""A number that stands for what is in an array, the same however the array is spread over chips.

Every element is mixed with its place in the whole array, and the results are summed modulo 2^32, whatever the order. An
array that differs in one element, by one bit or more, always has another number, for the mixing is a bijection (the
finalizer of MurmurHash3); of arrays that differ otherwise, one in 2^32 has the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


@jax.jit
def _all(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _one(leaf) for name, leaf in leaves.items()}


def of(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
    """The number of each array, on every host.

    Args:
      leaves: arrays of any dtype and layout, all on the same devices.
    """
    return {name: int(number) for name, number in jax.device_get(_all(dict(leaves))).items()}


def _one(x: jax.Array) -> jax.Array:
    words = _words(x)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(_mixed(words ^ (place * jnp.uint32(0x9E3779B9))), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of every element, as uint32; of 8 bytes, two."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)


def _mixed(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
