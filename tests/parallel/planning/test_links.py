"""Links of groups of chips, counted by hand on the grids of real slices."""

import math
import re

import jax
import pytest

from core import slices
from launch import environment
from parallel import mesh
from parallel.compiled import traffic
from parallel.planning import arithmetic, links


def links_of(slice_name, devices=None, dcn_shape=None, **shape):
    slice_ = slices.get(slice_name)
    devices = devices or mesh.topology_devices(slice_)
    return links.Links(mesh.make_mesh(shape, slice=slice_, devices=devices, dcn_shape=dcn_shape), slice_)


def collective(kind, axes, *, payload, wire, group_size, network="ICI", times=1, beside=0):
    return traffic.Collective(
        "x", kind, (), times, payload, wire, group_size, axes, network, (), (), beside > 0, beside, 0, ""
    )


@pytest.mark.parametrize(
    ("slice_name", "shape", "axes", "expected"),
    [
        ("v4-8", {"fsdp": 4}, ("fsdp",), 2),  # 2x2: a link along x and one along y
        ("v4-32", {"fsdp": 16}, ("fsdp",), 3),  # 2x2x4, open: one for each dimension
        ("v4-32", {"fsdp": 4, "tensor": 4}, ("tensor",), 2),  # the 2x2 plane of a host
        ("v4-32", {"fsdp": 4, "tensor": 4}, ("fsdp",), 1),  # a line along z
        ("v4-32", {"fsdp": 4, "tensor": 4}, ("fsdp", "tensor"), 3),
        ("v4-64", {"fsdp": 32}, ("fsdp",), 3),  # 2x4x4, still open
        ("v4-128", {"fsdp": 64}, ("fsdp",), 6),  # 4x4x4: three rings
        ("v4-128", {"data": 16, "fsdp": 4}, ("fsdp",), 2),  # one ring
        ("v5p-1024", {"fsdp": 512}, ("fsdp",), 6),
        ("v6e-256", {"fsdp": 256}, ("fsdp",), 4),  # 16x16: two rings
        ("v6e-64", {"fsdp": 64}, ("fsdp",), 2),  # 8x8: open
        ("tpu7x-128", {"fsdp": 128}, ("fsdp",), 6),  # 4x4x4: three rings, of which both devices of a chip are
        ("tpu7x-128", {"fsdp": 64, "tensor": 2}, ("tensor",), 6),  # the devices of a chip: as six links
        ("tpu7x-128", {"fsdp": 64, "tensor": 2}, ("fsdp",), 3),  # two groups share three rings
    ],
)
def test_links_of_a_group(slice_name, shape, axes, expected):
    assert links_of(slice_name, **shape).count(axes) == expected


def test_the_page_of_pipelines_says_from_how_many_tokens_fsdp_can_hide_its_traffic():
    page = (environment.WORKSPACE / "docs" / "explanation" / "pipelines.md").read_text()
    section = page.split("## Inside a slice")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| (v\S+) \| ([\d,]+) \|$", section, flags=re.MULTILINE))
    assert len(rows) == 7
    for slice_name, tokens in rows.items():
        slice_ = slices.get(slice_name)
        links_ = links_of(slice_name, fsdp=slice_.devices).count(("fsdp",))
        flops = arithmetic.PRODUCT_SHARE_OF_PEAK * slice_.chip.peak_flops
        assert int(tokens.replace(",", "")) == round(flops / (links_ * slice_.chip.link_bytes_per_second))


def test_groups_that_lie_between_one_another_share_their_links():
    found = links_of("v4-32", data=2, fsdp=2, tensor=4)  # z in halves of halves
    by_axis = {axis: found.extents((axis,)) for axis in ("data", "fsdp")}
    assert by_axis["fsdp"] == (links.Extent(2, 1, False),)
    assert by_axis["data"] == (links.Extent(2, 2, False),)
    assert (found.count(("fsdp",)), found.count(("data",))) == (1, 0.5)
    assert found.count(("data", "fsdp")) == 1


