"""Sums an array over a mesh axis around rings of chips, which other work can overlap.

libtpu compiles the gradient reductions of FSDP over many v4 chips to all-reduces, during which nothing else runs. A
permute is asynchronous. With n chips in a ring, n - 1 permutes and additions leave chip i with the sum of chunk i:

    acc = chunk[i - 1];   n - 1 times, s = 1, ...:   acc = from the chip before(acc) + chunk[i - 1 - s]

A chip sends (n - 1) / n of the array. If n = a b, rings of a chips that are b apart and then rings of b neighbors send
as much in a + b - 2 steps. Sums are rounded to the dtype of the array at every step.
"""

import math

import jax


def reduce_scatter(x: jax.Array, axis: str, *, dimension: int, toward: int = 1) -> jax.Array:
    """Returns this chip's chunk of the sum of x over a manual mesh axis.

    Args:
      dimension: the dimension that is divided into chunks, evenly.
      toward: 1 or -1, the direction around the rings.
    """
    n = jax.lax.axis_size(axis)
    inner = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    outer, me = n // inner, jax.lax.axis_index(axis)
    across = [[group * inner + i for group in range(outer)] for i in range(inner)]
    within = [[group * inner + i for i in range(inner)] for group in range(outer)]
    x = _around(x, axis, across, me // inner, dimension=dimension, toward=toward)
    return _around(x, axis, within, me % inner, dimension=dimension, toward=toward)


def _around(
    x: jax.Array, axis: str, rings: list[list[int]], me: jax.Array, *, dimension: int, toward: int
) -> jax.Array:
    """Returns this chip's chunk of the sum of `x` over its ring, in which it has place `me`."""
    n = len(rings[0])
    assert x.shape[dimension] % n == 0, (x.shape, dimension, n)
    size = x.shape[dimension] // n
    pairs = [(ring[i], ring[(i + toward) % n]) for ring in rings for i in range(n)]

    def chunk(place: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, (place % n) * size, size, dimension)

    found = chunk(me - toward)
    for step in range(2, n + 1):
        found = jax.lax.ppermute(found, axis, pairs) + chunk(me - toward * step)
    return found
