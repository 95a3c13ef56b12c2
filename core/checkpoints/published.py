"""Reads the parameters of a model from a folder of safetensors files, and writes them."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from core import parameters, units
from core.checkpoints import reading, safetensors_files
from core.checkpoints.safetensors_files import Stored, Tensor
from core.checkpoints.tensor_map import Source
from core.errors import UserError
from core.files import paths
from core.logical import Specs

_Ranges = tuple[tuple[int, int], ...]  # start and stop of each dimension of a part
_SHARD_BYTES = 2 * 10**9  # of an exported file, which is held in memory while it is written
_PART = "shard-{}.tmp"
_COMPARED_ROWS = 16  # of a tensor and its copy, before a run is prepared; all rows are compared when they are read
_CHECKED = 2**22  # numbers that are checked at a time


class _Parameter(NamedTuple):
    source: Source
    stacked: tuple[int, ...]  # number of tensors along the leading axes: (layers,), (layers, experts) or ()
    sizes: dict[str, int]

    @property
    def places(self) -> list[tuple[int, ...]]:
        return list(np.ndindex(*self.stacked))

    @property
    def names(self) -> list[str]:
        return [self.source.tensor(place) for place in self.places]


def _described(
    shapes: Any, specs: Specs, sources: Mapping[str, Source], limits: Mapping[str, int]
) -> dict[str, _Parameter]:
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    found = {}
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
        name, names, shape = parameters.path_name(path), spec.axes, tuple(leaf.shape)
        if (source := sources.get(name)) is None:
            continue
        depth = source.num_stacked
        labels = [label or "_" for label in names[depth:]]
        sizes = {label: limits.get(label, size) for label, size in zip(labels, shape[depth:], strict=True)}
        found[name] = _Parameter(source, shape[:depth], sizes)
    return found


class Copy(NamedTuple):
    """A tensor with the same numbers as a parameter, which some folders contain.

    Attributes:
      name: full name of the tensor.
      path: the parameter, which is read from this tensor if its own is missing.
      otherwise: end of the error message if the two differ.
    """

    name: str
    path: str
    otherwise: str


class PublishedFolder:
    """The parameters of a model in a folder of safetensors.

    Attributes:
      notes: how its configuration differs from the model's, and what is not read.
    """

    def __init__(
        self,
        folder: paths.Path,
        sources: Mapping[str, Source],
        *,
        prefixes: Sequence[str] = ("",),
        ignored: Sequence[str] = (),
        copies: Sequence[Copy] = (),
        limits: Mapping[str, int] | None = None,
        dequantized: Callable[[Mapping[str, Tensor]], Mapping[str, Stored]] | None = None,
        differences: Sequence[str] = (),
        name: str = "",
    ):
        """Reads the headers of the files.

        Args:
          sources: by path.
          prefixes: possible prefixes of tensor names.
          ignored: patterns of names of tensors that hold no parameter.
          copies: tensors that repeat a parameter.
          limits: length of logical axes that are shorter in the tensors, such as `{"vocab": 50257}`.
          dequantized: replaces quantized tensors; None: they are used as stored.
          differences: lines for `notes`.
          name: name of the folder in messages; "": its path.
        """
        self.folder, self._name = folder, name or str(folder)
        self._unprefixed, self._prefixes = dict(sources), tuple(prefixes)
        self._ignored, self._copies = tuple(ignored), tuple(copies)
        self._limits = dict(limits or {})
        tensors = safetensors_files.tensors(folder)
        self._use(tensors if dequantized is None else dequantized(tensors))
        self.notes = (*differences, *self._unread())

    def _use(self, tensors: Mapping[str, Stored]) -> None:
        self._tensors = tensors
        plain = [source.name.replace("{}", "0") for source in self._unprefixed.values() if source.name[0] != "/"]
        prefix = next((p for p in self._prefixes if any(p + name in tensors for name in plain)), self._prefixes[0])
        self._sources = {path: source.prefixed(prefix) for path, source in self._unprefixed.items()}
        for copy_ in self._copies:
            if copy_.name in tensors and self._sources[copy_.path].name not in tensors:
                self._sources[copy_.path] = dataclasses.replace(self._sources[copy_.path], name=copy_.name)

    def _unread(self) -> list[str]:
        lines = []
        for pattern in self._ignored:
            if names := fnmatch.filter(self._tensors, pattern):
                lines.append(f"not read: {units.counted(len(names), 'tensor')} {pattern}, such as {names[0]}")
        used = {tensor.file.name for tensor in self._tensors.values()}
        if others := sorted({file.name for file in self.folder.glob("*.safetensors")} - used):
            lines.append(f"not read: {', '.join(units.shortened(others, most=3))}")
        return lines

    def _differing(self, shapes: Any, *, rows: int | None = None) -> list[str]:
        lines, paths_read = [], set(parameters.names(shapes))
        for copy_ in self._copies:
            name = self._sources[copy_.path].name
            if copy_.path not in paths_read or name == copy_.name or not {name, copy_.name} <= self._tensors.keys():
                continue
            one, other = self._tensors[copy_.name], self._tensors[name]
            if one.shape != other.shape or not safetensors_files.are_equal(one, other, rows):
                lines.append(f"{copy_.name} is not a copy of {name}: {copy_.otherwise}")
        return lines

    def renamed(self, renames: Mapping[str, str]) -> PublishedFolder:
        """Returns the folder as if its tensors had other names (`core.parameters.renamed`)."""
        names = parameters.renamed(list(self._tensors), renames, where="INIT_RENAMES")
        other = copy.copy(self)
        other._use({names[name]: tensor for name, tensor in self._tensors.items()})
        return other

    def describe(self) -> str:
        """Describes the folder in a phrase."""
        return f"the published folder {self._name}"

    def has(self, path: str) -> bool:
        """Returns whether there is a `Source` for the parameter."""
        return path in self._sources

    def num_layers(self, path: str) -> int | None:
        """Returns the number of layers of a stacked parameter; None if there are none."""
        source = self._sources.get(path)
        if source is None or not source.num_stacked:
            return None
        others = (0,) * (source.num_stacked - 1)
        numbers = itertools.takewhile(lambda i: source.tensor((i, *others)) in self._tensors, itertools.count())
        return sum(1 for _ in numbers) or None

    def problems(self, shapes: Any, specs: Specs) -> list[str]:
        """Returns lines about differences between the folder and a model."""
        expected, unknown = self._expected(shapes, specs), self._unknown(shapes)
        unused = [name for name in self._tensors if name not in expected and 0 not in self._tensors[name].shape]
        known = [*self._ignored, *(copy_.name for copy_ in self._copies)]
        left = [name for name in unused if not any(fnmatch.fnmatch(name, p) for p in known)]
        return (
            unknown
            + self._misfits(expected)
            + self._differing(shapes, rows=_COMPARED_ROWS)
            + [reading.Unused(f"left over: {name} {list(self._tensors[name].shape)}") for name in left]
        )

    def _expected(self, shapes: Any, specs: Specs) -> dict[str, tuple[int, ...]]:
        expected: dict[str, tuple[int, ...]] = {}
        for parameter in _described(shapes, specs, self._sources, self._limits).values():
            expected |= dict.fromkeys(parameter.names, parameter.source.shape(parameter.sizes))
        return expected

    def _unknown(self, shapes: Any) -> list[str]:
        names = [name for name in parameters.names(shapes) if name not in self._sources]
        return [f"missing: {name}, which models of this family have not" for name in names]

    def _misfits(self, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
        lines = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in self._tensors]
        for name, tensor in self._tensors.items():
            if name in expected and tensor.shape != expected[name]:
                lines.append(f"{name}: shape {list(tensor.shape)}, the model needs {list(expected[name])}")
            if name in expected and not is_float(tensor.dtype):
                lines.append(
                    f"{name}: dtype {tensor.dtype}, the model needs floating-point numbers of at least 16 bits"
                )
        return lines

    def load(self, abstract: Any, specs: Specs, *, progress: Callable[[str, int, int], None] = lambda *_: None) -> Any:
        """Reads this host's shards of the parameters, a tree like `abstract`.

        `progress` is called with a path, its number from 1, and the number of parameters. Raises UserError if the
        folder does not fit the model.
        """
        lines = self._unknown(abstract) + self._misfits(self._expected(abstract, specs)) + self._differing(abstract)
        if lines:
            raise UserError(f"{self.folder} does not fit the model:\n  " + "\n  ".join(lines))
        described = _described(abstract, specs, self._sources, self._limits)
        leaves, structure = jax.tree.flatten(abstract)
        # Parameters that are parts of the same tensors are read together.
        groups: dict[tuple[str, ...], list[_Own]] = {}
        for (path, parameter), leaf in zip(described.items(), leaves, strict=True):
            groups.setdefault(tuple(parameter.names), []).append(_Own.of(path, parameter, leaf))
        arrays: dict[str, jax.Array] = {}
        for group in groups.values():
            for own in group:
                progress(own.path, len(arrays) + 1, len(leaves))
            for name, place in zip(group[0].parameter.names, group[0].parameter.places, strict=True):
                self._fill(group, name, place)
            arrays |= {own.path: own.placed() for own in group}
        return jax.tree.unflatten(structure, [arrays[path] for path in described])

    def _fill(self, group: Sequence[_Own], name: str, place: tuple[int, ...]) -> None:
        wanted = [(own.parameter, into, wanted) for own in group for into, wanted in own.at(place)]
        wanted = [one for one in wanted if one[1].size]
        if not wanted:
            return
        parts = [parameter.source.part(parameter.sizes, part) for parameter, _, part in wanted]
        reader = self._tensors[name].reader(parts)
        for parameter, into, part in wanted:
            into[...] = parameter.source.read(reader, parameter.sizes, part)
            self._require_finite(name, into)

    def _require_finite(self, name: str, values: np.ndarray) -> None:
        values = np.atleast_1d(values)
        step = max(1, _CHECKED // max(1, values[:1].size))  # a block has a few MiB
        wrong = sum(
            int(np.count_nonzero(~np.isfinite(values[start : start + step]))) for start in range(0, len(values), step)
        )
        if wrong:
            first = values[~np.isfinite(values)][0]
            raise UserError(
                f"{self._tensors[name].file}: {name} has {units.counted(wrong, 'number')} that "
                f"{'is' if wrong == 1 else 'are'} not finite ({float(first)}), with which no output would be a number; "
                "download the file again, or train or convert the model again"
            )


class _Own(NamedTuple):
    path: str
    parameter: _Parameter
    leaf: jax.ShapeDtypeStruct
    blocks: dict[_Ranges, np.ndarray]
    devices: dict[_Ranges, list[jax.Device]]

    @classmethod
    def of(cls, path: str, parameter: _Parameter, leaf: jax.ShapeDtypeStruct) -> _Own:
        devices: dict[_Ranges, list[jax.Device]] = {}
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            ranges = tuple(s.indices(size)[:2] for s, size in zip(index, leaf.shape, strict=True))
            devices.setdefault(ranges, []).append(device)
        return cls(path, parameter, leaf, {}, devices)

    def at(self, place: tuple[int, ...]) -> Iterator[tuple[np.ndarray, dict[str, slice]]]:
        """Yields, for parts with entries at `place`, the array to fill and the range of each axis."""
        sizes, depth = self.parameter.sizes, len(place)
        for ranges in self.devices:
            if ranges not in self.blocks:
                self.blocks[ranges] = np.zeros([stop - start for start, stop in ranges], self.leaf.dtype)
            leading, own = ranges[:depth], ranges[depth:]
            if not all(start <= i < stop for i, (start, stop) in zip(place, leading, strict=True)):
                continue
            block = self.blocks[ranges][tuple(i - start for i, (start, _) in zip(place, leading, strict=True))]
            wanted = {
                axis: slice(min(start, size), min(stop, size))
                for (axis, size), (start, stop) in zip(sizes.items(), own, strict=True)
            }
            yield block[tuple(slice(0, s.stop - s.start) for s in wanted.values())], wanted

    def placed(self) -> jax.Array:
        shards = []
        for ranges, devices in self.devices.items():
            block = self.blocks.pop(ranges)
            shards += [jax.device_put(block, device) for device in devices]
            jax.block_until_ready(shards)
        return jax.make_array_from_single_device_arrays(self.leaf.shape, self.leaf.sharding, shards)


def is_float(dtype: np.dtype) -> bool:
    """Returns whether a dtype is of floating-point numbers of 16 bits or more."""
    return jax.numpy.issubdtype(dtype, jax.numpy.floating) and dtype.itemsize > 1


def tensors_of(
    read: Callable[[str, int | None], np.ndarray],
    shapes: Any,
    specs: Specs,
    sources: Mapping[str, Source],
    *,
    limits: Mapping[str, int],
    dtype: Any,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names and tensors of a model, in the layout of published folders.

    Args:
      read: `read(path, layer)` returns a layer of a parameter, or all of it for None.
      sources: by path, with complete tensor names.
      limits: as in `PublishedFolder`.
      dtype: dtype of tensors whose source names none.
    """
    parts: dict[str, list[tuple[str, tuple[int, ...], _Parameter]]] = {}
    for path, parameter in _described(shapes, specs, sources, limits).items():
        for name, place in zip(parameter.names, parameter.places, strict=True):
            parts.setdefault(name, []).append((path, place, parameter))
    read = functools.lru_cache(maxsize=1)(read)  # a layer of experts is read once for all of its tensors
    for name, found in parts.items():
        source, sizes = found[0][2].source, found[0][2].sizes
        tensor = np.zeros(source.shape(sizes), source.dtype or dtype)
        for path, place, parameter in found:
            values = read(path, place[0] if place else None)[place[1:]]
            require_range(name, values, tensor.dtype)
            parameter.source.write(tensor, values, parameter.sizes)
        yield name, tensor


