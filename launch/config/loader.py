"""Loads an experiment file: checks it and builds its object with gin, or lists the mistakes.

    sources     gin's parser reads files and flags into statements with their file and line
    moved       old names and values are replaced by the current ones
    names       names become constructors, through the imports of each file
    checks      find mistakes that gin accepts, such as a misspelled macro; bindings without effect are left out
    build       gin gets the constructors and their values, and calls them. It gets macros replaced by their values,
                because it would evaluate a macro in the macro's own scope

The canonical text has a line for each value and one spelling for each name. A run saves it, and hosts compare it.
"""

import dataclasses
import functools
import importlib.util  # noqa: F401  gin forgets this import, and then fails in an obscure way on a missing file
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gin.config_parser import ImportStatement

import gin
from core import slices
from core.errors import UserError
from core.files import paths
from gin import config as gin_engine
from gin import utils as gin_utils
from launch import environment
from launch.config import checks, moved, sources
from launch.config.names import Names
from launch.config.signatures import Constructor
from launch.config.statements import (
    Binding,
    ConfigError,
    ConfigProblem,
    Macro,
    Reference,
    expand,
    flag,
    import_line,
    leaves,
    render,
    scoped,
    symbol_for,
    transform,
)

if TYPE_CHECKING:
    from launch.config.trust import Trust  # a training run reads the user's own experiment file

ROOT = f"{environment.PACKAGE}launch.experiment.Experiment"
DEFAULTS = "gin/defaults.gin"
_MESH = "TPU_MESH_CONFIG"
_MESH_HEADER = "from __gin__ import dynamic_registration\nfrom parallel import strategies"


@dataclass(frozen=True)
class Settings:
    """The imports and bindings of a configuration in canonical form."""

    imports: Mapping[str, str]  # full module names by symbol; `bindings` use the symbols
    bindings: tuple[Binding, ...]  # macros, then parameters, each sorted by name

    @functools.cached_property
    def text(self) -> str:
        """The canonical gin text."""
        imports = [import_line(sources.DYNAMIC_REGISTRATION), *map(self.import_line, self.imports)]
        macros, parameters = ([str(b) for b in self.bindings if b.is_macro is kind] for kind in (True, False))
        return "\n".join([*imports, "", *macros, "", *parameters]) + "\n"

    def import_line(self, symbol: str) -> str:
        """Returns the import statement for a symbol."""
        return import_line(self.imports[symbol], symbol)


@dataclass(frozen=True)
class LoadedConfig(Settings):
    """A valid configuration, whose `text` can be loaded as an experiment file."""

    experiment: str  # the name of the experiment file
    notes: tuple[str, ...]  # sentences for the user: bindings that are left out because of a later source
    files: tuple[Path, ...]  # the local gin files that were read, and those of the user's modules that they import
    _root: Constructor

    @functools.cached_property
    def _macros(self) -> dict[str, Binding]:
        return {b.name: b for b in self.bindings if b.is_macro}

    @property
    def slice(self) -> str:
        """The name of the slice; empty if none is bound outside of scopes."""
        bound = (b for b in self.bindings if b.parameter == "slice" and b.target == self._root and not b.scope)
        return next((str(expand(b.value, self._macros)) for b in bound), "")

    def build(self) -> Any:
        """Builds the root object; every call builds a new one.

        Raises:
          ConfigError: a constructor raised a ValueError, such as UserError, for its values.
        """
        gin.clear_config()
        with gin_engine.interactive_mode():  # a module imported anew brings new constructors under known names
            for constructor in {self._root, *(named.target for b in self.bindings for named in _named(b))}:
                gin.external_configurable(constructor.target, name=constructor.name, module=constructor.module)
        for b in self.bindings:
            if not b.is_macro:
                value = transform(expand(b.value, self._macros), _as_gin_has_it)
                gin.bind_parameter((b.scope, b.target.full_name, b.parameter), value)
        try:
            return gin.get_configurable(self._root.full_name)()
        except ValueError as error:
            raise ConfigError(self.experiment, [self._refusal(error)]) from error

    def _refusal(self, error: BaseException) -> ConfigProblem:
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_globals is vars(gin_engine))
        calls = [frame.f_locals["current_selector"] for frame in frames if "current_selector" in frame.f_locals]
        while getattr(type(error).__str__, "__module__", "") == gin_utils.__name__:  # a copy with a longer message
            error = error.__context__ or ValueError()
        refused = calls[-1] if calls else self._root.full_name
        given = sorted((b for b in self.bindings if b.target and b.target.full_name == refused), key=lambda b: b.order)
        named = [b for b in given if re.search(rf"\b{re.escape(b.parameter)}\b", str(error))]
        written = [self._macros[b.value.name] if isinstance(b.value, Macro) else b for b in named or given]
        file, line = (written[0].file, written[0].line) if written else (self.experiment, 0)
        actual = ", ".join(f"{b} ({b.place})" for b in written)
        name = refused.rpartition(".")[2]
        return ConfigProblem(file, line, f"{name} refuses its values: {error}", actual=actual)


