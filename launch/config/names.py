"""Resolves the names in gin files to constructors, through the imports of the file that has them, as gin does.

A name that stands for nothing is a problem with a suggestion. Where there is a suggestion, the rest of the
configuration is checked as if it had been written.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gin.config_parser import ImportStatement, Location

from launch.config.constructors import Constructor, constructor, why_not_a_constructor
from launch.config.sources import Source
from launch.config.statements import Binding, ConfigProblem, Reference, did_you_mean, is_flag, nearest, transform

PUBLIC_PACKAGES = ("core", "parallel", "models", "tasks")

_Symbols = dict[str, types.ModuleType | None]  # None: the import failed, which was reported


class _UnresolvedError(Exception):
    """A name that stands for no constructor; `guess` is a constructor that may have been meant."""

    def __init__(self, what: str, *, expected: str = "", fix: str = "", guess: Constructor | None = None):
        super().__init__(what)
        self.expected, self.fix, self.guess = expected, fix, guess


class Names:
    """Resolves every name in some sources.

    Attributes:
      problems: imports that failed and names that stand for no constructor.
    """

    def __init__(self, sources: Mapping[str, Source], *, folders: Iterable[Path]):
        self.problems: list[ConfigProblem] = []
        self._constructors: dict[Any, Constructor] = {}
        self._public = _public_modules()
        self._folders = [folder.resolve() for folder in folders]
        _make_importable(self._folders)
        self._symbols = {name: self._import_all(source.imports, file=name) for name, source in sources.items()}
        # Bindings of the command line may use what the files import, the experiment's own imports first.
        flags = [name for name in sources if is_flag(name)]
        shared: _Symbols = {}
        for name in [name for name in reversed(sources) if name not in flags] + flags:
            shared.update(self._symbols[name])
        self._symbols.update(dict.fromkeys(flags, shared))

    def resolve(self, binding: Binding) -> Binding:
        """Returns the binding with the constructors that its left-hand side and its value name."""

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, Reference):
                return leaf
            return dataclasses.replace(leaf, target=self._find(leaf.selector, binding, written=str(leaf))[0])

        target, guessed = None, False
        if not binding.is_macro:
            target, guessed = self._find(binding.selector, binding, written=binding.name)
        return dataclasses.replace(binding, target=target, guessed=guessed, value=transform(binding.value, change))

    def root(self, path: str, *, file: str) -> Constructor | None:
        """Returns the constructor of that full name; a problem of `file` where there is none."""
        module, _, name = path.rpartition(".")
        try:
            return self._member(importlib.import_module(module), [name], selector=path)
        except Exception as error:
            what = f"{path}, which the configuration is read into, cannot be imported"
            self.problems.append(ConfigProblem(file, 0, what, actual=_where_it_failed(error)))
            return None

    def _import_all(self, statements: Sequence[ImportStatement], *, file: str) -> _Symbols:
        first: dict[str, ImportStatement] = {}
        for statement in statements:
            before = first.setdefault(statement.bound_name(), statement)
            if before.module != statement.module and (before.is_from or statement.is_from):
                what = f"'{statement.bound_name()}' already stands for {before.module} in this file"
                fix = f"{_import_line(statement.module)} as …"
                self.problems.append(ConfigProblem(file, statement.location.line_num, what, fix=fix))
        return dict(reversed([(statement.bound_name(), self._import(statement, file)) for statement in statements]))

    def _import(self, statement: ImportStatement, file: str) -> types.ModuleType | None:
        name, line = statement.module, statement.location.line_num
        problem = module = None
        if name.startswith("__gin__"):
            problem = ConfigProblem(file, line, f"gin has no feature '{name}'", fix="remove the line")
        elif name[:1].isupper() or any(part.startswith("_") for part in name.split(".")):
            fix = "rename the module: lower case, no underscore in front"
            problem = ConfigProblem(file, line, f"'{name}' is not the name of a public module", fix=fix)
        else:
            try:
                module = importlib.import_module(name)
            except Exception as error:  # whatever a user's own module raises belongs in the list of mistakes
                problem = self._failed_import(name, error, file=file, line=line)
        if module and (shadowed := self._shadowed(module)):
            what = f"{name} is {module.__file__}, not {shadowed.name} next to the experiment"
            problem = ConfigProblem(file, line, what, fix=f"give {shadowed.name} a name of its own")
        if problem:
            self.problems.append(problem)
            return None
        return module if statement.is_from or statement.alias else sys.modules[name.split(".")[0]]

    def _shadowed(self, module: types.ModuleType) -> Path | None:
        """A file in the user's folders that a top-level module of that name keeps from being found."""
        files = [folder / f"{module.__name__}.py" for folder in self._folders]
        origin = Path(getattr(module, "__file__", None) or "").resolve()
        return next((file for file in files if file.is_file()), None) if origin not in files else None

    def _failed_import(self, name: str, error: Exception, *, file: str, line: int) -> ConfigProblem:
        missing = isinstance(error, ModuleNotFoundError) and (name + ".").startswith(f"{error.name}.")
        if not missing:
            return ConfigProblem(file, line, f"importing {name} failed", actual=_where_it_failed(error))
        package, _, last = name.rpartition(".")
        public = self._public.get(last) or self._public.get(nearest(last, self._public))
        fix = _import_line(public) if public else "put the module next to the experiment file or on PYTHONPATH"
        if package and hasattr(sys.modules.get(package), last):
            fix = f"import the module, {_import_line(package)}, and write {package.rpartition('.')[2]}.{last}"
        expected = did_you_mean(last, _siblings(package) or self._public)
        return ConfigProblem(file, line, f"there is no module {name}", expected=expected, fix=fix)

    def _find(self, selector: str, binding: Binding, *, written: str) -> tuple[Constructor | None, bool]:
        """The constructor, or what was probably meant, if anything; and whether that is a guess."""
        try:
            return self._lookup(selector, binding.file), False
        except _UnresolvedError as error:
            if str(error):
                problem = binding.problem(str(error), actual=written, expected=error.expected, fix=error.fix)
                self.problems.append(problem)
            return error.guess, True

    def _lookup(self, selector: str, file: str) -> Constructor:
        symbols = self._symbols.get(file, {})
        symbol, *rest = selector.split(".")
        if symbol not in symbols and is_flag(file):
            self._import_public(symbol, symbols, file=file)
        if symbol not in symbols:
            raise self._unknown_symbol(selector, symbols, file=file)
        if symbols[symbol] is None:
            raise _UnresolvedError("")
        return self._member(symbols[symbol], rest, selector=selector)

    def _import_public(self, symbol: str, symbols: _Symbols, *, file: str) -> None:
        """Adds the module of this workspace that has that name, if there is one."""
        if symbol in self._public:
            statement = ImportStatement(self._public[symbol], True, None, Location(None, 0, None, ""))
            symbols[symbol] = self._import(statement, file)

    def _unknown_symbol(self, selector: str, symbols: _Symbols, *, file: str) -> _UnresolvedError:
        symbol, _, rest = selector.partition(".")
        modules = {name: module for name, module in symbols.items() if module is not None}
        choices = {f"{name}.{member}" for name, module in modules.items() for member in _public_members(module)}
        bare = sorted(choice for choice in choices if choice.endswith(f".{selector}"))
        choice = bare[0] if bare else nearest(selector, choices)
        fix, guess = "import the module that has it, and write module.constructor", None
        if symbol in self._public and rest:
            fix = f"import it at the top of the file: {_import_line(self._public[symbol])}"
            self._import_public(symbol, symbols, file=file)  # so that this is reported once for each file
            module = symbols[symbol]
            if module is not None and rest in _public_members(module):
                guess = self._member(module, [rest], selector=selector)
        elif choice:
            name, member = choice.split(".")
            fix, guess = f"write {choice}", self._member(modules[name], [member], selector=choice)
        what = f"'{symbol}' is not imported here" if rest else f"'{symbol}' is not of the form module.constructor"
        return _UnresolvedError(what, expected=did_you_mean(selector, choices), fix=fix, guess=guess)

    def _member(self, module: types.ModuleType, rest: list[str], *, selector: str) -> Constructor:
        """The constructor at the end of the dotted path `rest` inside the module."""
        while len(rest) > 1 and inspect.ismodule(getattr(module, rest[0], None)):
            module, rest = getattr(module, rest[0]), rest[1:]
        name = rest[0] if rest else ""
        if any(part.startswith("_") for part in rest):
            raise _UnresolvedError(f"'{selector}' is private", fix="name a public constructor of the module")
        if name and not hasattr(module, name):
            raise self._unknown_member(module, name, selector=selector)
        if len(rest) > 1:
            fix = f"name a function or class of {module.__name__}"
            raise _UnresolvedError(f"'{selector}' is not a constructor of a module", fix=fix)
        target = getattr(module, name) if name else module
        if reason := why_not_a_constructor(target):
            raise _UnresolvedError(f"'{selector}' {reason}", expected=did_you_mean(name, _public_members(module)))
        if target not in self._constructors:
            self._constructors[target] = constructor(target, module=module.__name__, name=name)
        return self._constructors[target]

    def _unknown_member(self, module: types.ModuleType, name: str, *, selector: str) -> _UnresolvedError:
        members = _public_members(module)
        close = nearest(name, members)
        meant = f"{selector.rpartition('.')[0]}.{close}"
        fix = f"write {meant}" if close else ""
        if name in _siblings(module.__name__):
            fix = f"import that module: from {module.__name__} import {name}"
        guess = self._member(module, [close], selector=meant) if close else None
        what = f"{module.__name__} has no constructor '{name}'"
        return _UnresolvedError(what, expected=did_you_mean(name, members), fix=fix, guess=guess)


