"""Reads slices of the tensors in a folder of safetensors files, local or remote, without reading whole files.

A file consists of the header's length (8 bytes), a JSON header with dtype, shape and offset of every tensor, and the
tensors' bytes (https://github.com/huggingface/safetensors). Local files are memory-mapped; of remote files, the needed
rows are read, each once. `core.checkpoints.published` writes files, with the safetensors library.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from core import paths, published_files, units
from core.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
Slices = tuple[slice, ...]


class Tensor(NamedTuple):
    """The location of a tensor in a file.

    Attributes:
      file: the file.
      dtype: as stored.
      shape: as stored.
      start: offset of its bytes in the file.
    """

    file: paths.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int


def tensors(folder: paths.Path) -> Mapping[str, Tensor]:
    """Returns the tensors of a folder by name, from the headers of its files.

    As in transformers, `model.safetensors` wins over an index, and files that the index does not name are not read.

    Raises:
      UserError: there are no safetensors files, one is missing or truncated, or one is malformed.
    """
    if (folder / SINGLE).exists():
        return _header(folder / SINGLE)
    if (folder / INDEX).exists():
        return _indexed(folder)
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        header = _header(file)
        if twice := sorted(found.keys() & header.keys()):
            raise UserError(
                f"{folder}: {twice[0]} is in {found[twice[0]].file.name} and in {file.name}: remove the files that are "
                f"not of this model, or download the folder again with {INDEX}"
            )
        found |= header
    if found:
        return found
    raise UserError(f"{folder}: {published_files.without_safetensors([file.name for file in folder.glob('*')])}")


def _indexed(folder: paths.Path) -> dict[str, Tensor]:
    """Returns the tensors that an index names, from the files that it names."""
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f"{wrong[0]!r} is not the name of a file")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / INDEX}: malformed ({type(error).__name__}: {error}); expected an object with weight_map, the "
            "name of a file for each tensor. Download it again"
        ) from error
    if outside := [name for name in names if "/" in name]:
        raise UserError(f"{folder / INDEX}: the file {outside[0]!r} is outside of the folder; download it again")
    if missing := [name for name in names if not (folder / name).exists()]:
        raise UserError(
            f"{folder}: {INDEX} names {units.counted(len(names), 'file')}, of which {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; download the folder again"
        )
    headers = {name: _header(folder / name) for name in names}
    if absent := [name for name, file in weight_map.items() if name not in headers[file]]:
        raise UserError(
            f"{folder}: {INDEX} names {units.counted(len(absent), 'tensor')} that the files do not have, such as "
            f"{absent[0]} in {weight_map[absent[0]]}; download the folder again"
        )
    return {name: headers[file][name] for name, file in weight_map.items()}


def _header(file: paths.Path) -> dict[str, Tensor]:
    """Reads the header of one file, and compares the size that it implies with the file's."""
    size = file.stat().length
    try:
        length = int.from_bytes(paths.read_range(file, 0, min(8, size)), "little")
        header = json.loads(paths.read_range(file, 8, min(8 + length, size)))
        header.pop("__metadata__", None)
        entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {
            name: (str(entry["dtype"]), tuple(map(int, entry["shape"])), *_pair(entry["data_offsets"]))
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: not a safetensors file ({error}); download it again") from error
    expected = 8 + length + max((end for *_, end in entries.values()), default=0)
    if size != expected:
        raise UserError(
            f"{file}: {size} bytes, expected {expected}: the file is truncated or damaged; download it again"
        )
    unknown = {dtype for dtype, *_ in entries.values()} - _DTYPES.keys()
    if unknown:
        raise UserError(
            f"{file}: tensors of dtype {', '.join(sorted(unknown))}; supported are {', '.join(_DTYPES)}. Quantized "
            "weights must be converted to float first"
        )
    for name, (dtype, shape, start, end) in entries.items():
        if start < 0 or end - start != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise UserError(
                f"{file}: {name} has {end - start} bytes, expected {math.prod(shape) * _DTYPES[dtype].itemsize} for "
                f"{dtype} {list(shape)}: the header is damaged; download the file again"
            )
    return {
        name: Tensor(file, _DTYPES[dtype], shape, 8 + length + start)
        for name, (dtype, shape, start, _) in entries.items()
    }


def _pair(offsets: Sequence[int]) -> tuple[int, int]:
    start, end = offsets
    return int(start), int(end)


class Reader:
    """Reads parts of a tensor, in its stored dtype."""

    def __init__(self, tensor: Tensor, parts: Iterable[Slices]):
        """Reads the rows that the parts need from a remote file, each once; maps a local file into memory.

        Args:
          tensor: from `tensors`.
          parts: what will be read: a slice with a start and a stop for each dimension.
        """
        self._blocks: list[tuple[int, int, np.ndarray]] = []  # first row, end, rows
        shape = tensor.shape or (1,)
        if not paths.is_remote(tensor.file):
            mapped = np.memmap(tensor.file, tensor.dtype, "r", offset=tensor.start, shape=shape)
            self._blocks.append((0, shape[0], mapped))
            return
        row_bytes = math.prod(shape[1:]) * tensor.dtype.itemsize
        for start, stop in _union((part[0].start, part[0].stop) if part else (0, 1) for part in parts):
            content = paths.read_range(tensor.file, tensor.start + start * row_bytes, tensor.start + stop * row_bytes)
            rows = np.frombuffer(content, tensor.dtype).reshape(stop - start, *shape[1:])
            self._blocks.append((start, stop, rows))

    def __call__(self, part: Slices) -> np.ndarray:
        """Returns one of the parts; not a copy."""
        if not part:
            return self._blocks[0][2].reshape(())
        rows = part[0]
        first, _, block = next(b for b in self._blocks if b[0] <= rows.start and rows.stop <= b[1])
        return block[(slice(rows.start - first, rows.stop - first), *part[1:])]


def _union(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the union of half-open ranges, as ranges in order that do not touch."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
