"""The rows that every host supplies, for every strategy and slice, against the positions of its chips in the mesh."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from core import logical, slices
from parallel import mesh, strategies, strategy
from parallel.partitioner import Partitioner
from parallel.verify import agreement

SLICES = ("v4-32", "v4-64", "v5p-128", "2xv4-32")
ACROSS = {"data_parallel": "data", "zero1": "data", "hsdp": "data", "mesh3d": "data", "tensor": "tensor"}
ACROSS |= {"pipeline": "data", "pipeline_data": "stage", "pipeline_fsdp": "stage", "pipeline_fsdp_tensor": "stage"}


def adapted(name, slice_name):
    """The example's table with degrees for another slice: of several, one axis also spans them."""
    if name == "multislice":
        return strategies.multislice(slices=slices.get(slice_name).num_slices, tensor=2)
    tables = agreement.EXAMPLES[name].strategy
    if slices.get(slice_name).num_slices == 1:
        return tables
    return dataclasses.replace(tables, dcn_shape={ACROSS.get(name, "fsdp"): slices.get(slice_name).num_slices})


SEVERAL = ("multislice", "pipeline_data")  # for several slices alone
CASES = [(name, at) for at in SLICES for name in agreement.EXAMPLES if name not in SEVERAL or "x" in at]


@functools.cache
def chips(slice_name):
    return mesh.topology_devices(slices.get(slice_name))


def rows_of_hosts(grid, tables, shape, *, batch_size, host_of):
    """By host, the rows of its chips: a chip's block follows from its place along the axes that split the batch."""
    axes = logical.mesh_axes(tables.activation_rules["batch"])
    names, block = list(shape), batch_size // math.prod(shape[a] for a in axes)
    hosts = {}
    for place in np.ndindex(grid.shape):
        number = 0
        for axis in axes:
            number = number * shape[axis] + place[names.index(axis)]
        hosts.setdefault(host_of(grid[place]), set()).update(range(number * block, (number + 1) * block))
    return {host: tuple(sorted(rows)) for host, rows in sorted(hosts.items())}


class Cpu:
    """One of the CPU devices that play a slice, on the host that its number gives."""

    platform = device_kind = "cpu"

    def __init__(self, id, process_index):
        self.id, self.process_index = id, process_index


@pytest.mark.covers("D01", "D02", "M03", "R11")
@pytest.mark.parametrize(("name", "at"), CASES)
def test_every_host_supplies_the_rows_of_its_chips(name, at, monkeypatch):
    tables, slice_ = adapted(name, at), slices.get(at)
    bound = Partitioner(tables, slice=slice_, devices=chips(at))
    batch_size = 2 * bound.row_shards
    want = rows_of_hosts(
        bound.mesh.devices, tables, bound.mesh.shape, batch_size=batch_size, host_of=lambda chip: chip.process_index
    )
    supplied = []
    for host in range(slice_.hosts):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        supplied.append(bound.data_layout(batch_size))
    assert {host: layout.rows for host, layout in enumerate(supplied)} == want
    owned = [row for layout in supplied for row in layout.owned_rows]
    assert sorted(owned) == list(range(batch_size))  # each once
    assert all(set(layout.owned_rows) <= set(layout.rows) for layout in supplied)


@pytest.mark.covers("M03")
@pytest.mark.parametrize(("name", "at"), CASES)
def test_played_hosts_supply_the_rows_of_real_ones(name, at, monkeypatch):
    tables, slice_ = adapted(name, at), slices.get(at)
    shape = strategy.resolve(tables, slice_)
    monkeypatch.setattr(mesh, "Mesh", lambda grid, names, **_: grid)  # a Mesh wants real devices
    make = functools.partial(mesh.make_mesh, shape, slice=slice_, dcn_shape=tables.dcn_shape)
    count = functools.partial(rows_of_hosts, tables=tables, shape=shape, batch_size=128)
    played = make(devices=[Cpu(i, i // slice_.devices_per_host) for i in range(slice_.devices)])
    real = make(devices=chips(at))
    assert count(played, host_of=lambda cpu: cpu.process_index) == count(real, host_of=lambda c: c.process_index)
    alone = make(devices=[Cpu(i, 0) for i in range(slice_.devices)])  # one process that plays every host
    assert [cpu.id for cpu in alone.flat] == [cpu.id for cpu in played.flat]


def test_which_hosts_share_rows_depends_on_the_strategy():
    """v4-64 under fsdp 8 x tensor 4: four chips to a row, two hosts to a row; the check above is not a formality."""
    tables = agreement.EXAMPLES["fsdp_tensor"].strategy
    bound = Partitioner(tables, slice=slices.get("v4-64"), devices=chips("v4-64"))
    rows = rows_of_hosts(bound.mesh.devices, tables, bound.mesh.shape, batch_size=8, host_of=lambda c: c.process_index)
    assert len(rows) == 8
    assert len(set(rows.values())) == 4
