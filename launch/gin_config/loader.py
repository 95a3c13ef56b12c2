"""An experiment file becomes an object, or a list of all that is wrong with it. The only file that imports gin.

gin has the grammar and calls the constructors. Between the two stand our own checks, because gin lets pass what costs
an afternoon on a pod: a misspelt macro, a value given twice, a number in quotes, a setting of a strategy that is not in
use. The one idea: what counts in the end is one flat text, a line for each value, every name written the one way. A
run saves it, hosts compare it, and gin gets it with the macros filled in: gin would call what a macro stands for in a
scope of its own, and its record of what was used would be cut up by it.
"""

from __future__ import annotations

import importlib.util  # noqa: F401  gin forgets this import, and then fails in an obscure way on a missing file
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gin
from gin import config as gin_engine
from gin import config_parser
from launch.gin_config import checks, recovery, sources
from launch.gin_config.constructors import Constructor
from launch.gin_config.graph import Configuration
from launch.gin_config.names import Names
from launch.gin_config.sources import ParseFailure, Reader, closest, display, find, missing_file
from launch.gin_config.statements import (
    DYNAMIC_REGISTRATION,
    Binding,
    ConfigError,
    ConfigProblem,
    Import,
    Include,
    Macro,
    Reference,
    Statement,
    leaves,
    render,
    scoped,
)

ROOT = "launch.experiment.Experiment"
DEFAULTS = "gin/defaults.gin"