def _public_members(module: types.ModuleType) -> list[str]:
    """The constructors that belong to the module, or to a package that it belongs to."""
    top = module.__name__.split(".")[0]
    public = {name: member for name, member in vars(module).items() if not name.startswith("_")}
    constructors = {name: member for name, member in public.items() if not why_not_a_constructor(member)}
    return [name for name, member in constructors.items() if str(member.__module__).split(".")[0] == top]


def _public_modules() -> dict[str, str]:
    """`strategies` -> `parallel.strategies`: the modules of this workspace that a name alone tells apart."""
    found = [f"{package}.{name}" for package in PUBLIC_PACKAGES for name in _siblings(package)] + ["launch.experiment"]
    counts = collections.Counter(module.rpartition(".")[2] for module in found)
    return {module.rpartition(".")[2]: module for module in found if counts[module.rpartition(".")[2]] == 1}


def _siblings(package: str) -> list[str]:
    """The public modules in a package; none if there is no such package."""
    try:
        spec = importlib.util.find_spec(package) if package else None
    except (ImportError, ValueError):
        spec = None
    folders = (spec.submodule_search_locations if spec else None) or []
    return [module.name for module in pkgutil.iter_modules(folders) if not module.name.startswith("_")]


def _make_importable(folders: Iterable[Path]) -> None:
    """Appends to the path, so that a user's file never shadows a module of ours or of Python."""
    importlib.invalidate_caches()
    known = {Path(entry or ".").resolve() for entry in sys.path}
    sys.path.extend(str(folder) for folder in dict.fromkeys(folders) if folder not in known)


def _import_line(module: str) -> str:
    package, _, name = module.rpartition(".")
    return f"from {package} import {name}" if package else f"import {name}"


def _where_it_failed(error: Exception) -> str:
    """`NameError: name 'x' is not defined (my_strategy.py:3)`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    file, line = (frames[-1].filename, frames[-1].lineno) if frames else ("", 0)
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno
    return f"{type(error).__name__}: {error}" + (f" ({Path(file).name}:{line})" if file else "")
