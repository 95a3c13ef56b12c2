"""Maps the layers of a source of parameters to those of a model of another depth.

A mapping is a dict by patterns of parameter paths. With `{"layers/*": (0, 0, 1, None)}` the first two layers of the
model start from layer 0 of the source, the third from layer 1, and the last is initialized. Layers are entries along
the first dimension of stacked parameters; if the model repeats a group of layers, an entry is a group.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from core import logical, parameters, units
from core.errors import UserError
from core.parameters import ParamSpec, Specs

Layers = Mapping[str, Sequence[int | None]]


class LayerSource(Protocol):
    """The part of `core.checkpoints.warm_start.ParameterSource` that a mapping needs."""

    def describe(self) -> str:
        """Describes the source in one line."""

    def num_layers(self, path: str) -> int | None:
        """Returns the number of layers of a parameter; None if the source lacks it."""


@dataclasses.dataclass(frozen=True)
class LayerMap:
    """The source layer of each layer of a model; `LayerMap()` maps nothing.

    Attributes:
      layers: by path, the source layer of each layer; None: it is initialized.
      depths: by path, the number of layers in the source.
    """

    layers: Mapping[str, Sequence[int | None]] = dataclasses.field(default_factory=dict)
    depths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def initializes(self) -> bool:
        """Whether at least one layer is initialized."""
        return any(map(self.needs_fresh, self.layers))

    def needs_fresh(self, path: str) -> bool:
        """Returns whether layers of this parameter are initialized."""
        return None in self.layers.get(path, ())

    def in_source(self, tree: Any) -> Any:
        """Returns shapes and shardings for reading a source, given those of the model."""

        def one(path: Sequence[Any], leaf: Any) -> Any:
            if (depth := self.depths.get(parameters.path_name(path))) is None:
                return leaf
            shape, sharding = (depth, *leaf.shape[1:]), leaf.sharding
            if isinstance(sharding, jax.sharding.NamedSharding):  # the depth may not divide into the shards
                spec = jax.sharding.PartitionSpec(None, *sharding.spec[1:])
                sharding = jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(one, tree)

    def arranged(self, read: Any, abstract: Any, fresh: Any) -> Any:
        """Makes the model's parameters from those of the source.

        Arrays of `read` that are mapped, and arrays of `fresh` that are used, are deleted.
        """

        def one(path: Sequence[Any], array: jax.Array, like: Any) -> jax.Array:
            if (layers := self.layers.get(name := parameters.path_name(path))) is None:
                return array
            others = [fresh[path[0].key][path[1].key]] if self.needs_fresh(name) else []
            made = jax.jit(lambda *arrays: _taken(layers, *arrays), out_shardings=like.sharding)(array, *others)
            for used in (array, *others):
                used.delete()
            return made

        return jax.tree_util.tree_map_with_path(one, read, abstract)


def _taken(layers: Sequence[int | None], array: jax.Array, fresh: jax.Array | None = None) -> jax.Array:
    """Layer i of the result is layer `layers[i]` of `array`, or layer i of `fresh` for None."""
    taken = array[np.array([layer or 0 for layer in layers])]
    if fresh is None:
        return taken
    is_fresh = np.array([layer is None for layer in layers])
    return jnp.where(is_fresh.reshape(-1, *[1] * (array.ndim - 1)), fresh, taken)


def of(layers: Layers, source: LayerSource, shapes: Any, specs: Specs) -> LayerMap:
    """Returns the mapping of the parameters that match a pattern and that the source has.

    Args:
      layers: by pattern; the first pattern that matches a path counts.
      shapes, specs: of the parameters to read.

    Raises:
      UserError: patterns or their layers do not fit the parameters or the source.
    """
    parameters.matches(shapes, list(layers), where="INIT_LAYERS")
    every = zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(specs), strict=True)
    by_path = {parameters.path_name(path): (leaf.shape, spec) for (path, leaf), spec in every}
    pattern_of = {path: next((p for p in layers if fnmatch.fnmatch(path, p)), None) for path in by_path}
    mapped = {path: pattern for pattern in layers for path in by_path if pattern_of[path] == pattern}
    found = {path: source.num_layers(path) for path in mapped if _is_stacked(by_path[path][1])}
    problems: dict[tuple, str] = {}  # one line for the parameters of a pattern that have the same fault
    for path, pattern in mapped.items():
        depths = (by_path[path][0][0], found[path]) if path in found else ()
        if problem := _problem(layers[pattern], path, *depths, where=source.describe()):
            problems.setdefault((pattern, *depths), f"INIT_LAYERS: {pattern!r}: {problem}")
    if problems:
        raise UserError("\n".join(units.shortened(list(problems.values()), most=10)))
    has = {path: depth for path, depth in found.items() if depth is not None}
    notes = {
        (pattern, has[path]): f"{pattern}: {_told(layers[pattern], has[path])}"
        for path, pattern in mapped.items()
        if path in has
    }
    return LayerMap({path: layers[mapped[path]] for path in has}, has, tuple(notes.values()))


def _is_stacked(spec: ParamSpec) -> bool:
    return spec.stacked > 0 and logical.is_stacked(spec.axes)


def _problem(
    layers: Sequence[int | None], path: str, ours: int | None = None, theirs: int | None = None, *, where: str
) -> str:
    if ours is None:
        return f"{path} has no layers"
    if len(layers) != ours:
        return (
            f"{units.counted(len(layers), 'entry', 'entries')}, but {path} has {units.counted(ours, 'layer')} in the "
            "model: expected for each of these a layer of the source, or None to initialize it"
        )
    wrong = [layer for layer in layers if layer is not None and theirs is not None and layer >= theirs]
    has = f"{path} has {units.counted(theirs or 0, 'layer')}, counted from 0, in {where}"
    return f"names layer {wrong[0]}, but {has}" if wrong else ""


def _told(layers: Sequence[int | None], depth: int) -> str:
    copied = [f"{layer} from {source}" for layer, source in enumerate(layers) if source is not None]
    initialized = [str(layer) for layer, source in enumerate(layers) if source is None]
    unread = [str(source) for source in range(depth) if source not in layers]
    parts = [f"layers {', '.join(copied)}"] if copied else []
    parts += [f"initialized: {', '.join(initialized)}"] if initialized else []
    parts += [f"not taken from the source: {', '.join(unread)}"] if unread else []
    return "; ".join(parts)
