"""Arrays of several hosts are shown by any host alone, and read by all together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.errors import UserError
from core.hosts import global_arrays

MESH = Mesh(np.array(jax.devices()[:4]), ("fsdp",))


def laid_out(values, *spec):
    return jax.device_put(values, NamedSharding(MESH, PartitionSpec(*spec)))


def test_every_shard_of_this_host_is_described_and_copies_once():
    values = jnp.arange(16.0).reshape(8, 2).at[7, 1].set(jnp.inf)
    tree = {"head": {"w": laid_out(values, "fsdp"), "on": laid_out(jnp.array([True, False]))}, "step": 7}
    on, copies, w, *shards, step = global_arrays.describe(tree).splitlines()
    assert on == "head/on bool[2], P(), 1 host; here:"
    assert copies == "  [0:2] 1 of 2 are True: [ True False]"
    assert w == "head/w float32[8, 2], P('fsdp',), 1 host; here:"
    assert len(shards) == 4
    assert shards[1] == "  [2:4, 0:2] from 4 to 7, mean 5.5, 0 not finite: [[4. 5.] [6. 7.]]"
    assert shards[3].startswith("  [6:8, 0:2] from 12 to 14, mean 13, 1 not finite: ")
    assert step == "step 7"


def test_a_donated_array_is_described_as_deleted():
    array = laid_out(jnp.ones(4), "fsdp")
    array.delete()
    assert global_arrays.describe(array) == ("array float32[4]: deleted, because it was donated to a later computation")


def test_long_values_are_shortened_to_both_ends_and_four_digits():
    *_, short = global_arrays.describe(jnp.arange(5) / 3).splitlines()
    *_, long = global_arrays.describe(jnp.arange(6) / 3).splitlines()
    assert short.endswith(": [0. 0.3333 0.6667 1. 1.3333]")
    assert long.endswith(": [0. 0.3333 ... 1.3333 1.6667]")


def test_a_key_of_random_bits_is_described():
    assert global_arrays.describe({"rng": jax.random.key(3)}).startswith("rng Array((), dtype=key<fry>)")


def test_an_array_that_is_too_large_is_refused():
    array = laid_out(jnp.arange(8.0), "fsdp")
    np.testing.assert_array_equal(global_arrays.gathered(array), np.arange(8.0))
    with pytest.raises(UserError, match=r"float32\[8\] has 32 B, and every host would hold all of it; at most 8 B"):
        global_arrays.gathered(array, most_bytes=8)


TWO_HOSTS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from core.hosts import distributed, global_arrays
distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=2)
layout = NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), PartitionSpec("fsdp"))
array = jax.make_array_from_callback((4, 3), layout, lambda index: np.arange(12.0).reshape(4, 3)[index])
try:
    print(np.asarray(array))
except RuntimeError as error:
    print("REFUSED by jax")
if PROCESS == 1:  # alone
    print(global_arrays.describe(array))
print("ALL", global_arrays.gathered(array).sum())
distributed.shutdown()
"""


@pytest.mark.simulated(2)
@pytest.mark.covers("X10")
def test_one_host_alone_describes_an_array_of_two(run_hosts):
    zero, one = run_hosts(TWO_HOSTS, hosts=2)
    assert (zero.returncode, one.returncode) == (0, 0), zero.output + one.output
    for result in (zero, one):
        assert "REFUSED by jax" in result.output
        assert "ALL 66.0" in result.output
    assert "array float32[4, 3], P('fsdp',), 2 hosts; here:" in one.output
    assert "[2:3, 0:3] from 6 to 8, mean 7, 0 not finite: [[6. 7. 8.]]" in one.output
    assert "here:" not in zero.output
