"""Maps parameters to the tensors of published models, whose dimensions are in another order, merged or split.

A `Source` describes the dimensions of a tensor by the logical axes of a parameter, in the notation of einops:

    Source("h.{}.attn.c_attn.weight", "embed (0/3 heads head_dim)")

is a matrix whose rows are `embed`, and whose columns are the first of three blocks of `heads` x `head_dim`. `4+heads+2`
is the axis `heads` with four entries of other parameters before it and two after it; `4+(heads head_dim)+2` says the
same of merged axes. `_` is an unnamed dimension.

`{}` stands for the number of the layer: a parameter with the axis `layers` is read from one tensor per layer. A second
`{}` is the index along its next axis, such as an expert. `first=1, every=2` means layers 1, 3, 5, ...
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Slices = tuple[slice, ...]
_TOKEN = re.compile(r"(?:(\d+)\+)?\(([^)]*)\)(?:\+(\d+))?|(\S+)")
_AXIS = re.compile(r"(?:(\d+)\+)?(\w*[^\W\d]\w*)(?:\+(\d+))?")


@dataclasses.dataclass(frozen=True)
class Source:
    """The tensor, or the tensors of all layers, that hold a parameter.

    Attributes:
      name: name of the tensor, `{}` for the layer; with a leading "/" it takes no prefix.
      dims: the tensor's dimensions by the parameter's other axes; see the module.
      first, every: layer of the parameter's first entry, and stride in layers.
      dtype: dtype to write; "": that of the export.
    """

    name: str
    dims: str
    first: int = 0
    every: int = 1
    dtype: str = ""

    def prefixed(self, prefix: str) -> Source:
        """Returns the source with `prefix` before its name; a leading "/" is removed instead."""
        name = self.name[1:] if self.name.startswith("/") else prefix + self.name
        return dataclasses.replace(self, name=name)

    def tensor(self, place: tuple[int, ...]) -> str:
        """Returns the name of the tensor at these indices of the parameter's stacked axes."""
        return self.name.format(self.first + self.every * place[0], *place[1:]) if place else self.name

    @property
    def num_stacked(self) -> int:
        """The number of the parameter's leading axes that have a tensor for each entry."""
        return self.name.count("{}")

    @property
    def _groups(self) -> list[list[str]]:
        return [(merged or single).split() for _, merged, _, single in _TOKEN.findall(self.dims)]

    @property
    def _around(self) -> list[tuple[int, int]]:
        return [(int(before or 0), int(after or 0)) for before, _, after, _ in _TOKEN.findall(self.dims)]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of the tensor, given the length of each axis in it."""
        products = [math.prod(_size(token, sizes) for token in group) for group in self._groups]
        return tuple(sum(around) + own for around, own in zip(self._around, products, strict=True))

    def part(self, sizes: Mapping[str, int], wanted: Mapping[str, slice]) -> Slices:
        """Returns the part of the tensor that `read` reads."""
        return tuple(place for place, _, _ in self._placed(sizes, wanted))

    def _placed(self, sizes: Mapping[str, int], wanted: Mapping[str, slice]) -> list[tuple]:
        covers = [[_slice(token, sizes, wanted) for token in group] for group in self._groups]
        lengths = [[_size(token, sizes) for token in group] for group in self._groups]
        starts = [before for before, _ in self._around]
        return [_covering(*three) for three in zip(covers, lengths, starts, strict=True)]

    def read(self, read: Callable[[Slices], np.ndarray], sizes: Mapping[str, int], wanted: Mapping[str, slice]):
        """Reads a part of a parameter, with the axes of `sizes`, from one tensor.

        Args:
          read: reads a part of the tensor.
          sizes: length in the tensor of each axis but the stacked ones, in the parameter's order.
          wanted: the range to return of each of these axes.
        """
        placed = self._placed(sizes, wanted)
        values = read(tuple(place for place, _, _ in placed))
        values = values.reshape([size for _, shape, _ in placed for size in shape])
        values = values[tuple(part for _, _, parts in placed for part in parts)]
        tokens = [token for group in self._groups for token in group]
        values = values.reshape([n for token, n in zip(tokens, values.shape, strict=True) if _block(token) is None])
        order = [_axis(token)[1] for token in tokens if _block(token) is None]
        return values.transpose([order.index(axis) for axis in sizes])

    def write(self, tensor: np.ndarray, values: np.ndarray, sizes: Mapping[str, int]) -> None:
        """Writes a parameter, or its part for one layer, into `tensor`, an array of `shape(sizes)`.

        The axes of `values` are in the order of `sizes`; entries beyond a size are left out.
        """
        values = values[tuple(slice(0, size) for size in sizes.values())]
        tokens = [token for group in self._groups for token in group]
        order = [_axis(token)[1] for token in tokens if _block(token) is None]
        values = values.transpose([list(sizes).index(axis) for axis in order])
        own = tuple(
            slice(before, size - after) for (before, after), size in zip(self._around, tensor.shape, strict=True)
        )
        split = tensor[own].reshape([_size(token, sizes) for token in tokens])
        whole = {axis: slice(0, size) for axis, size in sizes.items()}
        split[tuple(_slice(token, sizes, whole) if (b := _block(token)) is None else b[0] for token in tokens)] = values


def _block(token: str) -> tuple[int, int] | None:
    number, slash, count = token.partition("/")
    return (int(number), int(count)) if slash else None


def _axis(token: str) -> tuple[int, str, int]:
    found = _AXIS.fullmatch(token)
    assert found is not None, token
    return int(found[1] or 0), found[2], int(found[3] or 0)


def _size(token: str, sizes: Mapping[str, int]) -> int:
    if (block := _block(token)) is not None:
        return block[1]
    before, axis, after = _axis(token)
    return before + sizes[axis] + after


def _slice(token: str, sizes: Mapping[str, int], wanted: Mapping[str, slice]) -> slice:
    if (block := _block(token)) is not None:
        return slice(block[0], block[0] + 1)
    before, axis, _ = _axis(token)
    return slice(before + wanted[axis].start, before + wanted[axis].stop)


def _covering(parts: Sequence[slice], sizes: Sequence[int], before: int) -> tuple[slice, list[int], list[slice]]:
    """Returns a range of a merged dimension with these parts, its shape as factors, and the parts inside."""
    lengths = [part.stop - part.start for part in parts]
    varies = next((i for i, length in enumerate(lengths) if length > 1), len(parts) - 1)
    inner = math.prod(sizes[varies + 1 :])
    start = 0
    for part, size in zip(parts[: varies + 1], sizes[: varies + 1], strict=True):
        start = start * size + part.start
    shape = [*lengths[: varies + 1], *sizes[varies + 1 :]]
    inside = [*(slice(None) for _ in range(varies + 1)), *parts[varies + 1 :]]
    return slice(before + start * inner, before + (start + lengths[varies]) * inner), shape, inside
