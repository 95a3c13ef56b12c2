"""Names, describes and compares the leaves of a state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from core.checkpoints import fingerprint
from core.errors import UserError


class Misfit(UserError):
    """A checkpoint does not fit the requested state."""


def by_name(tree: Any, *, joined_by: str = "/") -> dict[str, Any]:
    """Returns leaves by name, such as "params/decoder/linear/w"; equal for a NamedTuple and Orbax's dict of it."""
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
    contents = fingerprint.of(leaves)
    return {name: [kind(leaf), contents[name]] for name, leaf in leaves.items()}