def test_a_part_of_an_axis_has_no_more_links_than_its_chips_can_have():
    found = links_of("v4-32", fsdp=16)
    assert [found.count(("fsdp",), group_size=n) for n in (2, 4, 8, 16)] == [1, 2, 3, 3]


def test_simulated_devices_have_the_positions_of_the_chips():
    played = links_of("v4-32", devices=jax.devices()[:16], fsdp=4, tensor=4)
    real = links_of("v4-32", fsdp=4, tensor=4)
    assert (played._coordinates == real._coordinates).all()


def test_a_shift_along_a_line_or_a_ring_shares_no_link():
    assert links_of("v4-32", stage=4, fsdp=4).permute_load(("stage",)) == 1
    assert links_of("v4-128", stage=4, fsdp=16).permute_load(("stage",)) == 1


def test_a_shift_over_halves_of_a_line_crosses_the_other_half():
    assert links_of("v4-32", data=2, fsdp=2, tensor=4).permute_load(("data",)) == 2


def test_seconds_of_collectives_by_hand():
    found = links_of("v4-32", fsdp=16)
    gather = collective("all-gather", ("fsdp",), payload=16_000_000, wire=15_000_000, group_size=16)
    assert found.seconds(gather) == pytest.approx(15e6 / (3 * 45e9))
    line = links_of("v4-32", stage=4, fsdp=4)
    shift = collective("collective-permute", ("stage",), payload=9_000_000, wire=9_000_000, group_size=4)
    assert line.seconds(shift) == pytest.approx(9e6 / 45e9)
    # to everybody along a line of 4: the link in the middle carries 2 x 2 parts of a quarter each way
    exchange = collective("all-to-all", ("stage",), payload=8_000_000, wire=6_000_000, group_size=4)
    assert line.seconds(exchange) == pytest.approx(8e6 / 45e9)
    nobody = collective("all-reduce", (), payload=8, wire=0, group_size=1)
    assert found.seconds(nobody) == 0


def test_seconds_between_and_beside_the_devices_of_a_chip():
    found = links_of("tpu7x-32", stage=4, fsdp=4, tensor=2)  # a line along z, the square of a host, the pair
    pair = collective("all-to-all", ("tensor",), payload=8_000_000, wire=4_000_000, group_size=2)
    assert found.seconds(pair) == pytest.approx(4e6 / (6 * 90e9))
    shift = collective("collective-permute", ("stage",), payload=9_000_000, wire=9_000_000, group_size=4)
    assert found.seconds(shift) == pytest.approx(2 * 9e6 / 90e9)  # both devices of a chip send over one link
    exchange = collective("all-to-all", ("stage",), payload=8_000_000, wire=6_000_000, group_size=4)
    assert found.seconds(exchange) == pytest.approx(2 * 8e6 / 90e9)
    both = collective("all-to-all", ("stage", "tensor"), payload=8_000_000, wire=7_000_000, group_size=8)
    assert found.seconds(both) == pytest.approx(2 * 8e6 / 90e9)  # 4 x 4 parts of an eighth over the link in the middle
    assert [links_of("tpu7x-32", fsdp=32).count(("fsdp",), group_size=n) for n in (1, 2, 4, 8, 32)] == [1, 6, 1, 2, 3]


def test_slices_are_joined_by_the_network_of_hosts():
    found = links_of("2xv4-32", dcn_shape={"data": 2}, data=2, fsdp=16)
    assert found.count(("fsdp",)) == 3
    across = collective("all-reduce", ("data",), payload=1_000_000, wire=1_000_000, group_size=2, network="DCN")
    assert found.seconds(across) == pytest.approx(1e6 / 6.25e9)
    assert found.permute_load(("fsdp",)) == links_of("v4-32", fsdp=16).permute_load(("fsdp",))


def test_the_table_of_networks_agrees_with_that_of_slices():
    assert set(links.DCN_BYTES_PER_SECOND) == set(slices.CHIPS)
    for name in ("v4-32", "v5p-128"):
        slice_ = slices.get(name)
        per_host = links.DCN_BYTES_PER_SECOND[slice_.generation] * slice_.devices_per_host
        assert math.isclose(per_host, slices.DCN_BYTES_PER_SECOND_PER_HOST)
