"""A round trip of every collective on every axis of a mesh: whether the numbers are right, and how fast they came.

Chip p of n along an axis holds n chunks; chunk c is filled with p + c. So every answer is known in advance:

    all-reduce       chunk c: n (n - 1) / 2 + n c
    all-gather       row q, chunk c: q + c
    reduce-scatter   n (n - 1) / 2 + n p
    all-to-all       row q: q + p
    permute          chunk c: (p - 1) mod n + c
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.health import phase

REPEATS = 3


class Trip(NamedTuple):
    """One collective on one axis.

    Attributes:
      collective: its name.
      axis: of the mesh.
      chips: along the axis.
      is_right: whether this host's chips got what they should.
      bytes_per_second: that left each chip, by the least that the collective must send; the fastest of some.
    """

    collective: str
    axis: str
    chips: int
    is_right: bool
    bytes_per_second: float


class _Kind(NamedTuple):
    """A collective, what chip p of n must hold after it (rows x chunks), and the share of its array a chip sends."""

    run: Callable
    want: Callable[[int, int], np.ndarray]
    sent: Callable[[int], float]


def _kinds(axis: str, n: int) -> Mapping[str, _Kind]:
    chunks, total = np.arange(n), n * (n - 1) // 2
    ring = [(p, (p + 1) % n) for p in range(n)]
    lax = jax.lax
    return {
        "all-reduce": _Kind(
            lambda x: lax.psum(x, axis), lambda p, n: (total + n * chunks)[None], lambda n: 2 * (n - 1) / n
        ),
        "all-gather": _Kind(
            lambda x: lax.all_gather(x, axis, axis=0, tiled=True),
            lambda p, n: chunks[:, None] + chunks,
            lambda n: n - 1,
        ),
        "reduce-scatter": _Kind(
            lambda x: lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True),
            lambda p, n: np.full((1, 1), total + n * p),
            lambda n: (n - 1) / n,
        ),
        "all-to-all": _Kind(
            lambda x: lax.all_to_all(x, axis, 1, 0, tiled=True),
            lambda p, n: (chunks + p)[:, None],
            lambda n: (n - 1) / n,
        ),
        "permute": _Kind(
            lambda x: lax.ppermute(x, axis, ring), lambda p, n: ((p - 1) % n + chunks)[None], lambda n: 1.0
        ),
    }


def trips(mesh: Mesh, *, bytes_per_chip: int) -> list[Trip]:
    """Every collective on every axis that has more than one chip; all hosts call it.

    Args:
      mesh: of all chips.
      bytes_per_chip: float32 that each chip begins with, about.
    """
    return [
        _trip(mesh, axis, name, kind, bytes_per_chip)
        for axis, n in mesh.shape.items()
        if n > 1
        for name, kind in _kinds(axis, n).items()
    ]


def _trip(mesh: Mesh, axis: str, name: str, kind: _Kind, bytes_per_chip: int) -> Trip:
    phase.at(f"{name} along {axis}")
    n = mesh.shape[axis]
    chunk = max(1, bytes_per_chip // 4 // n)
    split = PartitionSpec(mesh.axis_names)
    along = np.arange(mesh.size) // (mesh.size // np.cumprod(list(mesh.shape.values()))[_at(mesh, axis)]) % n

    def block(index):
        chips = range(*index[0].indices(mesh.size))
        return np.stack([np.repeat(along[chip] + np.arange(n, dtype=np.float32), chunk) for chip in chips])

    sharding = NamedSharding(mesh, split)
    have = jax.make_array_from_callback((mesh.size, n * chunk), sharding, block)
    step = jax.jit(jax.shard_map(kind.run, mesh=mesh, in_specs=split, out_specs=split))
    got = jax.block_until_ready(step(have))
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        got = jax.block_until_ready(step(have))
        seconds.append(time.perf_counter() - started)
    rows = got.shape[0] // mesh.size
    is_right = all(
        np.array_equal(
            np.asarray(shard.data),
            np.repeat(kind.want(int(along[(shard.index[0].start or 0) // rows]), n), chunk, axis=1).astype(np.float32),
        )
        for shard in got.addressable_shards
    )
    return Trip(name, axis, n, is_right, kind.sent(n) * 4 * n * chunk / min(seconds))


def _at(mesh: Mesh, axis: str) -> int:
    return mesh.axis_names.index(axis)
