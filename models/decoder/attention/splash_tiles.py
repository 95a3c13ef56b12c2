"""Sizes of the tiles in which the splash kernel computes attention."""

import dataclasses
from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from core.errors import UserError, check_integer

LANES = 128  # tiles are multiples of 128, the width of a TPU vector register


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Upper limits of the splash kernel's tiles.

    The kernel uses the largest multiples of 128, up to these limits, that divide a row's positions on a chip (in ring
    attention, those of a chunk). Larger tiles need more vector memory (VMEM), and fewer reads from HBM.

    Attributes:
      queries, keys: positions per tile, multiples of 128.
      fused_backward: whether one kernel computes all gradients; it stores partial gradients of queries in HBM.
    """

    queries: int = 512
    keys: int = 512
    fused_backward: bool = False

    def __post_init__(self):
        for name in ("queries", "keys"):
            check_integer(size := getattr(self, name), where=f"Tiles.{name}", least=LANES)
            if size % LANES:
                raise UserError(f"Tiles.{name} = {size}: expected a multiple of {LANES}")

    def block_sizes(self, length: int) -> splash.BlockSizes:
        """Returns the tile sizes for `length` positions (a multiple of 128) on a chip."""
        q, kv = (largest(most, length) for most in (self.queries, self.keys))
        own: dict[str, Any] = {} if self.fused_backward else {"block_q_dq": q, "block_kv_dq": kv}
        return splash.BlockSizes(
            block_q=q,
            block_kv=kv,
            block_kv_compute=kv,
            block_q_dkv=q,
            block_kv_dkv=kv,
            block_kv_dkv_compute=kv,
            use_fused_bwd_kernel=self.fused_backward,
            **own,
        )

    def computed_share(self, positions: np.ndarray, *, window: int, shards: int) -> float:
        """Returns the share of scores in the tiles that the kernel computes, on the chip with most of them.

        A tile of which the mask hides a part counts half.

        Args:
          positions: [T], of the queries; those of keys are 0 to T - 1.
          window: number of keys, up to a query's own, that it attends to.
          shards: number of chips that share the queries of a row.
        """
        sizes = self.block_sizes(len(positions) // shards)
        queries = positions.reshape(-1, sizes.block_q)
        keys = np.arange(len(positions)).reshape(-1, sizes.block_kv)
        first, last = queries.min(axis=1)[:, None], queries.max(axis=1)[:, None]
        is_computed = (keys[:, 0] <= last) & (first - keys[:, -1] < window)
        is_whole = (keys[:, -1] <= first) & (last - keys[:, 0] < window)
        return float(np.max(np.mean((is_computed + is_whole.astype(int)).reshape(shards, -1) / 2, axis=1)))


def largest(most: int, length: int) -> int:
    """Returns the largest multiple of 128, up to `most`, that divides `length`, itself a multiple of 128."""
    return max(size for size in range(LANES, most + 1, LANES) if length % size == 0)
