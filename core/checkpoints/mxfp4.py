"""Reads tensors in MXFP4, a format of 4 bits with a shared scale, in bfloat16.

    x[.., 32 i + j] = 2^(scales[.., i] - 127) E2M1(blocks[.., i, j / 2])          j of 32, two numbers in a byte

OCP Microscaling Formats v1.0, section 5.4. Published folders have `NAME_blocks` [E, R, C / 32, 16] and `NAME_scales`
[E, R, C / 32], both uint8, for the transposed matrices [C, R] of E experts. A byte has the earlier number in its low
bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from core.checkpoints.safetensors_files import Slices, Stored, Tensor
from core.errors import UserError
from core.files import paths

METHOD = "mxfp4"  # its name in `quantization_config`
BLOCK = 32  # numbers with one scale
_NAN = 255  # a scale
_BLOCKS, _SCALES = "_blocks", "_scales"
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NUMBERS = np.concatenate([_E2M1, -_E2M1])
_PAIRS = np.stack([_NUMBERS[np.arange(256) % 16], _NUMBERS[np.arange(256) // 16]], axis=-1)  # of each byte


class Matrices(NamedTuple):
    """The matrices of all experts, [E, C, R].

    Attributes:
      blocks: pairs of 4-bit numbers, [E, R, C / 32, 16] uint8.
      scales: exponents plus 127, [E, R, C / 32] uint8; 255: NaN.
    """

    blocks: Tensor
    scales: Tensor

    @property
    def file(self) -> paths.Path:
        """The file of the blocks."""
        return self.blocks.file

    @property
    def dtype(self) -> np.dtype:
        """bfloat16."""
        return np.dtype(ml_dtypes.bfloat16)

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, C, R]."""
        experts, rows, groups = self.scales.shape
        return experts, groups * BLOCK, rows

    def reader(self, parts: Sequence[Slices]) -> _Reader:
        """Returns a function that reads one of `parts` (a slice for each dimension)."""
        return _Reader(self, parts)


class _Reader:
    def __init__(self, tensor: Matrices, parts: Sequence[Slices]):
        stored = [_stored(part) for part in parts]
        self._blocks = tensor.blocks.reader([(*part, slice(0, BLOCK // 2)) for part in stored])
        self._scales = tensor.scales.reader(stored)

    def __call__(self, part: Slices) -> np.ndarray:
        where = _stored(part)
        blocks, scales = self._blocks((*where, slice(0, BLOCK // 2))), self._scales(where)
        columns = slice(part[1].start - BLOCK * where[2].start, part[1].stop - BLOCK * where[2].start)
        found = np.empty([s.stop - s.start for s in part], ml_dtypes.bfloat16)
        for i, (of_expert, powers) in enumerate(zip(blocks, scales, strict=True)):
            exponents = np.where(powers == _NAN, 0, powers.astype(np.int32) - 127)
            numbers = np.ldexp(_PAIRS[of_expert].reshape(*powers.shape, BLOCK), exponents[..., None])
            numbers[powers == _NAN] = np.nan
            found[i] = numbers.reshape(len(powers), -1)[:, columns].T
        return found


def _stored(part: Slices) -> Slices:
    experts, columns, rows = part
    return experts, rows, slice(columns.start // BLOCK, -(-columns.stop // BLOCK))


def dequantized(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the tensors, with `Matrices` in place of each pair of blocks and scales.

    Raises UserError if scales are missing or do not fit.
    """
    del settings
    found: dict[str, Stored] = dict(tensors)
    for name, blocks in tensors.items():
        if not name.endswith(_BLOCKS):
            continue
        start = name.removesuffix(_BLOCKS)
        if (scales := tensors.get(start + _SCALES)) is None:
            raise UserError(f"{blocks.file}: {name} has no {start}{_SCALES} beside it; download the folder again")
        _check(name, blocks, scales)
        del found[name], found[start + _SCALES]
        found[start] = Matrices(blocks, scales)
    return found


def _check(name: str, blocks: Tensor, scales: Tensor) -> None:
    fits = len(scales.shape) == 3 and blocks.shape == (*scales.shape, BLOCK // 2)
    if not fits or {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}:
        raise UserError(
            f"{blocks.file}: {name} is {blocks.dtype} {list(blocks.shape)}, its scales {scales.dtype} "
            f"{list(scales.shape)}; expected uint8 [experts, rows, groups, {BLOCK // 2}] and [experts, rows, groups]"
        )
