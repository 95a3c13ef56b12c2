"""Bandwidth of collectives on a slice, from the positions of the chips of a group.

Chips form a grid with a link between neighbors along every dimension. In a gather or a reduction, a group of chips has
one link's bandwidth for each dimension that it spans, or two where wraparound links close the dimension into a ring. A
group of every second chip shares its links with the interleaved group and gets half. Where a chip has two devices
(tpu7x), a group with only one of them also gets half.

Sources: Google Cloud, "TPU architecture"; "How to Scale Your Model", chapter 2.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from core.slices import Slice
from parallel import mesh as meshes
from parallel.compiled.traffic import Collective

# Bytes per second that one device can send to other slices ("How to Scale Your Model", chapter 2: typical DCN bandwidth
# per TPU; half of the 100 Gb/s of a chip for tpu7x: Google Cloud, "TPU7x"). With 4 chips on a v4 or v5p host that is
# `core.slices.DCN_BYTES_PER_SECOND_PER_HOST`.
DCN_BYTES_PER_SECOND: Mapping[str, float] = {
    "v4": 6.25e9,
    "v5p": 6.25e9,
    "v5e": 3.125e9,
    "v6e": 12.5e9,
    "tpu7x": 6.25e9,
}
# Between a device and its host, in one direction. Assumed: "How to Scale Your Model", chapter 2, says about 16 GB/s per
# chip; v6e has PCIe 5 (Google Cloud, "TPU v6e"), of which half is counted here. The two devices of a
# tpu7x chip share that bandwidth.
PCIE_BYTES_PER_SECOND: Mapping[str, float] = {"v4": 16e9, "v5p": 16e9, "v5e": 16e9, "v6e": 32e9, "tpu7x": 16e9}

# Bandwidth between the two devices of a tpu7x chip, in ICI links (Google Cloud, "TPU7x": six times one of them).
LINKS_WITHIN_CHIP = 6


class Extent(NamedTuple):
    """A group of chips along one dimension of the slice.

    Attributes:
      chips: number of coordinates that the group occupies.
      stride: number of groups that share its links.
      is_ring: whether wraparound links close it.
    """

    chips: int
    stride: float
    is_ring: bool

    @property
    def links(self) -> float:
        """Bandwidth of a chip along this dimension, in multiples of one link in one direction."""
        return (2 if self.is_ring else 1) / self.stride


class Links:
    """Bandwidth model (bytes/s) of ICI, DCN and PCIe for one mesh on one slice."""

    def __init__(self, mesh: jax.sharding.Mesh, slice: Slice):
        self.slice = slice
        self._shape = dict(mesh.shape)
        self._coordinates = _coordinates(mesh, slice)
        self._counts: dict[tuple[tuple[str, ...], int | None], float] = {}

    def extents(self, axes: Sequence[str]) -> tuple[Extent, ...]:
        """Returns the extent of a group along each dimension in which it has several chips."""
        group, sharing = self._group(axes), self.slice.chip.devices // self._on_chip(axes)
        bounds = zip(self.slice.topology, self.slice.wraparound, strict=True)
        found = [_extent(group[:, i], *bound) for i, bound in enumerate(bounds)]
        return tuple(extent._replace(stride=extent.stride * sharing) for extent in found if extent.chips > 1)

    def _group(self, axes: Sequence[str]) -> np.ndarray:
        index = tuple(slice(None) if axis in axes else 0 for axis in self._shape)
        return self._coordinates[index].reshape(-1, self._coordinates.shape[-1])

    def _on_chip(self, axes: Sequence[str]) -> int:
        return len(set(self._group(axes)[:, -1]))

    def count(self, axes: Sequence[str], *, group_size: int | None = None) -> float:
        """Returns the number of links that a device can use at once in a gather or a reduction.

        `group_size` is the number of devices of a group that spans only part of these axes.
        """
        key = (tuple(axes), group_size)
        if key not in self._counts:
            self._counts[key] = self._count(axes, group_size)
        return self._counts[key]

    def _count(self, axes: Sequence[str], group_size: int | None) -> float:
        whole, on_chip = math.prod(self._shape[axis] for axis in axes), self._on_chip(axes)
        if 1 < (group_size or whole) <= on_chip:
            return LINKS_WITHIN_CHIP
        total = sum(extent.links for extent in self.extents(axes)) or 1.0
        if group_size is None or group_size >= whole:
            return total
        return min(total, max(1, int(math.log2(max(1, group_size // on_chip)))))

    def permute_load(self, axes: Sequence[str]) -> float:
        """Returns the messages on the busiest link when every chip sends to the next one."""
        return max((extent.stride for extent in self.extents(axes)), default=1.0)

    def seconds(self, collective: Collective) -> float:
        """Returns the seconds of one execution of a collective, without latency."""
        if collective.network == "DCN":
            return collective.wire_bytes / DCN_BYTES_PER_SECOND[self.slice.generation]
        if collective.network == "PCIe":
            return collective.wire_bytes / PCIE_BYTES_PER_SECOND[self.slice.generation]
        rate, axes = self.slice.chip.link_bytes_per_second, collective.axes
        if not axes:
            return 0.0
        if not self.extents(axes):  # between the devices of a chip
            return collective.wire_bytes / (rate * self.count(axes))
        if collective.kind == "collective-permute":
            return collective.wire_bytes * self.permute_load(axes) / rate
        if collective.kind.endswith("all-to-all"):
            crossing = max(_crossing(extent) for extent in self.extents(axes)) * self._on_chip(axes)
            return max(collective.payload_bytes * crossing, collective.wire_bytes) / rate
        return collective.wire_bytes / (rate * self.count(axes, group_size=collective.group_size))


def _coordinates(mesh: jax.sharding.Mesh, slice: Slice) -> np.ndarray:
    """Returns coordinates of the chip, and number on it, of each device: [*mesh shape, D + 1]."""
    devices = list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        simulated = meshes.simulated_devices(sorted(devices, key=lambda d: (d.process_index, d.id)), slice)
        by_device = {described.device: described for described in simulated}
        devices = [by_device[device] for device in devices]
    dimensions = len(slice.topology)
    coordinates = np.array([(*device.coords[:dimensions], device.core_on_chip) for device in devices])
    return coordinates.reshape(*mesh.devices.shape, dimensions + 1)


def _extent(places: np.ndarray, size: int, wraps: bool) -> Extent:
    taken = sorted(set(int(place) for place in places))
    if len(taken) == 1:
        return Extent(1, 1, False)
    stride = (taken[-1] - taken[0]) / (len(taken) - 1)
    return Extent(len(taken), stride, wraps and len(taken) * stride == size)


def _crossing(extent: Extent) -> float:
    """Returns what a dimension's middle link carries one way in an all-to-all, in payloads of one chip."""
    return extent.chips * extent.stride / (8 if extent.is_ring else 4)
