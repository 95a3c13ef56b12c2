"""Resolves names in gin files to constructors, through the imports of their file."""

import collections
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import sys
import traceback
import types
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gin.config_parser import ImportStatement, Location

from launch import environment
from launch.config import moved
from launch.config.signatures import Constructor, why_not_a_constructor
from launch.config.sources import Reader
from launch.config.statements import (
    Binding,
    ConfigProblem,
    Macro,
    Reference,
    did_you_mean,
    import_line,
    is_flag,
    nearest,
    transform,
)

if TYPE_CHECKING:
    from launch.config.trust import Trust

PUBLIC_PACKAGES = tuple(environment.PACKAGE + name for name in ("core", "parallel", "models", "tasks"))
_EXPERIMENT = (f"{environment.PACKAGE}launch.experiment", f"{environment.PACKAGE}launch.settings")
OURS = tuple(f"{package}." for package in (*PUBLIC_PACKAGES, f"{environment.PACKAGE}launch"))

_Symbols = MutableMapping[str, types.ModuleType | None]  # None: the import failed; the failure is in the problems


class _UnresolvedError(Exception):
    """A name cannot be resolved; the message is empty if the cause was already reported."""

    def __init__(self, what: str = "", *, expected: str = "", fix: str = ""):
        super().__init__(what)
        self.details = {"expected": expected, "fix": fix}


class _UntrustedError(_UnresolvedError):
    def __init__(self, module: str, *, constructor: str = ""):
        what = f"would call {constructor}" if constructor else f"would import {module}"
        super().__init__(
            f"this configuration of a run {what}, which can run any program",
            expected="constructors of this workspace and of optax",
            fix=f'if you trust the run and this module, add --gin "{import_line(module)}"',
        )


def _names_module(binding: Binding) -> bool:
    return binding.selector.rpartition(".")[2] == "seqio" and binding.parameter == "module"


def _module_macros(bindings: Iterable[Binding]) -> set[str]:
    found: set[str] = set()
    while True:
        read = [b.value for b in bindings if _names_module(b) or (b.is_macro and b.selector in found)]
        names = {value.name.rpartition("/")[2] for value in read if isinstance(value, Macro)}
        if names <= found:
            return found
        found |= names


