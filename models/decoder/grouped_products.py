"""Multiplies consecutive groups of rows, each with its own matrix, by XLA or by a TPU kernel.

S rows, E groups, D and F the dimensions of a matrix.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from core.platforms import by_platform

_TILES = (512, 256, 128)  # candidates for the rows of a kernel's tile; the first that divides is used
_WIDTH_BYTES = 2048  # the largest other dimensions of a tile; wider tiles exceed v4's vector memory


def grouped_product(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies consecutive groups of rows, each with its own matrix.

    On TPUs it uses the kernel `megablox` that comes with JAX. XLA would compile the gradient of the matrices to one
    masked product over all rows per matrix, which is E times as much work.

    Args:
      x: [S, D].
      matrices: [E, D, F].
      sizes: number of rows of each group, [E] int32. Rows after them belong to no group.

    Returns:
      [S, F]; rows that belong to no group have undefined values.
    """
    return by_platform(x, matrices, sizes, tpu=by_kernel, default=jax.lax.ragged_dot)


def by_kernel(x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Computes `grouped_product` with the kernel, after padding rows to a multiple of 128.

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