def require_range(name: str, values: np.ndarray, dtype: np.dtype) -> None:
    """Raises UserError if a finite value of a tensor is infinite in a dtype."""
    with np.errstate(over="ignore"):
        overflows = np.isinf(values.astype(dtype)) & np.isfinite(values)
    if overflows.any():
        raise UserError(
            f"{name} has {values[overflows][0]:.6g}, beyond the range of {dtype.name} (at most "
            f"{float(jax.numpy.finfo(dtype).max):.6g}); write bfloat16 or float32"
        )


def write(
    folder: paths.Path,
    tensors: Iterator[tuple[str, np.ndarray]],
    *,
    stem: str = "model",
    shard_bytes: float = _SHARD_BYTES,
) -> int:
    """Writes tensors as safetensors files; returns their size in bytes.

    Args:
      stem: beginning of the files' names.
      shard_bytes: most bytes of tensors in a file, unless one tensor is larger.
    """
    try:
        shards, total = _write_shards(folder, tensors, shard_bytes)
    except BaseException:
        for part in folder.glob(_PART.format("*")):
            part.unlink()
        raise
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    umask = os.umask(0)
    os.umask(umask)
    for i, name in enumerate(names):
        part = folder / _PART.format(i)
        os.chmod(part, 0o666 & ~umask)  # noqa: PTH101 (epath has none; the library makes files private)
        part.rename(folder / name)
    if len(shards) > 1:
        weight_map = {tensor: file for file, listed in zip(names, shards, strict=True) for tensor in listed}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        paths.write_text_atomically(folder / f"{stem}.safetensors.index.json", json.dumps(index, indent=1) + "\n")
    return total


def _write_shards(
    folder: paths.Path, tensors: Iterator[tuple[str, np.ndarray]], shard_bytes: float
) -> tuple[list[list[str]], int]:
    """Writes files with temporary names; returns the tensors' names in each, and the total bytes."""
    from safetensors.numpy import save_file

    shards: list[list[str]] = []
    held: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        save_file(held, folder / _PART.format(len(shards)), metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and sum(a.nbytes for a in held.values()) + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor
        total += tensor.nbytes
    flush()
    return shards, total
