"""Reads matrices in FP8 with a scale for each block, in float32.

    x[i, j] = scale_inv[i / R, j / C] E4M3(weight[i, j])          blocks of R x C numbers, the last ones may be smaller

DeepSeek-AI 2024 (DeepSeek-V3), section 3.3.2. Published folders have `NAME` in the dtype F8_E4M3 and its scales in
`NAME_scale_inv`; `weight_block_size` in `quantization_config` is [R, C].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from core.checkpoints.safetensors_files import Slices, Stored, Tensor
from core.errors import UserError
from core.files import paths

METHOD = "fp8"  # its name in `quantization_config`
SIZE = "weight_block_size"
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_SCALES = "_scale_inv"


class Matrix(NamedTuple):
    """An FP8 matrix with a scale for each block.

    Attributes:
      weight: numbers before scaling, [rows, columns] in `E4M3`.
      scales: [blocks of rows, blocks of columns].
      block: rows and columns of a block.
    """

    weight: Tensor
    scales: Tensor
    block: tuple[int, int]

    @property
    def file(self) -> paths.Path:
        """The file that contains `weight`."""
        return self.weight.file

    @property
    def dtype(self) -> np.dtype:
        """float32."""
        return np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns of the matrix."""
        return self.weight.shape

    def reader(self, parts: Sequence[Slices]) -> _Reader:
        """Returns a function that reads one of `parts`, which have a slice of rows and one of columns."""
        return _Reader(self, parts)


class _Reader:
    def __init__(self, matrix: Matrix, parts: Sequence[Slices]):
        self._block = matrix.block
        self._weight = matrix.weight.reader(parts)
        self._scales = matrix.scales.reader([self._of_scales(part) for part in parts])

    def _of_scales(self, part: Slices) -> Slices:
        return tuple(slice(s.start // size, -(-s.stop // size)) for s, size in zip(part, self._block, strict=True))

    def __call__(self, part: Slices) -> np.ndarray:
        where = self._of_scales(part)
        scales = self._scales(where)
        for axis, (own, of_scales, size) in enumerate(zip(part, where, self._block, strict=True)):
            places = np.arange(own.start, own.stop) // size - of_scales.start
            scales = np.take(scales, places, axis=axis)
        return self._weight(part).astype(np.float32) * scales.astype(np.float32)


def dequantized(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the tensors, with a `Matrix` in place of each FP8 tensor and its scales.

    Raises UserError if block size or scales are missing or do not fit.
    """
    block = settings.get(SIZE)
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise UserError(
            f"quantization_config.{SIZE} = {block!r}: expected the rows and columns of a block, such as [128, 128]; "
            "weights with one scale for each matrix are not read"
        )
    found: dict[str, Stored] = dict(tensors)
    for name, weight in tensors.items():
        if weight.dtype != E4M3:
            continue
        if (scales := tensors.get(name + _SCALES)) is None:
            raise UserError(f"{weight.file}: {name} has no {name}{_SCALES} beside it; download the folder again")
        wanted = tuple(-(-size // of) for size, of in zip(weight.shape, block, strict=False))
        is_float = np.issubdtype(scales.dtype, np.floating) or scales.dtype == np.dtype(ml_dtypes.bfloat16)
        if len(weight.shape) != 2 or scales.shape != wanted or not is_float:
            raise UserError(
                f"{weight.file}: {name} has the shape {list(weight.shape)}, its scales {scales.dtype} "
                f"{list(scales.shape)}; expected a matrix, and {list(wanted)} scales in blocks of {block}"
            )
        found[name] = Matrix(weight, scales, (block[0], block[1]))
        del found[name + _SCALES]
    return found
