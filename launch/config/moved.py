"""Replaces old names and values in gin files, by a table.

Old names are accepted for one release. The table applies to files, flags and saved configurations, before names are
resolved.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from gin.config_parser import ImportStatement

from core import units
from launch.config import old_parts, sources
from launch.config.old_parts import Rewrite
from launch.config.sources import Source
from launch.config.statements import (
    REQUIRED,
    Binding,
    ConfigProblem,
    Macro,
    Reference,
    import_line,
    is_flag,
    leaves,
    symbol_for,
    transform,
)
from launch.settings import GROUPS, HOMES

_ACCEPTED = "these names are old, and the next release will not accept them:"
_MOST_LINES = 12  # lines of a note
_UNKNOWN = "__unknown__"  # stands for an unknown module before a name, so that gin can parse the statement
_OF_PARAMETER, _OF_CONSTRUCTOR, _OF_MACRO = 2, 1, 0  # components after the module in a full name


class Table(NamedTuple):
    """Old names and values with their replacements, by full names such as `models.mixers.s5.S5.states`.

    Attributes:
      names: new names of modules, constructors, parameters and macros, by old names. No new name may begin with an old
        one.
      values: functions that replace old values of a parameter, by its new name.
      former: functions that replace bindings of parameters that no longer exist, by their names.
      needs: statements to add for a constructor (the key) to which parameters of another one have moved.
    """

    names: Mapping[str, str] = MappingProxyType({})
    values: Mapping[str, Rewrite] = MappingProxyType({})
    former: Mapping[str, Rewrite] = MappingProxyType({})
    needs: Mapping[str, str] = MappingProxyType({})


_Hook = Callable[[Binding], Sequence[str] | ConfigProblem | None]
_EXPERIMENT, _SETTINGS = "launch.experiment.Experiment", "launch.settings"
_DECODERS = ("models.decoder.transformer.Transformer", "models.decoder.transformer.preset")
MODULES = {  # includes names that other modules import from here
    "models.transformer": "models.decoder.transformer",
    "models.decoder_parts": "models.decoder.layers",
    "models.parts": "models.decoder.parts",
    "models.rotary": "models.decoder.rotary",
    "models.planner_config": "models.decoder.planner_config",
    "models.experts": "models.decoder.experts",
    "models.attention": "models.decoder.attention.attention",
    "models.ring_attention": "models.decoder.attention.ring_attention",
    "models.s5": "models.mixers.s5",
    "models.block_sparse": "models.mixers.block_sparse",
    "tasks.documents": "tasks.text.documents",
    "tasks.document_streams": "tasks.text.document_streams",
    "tasks.vocabularies": "tasks.text.vocabularies",
}
_FIELDS = {
    f"{constructor}.{old}": f"{constructor}.{new}"
    for constructor, fields in {
        f"{_SETTINGS}.Health": {
            "silent_limit_seconds": "heartbeat_timeout_seconds",
            "compare_interval": "replica_check_interval",
        },
        f"{_SETTINGS}.Checkpointing": {"persistent_directory": "checkpoint_mirror"},
        "models.decoder.experts.Experts": {
            "number": "num_experts",
            "capacity": "capacity_factor",
            "balance": "load_balance_coef",
        },
        "models.decoder.experts.trained": {"capacity": "capacity_factor", "balance": "load_balance_coef"},
    }.items()
    for old, new in fields.items()
}
_OF_GROUPS = {f"{_EXPERIMENT}.{n}": f"{_SETTINGS}.{GROUPS[group].__name__}.{n}" for n, group in HOMES.items()}
_OF_GROUPS |= {f"{_EXPERIMENT}.{old.rpartition('.')[2]}": new for old, new in _FIELDS.items() if _SETTINGS in old}
TABLE = Table(
    names=MODULES | _FIELDS | _OF_GROUPS,
    needs={
        f"{_SETTINGS}.{kind.__name__}": f"{_EXPERIMENT}.{group} = @{_SETTINGS}.{kind.__name__}()"
        for group, kind in GROUPS.items()
    },
    values={name: rewrite for decoder in _DECODERS for name, rewrite in old_parts.values(decoder).items()},
    former={name: rewrite for decoder in _DECODERS for name, rewrite in old_parts.former(decoder).items()},
)


# Gin files of this workspace now use these names of tasks; files that include them may still use the constructors.
_TASKS = {"renga.python_source": "tasks.text.python_source"}
_SEQIO = "tasks.text.seqio"


class Current(NamedTuple):
    """Statements in the current spelling."""

    sources: dict[str, Source]
    bindings: list[Binding]
    notes: dict[str, str]  # for each source with old spellings, a note that says the new ones
    problems: list[ConfigProblem]  # old spellings without a replacement; their statements are left out
    unclear: set[str]  # if there are problems: names in statements that were left out or changed


def current(read: Mapping[str, Source], bindings: Sequence[Binding]) -> Current:
    """Returns sources and their bindings in the current spelling.

    Sources are by name, bindings in the order in which they apply.
    """
    return _Spelling(read).current(bindings) if any(TABLE) else Current(dict(read), list(bindings), {}, [], set())


class _Spelling:
    def __init__(self, read: Mapping[str, Source]):
        self._read = read
        self._written = {name: {i.bound_name(): _module(i) for i in source.imports} for name, source in read.items()}
        self._now = {
            file: {symbol: _renamed(module, TABLE.names) for symbol, module in symbols.items()}
            for file, symbols in self._written.items()
        }
        self._shared: dict[str, str] = {}  # symbols of all sources, which flags may use
        for symbols in self._written.values():
            self._shared = symbols | self._shared
        self._lines: dict[str, list[str]] = {name: [] for name in read}
        self._used: set[str] = set()  # symbols of names that stay
        self._left: set[str] = set()  # symbols of names that moved
        self._problems: list[ConfigProblem] = []

    def current(self, bindings: Sequence[Binding]) -> Current:
        written = [_mapped(b, functools.partial(self._full, file=b.file)) for b in bindings]
        names = _names(written)
        renamed = [_mapped(b, lambda name, _: _renamed(name, names)) for b in written]
        renamed = [dataclasses.replace(b, order=order) for order, b in enumerate(renamed)]
        hooks, found, bound, changed = _hooks(renamed), [], {b.name for b in renamed}, []
        for old, was, now in zip(bindings, written, renamed, strict=True):
            statements = hooks[now.name](now) if now.name in hooks else None
            is_current = statements is None and (was.name, was.value) == (now.name, now.value)
            (self._used if is_current else self._left).update(_symbols(old))
            if is_current:
                found.append(old)
                continue
            changed.append(old)
            if isinstance(statements, ConfigProblem):
                self._problems.append(old.problem(statements.what, expected=statements.expected, fix=statements.fix))
                continue
            replaced = [now] if statements is None else _parsed(statements, at=now)
            if now.selector != was.selector and now.selector in TABLE.needs:
                replaced += [b for b in _parsed([TABLE.needs[now.selector]], at=now) if b.name not in bound]
            known_symbols = set(self._now[old.file])
            spelled = [_mapped(b, functools.partial(self._short, file=old.file)) for b in replaced]
            added = [s for s in self._now[old.file] if s not in known_symbols]
            self._tell(old, spelled, added, is_same_value=statements is None and was.value == now.value)
            known = {str(b) for b in (*bindings, *found) if b.file == old.file}  # what is to be added may be there
            found += [*spelled[:1], *(b for b in spelled[1:] if str(b) not in known)]
        found = self._without_former_macros(found, changed)
        ordered = [dataclasses.replace(binding, order=order) for order, binding in enumerate(found)]
        read = {file: source._replace(imports=self._imports(file)) for file, source in self._read.items()}
        lines = {file: units.shortened(lines, most=_MOST_LINES) for file, lines in self._lines.items() if lines}
        notes = {file: "\n  ".join([_ACCEPTED, *several]) for file, several in lines.items()}
        named = [name for b in changed for name in (*_selectors(b), *([b.name] if b.is_macro else []))]
        unclear = set(named) if self._problems else set()
        return Current(read, ordered, notes, self._problems, unclear)

    def _without_former_macros(self, found: list[Binding], changed: Sequence[Binding]) -> list[Binding]:
        """Returns the bindings without macros that only replaced statements read."""
        former, read = _macros(changed), _macros(found)
        while former - read:
            left = [b for b in found if b.is_macro and b.name in former - read]
            for b in left:
                self._tell(b, [], [], is_same_value=False)
            found = [b for b in found if b not in left]
            former, read = (former & read) | _macros(left), _macros(found)
        return found

    def _full(self, name: str, depth: int, *, file: str) -> str:
        symbol, _, rest = name.partition(".")
        symbols = self._shared if is_flag(file) else self._written[file]
        if depth == _OF_MACRO or symbol in symbols:
            return name if depth == _OF_MACRO else f"{symbols[symbol]}.{rest}"
        names = (*TABLE.names, *TABLE.values, *TABLE.former) if is_flag(file) else ()  # flags need no import statement
        former = (old.partition(f".{symbol}.") for old in names)
        homes = [home for home, found, inner in former if found and f"{rest}.".startswith(f"{inner}.")]
        return f"{homes[0]}.{name}" if homes else _UNKNOWN + name

    def _short(self, name: str, depth: int, *, file: str) -> str:
        if depth == _OF_MACRO or name.startswith(_UNKNOWN):
            return name.removeprefix(_UNKNOWN)
        parts = name.split(".")
        module, rest = ".".join(parts[:-depth]), parts[-depth:]
        symbols = self._now[file]
        symbol = next((symbol for symbol, known in symbols.items() if known == module), "")
        if not symbol:
            taken = {"gin", *(s for known in self._now.values() for s, m in known.items() if m != module)}
            symbol = symbol_for(module, taken)
            symbols[symbol] = module
        return ".".join([symbol, *rest])

    def _tell(self, old: Binding, new: Sequence[Binding], symbols: Sequence[str], *, is_same_value: bool) -> None:
        if [str(b) for b in new] == [str(old)]:
            return  # only the import of its module changes
        before, after = (old.name, new[0].name) if is_same_value else (str(old), "; ".join(map(str, new)))
        modules = {symbol: self._now[old.file][symbol] for symbol in symbols}
        if is_flag(old.file):  # flags use the files' imports and public modules without importing them
            modules = {s: m for s, m in modules.items() if m not in self._shared.values() and m.count(".") > 1}
        needed = "".join(f"; add {import_line(module, symbol)}" for symbol, module in modules.items())
        self._lines[old.file].append(
            f"{old.place}: write {after} for {before}{needed}" if new else f"{old.place}: remove {old}"
        )

    def _imports(self, file: str) -> list[ImportStatement]:
        found = []
        for statement in self._read[file].imports:
            symbol = statement.bound_name()
            if _renamed(_module(statement), TABLE.names) != _module(statement):
                new = sources.imported(self._now[file][symbol], symbol, at=statement)
                place = f"{file}:{statement.location.line_num}"
                self._lines[file].append(f"{place}: write {new.format()} for {statement.format()}")
                found.append(new)
            elif symbol in self._used or symbol not in self._left:
                found.append(statement)
        added = {s: module for s, module in self._now[file].items() if s not in self._written[file]}
        return [*found, *(sources.imported(module, symbol) for symbol, module in added.items())]


def _hooks(bindings: Sequence[Binding]) -> dict[str, _Hook]:
    macros = {b.name: b for b in bindings if b.is_macro}
    hooks: dict[str, _Hook] = {}
    for b in bindings:
        name, at = f"{b.selector}.{b.parameter}", b
        if name in TABLE.values:
            for _ in macros:
                at = macros.get(at.value.name, at) if isinstance(at.value, Macro) else at
        rewrite = TABLE.values.get(name) or TABLE.former.get(name)
        if rewrite:
            hooks[at.name] = functools.partial(_rewritten, b, rewrite, bindings)
    return hooks


def _rewritten(
    of: Binding, rewrite: Rewrite, bindings: Sequence[Binding], now: Binding
) -> Sequence[str] | ConfigProblem | None:
    """Calls `rewrite` with the left-hand side of `of` and the value of `now`."""
    if now.is_macro:
        now = dataclasses.replace(now, scope=of.scope, selector=of.selector, parameter=of.parameter)
    return rewrite(now, bindings)


def _names(bindings: Iterable[Binding]) -> Mapping[str, str]:
    task = None
    for b in bindings:
        if (b.scope, b.selector, b.parameter) == ("", _SEQIO, "name"):
            task = b.value
    constructor = _TASKS.get(task) if isinstance(task, str) else None
    return {**TABLE.names, constructor: _SEQIO} if constructor else TABLE.names


def _renamed(name: str, names: Mapping[str, str]) -> str:
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        if new := names.get(".".join(parts[:size])):
            return _renamed(".".join([new, *parts[size:]]), names)
    return name


def _module(statement: ImportStatement) -> str:
    name = statement.module.removeprefix("renga.")
    return name if statement.is_from or statement.alias else name.partition(".")[0]


def _symbols(binding: Binding) -> set[str]:
    own = [] if binding.is_macro else [binding.selector]
    return {name.partition(".")[0] for name in (*_selectors(binding), *own)}


def _selectors(binding: Binding) -> list[str]:
    return [leaf.selector for leaf in leaves(binding.value) if isinstance(leaf, Reference)]


def _macros(bindings: Iterable[Binding]) -> set[str]:
    return {leaf.name for b in bindings for leaf in leaves(b.value) if isinstance(leaf, Macro)}


def _mapped(binding: Binding, change: Callable[[str, int], str]) -> Binding:
    """Applies `change(name, depth)` to the names in a binding; depth: how many components follow the module."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Reference):
            return dataclasses.replace(leaf, selector=change(leaf.selector, _OF_CONSTRUCTOR))
        return Macro(change(leaf.name, _OF_MACRO)) if isinstance(leaf, Macro) and leaf.name != REQUIRED else leaf

    value = transform(binding.value, of_leaf)
    if binding.is_macro:
        return dataclasses.replace(binding, selector=change(binding.selector, _OF_MACRO), value=value)
    name = change(f"{binding.selector}.{binding.parameter}", _OF_PARAMETER)
    selector, _, parameter = name.rpartition(".")
    return dataclasses.replace(binding, selector=selector, parameter=parameter, value=value)


def _parsed(statements: Sequence[str], *, at: Binding) -> list[Binding]:
    """Parses statements that replace `at`, with its file and line; a macro keeps its name."""
    parsed = sources.parse("\n".join(statements)) if statements else []
    found = [dataclasses.replace(b, scope=b.scope or at.scope, file=at.file, line=at.line) for b in parsed]
    return [dataclasses.replace(at, value=found[0].value), *found[1:]] if found and at.is_macro else found
