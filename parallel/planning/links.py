"""Bandwidth of collectives on a slice, from the positions of the chips of a group.

Chips form a grid with a link between neighbors along every dimension. In a gather or a reduction, a group of chips
has one link's bandwidth for each dimension that it spans, or two where wraparound links close the dimension into a
ring, so that each chip sends in both directions. On an open line the chips at the ends have only one link, and all
data must cross it; therefore a v4-32 (2x2x4, no wraparound) has 3 links for a group of all its chips, not 6. A group
of every second chip shares its links with the interleaved group and gets half.

Wraparound is `core.slices.Slice.wraparound`: v4 and v5p from a 4x4x4 cube up, v5e and v6e along a dimension of 16
(Google Cloud, "TPU architecture"; "How to Scale Your Model", chapter 2). Link bandwidths are `core.slices.CHIPS`, in
one direction, from the table "ICI BW/link (one-way)" in the latter.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from core.slices import Slice
from parallel import mesh as meshes
from parallel.compiled.traffic import Collective

# Bytes per second that one chip can send to other slices ("How to Scale Your Model", chapter 2: typical DCN bandwidth
# per TPU). With 4 chips on a v4 or v5p host that is `core.slices.DCN_BYTES_PER_SECOND_PER_HOST`.
DCN_BYTES_PER_SECOND: Mapping[str, float] = {"v4": 6.25e9, "v5p": 6.25e9, "v5e": 3.125e9, "v6e": 12.5e9}
# Between a chip and its host, in one direction. Assumed: "How to Scale Your Model", chapter 2, says about 16 GB/s per
# chip; v6e has PCIe 5 (Google Cloud, "TPU v6e"), of which half is counted here.
PCIE_BYTES_PER_SECOND: Mapping[str, float] = {"v4": 16e9, "v5p": 16e9, "v5e": 16e9, "v6e": 32e9}


class Extent(NamedTuple):
    """A group of chips along one dimension of the slice.

    Attributes:
      chips: number of coordinates that the group occupies.
      stride: distance between neighbors; interleaved groups share the same links.
      is_ring: whether wraparound links close it.
    """

    chips: int
    stride: float
    is_ring: bool

    @property
    def links(self) -> float:
        """Bandwidth of a chip along this dimension, in links in one direction."""
        return (2 if self.is_ring else 1) / self.stride


class Links:
    """Bandwidth model (bytes/s) of ICI, DCN and PCIe for one mesh on one slice."""

    def __init__(self, mesh: jax.sharding.Mesh, slice: Slice):
        """Takes a mesh over the chips of `slice`, or over CPU devices that simulate them."""
        self.slice = slice
        self._shape = dict(mesh.shape)
        self._coordinates = _chip_coordinates(mesh, slice)

    def extents(self, axes: Sequence[str]) -> tuple[Extent, ...]:
        """Returns the extent of a group of chips along each dimension of the slice that the group spans.

        Args:
          axes: mesh axes that vary in the group; all groups of a mesh have the same extents.
        """
        index = tuple(slice(None) if axis in axes else 0 for axis in self._shape)
        group = self._coordinates[index].reshape(-1, self._coordinates.shape[-1])  # [chips, dimensions]
        bounds = zip(self.slice.topology, self.slice.wraparound, strict=True)
        found = [_extent(group[:, i], *bound) for i, bound in enumerate(bounds)]
        return tuple(extent for extent in found if extent.chips > 1)

    def count(self, axes: Sequence[str], *, group_size: int | None = None) -> float:
        """Returns the number of links, in one direction, that a chip can use at once in a gather or a reduction.

        Args:
          axes: mesh axes that vary in the group.
          group_size: number of chips of the group, if it spans only part of these axes: 2 chips use one link, 4 chips
            at most two.
        """
        whole = math.prod(self._shape[axis] for axis in axes)
        total = sum(extent.links for extent in self.extents(axes)) or 1.0
        if group_size is None or group_size >= whole:
            return total
        return min(total, max(1, int(math.log2(group_size))))

    def permute_load(self, axes: Sequence[str]) -> float:
        """Returns the number of messages on the busiest link when every chip sends to the next one along `axes`.

        That is the number of interleaved groups that share it: a shift along a line has load 1, including the way back
        from the end, which runs in the opposite direction.
        """
        return max((extent.stride for extent in self.extents(axes)), default=1.0)

    def seconds(self, collective: Collective) -> float:
        """Returns the time of one execution of a collective that has the links to itself, without latency."""
        if collective.network == "DCN":
            return collective.wire_bytes / DCN_BYTES_PER_SECOND[self.slice.generation]
        if collective.network == "PCIe":
            return collective.wire_bytes / PCIE_BYTES_PER_SECOND[self.slice.generation]
        rate, axes = self.slice.chip.link_bytes_per_second, collective.axes
        if not axes:
            return 0.0
        if collective.kind == "collective-permute":
            return collective.wire_bytes * self.permute_load(axes) / rate
        if collective.kind.endswith("all-to-all"):
            crossing = max((_crossing(extent) for extent in self.extents(axes)), default=0.0)
            return max(collective.payload_bytes * crossing, collective.wire_bytes) / rate
        return collective.wire_bytes / (rate * self.count(axes, group_size=collective.group_size))


def _chip_coordinates(mesh: jax.sharding.Mesh, slice: Slice) -> np.ndarray:
    """Returns the position of each chip of a mesh inside its slice, [*mesh shape, dimensions of the topology]."""
    chips = list(mesh.devices.flat)
    if chips[0].platform == "cpu":
        simulated = meshes.simulated_chips(sorted(chips, key=lambda d: (d.process_index, d.id)), slice)
        by_device = {chip.device: chip for chip in simulated}
        chips = [by_device[device] for device in chips]
    dimensions = len(slice.topology)
    coordinates = np.array([chip.coords[:dimensions] for chip in chips])
    return coordinates.reshape(*mesh.devices.shape, dimensions)


def _extent(places: np.ndarray, size: int, wraps: bool) -> Extent:
    taken = sorted(set(int(place) for place in places))
    if len(taken) == 1:
        return Extent(1, 1, False)
    stride = (taken[-1] - taken[0]) / (len(taken) - 1)
    return Extent(len(taken), stride, wraps and len(taken) * stride == size)


def _crossing(extent: Extent) -> float:
    """Returns the share of a chip's all-to-all payload that one link in the middle of the dimension carries one way."""
    return extent.chips * extent.stride / (8 if extent.is_ring else 4)