def _named(binding: Binding) -> list[Binding | Reference]:
    references = [leaf for leaf in leaves(binding.value) if isinstance(leaf, Reference)]
    return [*references] if binding.is_macro else [binding, *references]


def _as_gin_has_it(leaf: Any) -> Any:
    if not isinstance(leaf, Reference):
        return leaf
    return gin_engine.ConfigurableReference(scoped(leaf.scope, leaf.target.full_name), leaf.evaluate)


def load(
    path: str | Path,
    *,
    text: str | None = None,
    bindings: Sequence[str] = (),
    slice_name: str | None = None,
    root: str = ROOT,
    defaults: str = DEFAULTS,
    between: Mapping[str, str] = MappingProxyType({}),
    after: Mapping[str, str] = MappingProxyType({}),
    trust: "Trust | None" = None,
    of_environment: bool = False,
) -> LoadedConfig:
    """Reads an experiment file and checks it.

    Later sources override earlier ones: the file with its includes, TPU_MESH_CONFIG, `between`, `bindings`,
    `slice_name`, and `after`, which may leave `bindings` without effect.

    Args:
      path: the experiment file, relative to the working directory or the top of the workspace, or gs://.
      text: the content of the file; None: it is read.
      bindings: gin statements; they may use the imports of the file.
      slice_name: value for the macro SLICE; None: it is not changed.
      root: full name of the constructor of the object to build.
      defaults: the file that declares the macros.
      between, after: further gin texts, by their names in messages.
      trust: what the configuration of a run may name; None: the file is the user's own, and may name anything.
      of_environment: whether TPU_MESH_CONFIG also applies to a given `text`.

    Raises:
      UserError: there is no such file, or there are mistakes.
    """
    mesh = environment.mesh_bindings() if (text is None or of_environment) and root == ROOT else ()
    if mesh:
        between = {_MESH: "\n".join([_MESH_HEADER, *mesh, ""]), **between}
    if text is None and paths.is_remote(path):
        text = _content(str(path))
    reader = sources.Reader(experiment_includes=trust is None)
    folder = _read(reader, str(path), text)
    folders = (folder, Path.cwd()) if trust is None else (Path.cwd(),)
    flags = {flag(number): binding.strip() for number, binding in enumerate(bindings, start=1)}
    flags |= {"--slice": f"SLICE = {slice_name!r}"} if slice_name is not None else {}
    for name, statements in {**between, **flags, **after}.items():
        reader.text(statements, name=name, folder=None)
    spelling = _in_current_spelling(reader)
    names = Names(reader, folders=folders, trust=trust)
    shown, declared = sources.display(sources.WORKSPACE / defaults), declared_macros(defaults)
    config = checks.Configuration(reader, names, root=root, defaults=shown, declared=declared)
    problems, notes, kept = checks.check(config)
    problems += _other_slices(config, kept, slice_name if root == ROOT else None)
    if wrong := dict.fromkeys(reader.problems + names.problems + problems):
        position = {name: number for number, name in enumerate(reader.sources)}
        raise ConfigError(str(path), sorted(wrong, key=lambda p: (position.get(p.file, len(position)), p.line)))
    notes += [note for name, note in spelling.items() if trust is None or name != reader.experiment]
    others = [b for b in reader.bindings if b.name == "SLICE" and b.file in flags and slice_name not in (None, b.value)]
    notes += [f"{b.place}: {b} is left out, the SLICE argument chose {slice_name!r}" for b in others]
    notes = [*_of_environment(mesh), *notes]
    made = _canonical(kept, lambda named: named.target.module, names.own_modules)
    files = _files(reader.sources, names.own_modules)
    return LoadedConfig(made.imports, made.bindings, reader.experiment, tuple(notes), files, config.root)