class Names:
    """Resolves the names in sources to constructors.

    Attributes:
      problems: failed imports and unresolved names.
      unresolved: the unresolved names.
      own_modules: full names of imported modules that are not this project's.
    """

    def __init__(self, reader: Reader, *, folders: Iterable[Path], trust: "Trust | None" = None):
        """Imports the modules that the sources name.

        Args:
          reader: the sources.
          folders: where the user's modules are, besides Python's path.
          trust: what the first source may name; None: anything.
        """
        self.problems: list[ConfigProblem] = []
        self.unresolved: list[str] = []
        self.own_modules: set[str] = set()
        self._unclear, sources = reader.unclear, reader.sources
        self._module_macros = _module_macros(reader.bindings)
        others = {name: source for name, source in sources.items() if name != reader.experiment}
        named = {statement.module for source in others.values() for statement in source.imports}
        self._trust = {reader.experiment: trust.also(named)} if trust else {}
        self._constructors: dict[Any, Constructor] = {}
        self._folders = [folder.resolve() for folder in folders]
        make_importable(self._folders)
        self._symbols: dict[str, _Symbols] = {name: {} for name in sources}
        for name, source in sources.items():
            for statement in source.imports:
                self._import(statement, name)
        flags = [name for name in sources if is_flag(name)]
        files = [name for name in sources if name not in flags]
        # Bindings of the command line may use what the files import, the experiment's own imports first.
        shared = collections.ChainMap(*(self._symbols[name] for name in (*flags, *files)))
        self._symbols.update(dict.fromkeys(flags, shared))

    @property
    def _public(self) -> dict[str, str]:
        return _public_modules(PUBLIC_PACKAGES)

    def resolve(self, binding: Binding) -> Binding:
        """Returns a copy of a binding with the constructors of its names.

        Unknown names, and names that are not trusted, become problems.
        """

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, Reference):
                return leaf
            return dataclasses.replace(leaf, target=self._find(leaf.selector, binding, written=str(leaf)))

        target = None if binding.is_macro else self._find(binding.selector, binding, written=binding.name)
        value, trust = transform(binding.value, change), self._trust.get(binding.file)
        names_module = binding.selector in self._module_macros if binding.is_macro else _names_module(binding)
        if trust and names_module and not isinstance(value, Macro) and not trust.allows_module(value):
            value = None  # None: a task whose cache exists needs no module
        return dataclasses.replace(binding, target=target, value=value)

    def root(self, path: str) -> Constructor:
        """Returns the constructor with this full name, such as `launch.experiment.Experiment`."""
        module, _, name = path.rpartition(".")
        return self._member(importlib.import_module(module), [name], selector=path)

    def _import(self, statement: ImportStatement, file: str) -> None:
        """Imports a module for a file; the first import of a symbol wins, and failures become problems."""
        name, symbol, symbols = statement.module, statement.bound_name(), self._symbols[file]
        what, module, details = "", None, {}
        try:
            if (trust := self._trust.get(file)) and not trust.allows_import(name):
                raise _UntrustedError(name)
            if not f"{name}.".startswith(OURS):  # it may import seqio
                from tasks import edit_distance

                edit_distance.stand_in()
            module = importlib.import_module(name)
        except _UntrustedError as error:
            what, details = str(error), error.details
        except Exception as error:  # the user's module may raise anything; the error is listed with the other mistakes
            what, details = self._failed_import(name, error)
        if module and (shadowed := self._shadowed(module)):
            what = f"{name} is {module.__file__}, not {shadowed.name} next to the experiment"
            module, details = None, {"fix": f"give {shadowed.name} a name of its own"}
        if module and not (statement.is_from or statement.alias):
            module = sys.modules[name.split(".")[0]]
        if module and not f"{name}.".startswith(OURS):
            self.own_modules.add(name)
        first = symbols.setdefault(symbol, module)
        if module and first not in (module, None):
            what = f"'{symbol}' is already the name of {first.__name__} in this file"
            details = {"fix": f"{import_line(name)} as …"}
        if what:
            self.problems.append(ConfigProblem(file, statement.location.line_num, what, **details))

    def _shadowed(self, module: types.ModuleType) -> Path | None:
        files = [folder / f"{module.__name__}.py" for folder in self._folders]
        origin = Path(getattr(module, "__file__", None) or "").resolve()
        is_one = origin in [file.resolve() for file in files]  # which may be links
        return None if is_one else next((file for file in files if file.is_file()), None)

    def _failed_import(self, name: str, error: Exception) -> tuple[str, dict[str, str]]:
        if not (isinstance(error, ModuleNotFoundError) and (name + ".").startswith(f"{error.name}.")):
            new = moved.MODULES.get(getattr(error, "name", None) or "")
            details = {"fix": f"import {new}, as that module is called now"} if new else {}
            return f"importing {name} failed", {"actual": where_it_failed(error), **details}
        package, _, last = name.rpartition(".")
        public = self._public.get(last) or self._public.get(nearest(last, self._public))
        place = (
            "start in its folder, or put that on" if self._trust else "put the module next to the experiment file or on"
        )
        fix = import_line(public) if public else f"{place} PYTHONPATH"
        if package and hasattr(sys.modules.get(package), last):
            fix = f"import the module, {import_line(package)}, and write {package.rpartition('.')[2]}.{last}"
        expected = did_you_mean(last, _siblings(package) or self._public)
        return f"there is no module {name}", {"expected": expected, "fix": fix}

    def _find(self, selector: str, binding: Binding, *, written: str) -> Constructor | None:
        try:
            return self._lookup(selector, binding.file)
        except _UnresolvedError as error:
            self.unresolved.append(selector)
            if str(error) and selector.partition(".")[0] not in self._unclear:
                self.problems.append(binding.problem(str(error), actual=written, **error.details))
            return None

    def _lookup(self, selector: str, file: str) -> Constructor:
        symbols = self._symbols[file]
        symbol, *rest = selector.split(".")
        if symbol not in symbols:
            unknown = None if is_flag(file) and symbol in self._public else self._unknown_symbol(selector, symbols)
            if symbol in self._public and (rest or not unknown):  # report a missing import once per file
                self._import(ImportStatement(self._public[symbol], True, None, Location(None, 0, None, "")), file)
            if unknown:
                raise unknown
        if (module := symbols[symbol]) is None:
            raise _UnresolvedError
        found = self._member(module, rest, selector=selector)
        if (trust := self._trust.get(file)) and not trust.allows(found):
            raise _UntrustedError(found.module, constructor=f"{found.module}.{found.name}")
        return found

    def _unknown_symbol(self, selector: str, symbols: _Symbols) -> _UnresolvedError:
        symbol, _, rest = selector.partition(".")
        modules = {name: module for name, module in symbols.items() if module is not None}
        choices = {f"{name}.{member}" for name, module in modules.items() for member in _public_members(module)}
        homes = [name for name, module in modules.items() if _defines(module, selector)]
        bare = sorted(choice for choice in choices if choice.endswith(f".{selector}"))
        bare = [f"{home}.{selector}" for home in sorted(homes)] or bare
        choice = bare[0] if bare else nearest(selector, choices)
        fix = f"write {choice}" if choice else "import the module that has it, and write module.constructor"
        if symbol in self._public and rest:
            fix = f"import it at the top of the file: {import_line(self._public[symbol])}"
        what = f"'{symbol}' is not imported here" if rest else f"'{symbol}' does not have the form module.constructor"
        return _UnresolvedError(what, expected=did_you_mean(selector, choices), fix=fix)

    def _member(self, module: types.ModuleType, rest: list[str], *, selector: str) -> Constructor:
        while len(rest) > 1 and inspect.ismodule(getattr(module, rest[0], None)):
            module, rest = getattr(module, rest[0]), rest[1:]
        name = rest[0] if rest else ""
        if any(part.startswith("_") for part in rest):
            raise _UnresolvedError(f"'{selector}' is private", fix="name a public constructor of the module")
        if name and not hasattr(module, name):
            members = _public_members(module)
            close = nearest(name, members)
            fix = f"write {selector.rpartition('.')[0]}.{close}" if close else ""
            if name in _siblings(module.__name__):
                fix = f"import that module: {import_line(f'{module.__name__}.{name}')}"
            what = f"{module.__name__} has no constructor '{name}'"
            raise _UnresolvedError(what, expected=did_you_mean(name, members), fix=fix)
        if len(rest) > 1:
            fix = f"name a function or class of {module.__name__}"
            raise _UnresolvedError(f"'{selector}' is not a constructor of a module", fix=fix)
        target: Any = getattr(module, name) if name else module
        if reason := why_not_a_constructor(target):
            raise _UnresolvedError(f"'{selector}' {reason}", expected=did_you_mean(name, _public_members(module)))
        return self._constructors.setdefault(target, Constructor(target, module.__name__, name))


