"""Products of consecutive groups of rows with a matrix each, by XLA or by a TPU kernel.

S rows, E groups, D and F the dimensions of a matrix.
"""

import functools

import jax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

_TILES = (512, 256, 128)  # rows of a tile of the TPU kernel; the first that divides is taken
_WIDTH = 1024  # the largest other dimensions of a tile


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
    if x.shape[0] % _TILES[-1]:
        return jax.lax.ragged_dot(x, matrices, sizes)
    return jax.lax.platform_dependent(x, matrices, sizes, tpu=by_kernel, default=jax.lax.ragged_dot)


def _tiling(rows: int, inner: int, outer: int) -> tuple[int, int, int]:
    return next(tile for tile in _TILES if rows % tile == 0), min(inner, _WIDTH), min(outer, _WIDTH)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def by_kernel(x: jax.Array, matrices: jax.Array, sizes: jax.Array, interpret: bool = False) -> jax.Array:
    """Computes `grouped_product` by the kernel; rows are a multiple of 128."""
    tiling = _tiling(*x.shape, matrices.shape[-1])
    return gmm(x, matrices, sizes, x.dtype, tiling, interpret=interpret)


def _by_kernel_back(interpret: bool, saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, matrices, sizes = saved
    (rows, inner), outer = x.shape, dy.shape[1]
    how = {"interpret": interpret}
    dx = gmm(dy, matrices, sizes, x.dtype, _tiling(rows, outer, inner), transpose_rhs=True, **how)
    return dx, tgmm(x.T, dy, sizes, matrices.dtype, _tiling(rows, inner, outer), **how), None


by_kernel.defvjp(
    lambda x, matrices, sizes, interpret: (by_kernel(x, matrices, sizes, interpret), (x, matrices, sizes)),
    _by_kernel_back,
)
