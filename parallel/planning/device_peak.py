"""Measures the speed of matrix products on CPUs, which no table gives."""

import time

import jax
import jax.numpy as jnp

from core.slices import Slice

_SIZE = 1536
_REPETITIONS = 3


def of_cpus(slice: Slice) -> float:
    """Returns the FLOP/s of a float32 product on one device of this host, times the number of hosts.

    The devices of a host share its cores.
    """
    matrix = jax.device_put(jnp.ones((_SIZE, _SIZE), jnp.float32), jax.local_devices()[0])
    product = jax.jit(jnp.dot)
    product(matrix, matrix).block_until_ready()  # compiles
    times = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        times.append(time.perf_counter() - started)
    return slice.hosts * 2 * _SIZE**3 / min(times)
