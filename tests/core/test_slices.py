"""The slice table against published figures and libtpu's description of each topology."""

import math
import re

import pytest

from core import slices
from core.errors import UserError

# name: (chips, hosts, topology, wraparound, bf16 PFLOP/s, HBM GiB); Google's TPU pages.
PUBLISHED = {
    "v4-8": (4, 1, "2x2x1", False, 1.10, 128),
    "v4-16": (8, 2, "2x2x2", False, 2.20, 256),
    "v4-32": (16, 4, "2x2x4", False, 4.40, 512),
    "v4-64": (32, 8, "2x4x4", False, 8.80, 1024),
    "v4-128": (64, 16, "4x4x4", True, 17.6, 2048),
    "v5p-8": (4, 1, "2x2x1", False, 1.84, 380),
    "v5p-16": (8, 2, "2x2x2", False, 3.67, 760),
    "v5p-32": (16, 4, "2x2x4", False, 7.3, 1520),
    "v5p-64": (32, 8, "2x4x4", False, 14.7, 3040),
    "v5p-128": (64, 16, "4x4x4", True, 29.4, 6080),
    "v5p-256": (128, 32, "4x4x8", True, 59, 12160),
    "v5p-512": (256, 64, "4x8x8", True, 118, 24320),
    "v5p-1024": (512, 128, "8x8x8", True, 235, 48640),
    "tpu7x-8": (4, 1, "2x2x1", False, 9.228, 768),
    "tpu7x-128": (64, 16, "4x4x4", True, 147.6, 12288),
    "tpu7x-18432": (9216, 2304, "16x24x24", True, 21261, 1769472),
}


@pytest.mark.covers("R07")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name):
    chips, hosts, topology, wraparound, petaflops, hbm_gib = PUBLISHED[name]
    s = slices.get(name)
    assert (s.chips, s.hosts, s.topology_name) == (chips, hosts, topology)
    assert s.wraparound == (wraparound,) * 3
    assert math.isclose(s.peak_flops / 1e15, petaflops, rel_tol=0.01)
    assert s.hbm_bytes == hbm_gib * slices.GIB
    assert s.devices == chips * (2 if name.startswith("tpu7x") else 1)


def test_a_chip_may_have_two_devices():
    two = slices.get("2xtpu7x-32")
    assert (two.chips, two.devices, two.devices_per_slice) == (32, 64, 32)
    assert (two.hosts, two.chips_per_host, two.devices_per_host) == (8, 4, 8)
    assert (two.counted, two.counted_per_host) == ("32 chips (64 devices)", "4 chips (8 devices)")
    assert two.single is slices.get("tpu7x-32")
    assert slices.get("v4-32").counted == "16 chips"


def test_gpus_are_on_no_ring():
    assert slices.get("h100:8x2").wraparound == (False,)


def test_range_of_the_table():
    assert slices.get("v4-4096").chips == 2048
    assert slices.get("v5litepod-16") is slices.get("v5e-16")
    assert (slices.get("v5e-8").hosts, slices.get("v5e-16").hosts, slices.get("v6e-256").hosts) == (1, 4, 64)
    assert slices.get("v6e-128").wraparound == (False, True)


@pytest.mark.parametrize(
    "name", ["v4-8", "v4-32", "v4-64", "v5p-128", "v5e-8", "v5e-32", "v6e-16", "tpu7x-16", "tpu7x-128"]
)
def test_host_order_and_coordinates_are_those_of_libtpu(name, tpu_topology):
    s = slices.get(name)
    real: dict[int, list] = {}
    for device in tpu_topology(name):
        assert device.device_kind == s.chip.kinds[0]
        place = (*device.coords[: len(s.topology)], device.core_on_chip)
        real.setdefault(device.process_index, []).append(place)
    assert tuple(tuple(real[h]) for h in sorted(real)) == s.devices_by_host()


@pytest.mark.covers("R08")
@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("2x2xv4-8", ""), ("v4-30", "v4-32"), ("v4_32", "v4-32"), ("v5-64", "v5p-64"), ("v4-33", "v4-32")],
)
def test_unknown_slice_names_the_nearest(wrong, nearest):
    with pytest.raises(ValueError, match=f"unknown TPU slice '{wrong}'.*Nearest:.*{nearest}"):
        slices.get(wrong)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("tpu7x-4", "TensorCores, two per chip: tpu7x-8 has 4 chips (8 devices), 2x2x1"),
        ("tpu7x-4x4x4", "TensorCores, two per chip: tpu7x-128 has 64 chips (128 devices), 4x4x4"),
        ("v4-4", "TensorCores, two per chip: v4-8 has 4 chips, 2x2x1"),
        ("v5e-4x4", "chips: v5e-16 has 16 chips, 4x4"),
    ],
)
def test_a_name_that_counts_otherwise_is_answered_with_the_right_number(wrong, meant):
    with pytest.raises(UserError, match=re.escape(f"The number counts {meant}.")):
        slices.get(wrong)


