"""Reads slices of the tensors in a folder of safetensors files, without reading whole files.

A file consists of the header's length (8 bytes), a JSON header with dtype, shape and offset of every tensor, and the
tensors' bytes (https://github.com/huggingface/safetensors).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from core import units
from core.checkpoints import published_files
from core.errors import UserError
from core.files import foreign_json, paths

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
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_BLOCK = 2**22  # numbers that are compared at a time
Slices = tuple[slice, ...]


class Stored(Protocol):
    """An array that is read in parts."""

    @property
    def file(self) -> paths.Path:
        """The file that contains the numbers."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype that readers return."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""

    def reader(self, parts: Sequence[Slices]) -> Callable[[Slices], np.ndarray]:
        """Returns a function that reads one of `parts`, which have a slice for each dimension."""


class Tensor(NamedTuple):
    """The location of a tensor in a file; `start` is the offset of its bytes."""

    file: paths.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    def reader(self, parts: Sequence[Slices]) -> Callable[[Slices], np.ndarray]:
        """Returns a function that reads one of `parts`."""
        return Reader(self, parts)


def tensors(folder: paths.Path) -> Mapping[str, Tensor]:
    """Returns the tensors of a folder by name, from the headers of its files.

    `model.safetensors` wins over an index, and an index over other files. Raises UserError if there are none, two have
    the same name, or files are damaged.
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
    try:
        weight_map = foreign_json.load_object((folder / INDEX).read_bytes(), {"weight_map": dict})["weight_map"]
        if wrong := [name for name in weight_map.values() if not isinstance(name, str)]:
            raise foreign_json.MalformedError(f"{wrong[0]!r} is not the name of a file")
    except (foreign_json.MalformedError, IsADirectoryError) as error:
        raise UserError(
            f"{folder / INDEX}: malformed ({error}); expected an object with weight_map, the name of a file for each "
            "tensor. Download it again"
        ) from error
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if "/" in name or name in ("", ".", "..")]:
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
    others = {name: tensor for header in headers.values() for name, tensor in header.items()}
    return {**others, **{name: headers[file][name] for name, file in weight_map.items()}}


def _header(file: paths.Path) -> dict[str, Tensor]:
    size = file.stat().length
    try:
        if size < 8:
            raise foreign_json.MalformedError(f"it has {size} bytes")
        length = int.from_bytes(paths.read_range(file, 0, 8), "little")
        header = foreign_json.load_object(paths.read_range(file, 8, min(8 + length, size)))
        header.pop("__metadata__", None)
        entries = {name: _entry(name, entry) for name, entry in header.items()}
    except (foreign_json.MalformedError, IsADirectoryError) as error:
        raise UserError(f"{file}: not a safetensors file ({error}); download it again") from error
    expected = 8 + length + max((entry.end for entry in entries.values()), default=0)
    if size != expected:
        raise UserError(
            f"{file}: {size} bytes, expected {expected}: the file is truncated or damaged; download it again"
        )
    unknown = {entry.dtype for entry in entries.values()} - _DTYPES.keys()
    if unknown:
        raise UserError(
            f"{file}: tensors of dtype {', '.join(sorted(unknown))}; supported are {', '.join(_DTYPES)}. Quantized "
            "weights must be converted to float first"
        )
    _require_gapless(file, entries)
    return {
        name: Tensor(file, _DTYPES[entry.dtype], entry.shape, 8 + length + entry.start)
        for name, entry in entries.items()
    }


class _Entry(NamedTuple):
    """A tensor in a header; `start` and `end` are in bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _entry(name: str, entry: Any) -> _Entry:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]} if all(
            foreign_json.is_a(number, int) and number >= 0 for number in (*shape, start, end)
        ):
            return _Entry(dtype, tuple(shape), start, end)
    raise foreign_json.MalformedError(
        f"{name}: {str(entry)[:80]}; expected a dtype, a shape and two data_offsets, in integers from 0 up"
    )


def _require_gapless(file: paths.Path, entries: Mapping[str, _Entry]) -> None:
    at = 0
    for name, (dtype, shape, start, end) in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        wanted = math.prod(shape) * _DTYPES[dtype].itemsize
        if end - start != wanted:
            raise UserError(
                f"{file}: {name} has {end - start} bytes, expected {wanted} for {dtype} {list(shape)}: the header is "
                "damaged; download the file again"
            )
        if start != at:
            how = "overlaps the tensor before it" if start < at else "leaves unused bytes before it"
            raise UserError(
                f"{file}: {name} begins at byte {start}, expected {at}: it {how}, so the header is damaged; download "
                "the file again"
            )
        at = end


class Reader:
    """Reads parts of a tensor, in its stored dtype."""

    def __init__(self, tensor: Tensor, parts: Iterable[Slices]):
        """Maps a local file into memory, or reads the rows that the parts need from a remote one."""
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
        """Returns one of the parts as a view, not a copy."""
        if not part:
            return self._blocks[0][2].reshape(())
        rows = part[0]
        first, _, block = next(b for b in self._blocks if b[0] <= rows.start and rows.stop <= b[1])
        return block[(slice(rows.start - first, rows.stop - first), *part[1:])]


def are_equal(one: Stored, other: Stored, rows: int | None = None) -> bool:
    """Returns whether two tensors of equal shape hold the same numbers in float32.

    `rows` limits the comparison to the first rows; None: all.
    """
    length, *others = one.shape or (1,)
    length = length if rows is None else min(rows, length)
    step = max(1, _BLOCK // max(1, math.prod(others)))
    for start in range(0, length, step):
        part = (slice(start, min(start + step, length)), *(slice(0, size) for size in others))[: len(one.shape)]
        first, second = (tensor.reader([part])(part).astype(np.float32) for tensor in (one, other))
        if not np.array_equal(first, second, equal_nan=True):
            return False
    return True


def _union(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
