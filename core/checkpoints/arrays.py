"""The arrays of one saved step, read by a single machine that knows nothing of the model, a block at a time.

The one idea: how many hosts wrote a step and over which mesh does not matter, nor does it matter whether this machine
could hold it. A block is what one device wrote; a few of them are in memory at once, and no accelerator is touched, so
a step can be looked at beside the job that writes the next.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorstore

from core import paths
from core.checkpoints import fingerprint

PART = "state"  # of a step's folder
JOINED_BY = "."  # the names under which orbax stores arrays, where descriptions have "/"
_KIND = ".zarray"  # the file of an array that says what it is
_DIRECTORY_BYTES = 2**26
_AHEAD_BYTES = 2**28  # so much is asked for before it is looked at


class Block(NamedTuple):
    """A part of an array.

    Attributes:
      origin: where it begins, one index an axis.
      values: what is there.
    """

    origin: tuple[int, ...]
    values: np.ndarray


class Arrays:
    """The arrays of one step by name, as `leaves.by_name` names them."""

    def __init__(self, step_folder: paths.Path):
        """Reads what arrays there are; errors are of many types, whatever files and formats make of a wrong byte."""
        self._files = {"driver": "ocdbt", "base": _store(step_folder / PART)}
        # The directory of a bucket's files is asked for once, not once an array.
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _DIRECTORY_BYTES}})
        keys = tensorstore.KvStore.open(self._files, context=self._context).result().list().result()
        ends = f"/{_KIND}".encode()
        stored = [key.removesuffix(ends).decode() for key in keys if key.endswith(ends)]
        self._stored = {_comparable(name): name for name in stored}

    def __contains__(self, name: str) -> bool:
        return _comparable(name) in self._stored

    def kind(self, name: str) -> str:
        """`float32[8, 6]`."""
        opened = self._open(name)
        return f"{opened.dtype.name}{list(opened.shape)}"

    def number(self, name: str) -> int:
        """What `fingerprint.of` says of the array."""
        shape = self._open(name).shape
        numbers = (fingerprint.of_block(block.values, origin=block.origin, shape=shape) for block in self.blocks(name))
        return sum(numbers) % 2**32

    def blocks(self, name: str) -> Iterator[Block]:
        """Every block, read ahead of use."""
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
        """The part of `name` that stands where a block of another array of its shape does."""
        region = tuple(slice(o, o + n) for o, n in zip(block.origin, block.values.shape, strict=True))
        return self._open(name)[region].read().result()

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
    """Equal for the name that an array has in a description and the one that it is stored under."""
    return name.replace("/", JOINED_BY)


def _store(folder: paths.Path) -> dict[str, str]:
    if not paths.is_remote(folder):
        return {"driver": "file", "path": f"{folder}/"}
    bucket, _, path = str(folder).removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}


def _block_shape(opened: Any) -> tuple[int, ...]:
    return tuple(opened.chunk_layout.read_chunk.shape or ())  # None where there are no axes


def _origins(opened: Any) -> Iterator[tuple[int, ...]]:
    sizes = zip(opened.shape, _block_shape(opened), strict=True)
    return itertools.product(*(range(0, whole, part) for whole, part in sizes))


def _region(opened: Any, origin: tuple[int, ...]) -> tuple[slice, ...]:
    sizes = zip(origin, _block_shape(opened), opened.shape, strict=True)
    return tuple(slice(begin, min(begin + part, whole)) for begin, part, whole in sizes)


def _finished(origin: tuple[int, ...], reading: Any) -> Block:
    return Block(origin, reading.result())
