"""Runs five collectives along each axis of a mesh, checks their results and measures their speed.

Chip p of n along an axis holds n chunks; chunk c is filled with p + c. The results are:

    all-reduce       chunk c: n (n - 1) / 2 + n c
    all-gather       row q, chunk c: q + c
    reduce-scatter   n (n - 1) / 2 + n p
    all-to-all       row q: q + p
    permute          chunk c: (p - 1) mod n + c
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.hosts import activity

REPEATS = 3


class Trip(NamedTuple):
    """The result of one collective on one axis.

    Attributes:
      is_right: whether the results on this host's chips are correct.
      bytes_per_second: bytes that a chip must send, per second of the fastest repeat.
    """

    collective: str
    axis: str
    is_right: bool
    bytes_per_second: float


class _Collective(NamedTuple):
    """`expected`: what chip p must hold after it, [rows, chunks]; `sent`: bytes sent per byte of its input."""

    run: Callable[[jax.Array], jax.Array]
    expected: Callable[[int], np.ndarray]
    sent: float


def _collectives(axis: str, n: int) -> dict[str, _Collective]:
    chunks, total, ring = np.arange(n), n * (n - 1) // 2, [(p, (p + 1) % n) for p in range(n)]
    return {
        "all-reduce": _Collective(lambda x: lax.psum(x, axis), lambda p: (total + n * chunks)[None], 2 * (n - 1) / n),
        "all-gather": _Collective(
            lambda x: lax.all_gather(x, axis, axis=0, tiled=True), lambda p: chunks[:, None] + chunks, n - 1
        ),
        "reduce-scatter": _Collective(
            lambda x: lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True),
            lambda p: np.full((1, 1), total + n * p),
            (n - 1) / n,
        ),
        "all-to-all": _Collective(
            lambda x: lax.all_to_all(x, axis, 1, 0, tiled=True), lambda p: (chunks + p)[:, None], (n - 1) / n
        ),
        "permute": _Collective(lambda x: lax.ppermute(x, axis, ring), lambda p: ((p - 1) % n + chunks)[None], 1.0),
    }


def trips(mesh: Mesh, *, bytes_per_chip: int) -> list[Trip]:
    """Runs five collectives along each mesh axis with more than one chip.

    All hosts must call it. Each chip begins with about `bytes_per_chip` bytes of float32.
    """
    found = []
    for axis, n in mesh.shape.items():
        for name, collective in _collectives(axis, n).items() if n > 1 else ():
            activity.at(f"{name} along {axis}")
            found.append(_trip(mesh, axis, name, collective, chunk=max(1, bytes_per_chip // 4 // n)))
    return found


def _trip(mesh: Mesh, axis: str, name: str, collective: _Collective, *, chunk: int) -> Trip:
    n, split = mesh.shape[axis], PartitionSpec(mesh.axis_names)
    along = np.indices(mesh.devices.shape)[mesh.axis_names.index(axis)].ravel()  # of each chip, its place on the axis

    def block(index: Any) -> np.ndarray:  # of slices
        places = along[index[0], None]
        return np.repeat(places + np.arange(n, dtype=np.float32), chunk, axis=1)

    have = jax.make_array_from_callback((mesh.size, n * chunk), NamedSharding(mesh, split), block)
    step = jax.jit(jax.shard_map(collective.run, mesh=mesh, in_specs=split, out_specs=split))
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
            np.repeat(collective.expected(along[(shard.index[0].start or 0) // rows]), chunk, axis=1),
        )
        for shard in got.addressable_shards
    )
    return Trip(name, axis, is_right, collective.sent * 4 * n * chunk / min(seconds))
