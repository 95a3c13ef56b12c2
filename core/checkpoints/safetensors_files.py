"""Reads slices of the tensors in a folder of safetensors files, local or remote, without reading whole files.

A file consists of the header's length (8 bytes), a JSON header with dtype, shape and offset of every tensor, and the
tensors' bytes (https://github.com/huggingface/safetensors). Local files are memory-mapped; from remote files, only the
needed rows are read. `core.checkpoints.published` writes files, with the safetensors library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from core import paths, units
from core.errors import UserError

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
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")


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

    Raises:
      UserError: there are no safetensors files, one is missing or truncated, or one is malformed.
    """
    return {name: tensor for file in _files(folder) for name, tensor in _header(file).items()}


def _files(folder: paths.Path) -> list[paths.Path]:
    if (folder / INDEX).exists():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        if missing := [name for name in names if not (folder / name).exists()]:
            raise UserError(
                f"{folder}: {INDEX} names {units.counted(len(names), 'file')}, of which {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing; download the folder again"
            )
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickles = [name for name in _PICKLES if (folder / name).exists()]
    if pickles:
        raise UserError(
            f"{folder}: the weights are torch pickles ({', '.join(pickles)}), which can run any code when they are "
            "read, and are not supported; save the model again with transformers: model.save_pretrained(folder)"
        )
    raise UserError(f"{folder}: no *.safetensors files; expected model.safetensors or {INDEX} with its files")


def _header(file: paths.Path) -> dict[str, Tensor]:
    """Reads the header of one file, and compares the size that it implies with the file's."""
    size = file.stat().length
    try:
        with file.open("rb") as opened:
            length = min(int.from_bytes(opened.read(8), "little"), size)
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        entries = {
            name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]) for name, entry in header.items()
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
    return {
        name: Tensor(file, _DTYPES[dtype], shape, 8 + length + start)
        for name, (dtype, shape, start, _) in entries.items()
    }


def read(tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of a tensor, in its stored dtype.

    Args:
      tensor: from `tensors`.
      index: a slice with a start and a stop for each dimension.
    """
    if not paths.is_remote(tensor.file):
        mapped = np.memmap(tensor.file, tensor.dtype, "r", offset=tensor.start, shape=tensor.shape or (1,))
        return np.array(mapped.reshape(tensor.shape)[index])
    rows = index[0] if index else slice(0, 1)
    row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.start + rows.start * row_bytes)
        found = np.frombuffer(opened.read((rows.stop - rows.start) * row_bytes), tensor.dtype)
    if not index:
        return found.reshape(())
    return found.reshape(rows.stop - rows.start, *tensor.shape[1:])[(slice(None), *index[1:])]