def _other_slices(config: checks.Configuration, kept: Sequence[Binding], wanted: str | None) -> Iterator[ConfigProblem]:
    """Yields problems of bindings that give the experiment another slice than the argument of the command, if any."""
    if wanted is None:
        return
    for binding in kept:
        given = expand(binding.value, config.macros)
        if binding.target is config.root and binding.parameter == "slice" and not _is_same_slice(given, wanted):
            name = scoped(binding.scope, str(config.root))
            what = f"the SLICE argument {wanted!r} cannot override this binding"
            yield binding.problem(what, fix=f"{name}.slice = %SLICE, and SLICE = {render(given)} as its usual value")


def _is_same_slice(given: Any, wanted: str) -> bool:
    try:
        return given == wanted or slices.get(given).name == slices.get(wanted).name
    except UserError:
        return False


def _of_environment(mesh: Sequence[str]) -> list[str]:
    said = " ".join(f"{name}={environment.read(name)}" for name in (_MESH, "TPU_AXIS_NAMES"))
    return [f"{said} bind {'; '.join(mesh)}, after the file and before --gin"] if mesh else []


def _files(read: Iterable[str], modules: Iterable[str]) -> tuple[Path, ...]:
    places = [(sources.WORKSPACE / name, Path.cwd() / name) for name in read]
    found = [next((place for place in each if place.is_file()), None) for each in places]
    own = [getattr(sys.modules.get(module), "__file__", None) for module in sorted(modules)]
    return tuple(Path(file).resolve() for file in (*found, *own) if file)


def declared_macros(defaults: str = DEFAULTS) -> frozenset[str]:
    """Returns the names of the macros that the file `defaults` declares."""
    return _macros(declared_text(defaults))


def declared_text(defaults: str = DEFAULTS) -> str:
    """Returns the text of the file `defaults`, a path in the workspace."""
    return (sources.WORKSPACE / defaults).read_text(encoding="utf-8")


@functools.cache  # a plan calls it for each of a thousand candidates
def _macros(text: str) -> frozenset[str]:
    return frozenset(b.name for b in parse(text).bindings if b.is_macro)


def parse(text: str) -> Settings:
    """Parses a canonical text, such as the config.gin of a run, without importing modules.

    Old names and values become the current ones.
    """
    statements = sources.parse(text)
    read = {"": sources.Source([s for s in statements if isinstance(s, ImportStatement)], ())}
    now = moved.current(read, [s for s in statements if isinstance(s, Binding)])
    imports = {s.bound_name(): s.module for s in now.sources[""].imports}
    if not now.notes:
        return Settings(imports, tuple(now.bindings))
    return _canonical(now.bindings, lambda named: imports[named.selector.partition(".")[0]], imports.values())


def _read(reader: sources.Reader, path: str, text: str | None) -> Path:
    folders = (Path.cwd(), sources.WORKSPACE)
    if text is not None:
        reader.text(text, name=path, folder=None)
        return Path.cwd()
    if file := sources.find(path, folders=folders):
        reader.file(file)
        return file.parent
    raise ConfigError(path, [sources.missing_file(path, sources.closest(path, folders=folders), file=path)])


def _content(path: str) -> str:
    file = paths.resolve(path)
    if not file.exists():
        raise UserError(f"there is no file {path!r}; expected the experiment's address, such as gs://BUCKET/first.gin")
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(path, [sources.unreadable(path, error)]) from error


def _in_current_spelling(reader: sources.Reader) -> dict[str, str]:
    now = moved.current(reader.sources, reader.bindings)
    reader.sources, reader.bindings = now.sources, now.bindings
    reader.problems, reader.unclear = reader.problems + now.problems, reader.unclear | now.unclear
    return now.notes


def _canonical(bindings: Iterable[Binding], module: Callable[[Any], str], others: Iterable[str]) -> Settings:
    """Returns settings in canonical order; `others`: modules imported for their effect, such as registering tasks."""
    bindings = list(bindings)
    used = {module(named) for b in bindings for named in _named(b)}
    symbols: dict[str, str] = {}
    for name in (*sorted(used), *sorted(set(others) - used)):
        symbols[name] = symbol_for(name, {"gin", *symbols.values()})

    def renamed(named: Any) -> Any:
        if not isinstance(named, Binding | Reference) or (isinstance(named, Binding) and named.is_macro):
            return named
        return dataclasses.replace(named, selector=f"{symbols[module(named)]}.{named.selector.rpartition('.')[2]}")

    written = [dataclasses.replace(renamed(b), value=transform(b.value, renamed)) for b in bindings]
    ordered = tuple(sorted(written, key=lambda b: (not b.is_macro, str(b))))
    return Settings({symbol: name for name, symbol in symbols.items()}, ordered)
