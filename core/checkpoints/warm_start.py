"""Starts a run from the parameters of another run or of a published model."""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from core import parameters, units
from core.checkpoints import reading, steps
from core.checkpoints.steps import Description, LeftOut
from core.errors import UserError
from core.files import paths
from core.parameters import ParamSpec, Specs

if TYPE_CHECKING:
    from core.checkpoints.layer_map import LayerMap  # a run that starts from no other does not import it

Progress = Callable[[str, int, int], None]  # path of a parameter, its number from 1, how many there are
MOST_LINES = 30
_CONVERTED_BYTES = 2**28  # limit, per device, on arrays that are in memory as they were saved, to be converted


def _device_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


class ParameterSource(Protocol):
    """Interface of parameters that a run can start from.

    Attributes:
      notes: lines that say how their model differs from the one to start.
    """

    notes: Sequence[str]

    def describe(self) -> str:
        """Describes the source in one line."""

    def renamed(self, renames: Mapping[str, str]) -> ParameterSource:
        """Returns the source with other names (`core.parameters.renamed`)."""

    def has(self, path: str) -> bool:
        """Returns whether the source has this parameter."""

    def num_layers(self, path: str) -> int | None:
        """Returns the number of layers of a stacked parameter; None if the source lacks it."""

    def problems(self, shapes: Any, specs: Specs) -> Sequence[str]:
        """Returns a line for each parameter that is missing, unused (`reading.Unused`), or does not fit."""

    def load(self, abstract: Any, specs: Specs, *, progress: Progress) -> Any:
        """Reads this host's shards of the parameters, a tree like `abstract`.

        `progress` is called with a path, its number from 1, and the number of parameters.
        """


OpenSource = Callable[[LeftOut], ParameterSource]


class Origin(NamedTuple):
    """Reads the frozen parameters that checkpoints leave out, and checks that they are the same.

    Attributes:
      open_source: opens their source.
      specs: specs of the model's parameters.
    """

    open_source: OpenSource
    specs: Specs

    def still_frozen(self, left_out: LeftOut) -> LeftOut | None:
        """Returns the entry with only the arrays that are frozen now, which checkpoints may go on to leave out."""
        specs = reading.by_name({"params": self.specs})
        arrays = [name for name in left_out.arrays if name not in specs or not specs[name].trainable]
        return left_out._replace(arrays=arrays) if arrays else None

    def read(self, source: ParameterSource, described: Description, abstract_state: Any) -> dict[str, jax.Array]:
        """Returns the arrays that a step leaves out, by name. Raises UserError if their fingerprints differ."""
        return read_left_out(source, described, left_out_of(described, abstract_state, self.specs))


def left_out_of(described: Description, abstract_state: Any, specs: Specs) -> dict[str, tuple[Any, ParamSpec]]:
    """Returns (leaf of `abstract_state`, spec) of arrays that a step leaves out, by name."""
    shapes, by_name = reading.by_name(abstract_state), reading.by_name({"params": specs})
    names = described.left_out.arrays if described.left_out else []
    return {name: (shapes[name], by_name[name]) for name in names if name in shapes}


def require_left_out(
    source: ParameterSource, described: Description, wanted: Mapping[str, tuple[Any, ParamSpec]]
) -> None:
    """Raises UserError if a source lacks arrays that a step leaves out."""
    assert described.left_out is not None
    problems = [one for one in source.problems(*_trees(wanted)) if not isinstance(one, reading.Unused)]
    if problems:
        raise UserError(
            f"{source.describe()} does not have the parameters that the checkpoint leaves out:\n  "
            + "\n  ".join(units.shortened(problems, most=MOST_LINES))
            + f"\n{_read_from(described.left_out)}; {PUT_BACK}"
        )


def read_left_out(
    source: ParameterSource, described: Description, wanted: Mapping[str, tuple[Any, ParamSpec]]
) -> dict[str, jax.Array]:
    """Reads arrays that a step leaves out. Raises UserError if their fingerprints differ.

    `wanted` has, by name, a struct with sharding, and a spec.
    """
    require_left_out(source, described, wanted)
    assert described.left_out is not None
    arrays = read_of_source(source, wanted)
    own, other = {name: described.content[name] for name in wanted}, reading.describe(arrays)
    if own != other:
        wrong = [_path_of(name) for name in own if own[name] != other[name]]
        raise UserError(
            f"{source.describe()} is not the source of the checkpoint's frozen parameters: {len(wrong)} of "
            f"{len(described.left_out.arrays)} differ ({', '.join(units.shortened(wrong, most=3))}). The hash of those "
            f"read is {steps.content_hash(own)} in the checkpoint and {steps.content_hash(other)} there; "
            f"{_read_from(described.left_out)}; {PUT_BACK}"
        )
    return arrays


