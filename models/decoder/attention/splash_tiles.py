"""Sizes of the tiles in which the splash kernel computes attention; they change speed and memory, never results."""

import dataclasses
from typing import Any

from jax.experimental.pallas.ops.tpu import splash_attention as splash

from core.errors import UserError, check_integer

LANES = 128  # a TPU vector register is 128 wide; tiles are multiples of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """The largest tiles; each row takes the largest multiples of 128 up to them that divide its positions on a chip.

    Larger tiles need more of a chip's vector memory (VMEM), and fewer reads of keys and values from HBM.

    Attributes:
      queries: positions of queries in a tile.
      keys: positions of keys and values in a tile.
      fused_backward: whether one kernel computes the gradients of queries, keys and values. It computes scores once
        in place of twice, and adds up partial gradients of queries, one for each tile of keys, in HBM.

    Raises:
      UserError: a size that is no multiple of 128.
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
        """Returns the tiles for queries and keys of `length` positions, a multiple of 128."""
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


def largest(most: int, length: int) -> int:
    """Returns the largest multiple of 128, up to `most`, that divides `length`."""
    return max(size for size in range(LANES, most + 1, LANES) if length % size == 0)
