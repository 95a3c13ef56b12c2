"""Names, describes and compares the leaves of a state; the description of an array includes a 32-bit fingerprint.

A fingerprint does not depend on the sharding. Each element is hashed together with its index in the global array, and
the hashes are summed modulo 2^32 in any order. Arrays that differ in one element always have different fingerprints,
because the hash is a bijection (the finalizer of MurmurHash3); other different arrays have equal fingerprints with
probability 2^-32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from core.errors import UserError

JOINED_BY = "."  # separator in the names under which Orbax stores arrays; here it is "/"
_SPREAD = 0x9E3779B9  # multiplier of the index
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


class Misfit(UserError):
    """A checkpoint does not fit the requested state."""


def by_name(tree: Any, *, joined_by: str = "/") -> dict[str, Any]:
    """Returns leaves by name, such as "params/decoder/linear/w"; names are equal for a NamedTuple and Orbax's dict."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        joined_by.join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path): leaf
        for path, leaf in flat
    }


def host_bytes(state: Any) -> int:
    """Returns the bytes of all arrays on this host, counting a shard once if several devices have it.

    Args:
      state: a tree of jax.Array, or of jax.ShapeDtypeStruct with shardings.
    """
    total = 0
    for leaf in by_name(state).values():
        places = {str(place) for place in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}
        total += len(places) * math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total


def require_arrays(state: Any) -> None:
    """Raises TypeError if a leaf is not a jax.Array."""
    wrong = {name: type(leaf).__name__ for name, leaf in by_name(state).items() if not isinstance(leaf, jax.Array)}
    if wrong:
        raise TypeError(f"a checkpoint holds jax.Arrays; these leaves are not: {wrong}; put them on the devices first")


def differences(saved: Mapping[str, str], abstract_state: Any) -> list[str]:
    """Returns one line for each leaf that is missing, extra, or of another shape or dtype.

    Args:
      saved: dtypes and shapes by name, as `kind` formats them.
      abstract_state: the requested state.
    """
    wanted = {name: kind(leaf) for name, leaf in by_name(abstract_state).items()}
    lines = [f"{name}: not in the checkpoint, expected {wanted[name]}" for name in wanted if name not in saved]
    lines += [f"{name}: {saved[name]} in the checkpoint, not expected" for name in saved if name not in wanted]
    both = [name for name in wanted if name in saved and saved[name] != wanted[name]]
    return lines + [f"{name}: {saved[name]} in the checkpoint, expected {wanted[name]}" for name in both]


def kind(leaf: Any) -> str:
    """Formats dtype and shape: `float32[8, 6]`."""
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def require_shardings(abstract_state: Any) -> None:
    """Raises Misfit if a leaf has no sharding."""
    without = [name for name, leaf in by_name(abstract_state).items() if getattr(leaf, "sharding", None) is None]
    if without:
        raise Misfit(f"restore needs the sharding of every leaf; missing: {', '.join(without[:20])}")


def describe(state: Any) -> dict[str, list]:
    """Returns dtype, shape and fingerprint of every leaf as JSON: `{"params/w": ["float32[8, 6]", 2864434397]}`."""
    leaves = by_name(state)
    contents = fingerprints(leaves)
    return {name: [kind(leaf), contents[name]] for name, leaf in leaves.items()}


@jax.jit
def _all(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: fingerprint(leaf) for name, leaf in leaves.items()}


def fingerprints(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
    """Returns the fingerprint of each array, on every host.

    Args:
      leaves: arrays of any dtype and sharding, all on the same devices.
    """
    return {name: int(found) for name, found in jax.device_get(_all(dict(leaves))).items()}


def fingerprint_of_block(values: np.ndarray, *, origin: tuple[int, ...], shape: tuple[int, ...]) -> int:
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


def fingerprint(x: jax.Array) -> jax.Array:
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