def read_of_source(source: ParameterSource, wanted: Mapping[str, tuple[Any, ParamSpec]]) -> dict[str, jax.Array]:
    """Reads the arrays `wanted` from a source, by name."""
    found = source.load(*_trees(wanted), progress=lambda *_: None)
    return {name: found[module][entry] for name in wanted for module, entry in (_place(name),)}


PUT_BACK = (
    "put it back, unchanged; commands that read this run itself also accept --gin \"INIT_FROM = 'NEW_PLACE'\" for it"
)


def _read_from(left_out: LeftOut) -> str:
    return f"the run read its {units.counted(len(left_out.arrays), 'frozen parameter')} from {left_out.source}"


def _place(name: str) -> tuple[str, str]:
    module, _, entry = name.removeprefix(_PREFIX).rpartition("/")
    return module, entry


def _trees(wanted: Mapping[str, tuple[Any, ParamSpec]]) -> tuple[Any, Any]:
    shapes: dict[str, dict[str, Any]] = {}
    specs: dict[str, dict[str, ParamSpec]] = {}
    for name, (shape, spec) in wanted.items():
        module, entry = _place(name)
        shapes.setdefault(module, {})[entry], specs.setdefault(module, {})[entry] = shape, spec
    return shapes, specs


class SavedParameters(ParameterSource):
    """The parameters of a checkpoint; `meta` is its run's metadata."""

    def __init__(
        self,
        folder: paths.Path,
        renames: Mapping[str, str] | None = None,
        *,
        notes: Sequence[str] = (),
        open_source: OpenSource | None = None,
    ):
        """Reads the metadata of the step.

        Args:
          renames: as in `core.parameters.renamed`; None: none.
          notes: see `ParameterSource`.
          open_source: opens the source of parameters that the step leaves out; None: they cannot be read.
        """
        self.folder, self.notes, self._open_source = folder, tuple(notes), open_source
        with reading.refusing_damage(folder):
            self._described = steps.read(folder)
        self.meta, content = self._described.meta, self._described.content
        stored = {_path_of(name): name for name in content if name.startswith(_PREFIX)}
        paths_here = parameters.renamed(list(stored), renames or {}, where="INIT_RENAMES")
        self._stored = {paths_here[path]: name.removeprefix(_PREFIX) for path, name in stored.items()}
        self._content = {paths_here[path]: content[name] for path, name in stored.items()}

    def describe(self) -> str:
        return f"step {self.folder.name} of {self.folder.parent}"

    def renamed(self, renames: Mapping[str, str]) -> SavedParameters:
        return SavedParameters(self.folder, renames, notes=self.notes, open_source=self._open_source)

    def has(self, path: str) -> bool:
        return path in self._stored

    def num_layers(self, path: str) -> int | None:
        return next(iter(reading.shape_of(self._content[path][0])), None) if self.has(path) else None

    def problems(self, shapes: Any, specs: Specs) -> Sequence[str]:
        del specs
        wanted = _by_path(shapes)
        kinds = {path: _read_as(kind, wanted.get(path)) for path, (kind, _) in self._content.items()}
        return reading.differences(kinds, wanted)

    @property
    def is_averaged(self) -> bool:
        """Whether the parameters are the average of the run's optimizer."""
        return bool(self.meta.get(steps.AVERAGED))

    @property
    def left_out(self) -> LeftOut | None:
        """The parameters that the step leaves out; None: it contains all."""
        return self._described.left_out

    def require_source(self, shapes: Any, specs: Specs) -> None:
        """Raises UserError if parameters that the step leaves out are not in their source."""
        if absent := self._absent(_by_path(shapes), _by_path(specs)):
            require_left_out(self._source, self._described, absent)

    def load(self, abstract: Any, specs: Specs, *, progress: Progress) -> Any:
        """Reads the parameters; floating-point numbers are converted to the dtypes of `abstract`.

        Raises UserError if a parameter is missing, or the step was removed or is damaged.
        """
        wanted = _by_path(abstract)
        if missing := [path for path in wanted if path not in self._stored]:
            raise UserError(f"{self.describe()} has no parameters {', '.join(missing)}")
        progress("all together", len(wanted), len(wanted))
        by_path = self._read_left_out(wanted, _by_path(specs))
        with reading.refusing_damage(self.folder):
            for group in self._groups({path: leaf for path, leaf in wanted.items() if path not in by_path}):
                found = self._read_as_saved(group)
                by_path |= {path: found.pop(path).astype(wanted[path].dtype) for path in group}
        return jax.tree_util.tree_map_with_path(lambda path, _: by_path[parameters.path_name(path)], abstract)

    def _groups(self, wanted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields arrays, in their saved dtypes, to read together: those in another one than wanted in limited size."""
        from core.checkpoints import arrays  # a run that starts from no other does not import it

        saved = {path: leaf.update(dtype=self._dtype(path)) for path, leaf in wanted.items()}
        if same := {path: leaf for path, leaf in saved.items() if leaf.dtype == wanted[path].dtype}:
            yield same
        others = {path: leaf for path, leaf in saved.items() if path not in same}
        yield from arrays.grouped(others, size=_device_bytes, most=_CONVERTED_BYTES)

    def _read_as_saved(self, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
        from core.checkpoints import arrays  # a run that starts from no other does not import it

        stored = {_PREFIX + self._stored[path]: leaf for path, leaf in wanted.items()}
        read = reading.by_name(arrays.read_arrays(self.folder, stored))
        found = {path: read[_PREFIX + self._stored[path]] for path in wanted}
        numbers = reading.fingerprints(found)
        if wrong := [path for path, number in numbers.items() if number != self._content[path][1]]:
            listed = ", ".join(units.shortened(wrong, most=3))
            raise steps.DamagedError(f"{len(wrong)} of {len(found)} arrays differ from what was saved: {listed}")
        return found

    def _dtype(self, path: str) -> np.dtype:
        return jnp.dtype(self._content[path][0].partition("[")[0])

    def _absent(self, wanted: Mapping[str, Any], specs: Mapping[str, ParamSpec]) -> dict[str, tuple[Any, ParamSpec]]:
        names = {path: _PREFIX + self._stored[path] for path in wanted if path in self._stored}
        absent = {path: name for path, name in names.items() if name not in self._described.saved}
        return {name: (wanted[path].update(dtype=self._dtype(path)), specs[path]) for path, name in absent.items()}

    @functools.cached_property
    def _source(self) -> ParameterSource:
        assert self._described.left_out is not None
        if self._open_source is None:
            raise UserError(f"{self.describe()} leaves out parameters, which are in {self._described.left_out.source}")
        return self._open_source(self._described.left_out)

    def _read_left_out(self, wanted: Mapping[str, Any], specs: Mapping[str, ParamSpec]) -> dict[str, Any]:
        if not (asked := self._absent(wanted, specs)):
            return {}
        found = read_left_out(self._source, self._described, asked)
        paths_of = {_PREFIX + self._stored[path]: path for path in wanted}
        return {paths_of[name]: array.astype(wanted[paths_of[name]].dtype) for name, array in found.items()}


class GivenParameters(ParameterSource):
    """Parameters in the memory of this process, which is the only one of the run."""

    notes: Sequence[str] = ()

    def __init__(self, params: Any, renames: Mapping[str, str] | None = None):
        """Takes a tree `{module: {name: array}}` of JAX or numpy arrays, which are not donated."""
        if not _is_tree_of_arrays(params):
            raise UserError(
                f"init_from is of type {type(params).__name__}: expected text or {{module: {{name: array}}}}"
            )
        self._params, found = params, _by_path(params)
        names = parameters.renamed(list(found), renames or {}, where="INIT_RENAMES")
        self._arrays = {names[path]: array for path, array in found.items()}

    def describe(self) -> str:
        return f"{units.counted(len(self._arrays), 'parameter')} in memory"

    def renamed(self, renames: Mapping[str, str]) -> GivenParameters:
        return GivenParameters(self._params, renames)

    def has(self, path: str) -> bool:
        return path in self._arrays

    def num_layers(self, path: str) -> int | None:
        return next(iter(self._arrays[path].shape), None) if self.has(path) else None

    def problems(self, shapes: Any, specs: Specs) -> Sequence[str]:
        del specs
        wanted = _by_path(shapes)
        kinds = {path: _read_as(reading.kind(array), wanted.get(path)) for path, array in self._arrays.items()}
        return reading.differences(kinds, wanted, where="in memory")

    def load(self, abstract: Any, specs: Specs, *, progress: Progress) -> Any:
        """Returns copies of the arrays, converted to the dtypes of `abstract`."""
        del specs
        progress("all together", len(self._arrays), len(self._arrays))

        def copied(path: Sequence[Any], like: Any) -> jax.Array:
            whole = np.asarray(self._arrays[parameters.path_name(path)])
            shard = functools.partial(_copied_part, whole, like.dtype)
            return jax.make_array_from_callback(like.shape, like.sharding, shard)

        return jax.tree_util.tree_map_with_path(copied, abstract)


def _copied_part(whole: np.ndarray, dtype: Any, index: Any) -> np.ndarray:
    return np.array(whole[index], dtype)  # a copy: a step donates the array that is made of it


def _is_tree_of_arrays(params: Any) -> bool:
    return isinstance(params, Mapping) and all(
        isinstance(entries, Mapping) and all(isinstance(array, jax.Array | np.ndarray) for array in entries.values())
        for entries in params.values()
    )


_PREFIX = "params/"


def _path_of(name: str) -> str:
    """Returns a parameter's path from its name in a checkpoint: without Haiku's `~`."""
    return name.removeprefix(_PREFIX).replace("~/", "")


def _by_path(tree: Any) -> dict[str, Any]:
    return {parameters.path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _read_as(kind: str, wanted: Any) -> str:
    """Returns dtype and shape as read: a floating-point dtype becomes the wanted floating-point one."""
    dtype, bracket, shape = kind.partition("[")
    if wanted is None or not all(jnp.issubdtype(jnp.dtype(d), jnp.floating) for d in (dtype, wanted.dtype)):
        return kind
    return f"{jnp.dtype(wanted.dtype).name}{bracket}{shape}"


def chosen(params: Any, patterns: Sequence[str]) -> Any:
    """Selects from `{module: {name: leaf}}` the parameters that match a pattern; UserError if a pattern matches none.

    Patterns are shell wildcards over paths such as `layers/block/query`.
    """
    parameters.matches(params, patterns, where="INIT_PATTERNS")
    return parameters.where(params, lambda path: any(fnmatch.fnmatch(path, p) for p in patterns))


def read_from(source: ParameterSource, params: Any, patterns: Sequence[str], *, optional: Sequence[str]) -> Any:
    """Returns the tree of the parameters that `load` reads from the source.

    Args:
      params, patterns: as in `chosen`.
      optional: wildcards over paths that are left out where the source lacks them.
    """
    return parameters.where(
        chosen(params, patterns),
        lambda path: source.has(path) or not any(fnmatch.fnmatch(path, p) for p in optional),
    )


def require_fit(
    source: ParameterSource,
    shapes: Any,
    specs: Specs,
    patterns: Sequence[str],
    *,
    optional: Sequence[str] = (),
    layers: LayerMap | None = None,
) -> None:
    """Raises UserError if a source does not fit the parameters that match the patterns.

    Args:
      shapes, specs: of all parameters of the model.
      patterns, optional, layers: as in `load`.
    """
    for pattern in patterns:
        if not read_from(source, shapes, [pattern], optional=optional):
            absent = ", ".join(units.shortened(parameters.names(chosen(shapes, [pattern])), most=3))
            raise UserError(
                f"INIT_PATTERNS: {pattern!r} reads nothing: {source.describe()} has none of {absent}; leave "
                "the pattern out, and they are initialized"
            )
    wanted, of_these = (read_from(source, tree, patterns, optional=optional) for tree in (shapes, specs))
    lines = source.problems(layers.in_source(wanted) if layers else wanted, of_these)
    if tuple(patterns) != ("*",):
        lines = [line for line in lines if not isinstance(line, reading.Unused)]
    if lines:
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        raise UserError(
            f"INIT_FROM: {source.describe()} does not fit the model:\n  "
            + "\n  ".join([*source.notes, *lines[:MOST_LINES], *more])
            + "\nINIT_PATTERNS chooses the parameters to start from; all others are initialized. INIT_RENAMES gives "
            "names here by names there: {'decoder/*': 'layers/*'}. INIT_LAYERS gives a layer there for each layer "
            "here: {'layers/*': (0, 0, 1, 1)}"
        )


def load(
    source: ParameterSource,
    init: Callable[[Set[str]], Any],
    abstract: Any,
    specs: Specs,
    patterns: Sequence[str],
    *,
    optional: Sequence[str] = (),
    layers: LayerMap | None = None,
    progress: Progress = lambda *_: None,
) -> Any:
    """Reads the parameters that match the patterns from `source`, and initializes all others.

    Args:
      init: initializes the parameters with these paths; called only if some are not read.
      abstract, specs: shapes with shardings, and specs, of the parameters.
      patterns: as in `chosen`.
      optional: wildcards over paths that are initialized where the source lacks them.
      layers: the source layers to start from; None: the same ones.
      progress: called with a path, its number from 1, and the number of parameters.
    """
    wanted, of_these = (read_from(source, tree, patterns, optional=optional) for tree in (abstract, specs))
    is_read = {path: not (layers and layers.needs_fresh(path)) for path in _by_path(wanted)}
    absent = {path for path in _by_path(abstract) if not is_read.get(path)}
    fresh = init(absent) if absent else {}
    read = source.load(layers.in_source(wanted) if layers else wanted, of_these, progress=progress)
    loaded: Mapping = layers.arranged(read, wanted, fresh) if layers else read
    return {
        module: {
            name: loaded[module][name] if name in loaded.get(module, ()) else fresh[module][name] for name in entries
        }
        for module, entries in abstract.items()
    }
