"""Starts a run from the parameters of another run or of a published model, under any strategy.

All missing, unused and differently shaped parameters are listed before any array is read. Each host reads the shards of
its own chips.

Checkpoints of a run from a published model leave out its frozen parameters; `Origin` reads them from there again.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
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


class ParameterSource(Protocol):
    """Interface of parameters that a run can start from.

    Attributes:
      notes: lines that say how the model they come from differs from the one to start, even where all shapes agree.
    """

    notes: Sequence[str]

    def describe(self) -> str:
        """Describes the source in one line."""

    def renamed(self, renames: Mapping[str, str]) -> ParameterSource:
        """Returns the source as if its parameters, or the tensors of a published folder, had other names.

        Args:
          renames: see `core.parameters.renamed`.

        Raises:
          UserError: as `core.parameters.renamed`.
        """

    def has(self, path: str) -> bool:
        """Returns whether the source has a parameter with this path."""

    def num_layers(self, path: str) -> int | None:
        """Returns the number of layers of a stacked parameter in the source; None if the source lacks the parameter."""

    def problems(self, shapes: Any, specs: Specs) -> Sequence[str]:
        """Returns one line for each parameter that is missing, unused (`reading.Unused`), or of another shape or kind.

        Args:
          shapes, specs: shapes and specs of the parameters to read, trees of one structure.
        """

    def load(self, abstract: Any, specs: Specs, *, progress: Progress) -> Any:
        """Reads this host's shards, and calls `progress` meanwhile.

        Args:
          abstract: shapes, dtypes and shardings of the parameters to read.
          specs: their specs, a tree of the same structure.
          progress: called with the path of a parameter, its number from 1, and the number of parameters.

        Returns:
          A tree of arrays like `abstract`.

        Raises:
          UserError: parameters are missing or do not fit, or their values are damaged.
        """


OpenSource = Callable[[LeftOut], ParameterSource]


class Origin(NamedTuple):
    """Reads the frozen parameters that checkpoints of a run leave out, and checks that they are the same.

    Attributes:
      open_source: opens the source of the parameters that a step leaves out.
      specs: specs of the parameters of the run's model.
    """

    open_source: OpenSource
    specs: Specs

    def read(self, source: ParameterSource, described: Description, abstract_state: Any) -> dict[str, jax.Array]:
        """Returns the arrays that a step leaves out, by name.

        Args:
          source: from `open_source`.
          described: metadata of the step.
          abstract_state: shapes and shardings of the arrays of the step.

        Raises:
          UserError: the source lacks some of the arrays, or their values differ.
        """
        return read_left_out(source, described, left_out_of(described, abstract_state, self.specs))


def left_out_of(described: Description, abstract_state: Any, specs: Specs) -> dict[str, tuple[Any, ParamSpec]]:
    """Returns shape, dtype and sharding, and the `ParamSpec`, of each array that a step leaves out, by name.

    Args:
      described: metadata of the step.
      abstract_state: shapes, dtypes and shardings of arrays of the state; others that are left out are not returned.
      specs: specs of the model's parameters.
    """
    shapes, by_name = reading.by_name(abstract_state), reading.by_name({"params": specs})
    names = described.left_out.arrays if described.left_out else []
    return {name: (shapes[name], by_name[name]) for name in names if name in shapes}


def require_left_out(
    source: ParameterSource, described: Description, wanted: Mapping[str, tuple[Any, ParamSpec]]
) -> None:
    """Checks by its headers that a source has the arrays that a step leaves out; arguments as for `read_left_out`.

    Raises:
      UserError: the source lacks some of them; lists them.
    """
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
    """Reads arrays that a step leaves out, and compares them with their fingerprints.

    Args:
      source: where the arrays are.
      described: metadata of the step.
      wanted: shape, dtype and sharding, and spec of each array, by name.

    Raises:
      UserError: the source lacks some of the arrays, or their values differ.
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
    """Reads arrays from a source, in the dtypes of `wanted`, without comparing them; returns them by name."""
    found = source.load(*_trees(wanted), progress=lambda *_: None)
    return {name: found[module][entry] for name in wanted for module, entry in (_place(name),)}


PUT_BACK = (
    "put it back, unchanged; commands that read this run itself also accept --gin \"INIT_FROM = 'NEW_PLACE'\" for it"
)


def _read_from(left_out: LeftOut) -> str:
    return f"the run read its {units.counted(len(left_out.arrays), 'frozen parameter')} from {left_out.source}"


def _place(name: str) -> tuple[str, str]:
    """Returns module and entry of a parameter from its name in a checkpoint."""
    module, _, entry = name.removeprefix(_PREFIX).rpartition("/")
    return module, entry


def _trees(wanted: Mapping[str, tuple[Any, ParamSpec]]) -> tuple[Any, Any]:
    """Returns `wanted`, which is by name, as two trees `{module: {entry: …}}`: one of shapes and one of specs."""
    shapes: dict[str, dict[str, Any]] = {}
    specs: dict[str, dict[str, ParamSpec]] = {}
    for name, (shape, spec) in wanted.items():
        module, entry = _place(name)
        shapes.setdefault(module, {})[entry], specs.setdefault(module, {})[entry] = shape, spec
    return shapes, specs


