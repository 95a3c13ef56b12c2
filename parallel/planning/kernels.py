"""FLOPs of Mosaic kernels, which the compiler does not estimate, from their shapes on one chip.

A kernel without a cost function here is reported by name when a step is priced; it is never assumed to be free.

B rows, H query heads, Q query positions, S key positions, K head_dim, all of one chip.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from parallel.hlo.costs import Kernel

# Number of matrix products of [B, H, Q, S] x K in each splash kernel, by JAX's name for it. Forward: scores and values.
# dq: scores, dP and dQ. dkv: scores, dP, dK and dV; also dQ where the backward pass is a single kernel.
_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
_FUSED_BACKWARD = 5
_FUSED_RESULT_RANK = 5  # it returns dQ in one part per block of keys: [B, blocks, H, Q, K]


def flops(kernel: Kernel) -> float | None:
    """Returns the FLOPs of all executions of a kernel on one chip, or None for an unknown kernel."""
    name = next((n for n in _PRODUCTS if kernel.name.startswith(n) or f"/{n}" in kernel.op_name), None)
    if name is None:
        return None
    arrays = [dims for operand in kernel.operands if (dims := _floating(operand))]
    queries, keys = [dims for dims in arrays if len(dims) >= 3][:2]
    products = _PRODUCTS[name]
    if name == "splash_mha_dkv" and any(len(_floating(r)) >= _FUSED_RESULT_RANK for r in kernel.results):
        products = _FUSED_BACKWARD
    return 2.0 * products * math.prod(queries) * keys[-2] * causal_share(queries[-2], keys[-2]) * kernel.times


def causal_share(queries: int, keys: int) -> float:
    """Returns the share of Q x S scores at or before the query, on the chip with the last queries, which takes longest.

    1/2 where a chip has all queries; close to 1 where it has only the last eighth of them.
    """
    return 1 - queries / (2 * keys)


def _floating(array: str) -> Sequence[int]:
    """Returns the dimensions of an array such as `bf16[2,32,2048,128]`; () for integers and scalars."""
    found = re.fullmatch(r"(?:bf16|f32)\[([\d,]+)\]", array)
    return tuple(int(n) for n in found[1].split(",")) if found else ()
