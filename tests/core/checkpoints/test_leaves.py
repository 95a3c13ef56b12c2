"""Fingerprints of arrays depend on the content and not on the layout; the smallest change gives another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.checkpoints import reading

RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(16, 24)).astype(np.float32)


def number(value, *spec, devices=1):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    return reading.fingerprints({"x": jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))})["x"]


@pytest.mark.parametrize(("devices", "spec"), [(16, ("fsdp",)), (8, (None, "fsdp")), (4, ())])
def test_the_layout_has_no_say(devices, spec):
    assert number(WEIGHTS, *spec, devices=devices) == number(WEIGHTS)


def test_one_bit_a_swap_or_another_place_gives_another_number():
    seen = {number(WEIGHTS)}
    for place in RNG.integers(0, WEIGHTS.size, 20):
        changed = WEIGHTS.copy()
        changed.view(np.uint32).flat[place] ^= 1 << int(RNG.integers(32))
        seen.add(number(changed))
    swapped, turned = WEIGHTS.copy(), np.ascontiguousarray(WEIGHTS.T)
    swapped[[0, 1]] = swapped[[1, 0]]
    seen |= {number(swapped), number(turned), number(np.zeros(3, np.float32)), number(np.zeros(4, np.float32))}
    assert len(seen) == 25


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_, jnp.int8])
def test_every_dtype_has_one(dtype):
    value = jnp.asarray(WEIGHTS > 0).astype(dtype)
    changed = value.at[3, 5].set(1 - value[3, 5] if dtype != jnp.bool_ else ~value[3, 5])
    assert number(value) != number(changed)


def test_keys_and_scalars_have_one():
    keys = [reading.fingerprints({"key": jax.random.key(seed)})["key"] for seed in (1, 1, 2)]
    assert keys[0] == keys[1] != keys[2]
    assert number(np.int32(4)) != number(np.int32(5))
