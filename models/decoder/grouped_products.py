"""Products of consecutive groups of rows with a matrix each, by XLA or by a TPU kernel.

S rows, E groups, D and F the dimensions of a matrix.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from core.platforms import by_platform

_TILES = (512, 256, 128)  # rows of a tile of the TPU kernel; the first that divides is taken
_WIDTH_BYTES = 2048  # the largest other dimensions of a tile; wider tiles exceed the vector memory of v4


def grouped_product(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies consecutive groups of rows with a matrix each.

    On TPUs by the kernel `megablox` that comes with JAX. XLA would compile the gradient of the matrices into one masked
    product over all rows for each matrix, E times as much work.

    Args:
      x: [S, D].
      matrices: [E, D, F].
      sizes: rows of each group, [E], int32. Later rows belong to no group.

    Returns:
      [S, F]; without meaning in rows that belong to no group.
    """
    return by_platform(x, matrices, sizes, tpu=by_kernel, default=jax.lax.ragged_dot)


def by_kernel(x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Computes `grouped_product` by the kernel, with empty rows added up to a multiple of 128.

    Args:
      x, matrices, sizes: as in `grouped_product`.
      interpret: whether to run the kernel in Pallas's interpreter, which needs no TPU.
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