__all__ = ["DEFAULTS", "ROOT", "ConfigError", "ConfigProblem", "LoadedConfig", "load", "parse", "problems"]


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration without mistakes.

    Attributes:
      experiment: the name of the experiment file.
      text: all that counts, in canonical form: equal on two hosts exactly if both will build the same. It is itself an
        experiment file.
      files: the content of every file and flag that was read, by name.
      notes: sentences for the user: bindings left out because a later source chose otherwise.
    """

    experiment: str
    text: str
    files: Mapping[str, str]
    notes: tuple[str, ...]
    _plain_text: str = field(repr=False)
    _root: Constructor = field(repr=False)
    _bindings: tuple[Binding, ...] = field(repr=False)
    _operative: list[str] = field(default_factory=list, repr=False, compare=False)

    def build(self) -> Any:
        """The root object, made anew at every call.

        Raises:
          ConfigError: a constructor refused its values with a ValueError.
        """
        _install(self._plain_text)
        bound = any(binding.target is self._root for binding in self._bindings)
        try:
            built = gin.get_configurable(self._root.target)() if bound else self._root.target()
        except ValueError as error:
            raise ConfigError(self.experiment, [self._refusal(str(error))]) from error
        self._operative[:] = [gin.operative_config_str()]
        return built

    def operative_text(self) -> str:
        """What the last `build` used, with the defaults of the constructors that it called.

        Raises:
          ValueError: nothing was built yet.
        """
        if not self._operative:
            raise ValueError(f"nothing of {self.experiment} is operative before it was built: call build() first")
        return self._operative[0]

    def _refusal(self, message: str) -> ConfigProblem:
        """The innermost constructor that gin names in the message, and where its values come from."""
        reason, *calls = message.split("\n  In call to configurable '")
        name = calls[0].partition("'")[0] if calls else self._root.name
        given = [b for b in self._bindings if b.target is not None and b.target.name == name]
        named = [b for b in given if re.search(rf"\b{re.escape(b.parameter)}\b", reason)]
        macros = {b.name: b for b in self._bindings if b.is_macro}
        written = [macros[b.value.name] if isinstance(b.value, Macro) else b for b in named or given]
        file, line = (written[0].file, written[0].line) if written else (self.experiment, 0)
        said = ", ".join(f"{b} ({b.place})" for b in written)
        return ConfigProblem(file, line, f"{name} refuses its values: {reason}", actual=said)


def load(
    path: str | Path,
    *,
    bindings: Sequence[str] = (),
    slice_name: str | None = None,
    root: str = ROOT,
    defaults: str = DEFAULTS,
    between: Mapping[str, str] = MappingProxyType({}),
) -> LoadedConfig:
    """Reads an experiment file, checks it, and makes it gin's current configuration.

    Args:
      path: from the working directory or the top of the workspace.
      bindings: of the command line; each may use what the experiment imports and the public modules of this workspace.
      slice_name: value for the macro SLICE, whatever the file and `bindings` say.
      root: full name of the constructor that the configuration is for.
      defaults: the file that declares the macros.
      between: further gin texts, by the name that messages give them; they win over the file, `bindings` over them.

    Raises:
      ConfigError: lists every mistake found.
    """
    found, config, verdict = _examine(
        path, bindings=bindings, slice_name=slice_name, root=root, defaults=defaults, between=between
    )
    if found or config is None:
        raise ConfigError(str(path), found)
    plain_text = _flatten(verdict.plain)
    _install(plain_text)
    return LoadedConfig(
        experiment=config.experiment,
        text=_flatten(verdict.kept),
        files={name: source.text for name, source in config.sources.items()},
        notes=(*verdict.notes, *_replaced_slice(config, slice_name)),
        _plain_text=plain_text,
        _root=config.root,
        _bindings=tuple(verdict.kept),
    )


def _replaced_slice(config: Configuration, slice_name: str | None) -> list[str]:
    """A note for a --gin binding of SLICE where the SLICE argument is another slice."""
    bound = [b for b in config.bindings if b.is_macro and b.name == "SLICE" and b.file.startswith("--gin")]
    if slice_name is None or not bound or bound[-1].value == slice_name:
        return []
    return [f"{bound[-1].place}: {bound[-1]} is left out, the SLICE argument chose {slice_name!r}"]


def problems(
    path: str | Path,
    *,
    bindings: Sequence[str] = (),
    slice_name: str | None = None,
    root: str = ROOT,
    defaults: str = DEFAULTS,
) -> list[ConfigProblem]:
    """Every mistake that can be found without constructing anything; the arguments are those of `load`."""
    return _examine(path, bindings=bindings, slice_name=slice_name, root=root, defaults=defaults)[0]


def parse(text: str) -> tuple[list[Statement], list[ParseFailure]]:
    """The statements of a gin text; when some do not parse, the others and what can be told of those."""
    try:
        return _statements(text), []
    except recovery.ERRORS as error:
        return recovery.recover(text, error, parse=_statements)


def _examine(
    path: str | Path,
    *,
    bindings: Sequence[str],
    slice_name: str | None,
    root: str,
    defaults: str,
    between: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[ConfigProblem], Configuration | None, checks.Verdict]:
    folders = (Path.cwd(), sources.WORKSPACE)
    file = find(str(path), folders=folders)
    if file is None:
        parts = missing_file(str(path), closest(str(path), folders=folders))
        return [ConfigProblem(str(path), 0, **parts)], None, checks.Verdict([], [], [], [])
    reader = Reader(parse)
    experiment = reader.file(file)
    for name, text in between.items():
        reader.text(text, name=name, folder=Path.cwd())
    for number, binding in enumerate(bindings, start=1):
        reader.text(binding.strip(), name=f"--gin #{number}", folder=Path.cwd())
    if slice_name is not None:
        reader.text(f"SLICE = {slice_name!r}", name="--slice", folder=Path.cwd())
    declared_in, macros = _declared_macros(reader, defaults, folders=(*folders, file.parent))
    names = Names(reader.sources, folders=(file.parent, Path.cwd()))
    config = Configuration(
        experiment=experiment,
        root=names.root(root, file=experiment),
        defaults=declared_in,
        macros=macros,
        bindings=tuple(names.resolve(binding) for binding in reader.bindings),
        sources=reader.sources,
        complete=reader.complete,
    )
    verdict = checks.check(config)
    return _in_reading_order(reader.problems + names.problems + verdict.problems, config), config, verdict


def _declared_macros(reader: Reader, defaults: str, *, folders: Iterable[Path]) -> tuple[str, frozenset[str]]:
    """The closed set of macros, and the name of the file that declares it."""
    file = find(defaults, folders=folders)
    if file is None:
        reader.problems.append(ConfigProblem(defaults, 0, "the file that declares the macros is missing"))
        used = {leaf.name for b in reader.bindings for leaf in leaves(b.value) if isinstance(leaf, Macro)}
        return defaults, frozenset({b.name for b in reader.bindings if b.is_macro} | used)
    statements, _ = parse(file.read_text(encoding="utf-8"))
    return display(file), frozenset(s.name for s in statements if isinstance(s, Binding) and s.is_macro)


def _in_reading_order(found: Iterable[ConfigProblem], config: Configuration) -> list[ConfigProblem]:
    position = {name: number for number, name in enumerate(config.sources)}
    return sorted(dict.fromkeys(found), key=lambda p: (position.get(p.file, len(position)), p.line))


def _flatten(bindings: Iterable[Binding]) -> str:
    """Imports, macros, then parameters by constructor: each sorted, and each name written from its own module."""
    bindings = list(bindings)
    mentioned = [leaf.target for b in bindings for leaf in leaves(b.value) if isinstance(leaf, Reference)]
    symbols = _symbols({c.module for c in [*mentioned, *(b.target for b in bindings)] if c is not None})

    def selector(constructor: Constructor) -> str:
        return f"{symbols[constructor.module]}.{constructor.name}"

    def reference(leaf: Reference) -> str:
        return f"@{scoped(leaf.scope, selector(leaf.target))}{'()' if leaf.evaluate else ''}"

    def line(binding: Binding) -> str:
        left = binding.name if binding.is_macro else f"{selector(binding.target)}.{binding.parameter}"
        scope = "" if binding.is_macro else binding.scope
        return f"{scoped(scope, left)} = {render(binding.value, reference=reference)}"

    header = [f"from {DYNAMIC_REGISTRATION.replace('.', ' import ')}"]
    imports = [_import_line(module, symbol) for module, symbol in symbols.items()]
    macros = sorted(line(b) for b in bindings if b.is_macro)
    parameters = sorted(line(b) for b in bindings if not b.is_macro)
    return "\n".join([*header, *imports, "", *macros, "", *parameters]) + "\n"


def _symbols(modules: Iterable[str]) -> dict[str, str]:
    """A short name for each module, all different; `gin` itself is taken."""
    symbols: dict[str, str] = {}
    for module in sorted(modules):
        name = module.rpartition(".")[2]
        taken = {"gin", *symbols.values()}
        symbols[module] = next(s for s in (name, *(f"{name}{i}" for i in range(2, len(taken) + 3))) if s not in taken)
    return symbols


def _import_line(module: str, symbol: str) -> str:
    package, _, name = module.rpartition(".")
    alias = f" as {symbol}" if symbol != name else ""
    return f"from {package} import {name}{alias}" if package else f"import {name}{alias}"


def _install(text: str) -> None:
    """Makes the text the configuration that gin holds, in place of any other."""
    gin.clear_config()
    with gin_engine.interactive_mode():  # a module imported anew brings new constructors under known names
        gin.parse_config(text)
    gin.finalize()


class _Delegate(config_parser.ParserDelegate):
    """Keeps names as names: what they stand for is found out later, with all mistakes at once."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, selector = scoped_configurable_name.rpartition("/")
        return Reference(scope, selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


_CONVERT: dict[type, Callable[[Any], Statement]] = {
    config_parser.BindingStatement: lambda s: Binding(s.location.line_num, s.scope, s.selector, s.arg_name, s.value),
    config_parser.ImportStatement: lambda s: Import(s.location.line_num, s.module, s.is_from, s.alias),
    config_parser.IncludeStatement: lambda s: Include(s.location.line_num, s.filename),
}


def _statements(text: str) -> list[Statement]:
    """The statements of a text that parses; the header of a block says nothing that its bindings do not."""
    parsed = config_parser.ConfigParser(text, _Delegate())
    return [_CONVERT[type(s)](s) for s in parsed if not isinstance(s, config_parser.BlockDeclaration)]