def _public_members(module: types.ModuleType) -> list[str]:
    top = module.__name__.split(".")[0]
    public = {name: member for name, member in vars(module).items() if not name.startswith("_")}
    constructors = {name: member for name, member in public.items() if not why_not_a_constructor(member)}
    return [name for name, member in constructors.items() if str(member.__module__).split(".")[0] == top]


def _defines(module: types.ModuleType, name: str) -> bool:
    return getattr(getattr(module, name, None), "__module__", None) == module.__name__


@functools.cache
def _public_modules(packages: tuple[str, ...]) -> dict[str, str]:
    from launch.config.trust import CONSTRUCTORS  # imported only where a name is unknown

    top = [f"{p}.{name}" for p in packages if importlib.import_module(p) for name in _siblings(p)]
    listed = [environment.PACKAGE + module for module in CONSTRUCTORS]
    return {**_by_last_name([*listed, "optax"]), **_by_last_name([*top, *_EXPERIMENT])}


def _by_last_name(modules: list[str]) -> dict[str, str]:
    names = [module.rpartition(".")[2] for module in modules]
    return {name: m for name, m in zip(names, modules, strict=True) if names.count(name) == 1}


def _siblings(package: str) -> list[str]:
    folders = getattr(sys.modules.get(package), "__path__", [])
    return [module.name for module in pkgutil.iter_modules(folders) if not module.name.startswith("_")]


def make_importable(folders: Iterable[Path]) -> None:
    """Appends folders to `sys.path`: at its end, to shadow no other modules."""
    importlib.invalidate_caches()
    known = {Path(entry or ".").resolve() for entry in sys.path}
    sys.path.extend(str(folder) for folder in dict.fromkeys(folders) if folder not in known)


def where_it_failed(error: Exception) -> str:
    """Returns the error with its file and line: `NameError: name 'x' is not defined (my_strategy.py:3)`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    file, line = frames[-1].filename, frames[-1].lineno
    if isinstance(error, SyntaxError) and error.filename:  # in a file, unless code raised it itself
        file, line = error.filename, error.lineno
    return f"{type(error).__name__}: {error} ({Path(file).name}:{line})"
