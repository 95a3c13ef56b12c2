"""What Mosaic kernels cost, which the compiler does not estimate: FLOPs from the shapes that a chip gives them.

A kernel without a cost function here is named by whoever prices a step, and never taken to be free.

B rows, H query heads, Q query positions, S key positions, K head_dim, all of one chip.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from parallel.hlo.costs import Kernel

# Matrix products of [B, H, Q, S] x K that each splash kernel does, in the names that JAX gives them. Forward: scores
# and values. dq: scores, dP and dQ. dkv: scores, dP, dK and dV; with dQ as well where the backward pass is one kernel.
_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
_FUSED_BACKWARD = 5
_FUSED_RESULT_RANK = 5  # its dQ comes in parts, one for each block of keys: [B, blocks, H, Q, K]


def flops(kernel: Kernel) -> float | None:
    """FLOPs of all executions of a kernel on one chip; None for a kernel that is not known here."""
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
    """Of Q x S scores, the share at or before the query, on the chip that has the last queries: the others wait for it.

    Half where a chip has all queries; nearly all where it has the last eighth of them.
    """
    return 1 - queries / (2 * keys)


def _floating(array: str) -> Sequence[int]:
    """Dimensions of `bf16[2,32,2048,128]`; nothing for integers and for single numbers."""
    found = re.fullmatch(r"(?:bf16|f32)\[([\d,]+)\]", array)
    return tuple(int(n) for n in found[1].split(",")) if found else ()
