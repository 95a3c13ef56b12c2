"""Counts the FLOPs of Pallas kernels from shapes: attention, and products of groups of rows.

Which share of them is computed follows from the names of operations (`core.computed_share`). Without it, attention is
taken to be causal, and grouped products to fill their rows.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from core import computed_share
from parallel.compiled.hlo.costs import Kernel

Shape = Sequence[int]


class _Products(NamedTuple):
    """Numbers of products [B, H, Q, S] x K of a kernel, by whether K is the width of keys or of values."""

    of_keys: int
    of_values: int


# By JAX's name for the splash kernel. Forward: scores; values. dq: scores and dQ; dP. dkv: scores and dK; dP and dV.
_ATTENTION = {"splash_mha_fwd": _Products(1, 1), "splash_mha_dq": _Products(2, 1), "splash_mha_dkv": _Products(2, 2)}
_FUSED_BACKWARD = _Products(3, 2)  # dkv that also computes dQ, and returns it in one part per block of keys:
_FUSED_RESULT_RANK = 5  # [B, blocks, H, Q, K]
_GROUPED = ("gmm", "tgmm")  # of `models.decoder.grouped_products`, by JAX's name for the kernel


def of_compiled(kernel: Kernel) -> float | None:
    """Returns the FLOPs of a compiled kernel in a step, or None if the kernel is unknown."""
    names = [n for n in _ATTENTION if kernel.name.startswith(n) or f"/{n}" in kernel.op_name]
    shapes = (tuple(map(_shape, arrays)) for arrays in (kernel.operands, kernel.results))
    found = of_shapes((names or [kernel.name.partition(".")[0]])[0], *shapes, scopes=kernel.op_name)
    return None if found is None else found * kernel.times


def _shape(array: str) -> Shape:
    """Returns the dimensions of an array such as `bf16[2,32,2048,128]`; () if it has integers."""
    found = re.fullmatch(r"(?:bf16|f32)\[([\d,]+)\]", array)
    return tuple(int(n) for n in found[1].split(",")) if found else ()


def of_shapes(name: str, operands: Sequence[Shape], results: Sequence[Shape], *, scopes: str) -> float | None:
    """Returns the FLOPs of one execution of a kernel, or None if the kernel is unknown.

    Args:
      name: of the kernel; those of splash kernels may have further words behind.
      operands, results: shapes of its arrays; () for arrays of integers.
      scopes: JAX's names around the kernel.
    """
    share = computed_share.of(scopes)
    if name in _GROUPED:
        return _of_groups([s for s in operands if len(s) == 2], results) * (1.0 if share is None else share)
    kind = next((n for n in _ATTENTION if name.startswith(n)), None)
    if kind is None:
        return None
    (*heads, queries, width), (*_, keys, _), (*_, value_width) = [s for s in operands if len(s) >= 3][:3]
    is_fused = kind == "splash_mha_dkv" and any(len(s) >= _FUSED_RESULT_RANK for s in results)
    products = _FUSED_BACKWARD if is_fused else _ATTENTION[kind]
    if share is None:
        share = causal_share(queries, keys)
    widths = products.of_keys * width + products.of_values * value_width
    return 2.0 * math.prod(heads) * queries * keys * widths * share


def causal_share(queries: int, keys: int) -> float:
    """Returns the share of scores at or before the query, on the chip with the last queries, which takes longest.

    It is 1/2 where a chip has all queries, and close to 1 where it has only the last eighth of them.
    """
    return 1 - queries / (2 * keys)


def _of_groups(rows: Sequence[Shape], results: Sequence[Shape]) -> float:
    """Returns FLOPs of [S, D] times one of E matrices [D, F] per row, or of the matrices' gradient."""
    (result,) = (shape for shape in results if shape)
    if len(result) == 3:
        return 2.0 * rows[1][0] * result[1] * result[2]
    return 2.0 * math.prod(rows[0]) * result[1]
