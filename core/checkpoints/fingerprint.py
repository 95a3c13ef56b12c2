"""Fingerprints of arrays: 32-bit hashes that do not depend on the sharding.

Each element is hashed together with its index in the global array, and the hashes are summed modulo 2^32 in any order.
Arrays that differ in one element always have different fingerprints, because the hash is a bijection (the finalizer of
MurmurHash3); other different arrays have equal fingerprints with probability 2^-32.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

_SPREAD = 0x9E3779B9  # multiplier of the index
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


@jax.jit
def _all(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: number(leaf) for name, leaf in leaves.items()}


def of(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
    """Returns the fingerprint of each array, on every host.

    Args:
      leaves: arrays of any dtype and sharding, all on the same devices.
    """
    return {name: int(number) for name, number in jax.device_get(_all(dict(leaves))).items()}


def of_block(values: np.ndarray, *, origin: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Returns the contribution of a block to an array's fingerprint: the sum over all blocks modulo 2^32.

    It is computed with numpy on the host.

    Args:
      values: the block.
      origin: index of its first element in the array, one per axis.
      shape: shape of the array.
    """
    words = _host_words(values)
    if words.ndim > values.ndim:  # of 8 bytes, two
        origin, shape = (*origin, 0), (*shape, 2)
    place = np.zeros(words.shape, np.uint32)
    for axis, (begin, size) in enumerate(zip(origin, shape, strict=True)):
        here = (np.arange(begin, begin + words.shape[axis]) % 2**32).astype(np.uint32)
        place *= np.uint32(size % 2**32)
        place += here.reshape([-1 if other == axis else 1 for other in range(words.ndim)])
    place *= np.uint32(_SPREAD)
    with np.errstate(over="ignore"):
        return int(np.sum(_mixed(words ^ place), dtype=np.uint32))


def _host_words(values: np.ndarray) -> np.ndarray:
    size = values.dtype.itemsize
    plain = np.ascontiguousarray(values).reshape(-1).view(np.dtype(f"u{min(size, 4)}"))
    return plain.astype(np.uint32).reshape(values.shape if size <= 4 else (*values.shape, 2))


def number(x: jax.Array) -> jax.Array:
    """Returns the fingerprint of one array, [] uint32; for use inside jitted functions."""
    words = _words(x)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(_mixed(words ^ (place * jnp.uint32(_SPREAD))), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of every element as uint32; elements of 8 bytes give two."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)


def _mixed(h: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))
