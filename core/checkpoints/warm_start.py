"""Starts a run from the parameters of another run or of a published model, under any strategy.

All missing, unused and differently shaped parameters are listed before any array is read. Each host reads the shards of
its own chips.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from core import parameters, paths, units
from core.checkpoints import reading, steps
from core.errors import UserError
from core.parameters import Specs

Progress = Callable[[str, int, int], None]  # path of a parameter, its number from 1, how many there are
MOST_LINES = 30


class ParameterSource(Protocol):
    """Interface of parameters that a run can start from.

    Attributes:
      notes: how the model that they belong to differs from the one that starts, where shapes may agree all the same.
    """

    notes: Sequence[str]

    def describe(self) -> str:
        """Describes the source in one line."""

    def renamed(self, renames: Mapping[str, str]) -> ParameterSource:
        """Returns the source as if its parameters, or the tensors of a published folder, had other names.

        Args:
          renames: see `core.parameters.renamed`.
        """

    def has(self, path: str) -> bool:
        """Returns whether the source has a parameter with this path."""

    def problems(self, shapes: Any, specs: Specs) -> list[str]:
        """Returns one line for each parameter that is missing, unused or of another shape."""

    def load(self, abstract: Any, specs: Specs, *, progress: Progress) -> Any:
        """Returns a tree like `abstract`, whose leaves have shardings, with the parameters that this host needs."""


class SavedParameters:
    """The parameters of a checkpoint.

    Attributes:
      folder: folder of the step.
      meta: metadata of its run.
      notes: see `ParameterSource`; empty until a caller that knows the models sets it.
    """

    def __init__(self, folder: paths.Path, renames: Mapping[str, str] | None = None, *, notes: Sequence[str] = ()):
        """Reads the metadata of the step; `renames` of its paths are as in `core.parameters.renamed`."""
        self.folder, self.notes = folder, tuple(notes)
        with reading.refusing_damage(folder):
            described = steps.read(folder)
        self.meta, content = described.meta, described.content
        stored = {_path_of(name): name for name in content if name.startswith(_PREFIX)}
        paths_here = parameters.renamed(list(stored), renames or {}, where="INIT_RENAMES")
        self._stored = {paths_here[path]: name.removeprefix(_PREFIX) for path, name in stored.items()}
        self._content = {paths_here[path]: content[name] for path, name in stored.items()}

    def describe(self) -> str:
        """See `ParameterSource`."""
        return f"step {self.folder.name} of {self.folder.parent}"

    def renamed(self, renames: Mapping[str, str]) -> SavedParameters:
        """See `ParameterSource`."""
        return SavedParameters(self.folder, renames, notes=self.notes)

    def has(self, path: str) -> bool:
        """See `ParameterSource`."""
        return path in self._stored

    def problems(self, shapes: Any, specs: Specs) -> list[str]:
        """See `ParameterSource`."""
        del specs
        wanted = _by_path(shapes)
        kinds = {path: _read_as(kind, wanted.get(path)) for path, (kind, _) in self._content.items()}
        return reading.differences(kinds, wanted)

    def load(self, abstract: Any, specs: Specs, *, progress: Progress) -> Any:
        """See `ParameterSource`. Floating-point parameters are converted to the dtype of `abstract`.

        Raises:
          UserError: the step was removed meanwhile, or parameters are missing or differ from what was saved; lists
            them. Converted ones are not compared.
        """
        del specs
        wanted = _by_path(abstract)
        if missing := [path for path in wanted if path not in self._stored]:
            raise UserError(f"{self.describe()} has no parameters {', '.join(missing)}")
        if not self.folder.exists():
            raise UserError(
                f"{self.describe()} was removed after it was chosen: that run is still training and keeps its latest "
                "KEEP_CHECKPOINTS steps. Start again, or copy the step and name the copy"
            )
        progress("all", 1, 1)
        places = {path: self._stored[path].rpartition("/")[::2] for path in wanted}
        stored: dict[str, dict[str, Any]] = {}
        for path, (module, name) in places.items():
            stored.setdefault(module, {})[name] = wanted[path]
        with reading.refusing_damage(self.folder):
            found = reading.read_arrays(self.folder, {"params": stored})["params"]
            by_path = {path: found[module][name] for path, (module, name) in places.items()}
            self._require_as_saved(by_path)
        return jax.tree_util.tree_map_with_path(lambda path, _: by_path[parameters.path_name(path)], abstract)

    def _require_as_saved(self, found: Mapping[str, jax.Array]) -> None:
        same = {path: leaf for path, leaf in found.items() if reading.kind(leaf) == self._content[path][0]}
        numbers = reading.fingerprints(same)
        if wrong := [path for path, number in numbers.items() if number != self._content[path][1]]:
            listed = ", ".join(units.shortened(wrong, most=3))
            raise steps.DamagedError(f"{len(wrong)} of {len(same)} arrays differ from what was saved: {listed}")


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


def _read(source: ParameterSource, params: Any, patterns: Sequence[str], optional: Sequence[str]) -> Any:
    """Returns the tree of the parameters that match `patterns`, without optional ones that the source lacks."""
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
    source: ParameterSource, shapes: Any, specs: Specs, patterns: Sequence[str], *, optional: Sequence[str] = ()
) -> None:
    """Checks that a source has the parameters that match the patterns, unless they are optional (see `load`).

    With patterns other than `*`, parameters that are left over in the source are allowed.

    Raises:
      UserError: lists every difference.
    """
    lines = source.problems(*(_read(source, tree, patterns, optional) for tree in (shapes, specs)))
    if tuple(patterns) != ("*",):
        lines = [line for line in lines if not line.startswith("left over") and not line.endswith("not expected")]
    if lines:
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        raise UserError(
            f"INIT_FROM: {source.describe()} does not fit the model:\n  "
            + "\n  ".join([*source.notes, *lines[:MOST_LINES], *more])
            + "\nINIT_PATTERNS chooses the parameters to start from; all others are initialized. INIT_RENAMES gives "
            "names here by names there: {'decoder/*': 'layers/*'}"
        )


def load(
    source: ParameterSource,
    init: Callable[[], Any],
    abstract: Any,
    specs: Specs,
    patterns: Sequence[str],
    *,
    optional: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> Any:
    """Reads the parameters that match the patterns from `source`, and initializes all others.

    Args:
      source: the parameters to start from.
      init: initializes all parameters; called unless all of them are read.
      abstract: shapes and shardings of the parameters.
      specs: the specs of the parameters.
      patterns: as in `chosen`.
      optional: wildcards over paths of parameters, such as adapters, that are initialized where the source lacks them.
      progress: called before a parameter is read.
    """
    wanted = _read(source, abstract, patterns, optional)
    if len(jax.tree.leaves(wanted)) == len(jax.tree.leaves(abstract)):
        return source.load(abstract, specs, progress=progress)
    fresh = init()
    jax.tree.map(lambda a: a.delete(), _read(source, fresh, patterns, optional))  # to make room
    loaded: Mapping = source.load(wanted, _read(source, specs, patterns, optional), progress=progress)
    return {
        module: {name: loaded.get(module, {}).get(name, leaf) for name, leaf in entries.items()}
        for module, entries in fresh.items()
    }