class SavedParameters(ParameterSource):
    """The parameters of a checkpoint.

    Attributes:
      folder: folder of the step.
      meta: metadata that its run saved with it.
      notes: see `ParameterSource`; empty unless a caller that knows the models gives them.
    """

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
          folder: folder of the step.
          renames: renames of its paths, as in `core.parameters.renamed`.
          notes: see `ParameterSource`.
          open_source: opens the source of parameters that the step leaves out; None: such a step cannot be read.

        Raises:
          UserError: the metadata is damaged, or the renames do not fit its paths.
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
        """Returns the differences between the step and a model.

        They are found in the step's metadata, which describes the parameters that the step leaves out, too.
        """
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
        """The parameters that the step leaves out; None if it contains all."""
        return self._described.left_out

    def require_source(self, shapes: Any, specs: Specs) -> None:
        """Checks that parameters that the step leaves out are in their source; reads headers only.

        Raises:
          UserError: the source is not there, or does not have them.
        """
        if absent := self._absent(_by_path(shapes), _by_path(specs)):
            require_left_out(self._source, self._described, absent)

    def load(self, abstract: Any, specs: Specs, *, progress: Progress) -> Any:
        """Reads the parameters; returns a tree like `abstract`, with floating-point numbers in its dtypes.

        Raises:
          UserError: the step was removed meanwhile, or parameters are missing or differ from what was saved; lists
            them. Saved parameters that are converted are not compared.
        """
        wanted = _by_path(abstract)
        if missing := [path for path in wanted if path not in self._stored]:
            raise UserError(f"{self.describe()} has no parameters {', '.join(missing)}")
        if not self.folder.exists():
            raise UserError(
                f"{self.describe()} was removed after it was chosen: that run is still training and keeps its latest "
                "KEEP_CHECKPOINTS steps. Start again, or copy the step and name the copy"
            )
        from core.checkpoints import arrays  # a run that starts from no other does not import it

        progress("all together", len(wanted), len(wanted))
        by_path = self._read_left_out(wanted, _by_path(specs))
        places = {path: self._stored[path].rpartition("/")[::2] for path in wanted if path not in by_path}
        stored: dict[str, dict[str, Any]] = {}
        for path, (module, name) in places.items():
            stored.setdefault(module, {})[name] = wanted[path]
        with reading.refusing_damage(self.folder):
            found = arrays.read_arrays(self.folder, {"params": stored})["params"]
            own = {path: found[module][name] for path, (module, name) in places.items()}
            self._require_as_saved(own)
        by_path |= own
        return jax.tree_util.tree_map_with_path(lambda path, _: by_path[parameters.path_name(path)], abstract)

    def _require_as_saved(self, found: Mapping[str, jax.Array]) -> None:
        same = {path: leaf for path, leaf in found.items() if reading.kind(leaf) == self._content[path][0]}
        numbers = reading.fingerprints(same)
        if wrong := [path for path, number in numbers.items() if number != self._content[path][1]]:
            listed = ", ".join(units.shortened(wrong, most=3))
            raise steps.DamagedError(f"{len(wrong)} of {len(same)} arrays differ from what was saved: {listed}")

    def _absent(self, wanted: Mapping[str, Any], specs: Mapping[str, ParamSpec]) -> dict[str, tuple[Any, ParamSpec]]:
        """Returns the wanted parameters that the step leaves out, by name, with shardings, saved dtypes and specs."""
        names = {path: _PREFIX + self._stored[path] for path in wanted if path in self._stored}
        absent = {path: name for path, name in names.items() if name not in self._described.saved}
        saved_as = {path: jnp.dtype(self._content[path][0].partition("[")[0]) for path in absent}
        return {name: (wanted[path].update(dtype=saved_as[path]), specs[path]) for path, name in absent.items()}

    @functools.cached_property
    def _source(self) -> ParameterSource:
        assert self._described.left_out is not None
        if self._open_source is None:
            raise UserError(f"{self.describe()} leaves out parameters, which are in {self._described.left_out.source}")
        return self._open_source(self._described.left_out)

    def _read_left_out(self, wanted: Mapping[str, Any], specs: Mapping[str, ParamSpec]) -> dict[str, Any]:
        """Reads the wanted parameters that the step leaves out; returns them by path, in the wanted dtypes."""
        if not (asked := self._absent(wanted, specs)):
            return {}
        found = read_left_out(self._source, self._described, asked)
        paths_of = {_PREFIX + self._stored[path]: path for path in wanted}
        return {paths_of[name]: array.astype(wanted[paths_of[name]].dtype) for name, array in found.items()}