def test_utilization_by_hand_and_never_above_all_of_it():
    flops, v4_32 = 41.25e9 * 32 * 2048, slices.get("v4-32")  # a 7B at 2,048 tokens
    assert v4_32.mfu(flops, seconds=1.0) == pytest.approx(flops / (16 * 275e12))
    with pytest.raises(ValueError, match=r"are 123% of its peak.*expected at most 100 %"):
        v4_32.mfu(flops, seconds=0.5)


def test_chips_are_shared_evenly_or_not_at_all():
    v4_32 = slices.get("v4-32")
    assert [slices.get("2xv4-16").shared_by(n).hosts for n in (1, 2, 16)] == [1, 2, 16]
    assert v4_32.shared_by(2).chips_per_host == 8
    for wrong in (0, 3, 32):
        message = f"{wrong} processes cannot share the 16 chips of v4-32 evenly; expected one of 1, 2, 4, 8, 16"
        with pytest.raises(ValueError, match=message):
            v4_32.shared_by(wrong)


def test_devices_that_are_no_tpus_have_names_too():
    gpus = slices.get("h100:8x2")
    assert (gpus.chips, gpus.hosts, gpus.chips_per_host, gpus.is_tpu) == (16, 2, 8, False)
    assert gpus.mfu(16 * 989e12, seconds=2.0) == 0.5
    assert slices.get("a100:4x1").name == "a100:4"
    assert slices.of_device_kind("NVIDIA H200", per_host=8, hosts=1) == slices.get("h200:8")
    assert slices.of_device_kind("TPU v4", per_host=4, hosts=1) == slices.get("v4-8")
    with pytest.raises(UserError, match=r"3 'TPU v4' devices .*name the SLICE, or set TPU_ACCELERATOR_TYPE"):
        slices.of_device_kind("TPU v4", per_host=3, hosts=1)
    cpu = slices.get("cpu:2")
    assert cpu == slices.of_device_kind("cpu", per_host=2, hosts=1)
    assert cpu.peak_flops == 0
    assert cpu.mfu(1e9, seconds=2.0, peak_flops=1e9) == 0.5


@pytest.mark.parametrize(
    ("kind", "name", "devices"),
    [
        ("TPU v4", "v4-2", 1),
        ("TPU v5", "v5p-2", 1),
        ("TPU v5p", "v5p-2", 1),
        ("TPU v5 lite", "v5e-1", 1),
        ("TPU v6e", "v6e-1", 1),
        ("TPU7x", "tpu7x-2", 2),
        ("NVIDIA H200", "h200:1", 1),
        ("cpu", "cpu:1", 1),
    ],
)
def test_one_chip_of_every_kind_is_a_slice(kind, name, devices):
    one = slices.one_of_device_kind(kind)
    assert (one.name, one.chips, one.devices, one.hosts) == (name, 1, devices, 1)
    assert kind in one.chip.kinds
    assert one == slices.SLICES.get(name, one)


@pytest.mark.parametrize("wrong", ["h100:0", "h100:8x", "h100:", "rtx:1", "v4:8", "h100:8x2x2"])
def test_unknown_devices_are_refused_with_the_form_expected(wrong):
    with pytest.raises(ValueError, match=f"unknown devices '{wrong}': expected KIND:DEVICES.*h100:8x2"):
        slices.get(wrong)


@pytest.mark.parametrize("wrong", ["h100", "h100-8", "gpu", "cpu"])
def test_devices_without_their_number_are_no_tpu_slice(wrong):
    with pytest.raises(ValueError, match=f"unknown devices '{wrong}': expected local, or KIND:DEVICES, such as h100:8"):
        slices.get(wrong)


@pytest.mark.parametrize("name", ["gin/quickstart.gin", "my-run.gin"])
def test_an_experiment_in_place_of_a_slice_is_named(name):
    with pytest.raises(ValueError, match=f"'{name}' is no slice: the slice comes first"):
        slices.get(name)


def test_a_gpu_that_is_not_in_the_table_is_named():
    with pytest.raises(ValueError, match=r"'NVIDIA T4' devices, which Renga does not know: .* NVIDIA L4"):
        slices.of_device_kind("NVIDIA T4", per_host=1, hosts=1)
