"""Reads the arrays of a saved step, written by any number of hosts and with any mesh."""

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore

from core.checkpoints import reading, steps
from core.checkpoints.steps import DamagedError
from core.files import paths

_KIND = ".zarray"  # the file with an array's dtype and shape
_DIRECTORY_BYTES = 2**26
_AHEAD_BYTES = 2**28  # limit on the bytes of blocks that are read ahead
_TOGETHER_BYTES = 96 * 10**9  # limit on the host memory used for arrays that `read_arrays` reads at the same time
_FILES_TOGETHER = 128
_JOINED_BY = "."  # separator in the names under which arrays are stored; elsewhere it is "/"


class Block(NamedTuple):
    """A part of an array; `origin` is the index of its first element."""

    origin: tuple[int, ...]
    values: np.ndarray


class Arrays:
    """The arrays of one saved step, named as by `reading.by_name`."""

    def __init__(self, step_folder: paths.Path):
        self._files = {"driver": "ocdbt", "base": paths.kvstore(step_folder / steps.STATE_PART)}
        # The cache makes TensorStore read the directory of a bucket once, and not once per array.
        self._context = tensorstore.Context(
            {
                "cache_pool": {"total_bytes_limit": _DIRECTORY_BYTES},
                "file_io_concurrency": {"limit": _FILES_TOGETHER},
            }
        )
        keys = tensorstore.KvStore.open(self._files, context=self._context).result().list().result()
        ends = f"/{_KIND}".encode()
        stored = [key.removesuffix(ends).decode() for key in keys if key.endswith(ends)]
        self._stored = {_comparable(name): name for name in stored}

    def __contains__(self, name: str) -> bool:
        return _comparable(name) in self._stored

    def kind(self, name: str) -> str:
        """Returns dtype and shape: `float32[8, 6]`."""
        opened = self._open(name)
        return f"{opened.dtype.name}{list(opened.shape)}"

    def number(self, name: str) -> int:
        """Returns the array's fingerprint (`reading.fingerprints`)."""
        shape = self._open(name).shape
        numbers = (
            reading.fingerprint_of_block(block.values, origin=block.origin, shape=shape) for block in self.blocks(name)
        )
        return sum(numbers) % 2**32

    def blocks(self, name: str) -> Iterator[Block]:
        """Yields an array in the blocks in which it was written."""
        opened = self._open(name)
        waiting: collections.deque[tuple[tuple[int, ...], Any]] = collections.deque()
        bytes_each = max(math.prod(_block_shape(opened)) * opened.dtype.numpy_dtype.itemsize, 1)
        for origin in _origins(opened):
            waiting.append((origin, opened[_region(opened, origin)].read()))
            if len(waiting) * bytes_each > _AHEAD_BYTES:
                yield _finished(*waiting.popleft())
        while waiting:
            yield _finished(*waiting.popleft())

    def read(self, name: str, block: Block) -> np.ndarray:
        """Reads the part of `name` at the place of `block`."""
        region = tuple(slice(o, o + n) for o, n in zip(block.origin, block.values.shape, strict=True))
        return self._open(name)[region].read().result()

    def part(self, name: str, index: int | None) -> np.ndarray:
        """Reads the entry at an index of the first axis; None: the whole array."""
        opened = self._open(name)
        return (opened if index is None else opened[index]).read().result()

    def placed(self, wanted: Mapping[str, Any]) -> Iterator[jax.Array]:
        """Yields the arrays of `wanted` (jax.ShapeDtypeStruct with shardings, by name) in order."""
        opening = {name: self._opening(name) for name in wanted}
        begun = {name: _Shards(name, opening[name].result(), leaf) for name, leaf in wanted.items()}
        for name, leaf in wanted.items():
            yield jax.make_array_from_callback(leaf.shape, leaf.sharding, begun.pop(name), dtype=leaf.dtype)

    def _open(self, name: str) -> Any:
        return self._opening(name).result()

    def _opening(self, name: str) -> Any:
        if name not in self:
            raise FileNotFoundError(f"no array {name}")
        spec = {
            "driver": "zarr",
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
            "fill_missing_data_reads": False,
            "kvstore": {**self._files, "path": f"{self._stored[_comparable(name)]}/"},
        }
        return tensorstore.open(spec, open=True, read=True, context=self._context)


class _Shards:
    """Starts to read this host's shards of an array; calling it with an index waits for that shard."""

    def __init__(self, name: str, opened: Any, leaf: Any):
        if opened.shape != leaf.shape:
            raise DamagedError(f"{name} has shape {list(opened.shape)}, not {list(leaf.shape)}")
        self._shape, self._dtype = leaf.shape, leaf.dtype
        places = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        once = {self._bounds(index): index for index in places}  # several devices may have the same shard
        self._reads = {bounds: opened[index].read() for bounds, index in once.items()}

    def __call__(self, index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return self._reads[self._bounds(index)].result().astype(self._dtype, copy=False)

    def _bounds(self, index: tuple[slice, ...]) -> tuple[tuple[int, int, int], ...]:
        return tuple(part.indices(size) for part, size in zip(index, self._shape, strict=True))


def _comparable(name: str) -> str:
    return name.replace("/", _JOINED_BY)


def _block_shape(opened: Any) -> tuple[int, ...]:
    return tuple(opened.chunk_layout.read_chunk.shape or ())  # None for a scalar


def _origins(opened: Any) -> Iterator[tuple[int, ...]]:
    sizes = zip(opened.shape, _block_shape(opened), strict=True)
    return itertools.product(*(range(0, whole, part) for whole, part in sizes))


def _region(opened: Any, origin: tuple[int, ...]) -> tuple[slice, ...]:
    sizes = zip(origin, _block_shape(opened), opened.shape, strict=True)
    return tuple(slice(begin, min(begin + part, whole)) for begin, part, whole in sizes)


def _finished(origin: tuple[int, ...], pending: Any) -> Block:
    return Block(origin, pending.result())


def read_arrays(step_folder: paths.Path, abstract_state: Any) -> Any:
    """Returns a tree like `abstract_state` with the arrays of the same names; not collective.

    `abstract_state` is a tree of jax.ShapeDtypeStruct with shardings.
    """
    stored, wanted = Arrays(step_folder), reading.by_name(abstract_state)
    groups = grouped(wanted, size=reading.host_bytes, most=_TOGETHER_BYTES)
    found = [array for group in groups for array in stored.placed(group)]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), found)


def grouped(wanted: Mapping[str, Any], *, size: Callable[[Any], int], most: int) -> Iterator[dict[str, Any]]:
    """Yields arrays to read together, in order: of at most `most` bytes by `size`, or a single larger one."""
    group: dict[str, Any] = {}
    group_bytes = 0
    for name, leaf in wanted.items():
        own_bytes = size(leaf)
        if group and group_bytes + own_bytes > most:
            yield group
            group, group_bytes = {}, 0
        group[name] = leaf
        group_bytes += own_bytes
    if group:
        yield group
