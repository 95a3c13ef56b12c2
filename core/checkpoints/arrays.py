"""Reads the arrays of a saved step block by block, on a single machine and without the model.

It reads steps written by any number of hosts and with any mesh. A block is the shard that one device wrote; only a few
are in memory at a time, so the step may be larger than the machine's memory. No accelerator is used, so a step can be
read while a job runs.
"""

import collections
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorstore

from core.checkpoints import reading
from core.checkpoints.reading import JOINED_BY
from core.files import paths

PART = "state"  # subfolder of a step's folder
_KIND = ".zarray"  # the file with an array's dtype and shape
_DIRECTORY_BYTES = 2**26
_AHEAD_BYTES = 2**28  # limit on the bytes that are read ahead


class Block(NamedTuple):
    """A part of an array.

    Attributes:
      origin: index of its first element, one per axis.
      values: its elements.
    """

    origin: tuple[int, ...]
    values: np.ndarray


class Arrays:
    """The arrays of one step, by the names of `reading.by_name`."""

    def __init__(self, step_folder: paths.Path):
        """Lists the arrays. Damaged files cause exceptions of many types."""
        self._files = {"driver": "ocdbt", "base": paths.kvstore(step_folder / PART)}
        # The cache makes TensorStore read the directory of a bucket once, and not once per array.
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _DIRECTORY_BYTES}})
        keys = tensorstore.KvStore.open(self._files, context=self._context).result().list().result()
        ends = f"/{_KIND}".encode()
        stored = [key.removesuffix(ends).decode() for key in keys if key.endswith(ends)]
        self._stored = {_comparable(name): name for name in stored}

    def __contains__(self, name: str) -> bool:
        return _comparable(name) in self._stored

    def kind(self, name: str) -> str:
        """Returns dtype and shape as text: `float32[8, 6]`."""
        opened = self._open(name)
        return f"{opened.dtype.name}{list(opened.shape)}"

    def number(self, name: str) -> int:
        """Returns the fingerprint of the array, equal to that of `reading.fingerprints`."""
        shape = self._open(name).shape
        numbers = (
            reading.fingerprint_of_block(block.values, origin=block.origin, shape=shape) for block in self.blocks(name)
        )
        return sum(numbers) % 2**32

    def blocks(self, name: str) -> Iterator[Block]:
        """Yields every block; the next ones are read in the background."""
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
        """Reads the part of `name` at the same place as a block of another array of the same shape."""
        region = tuple(slice(o, o + n) for o, n in zip(block.origin, block.values.shape, strict=True))
        return self._open(name)[region].read().result()

    def part(self, name: str, index: int | None) -> np.ndarray:
        """Reads a whole array, or its entry at this index of the first axis."""
        opened = self._open(name)
        return (opened if index is None else opened[index]).read().result()

    def _open(self, name: str) -> Any:
        spec = {
            "driver": "zarr",
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
            "fill_missing_data_reads": False,
            "kvstore": {**self._files, "path": f"{self._stored[_comparable(name)]}/"},
        }
        return tensorstore.open(spec, open=True, read=True, context=self._context).result()


def _comparable(name: str) -> str:
    """Normalizes a name, so that the one in a description equals the one under which the array is stored."""
    return name.replace("/", JOINED_BY)


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