class GivenParameters(ParameterSource):
    """Parameters in the memory of this process, which is the only one of the run.

    Attributes:
      notes: empty; see `ParameterSource`.
    """

    notes: Sequence[str] = ()

    def __init__(self, params: Any, renames: Mapping[str, str] | None = None):
        """Takes a tree `{module: {name: array}}` of JAX or numpy arrays.

        Args:
          params: the tree; it is not changed, and its arrays are not donated.
          renames: renames of its paths, as in `core.parameters.renamed`.

        Raises:
          UserError: `params` has another form, or the renames do not fit its paths.
        """
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
    """Returns the path of a parameter from its name in a checkpoint: without Haiku's `~`."""
    return name.removeprefix(_PREFIX).replace("~/", "")


def _by_path(tree: Any) -> dict[str, Any]:
    return {parameters.path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _read_as(kind: str, wanted: Any) -> str:
    """Returns the dtype and shape that a stored array has when it is read: any floating-point dtype is converted."""
    dtype, bracket, shape = kind.partition("[")
    if wanted is None or not all(jnp.issubdtype(jnp.dtype(d), jnp.floating) for d in (dtype, wanted.dtype)):
        return kind
    return f"{jnp.dtype(wanted.dtype).name}{bracket}{shape}"


def chosen(params: Any, patterns: Sequence[str]) -> Any:
    """Selects the parameters whose paths match one of the patterns; returns a tree of them.

    Args:
      params: modules of parameters, `{module: {name: leaf}}`, or specs of the same form.
      patterns: shell wildcards over paths such as `layers/block/query`.

    Raises:
      UserError: a pattern matches no parameter.
    """
    parameters.matches(params, patterns, where="INIT_PATTERNS")
    return _where(params, lambda path: any(fnmatch.fnmatch(path, p) for p in patterns))


def read_from(source: ParameterSource, params: Any, patterns: Sequence[str], *, optional: Sequence[str]) -> Any:
    """Returns the tree of the parameters that `load` reads from the source.

    Args:
      source: the parameters to start from.
      params: modules of parameters, `{module: {name: leaf}}`, or specs of the same form.
      patterns: as in `chosen`.
      optional: wildcards over paths of parameters that are left out where the source lacks them.

    Raises:
      UserError: a pattern matches no parameter.
    """
    return _where(
        chosen(params, patterns),
        lambda path: source.has(path) or not any(fnmatch.fnmatch(path, p) for p in optional),
    )


def _where(params: Any, is_wanted: Callable[[str], bool]) -> Any:
    selected = {
        module: {name: leaf for name, leaf in entries.items() if is_wanted(parameters.path_name(_keys(module, name)))}
        for module, entries in params.items()
    }
    return {module: entries for module, entries in selected.items() if entries}


def _keys(module: str, name: str) -> tuple:
    return jax.tree_util.DictKey(module), jax.tree_util.DictKey(name)


def require_fit(
    source: ParameterSource,
    shapes: Any,
    specs: Specs,
    patterns: Sequence[str],
    *,
    optional: Sequence[str] = (),
    layers: LayerMap | None = None,
) -> None:
    """Checks that a source has the parameters that match the patterns, unless they are optional.

    With patterns other than `*`, parameters that are left over in the source are allowed.

    Args:
      source: the parameters to start from.
      shapes: shapes of all parameters of the model.
      specs: their specs.
      patterns, optional, layers: as in `load`.

    Raises:
      UserError: there are differences, of which it lists the first MOST_LINES; or a pattern matches no parameter, or
        only optional ones that the source lacks.
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
    init: Callable[[], Any],
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
      source: the parameters to start from.
      init: initializes all parameters; called unless all of them, and all of their layers, are read.
      abstract: shapes and shardings of the parameters.
      specs: the specs of the parameters.
      patterns: as in `chosen`.
      optional: wildcards over paths of parameters, such as adapters, that are initialized where the source lacks them.
      layers: the layers of the source that the parameters start from; None: the same ones.
      progress: called before a parameter is read, with its path, its number from 1, and the number of parameters.

    Returns:
      The arrays of all parameters, a tree like `abstract`.

    Raises:
      UserError: a pattern matches no parameter; or as `load` of the source.
    """
    wanted, of_these = (read_from(source, tree, patterns, optional=optional) for tree in (abstract, specs))
    is_whole = len(jax.tree.leaves(wanted)) == len(jax.tree.leaves(abstract)) and not (layers and layers.initializes)
    fresh = {} if is_whole else init()
    for path, array in _by_path({} if is_whole else read_from(source, fresh, patterns, optional=optional)).items():
        if not (layers and layers.needs_fresh(path)):
            array.delete()  # to make room
    read = source.load(layers.in_source(wanted) if layers else wanted, of_these, progress=progress)
    loaded: Mapping = layers.arranged(read, wanted, fresh) if layers else read
    if is_whole:
        return loaded
    return {
        module: {name: loaded.get(module, {}).get(name, leaf) for name, leaf in entries.items()}
        for module, entries in fresh.items()
    }
