"""Simulated devices have the positions that libtpu gives the chips."""

import functools
import os
import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from core import slices
from parallel import mesh

SHAPES = [
    {"fsdp": -1},
    {"data": 2, "fsdp": -1},
    {"fsdp": -1, "tensor": 4},
    {"data": 2, "fsdp": -1, "tensor": 2},
    {"stage": 4, "fsdp": -1},
]


def sized(shape, chips):
    fixed = -int(np.prod(list(shape.values())))
    return {axis: chips // fixed if n == -1 else n for axis, n in shape.items()}


class Cpu:
    """As many CPU devices as a slice has chips, of one process or of several."""

    platform = device_kind = "cpu"

    def __init__(self, id, process_index=0):
        self.id, self.process_index = id, process_index

    def __repr__(self):
        return f"cpu {self.id}"


@pytest.mark.covers("M03")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["v4-8", "v4-16", "v4-32", "v4-64", "v5p-128", "v5e-16", "tpu7x-32", "tpu7x-128"])
def test_the_simulated_mesh_is_that_of_libtpu(name, shape, tpu_topology, monkeypatch):
    slice_ = slices.get(name)
    shape = sized(shape, slice_.devices)
    monkeypatch.setattr(mesh, "Mesh", lambda grid, names, **_: grid)  # a Mesh wants real devices
    played = mesh.make_mesh(shape, slice=slice_, devices=[Cpu(i) for i in range(slice_.devices)])
    real = mesh.make_mesh(shape, slice=slice_, devices=tpu_topology(name))
    places = [place for host in slice_.devices_by_host() for place in host]
    want = [(*device.coords[: len(slice_.topology)], device.core_on_chip) for device in real.flat]
    assert played.shape == real.shape == tuple(shape.values())
    assert [places[cpu.id] for cpu in played.flat] == want


@pytest.mark.covers("M03")
@pytest.mark.parametrize(("name", "kind"), [("v5p-16", "TPU v5p"), ("v5e-8", "TPU v5e"), ("v6e-8", "TPU v6e")])
def test_a_chip_by_its_other_name_has_the_same_place(name, kind, tpu_topology, monkeypatch):
    """JAX has an order of its own for 8 chips called TPU v5p, and another for chips called TPU v5 lite."""
    monkeypatch.setattr(mesh, "Mesh", lambda grid, names, **_: grid)
    devices = tpu_topology(name)
    read = ("id", "process_index", "coords", "platform", "core_on_chip")
    renamed = [types.SimpleNamespace(**{a: getattr(d, a) for a in read}, device_kind=kind) for d in devices]
    of_name, of_other = (
        mesh.make_mesh({"data": 2, "fsdp": 4}, slice=slices.get(name), devices=of) for of in (devices, renamed)
    )
    assert [d.id for d in of_other.flat] == [d.id for d in of_name.flat]


@pytest.mark.covers("M03")
def test_neighbors_in_the_mesh_are_neighbors_in_the_slice(tpu_topology):
    built = mesh.make_mesh({"fsdp": 4, "tensor": 4}, slice=slices.get("v4-32"), devices=tpu_topology("v4-32"))
    for group in built.devices:  # a tensor group of four is a square of one host: every hop is one link
        coordinates = np.array([chip.coords for chip in group])
        assert len({chip.process_index for chip in group}) == 1
        assert all(1 <= np.abs(a - b).sum() <= 2 for a in coordinates for b in coordinates if (a != b).any())


@pytest.mark.parametrize(
    ("name", "shape"), [("tpu7x-32", {"fsdp": 8, "tensor": 4}), ("tpu7x-128", {"fsdp": 64, "tensor": 2})]
)
def test_the_last_axis_has_the_devices_of_a_chip(name, shape, tpu_topology):
    built = mesh.make_mesh(shape, slice=slices.get(name), devices=tpu_topology(name))
    pairs = built.devices.reshape(-1, 2)
    assert all(tuple(a.coords) == tuple(b.coords) for a, b in pairs)


def test_axes_are_automatic_and_in_the_order_of_the_shape():
    built = mesh.make_mesh({"data": 2, "tensor": 2}, slice=slices.get("v4-8"), devices=jax.devices())
    assert built.axis_names == ("data", "tensor")
    assert built.axis_types == (AxisType.Auto, AxisType.Auto)
    assert built.devices.shape == (2, 2)


def test_leading_axes_come_first_in_the_mesh_and_no_chip_moves():
    make = functools.partial(mesh.make_mesh, slice=slices.get("v4-16"), devices=jax.devices())
    shape = {"stage": 2, "data": 1, "fsdp": 2, "tensor": 2}
    plain, built = make(shape), make(shape, leading=["data", "fsdp"])
    assert built.axis_names == ("data", "fsdp", "stage", "tensor")
    np.testing.assert_array_equal(built.devices.transpose(2, 0, 1, 3), plain.devices)


def test_devices_are_taken_in_process_order_whatever_order_they_come_in():
    slice_ = slices.get("v4-16")
    devices = [Cpu(id=100 * host + i, process_index=host) for host in (0, 1) for i in range(4)]
    chips = mesh.simulated_devices(sorted(devices, key=lambda d: (d.process_index, d.id)), slice_)
    assert [c.process_index for c in chips] == [0] * 4 + [1] * 4
    places = [place for host in slice_.devices_by_host() for place in host]
    assert [(*c.coords, c.core_on_chip) for c in chips] == places
    assert sorted(c.id for c in chips) == list(range(8))


@pytest.mark.covers("R08")
@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("v4-64", lambda real: jax.devices(), r"v4-64 has 32 devices on 8 hosts, but JAX sees 16 cpu device"),
        ("v4-64", lambda real: real("v4-32"), r"v4-64 has 32 devices on 8 hosts, but JAX sees 16 TPU v4 .* 4 host"),
        ("v4-16", lambda real: real("v4-32"), r"v4-16 has 8 devices on 2 hosts, but JAX sees 16"),
        ("v5p-32", lambda real: real("v4-32"), r"v5p-32 has 16 TPU v5 chips, but JAX sees 16 TPU v4 devices; name"),
    ],
)
def test_devices_of_another_slice_are_refused(name, devices, message, tpu_topology):
    slice_ = slices.get(name)
    with pytest.raises(ValueError, match=message):
        mesh.make_mesh({"fsdp": slice_.devices}, slice=slice_, devices=devices(tpu_topology))


def test_describing_a_slice_leaves_no_trace_in_the_environment(tpu_topology, monkeypatch):
    for name in ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    assert len(tpu_topology("v4-16")) == 8
    assert dict(os.environ) == before


def test_gpus_are_in_the_order_of_their_hosts():
    built = mesh.make_mesh({"data": 2, "tensor": 8}, slice=slices.get("h100:8x2"), devices=jax.devices())
    assert [device.id for device in built.devices.flat] == list(range(16))
    with pytest.raises(ValueError, match="h100:8 is not a TPU slice; ahead-of-time compilation needs one"):
        mesh.topology_devices(slices.get("h100:8"))
