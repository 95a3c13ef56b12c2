"""From the names in a gin file to the constructors they stand for.

The one idea: a name is resolved as gin will resolve it, through the imports of the file it stands in, but a name that
does not resolve yields a problem and a guess, so that the rest of the configuration can still be judged.
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launch.gin_config.constructors import Constructor, constructor
from launch.gin_config.statements import (
    Binding,
    ConfigProblem,
    Import,
    Reference,
    Source,
    did_you_mean,
    is_flag,
    nearest,
    transform,
)

PUBLIC_PACKAGES = ("core", "parallel", "models", "tasks")


class _Unresolved(Exception):
    """A name that stands for no constructor; `guess` is a constructor that may have been meant."""

    def __init__(self, what: str, *, expected: str = "", fix: str = "", guess: Constructor | None = None):
        super().__init__(what)
        self.expected, self.fix, self.guess = expected, fix, guess


class Names:
    """What every name in these sources stands for.

    Attributes:
      problems: imports that failed and names that stand for no constructor.
    """

    def __init__(self, sources: Mapping[str, Source], *, folders: Iterable[Path]):
        self.problems: list[ConfigProblem] = []
        self._constructors: dict[Any, Constructor] = {}
        self._public = _public_modules()
        self._folders = [folder.resolve() for folder in folders]
        _make_importable(self._folders)
        self._symbols = {name: self._import_all(source) for name, source in sources.items()}
        self._share_with_command_line(sources)

    def resolve(self, binding: Binding) -> Binding:
        """The binding with its own constructor and those that its value refers to filled in."""

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, Reference):
                return leaf
            target, _ = self._find(leaf.selector, binding, said=str(leaf))
            return dataclasses.replace(leaf, target=target)

        target, guessed = (
            (None, False) if binding.is_macro else self._find(binding.selector, binding, said=binding.name)
        )
        value = transform(binding.value, change)
        return dataclasses.replace(binding, target=target, guessed=guessed, value=value)

    def root(self, path: str, *, file: str) -> Constructor | None:
        """The constructor of that full name; a problem of `file` when there is none."""
        module, _, name = path.rpartition(".")
        try:
            return self._member(importlib.import_module(module), [name], selector=path)
        except Exception as error:
            what = f"{path}, which the configuration is read into, cannot be imported"
            self.problems.append(ConfigProblem(file, 0, what, actual=_where_it_failed(error)))
            return None

    def _import_all(self, source: Source) -> dict[str, types.ModuleType | None]:
        """The modules by the name that this source knows them by; None for one that failed."""
        first: dict[str, Import] = {}
        for statement in source.imports:
            before = first.setdefault(statement.symbol, statement)
            if before.module != statement.module and (before.is_from or statement.is_from):
                what = f"'{statement.symbol}' already stands for {before.module} in this file"
                self._say(source.name, statement.line, what, fix=f"{_import_line(statement.module)} as …")
        modules = [(statement.symbol, self._import(statement, source)) for statement in source.imports]
        return dict(reversed(modules))

    def _import(self, statement: Import, source: Source) -> types.ModuleType | None:
        name = statement.module
        if name.startswith("__gin__"):
            self._say(source.name, statement.line, f"gin has no feature '{name}'", fix="remove the line")
            return None
        if name[:1].isupper() or any(part.startswith("_") for part in name.split(".")):
            fix = "rename the module: lower case, no underscore in front"
            self._say(source.name, statement.line, f"'{name}' is not the name of a public module", fix=fix)
            return None
        try:
            module = importlib.import_module(name)
        except Exception as error:  # whatever a user's own module raises belongs in the list of mistakes
            self._say_import_failed(statement, source, error)
            return None
        shadowed = self._shadowed(module)
        if shadowed:
            what = f"{name} is {module.__file__}, not {shadowed.name} next to the experiment"
            self._say(source.name, statement.line, what, fix=f"give {shadowed.name} a name of its own")
            return None
        plain = not statement.is_from and not statement.alias
        return sys.modules[name.split(".")[0]] if plain else module

    def _shadowed(self, module: types.ModuleType) -> Path | None:
        """A file in the user's folders that a top-level module of that name keeps from being found."""
        files = [folder / f"{module.__name__}.py" for folder in self._folders]
        origin = Path(getattr(module, "__file__", None) or "").resolve()
        return next((file for file in files if file.is_file()), None) if origin not in files else None

    def _say_import_failed(self, statement: Import, source: Source, error: Exception) -> None:
        name = statement.module
        missing = isinstance(error, ModuleNotFoundError) and (name + ".").startswith(f"{error.name}.")
        if not missing:
            self._say(source.name, statement.line, f"importing {name} failed", actual=_where_it_failed(error))
            return
        package, _, last = name.rpartition(".")
        public = self._public.get(last) or self._public.get(nearest(last, self._public))
        fix = _import_line(public) if public else "put the module next to the experiment file or on PYTHONPATH"
        if package and hasattr(sys.modules.get(package), last):
            fix = f"import the module, {_import_line(package)}, and write {package.rpartition('.')[2]}.{last}"
        expected = did_you_mean(last, _siblings(package) or self._public)
        self._say(source.name, statement.line, f"there is no module {name}", expected=expected, fix=fix)

    def _share_with_command_line(self, sources: Mapping[str, Source]) -> None:
        """Bindings of the command line know what the files import, the experiment's own imports first."""
        flags = [name for name, source in sources.items() if source.on_command_line]
        shared: dict[str, types.ModuleType | None] = {}
        for name in [name for name in reversed(sources) if name not in flags] + flags:
            shared.update(self._symbols[name])
        for name in flags:
            self._symbols[name] = shared

    def _find(self, selector: str, binding: Binding, *, said: str) -> tuple[Constructor | None, bool]:
        """The constructor, or what was probably meant, if anything; and whether that is a guess."""
        try:
            return self._lookup(selector, binding.file), False
        except _Unresolved as error:
            if str(error):
                self._say(binding.file, binding.line, str(error), actual=said, expected=error.expected, fix=error.fix)
            return error.guess, True

    def _lookup(self, selector: str, file: str) -> Constructor:
        symbols = self._symbols.get(file, {})
        symbol, *rest = selector.split(".")
        if symbol not in symbols and is_flag(file):
            self._import_public(symbol, symbols, file=file)
        if symbol not in symbols:
            raise self._unknown_symbol(selector, symbols, file=file)
        if symbols[symbol] is None:
            raise _Unresolved("")  # the import that failed was reported
        return self._member(symbols[symbol], rest, selector=selector)

    def _import_public(self, symbol: str, symbols: dict[str, types.ModuleType | None], *, file: str) -> None:
        """Adds the module of this workspace that has that name, if there is one."""
        if symbol in self._public:
            symbols[symbol] = self._import(Import(0, self._public[symbol], True), Source(file, ""))

    def _unknown_symbol(self, selector: str, symbols: dict[str, types.ModuleType | None], *, file: str) -> _Unresolved:
        symbol, _, rest = selector.partition(".")
        modules = {name: module for name, module in symbols.items() if module is not None}
        choices = {f"{name}.{member}" for name, module in modules.items() for member in _public_members(module)}
        bare = sorted(choice for choice in choices if choice.endswith(f".{selector}"))
        choice = bare[0] if bare else nearest(selector, choices)
        guess = None
        if symbol in self._public and rest:
            fix = f"import it at the top of the file: {_import_line(self._public[symbol])}"
            self._import_public(symbol, symbols, file=file)  # said once for each file
            module = symbols[symbol]
            known = module is not None and rest in _public_members(module)
            guess = self._member(module, [rest], selector=selector) if known else None
        elif choice:
            fix = f"write {choice}"
            name, member = choice.split(".")
            guess = self._member(modules[name], [member], selector=choice)
        else:
            fix = "import the module that has it, and write module.constructor"
        what = f"'{symbol}' is not imported here" if rest else f"'{symbol}' is not of the form module.constructor"
        return _Unresolved(what, expected=did_you_mean(selector, choices), fix=fix, guess=guess)

    def _member(self, module: types.ModuleType, rest: list[str], *, selector: str) -> Constructor:
        """The constructor at the end of the dotted path `rest` inside the module."""
        while len(rest) > 1 and inspect.ismodule(getattr(module, rest[0], None)):
            module, rest = getattr(module, rest[0]), rest[1:]
        if not rest:
            choices = did_you_mean("", _public_members(module))
            raise _Unresolved(f"'{selector}' is a module, not a constructor", expected=choices)
        name = rest[0]
        if any(part.startswith("_") for part in rest):
            raise _Unresolved(f"'{selector}' is private", fix="name a public constructor of the module")
        if not hasattr(module, name):
            raise self._unknown_member(module, name, selector=selector)
        if len(rest) > 1:
            fix = f"name a function or class of {module.__name__}"
            raise _Unresolved(f"'{selector}' is not a constructor of a module", fix=fix)
        target = getattr(module, name)
        reason = _why_not_a_constructor(target)
        if reason:
            raise _Unresolved(f"'{selector}' {reason}", expected=did_you_mean(name, _public_members(module)))
        if target not in self._constructors:
            self._constructors[target] = constructor(target, module=module.__name__, name=name)
        return self._constructors[target]

    def _unknown_member(self, module: types.ModuleType, name: str, *, selector: str) -> _Unresolved:
        members = _public_members(module)
        close = nearest(name, members)
        written = selector.rpartition(".")[0]
        fix = f"write {written}.{close}" if close else ""
        if name in _siblings(module.__name__):
            fix = f"import that module: from {module.__name__} import {name}"
        guess = self._member(module, [close], selector=f"{written}.{close}") if close else None
        what = f"{module.__name__} has no constructor '{name}'"
        return _Unresolved(what, expected=did_you_mean(name, members), fix=fix, guess=guess)

    def _say(self, file: str, line: int, what: str, *, actual: str = "", expected: str = "", fix: str = "") -> None:
        self.problems.append(ConfigProblem(file, line, what, actual=actual, expected=expected, fix=fix))


def _why_not_a_constructor(target: Any) -> str:
    if inspect.ismodule(target):
        return "is a module, not a constructor"
    if not inspect.isclass(target) and not inspect.isroutine(target):
        return f"is a value ({type(target).__name__}), not a constructor"
    if getattr(target, "_is_protocol", False) or inspect.isabstract(target):
        return "is an interface, which cannot be constructed"
    return ""


def _public_members(module: types.ModuleType) -> list[str]:
    """The constructors that belong to the module, or to a package that it belongs to."""
    top = module.__name__.split(".")[0]
    public = {name: member for name, member in vars(module).items() if not name.startswith("_")}
    constructors = {name: member for name, member in public.items() if not _why_not_a_constructor(member)}
    return [name for name, member in constructors.items() if str(member.__module__).split(".")[0] == top]


def _public_modules() -> dict[str, str]:
    """`strategies` -> `parallel.strategies`: the modules of this workspace that a bare name can only mean."""
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
    """Last on the path, so that a user's file never shadows a module of ours or of Python."""
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
