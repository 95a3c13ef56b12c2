"""How many links of a slice a collective can use, from where the chips of its group stand.

Chips form a grid, and each has a link to its neighbour on either side along every dimension. The one idea: a group of
chips that lies along a dimension has, for a gather or a reduction, one link's worth of bandwidth in that dimension, and
two where wraparound links close the dimension into a ring, so that each chip sends both ways. On an open line the chips
at the ends have one link only, and everything must pass it (hence a v4-32, 2x2x4 without wraparound, has 3 links for
all its chips, not 6). A group that takes only every second chip shares its links with the group between, and has half.

Wraparound: `core.slices.Slice.wraparound`: v4 and v5p from a 4x4x4 cube up, v5e and v6e along a dimension of 16 (Google
Cloud, "TPU architecture": slices below a cube have no wraparound; "How to Scale Your Model", chapter 2). Rates of
links are those of `core.slices.CHIPS`, one way, from the table "ICI BW/link (one-way)" in the latter.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from core.slices import Slice
from parallel import mesh as meshes
from parallel.traffic import Collective

# Bytes per second that one chip can send to other slices ("How to Scale Your Model", chapter 2: typical DCN bandwidth
# per TPU). With 4 chips on a v4 or v5p host that is `core.slices.DCN_BYTES_PER_SECOND_PER_HOST`.
DCN_BYTES_PER_SECOND: Mapping[str, float] = {"v4": 6.25e9, "v5p": 6.25e9, "v5e": 3.125e9, "v6e": 12.5e9}


class Extent(NamedTuple):
    """A group of chips along one dimension of the slice.

    Attributes:
      chips: places that it takes there.
      stride: distance of neighbours; the groups between them use the same links.
      is_ring: whether wraparound links close it.
    """

    chips: int
    stride: float
    is_ring: bool

    @property
    def links(self) -> float:
        """What a chip can send along this dimension, in links one way."""
        return (2 if self.is_ring else 1) / self.stride


class Links:
    """The links of one mesh on one slice."""

    def __init__(self, mesh: jax.sharding.Mesh, slice: Slice):
        """Takes a mesh of the chips of `slice`, or of CPU devices that play them."""
        self.slice = slice
        self._shape = dict(mesh.shape)
        self._coordinates, self._slice_of = places(mesh, slice)
        self._loads: dict[tuple[str, ...], int] = {}

    def extents(self, axes: Sequence[str]) -> tuple[Extent, ...]:
        """How the group of the first chip lies, by dimension of the slice; only dimensions that it extends along.

        Args:
          axes: mesh axes that vary in the group; all groups of a mesh lie alike.
        """
        index = tuple(slice(None) if axis in axes else 0 for axis in self._shape)
        group = self._coordinates[index].reshape(-1, self._coordinates.shape[-1])  # [chips, dimensions]
        bounds = zip(self.slice.topology, self.slice.wraparound, strict=True)
        found = [_extent(group[:, i], *bound) for i, bound in enumerate(bounds)]
        return tuple(extent for extent in found if extent.chips > 1)

    def count(self, axes: Sequence[str], *, group_size: int | None = None) -> float:
        """Links, one way, that a chip can use at once for a gather or a reduction inside a group; at least a part of 1.

        Args:
          axes: mesh axes that vary in the group.
          group_size: its chips, where the group is only a part of these axes: 2 chips have one link, 4 at most two.
        """
        whole = math.prod(self._shape[axis] for axis in axes)
        total = sum(extent.links for extent in self.extents(axes)) or 1.0
        if group_size is None or group_size >= whole:
            return total
        return min(total, max(1, int(math.log2(group_size))))

    def permute_load(self, axes: tuple[str, ...]) -> int:
        """Messages on the busiest link when every chip sends to the next one along `axes`; routes go x, then y, then z.

        A shift along a line is 1, also the way back from its end: that runs against the others.
        """
        if axes not in self._loads:
            self._loads[axes] = self._permute_load(axes)
        return self._loads[axes]

    def _permute_load(self, axes: Sequence[str]) -> int:
        sizes = tuple(self._shape.values())
        varying = [i for i, axis in enumerate(self._shape) if axis in axes]
        numbers = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), varying, range(len(varying)))
        numbers = numbers.reshape(math.prod(sizes[i] for i in varying), -1)  # [chips of a group, groups]
        flat = self._coordinates.reshape(-1, self._coordinates.shape[-1])
        load: collections.Counter = collections.Counter()
        for source, target in zip(numbers.flat, np.roll(numbers, -1, axis=0).flat, strict=True):
            load.update((self._slice_of[source], *link) for link in self._route(flat[source], flat[target]))
        return max(load.values(), default=1)

    def _route(self, source: np.ndarray, target: np.ndarray) -> list[tuple]:
        """The links (chip, dimension, direction) between two chips."""
        at, links = [int(c) for c in source], []
        for i, (size, wraps) in enumerate(zip(self.slice.topology, self.slice.wraparound, strict=True)):
            distance = int(target[i]) - at[i]
            if wraps and abs(distance) > size // 2:
                distance -= size if distance > 0 else -size
            step = int(math.copysign(1, distance))
            for _ in range(int(abs(distance))):
                links.append((*at, i, step))
                at[i] = (at[i] + step) % size
        return links

    def seconds(self, collective: Collective) -> float:
        """Time of one execution of a collective that has the links to itself; latency is left out."""
        if collective.network == "DCN":
            return collective.wire_bytes / DCN_BYTES_PER_SECOND[self.slice.generation]
        rate, axes = self.slice.chip.link_bytes_per_second, collective.axes
        if not axes:
            return 0.0
        if collective.kind == "collective-permute":
            return collective.wire_bytes * self.permute_load(axes) / rate
        if collective.kind.endswith("all-to-all"):
            crossing = max((_crossing(extent) for extent in self.extents(axes)), default=0.0)
            return max(collective.payload_bytes * crossing, collective.wire_bytes) / rate
        return collective.wire_bytes / (rate * self.count(axes, group_size=collective.group_size))


def places(mesh: jax.sharding.Mesh, slice: Slice) -> tuple[np.ndarray, list[int]]:
    """Where each chip of a mesh stands.

    Returns:
      [*mesh shape, dimensions of the topology], the place in its slice; and, in mesh order, which slice that is.
    """
    chips = list(mesh.devices.flat)
    if chips[0].platform == "cpu":
        played = meshes.play(sorted(chips, key=lambda d: (d.process_index, d.id)), slice)
        by_device = {chip.device: chip for chip in played}
        chips = [by_device[device] for device in chips]
    dimensions = len(slice.topology)
    coordinates = np.array([chip.coords[:dimensions] for chip in chips])
    return coordinates.reshape(*mesh.devices.shape, dimensions), [getattr(c, "slice_index", 0) or 0 for c in chips]


def _extent(places: np.ndarray, size: int, wraps: bool) -> Extent:
    taken = sorted(set(int(place) for place in places))
    if len(taken) == 1:
        return Extent(1, 1, False)
    stride = (taken[-1] - taken[0]) / (len(taken) - 1)
    return Extent(len(taken), stride, wraps and len(taken) * stride == size)


def _crossing(extent: Extent) -> float:
    """Of an all-to-all, the share of a chip's payload that a link in the middle of the dimension carries one way."""
    return extent.chips * extent.stride / (8 if extent.is_ring else 4)
