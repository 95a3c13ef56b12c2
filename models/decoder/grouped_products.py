"""Products of consecutive groups of rows, each with its own matrix.

S rows, E groups, D and F the dimensions of a matrix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from core.platforms import by_platform

_TILES = (512, 256, 128)  # candidates for the rows of a kernel's tile; the first that divides is used
_MOST_ROWS = 64  # of a block on CPUs
_WIDTH_BYTES = 2048  # the largest other dimensions of a tile; wider tiles exceed v4's vector memory


def grouped_product(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies consecutive groups of rows, each with its own matrix; [S, F].

    On TPUs it uses JAX's kernel `megablox`. It has no forward-mode derivative (`jax.jvp`).

    Args:
      x: [S, D].
      matrices: [E, D, F].
      sizes: [E] int32, rows of each group; results of rows after them are undefined.
    """
    return by_platform(x, matrices, sizes, tpu=by_kernel, cpu=by_blocks, default=jax.lax.ragged_dot)


@jax.custom_vjp
def by_blocks(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes `grouped_product` in a loop over blocks of rows.

    A block may extend into the next group; later blocks overwrite these rows. Where a gradient is computed,
    `jax.lax.ragged_dot` is used instead.
    """
    if not len(x):
        return jnp.zeros((0, matrices.shape[-1]), x.dtype)
    average = max(len(x) // len(matrices), 1)
    rows = min(1 << average.bit_length() - 1, _MOST_ROWS)
    blocks = -(-sizes // rows)
    ends = jnp.cumsum(blocks)  # [E], number of the block after those of each group
    first_rows = jnp.cumsum(sizes) - sizes
    padded = jnp.pad(x, ((0, rows - 1), (0, 0)))

    def add_block(i: jax.Array, y: jax.Array) -> jax.Array:
        group = jnp.sum(ends <= i)
        at = first_rows[group] + (i - ends[group] + blocks[group]) * rows
        of_block = jax.lax.dynamic_slice_in_dim(padded, at, rows)
        product = of_block @ jax.lax.dynamic_index_in_dim(matrices, group, keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(y, product.astype(y.dtype), at, axis=0)

    y = jax.lax.fori_loop(0, ends[-1], add_block, jnp.zeros((len(padded), matrices.shape[-1]), x.dtype))
    return y[: len(x)]


def _by_blocks_back(back: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    return *back(dy), None


by_blocks.defvjp(
    lambda x, matrices, sizes: jax.vjp(lambda x, matrices: jax.lax.ragged_dot(x, matrices, sizes), x, matrices),
    _by_blocks_back,
)


def by_kernel(x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Computes `grouped_product` with the kernel, after padding rows to a multiple of 128.

    Args:
      interpret: whether to use Pallas's interpreter.
    """
    padded = jnp.pad(x, ((0, -x.shape[0] % _TILES[-1]), (0, 0)))
    return _by_kernel(padded, matrices, sizes, interpret)[: x.shape[0]]


def _tiling(rows: int, inner: int, outer: int, itemsize: int) -> tuple[int, int, int]:
    width = _WIDTH_BYTES // itemsize
    return next(tile for tile in _TILES if rows % tile == 0), min(inner, width), min(outer, width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_kernel(x: jax.Array, matrices: jax.Array, sizes: jax.Array, interpret: bool) -> jax.Array:
    tiling = _tiling(len(x), x.shape[1], matrices.shape[-1], x.dtype.itemsize)
    return gmm(x, matrices, sizes, x.dtype, tiling, interpret=interpret)


def _by_kernel_back(interpret: bool, saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, matrices, sizes = saved
    (rows, inner), outer, itemsize = x.shape, dy.shape[1], x.dtype.itemsize
    how = {"interpret": interpret}
    dx = gmm(dy, matrices, sizes, x.dtype, _tiling(rows, outer, inner, itemsize), transpose_rhs=True, **how)
    return dx, tgmm(x.T, dy, sizes, matrices.dtype, _tiling(rows, inner, outer, itemsize), **how), None


_by_kernel.defvjp(
    lambda x, matrices, sizes, interpret: (_by_kernel(x, matrices, sizes, interpret), (x, matrices, sizes)),
    _by_kernel_back,
)
