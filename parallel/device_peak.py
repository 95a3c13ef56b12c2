"""The peak of a slice's matrix products: from the table, or measured on a CPU, whose speed depends on the machine."""

import time

import jax
import jax.numpy as jnp

from core.slices import Slice

_SIZE = 1536
_REPETITIONS = 3


def of(slice: Slice) -> float:
    """Returns the peak FLOP/s of the whole job.

    On CPUs it is the speed of a product of float32 matrices on this host, times the number of hosts: the devices of a
    host share its cores. The measurement takes about a tenth of a second.
    """
    return slice.hosts * _of_products() if slice.peak_flops is None else slice.peak_flops


def _of_products() -> float:
    matrix = jax.device_put(jnp.ones((_SIZE, _SIZE), jnp.float32), jax.local_devices()[0])
    product = jax.jit(jnp.dot)
    product(matrix, matrix).block_until_ready()  # compiles
    times = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        times.append(time.perf_counter() - started)
    return 2 * _SIZE**3 / min(times)
