"""This host's rows reach exactly the chips that need them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import slices
from core.batches import Field
from parallel import mesh, strategies
from parallel.partitioner import Partitioner

FSDP, BY_FOUR = strategies.fsdp(), strategies.fsdp_tensor(tensor=4)


def bind(tables, slice_name, devices=None):
    return Partitioner(tables, slice=slices.get(slice_name), devices=devices or jax.devices())


@pytest.mark.covers("D03")
@pytest.mark.parametrize("tables", [FSDP, BY_FOUR], ids=lambda t: t.name)
def test_put_gives_every_chip_its_rows_on_a_host_whose_rows_are_strided(tables, tpu_topology, monkeypatch):
    """The callback that fills a host's chips, for every host of a v4-32 in turn."""
    bound = bind(tables, "v4-32", tpu_topology("v4-32"))
    spec = {"inputs": Field((32, 3), jnp.int32, ("batch", "length"))}
    whole = np.arange(96, dtype=np.int32).reshape(32, 3)
    filled = {}

    def fill(shape, sharding, callback):
        for device, index in sharding.devices_indices_map(shape).items():
            if device.process_index == jax.process_index():
                filled[device] = callback(index)
                np.testing.assert_array_equal(filled[device], whole[index])

    monkeypatch.setattr(jax, "make_array_from_callback", fill)
    for host in range(4):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        rows = bound.data_layout(32).rows
        mesh.put({"inputs": whole[list(rows)]}, spec, bound.batch_shardings(spec), rows=rows)
    assert len(filled) == 16


@pytest.mark.covers("D03", "M17")
def test_put_places_rows_in_the_slices_own_order():
    bound = bind(FSDP, "v4-32")
    whole = np.arange(16 * 8, dtype=np.int32).reshape(16, 8)
    spec = {"inputs": Field((16, 8), jnp.int32, ("batch", "length"))}
    layouts = bound.batch_shardings(spec)
    array = mesh.put({"inputs": whole}, spec, layouts, rows=range(16))["inputs"]
    np.testing.assert_array_equal(array, whole)
    by_device = {s.device.id: s.index[0].start for s in array.addressable_shards}
    assert {by_device[i] for i in range(4)} == {0, 4, 8, 12}  # the four chips that play host 0


SPEC = {"x": Field((16, 3), jnp.int32, ("batch", "length")), "y": Field((16,), jnp.float32, ("batch",))}
OWED = {"x": np.zeros((16, 3), np.int32), "y": np.zeros(16, np.float32)}


@pytest.mark.covers("D03")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": np.zeros((17, 3), np.int32)}, "feature 'x' has shape (17, 3), expected (16, 3)"),
        ({"x": np.zeros((16, 4), np.int32)}, "feature 'x' has shape (16, 4), expected (16, 3)"),
        ({"x": np.zeros((16, 3))}, "feature 'x' is float64, expected int32"),
        ({"z": np.zeros(16)}, "feature 'z' is not one of x, y"),
        ({"y": None}, "feature 'y' is missing"),
    ],
)
def test_a_batch_other_than_the_rows_of_this_host_is_rejected(change, says):
    given = {k: a for k, a in {**OWED, **change}.items() if a is not None}
    layouts = bind(FSDP, "v4-32").batch_shardings(SPEC)
    with pytest.raises(ValueError, match="host 0 must supply 16 of the 16 rows of a batch") as error:
        mesh.put(given, SPEC, layouts, rows=range(16))
    assert says in str(error.value)
    assert "Supply exactly the rows data_layout(batch_size).rows" in str(error.value)


def test_a_global_batch_is_rejected_where_a_host_supplies_a_part():
    """The commonest mistake on several hosts: the first rows would pass for the host's own."""
    layouts = bind(FSDP, "v4-32").batch_shardings(SPEC)
    with pytest.raises(
        ValueError, match=r"must supply 4 of the 16 rows .*\n  feature 'x' has shape \(16, 3\), expected \(4, 3\)"
    ):
        mesh.put(OWED, SPEC, layouts, rows=(1, 5, 9, 13))
