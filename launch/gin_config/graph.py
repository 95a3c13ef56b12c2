"""A configuration as a graph: what is reachable from the root, and what a later choice has displaced.

The one idea: macros and constructors are nodes, the values bound to them edges. What cannot be reached has no effect,
whatever it says. Nothing is constructed here.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from launch.gin_config.constructors import Constructor
from launch.gin_config.statements import (
    REQUIRED,
    Binding,
    ConfigProblem,
    Macro,
    Reference,
    Source,
    Unreadable,
    is_flag,
    leaves,
    nearest,
    scoped,
    transform,
)
from launch.gin_config.types import UNKNOWN, hint_text


class Configuration(NamedTuple):
    """All that was read, every name resolved.

    Attributes:
      experiment: the file that the reading began with.
      root: the constructor that everything is read into; None if it could not be imported.
      defaults: the file that declares the macros.
      macros: the closed set of macro names.
      bindings: in the order in which they apply.
      complete: nothing is missing from `bindings`; if not, what seems absent or unused is not held against anyone.
    """

    experiment: str
    root: Constructor | None
    defaults: str
    macros: frozenset[str]
    bindings: tuple[Binding, ...]
    sources: Mapping[str, Source]
    complete: bool


class Table:
    """Bindings by what they bind; of several with one name, the last one counts."""

    def __init__(self, config: Configuration):
        self.by_name: dict[Any, list[Binding]] = collections.defaultdict(list)
        for binding in config.bindings:
            self.by_name[key(binding)].append(binding)
        self.final = sorted((found[-1] for found in self.by_name.values()), key=lambda b: b.order)
        self.macros = {b.name: b for b in self.final if b.is_macro}
        self._parameters: dict[Any, dict[str, dict[str, Binding]]] = {}
        self._edges: dict[Any, list[Any]] = collections.defaultdict(list)
        for b in config.bindings:
            self._edges[b.name if b.is_macro else b.target] += _mentions(b.value)
        for b in self.final:
            if b.target is not None:
                self._parameters.setdefault(b.target, {}).setdefault(b.scope, {})[b.parameter] = b

    def parameters(self, constructor: Constructor, scope: tuple[str, ...]) -> dict[str, Binding]:
        """What is bound to the constructor inside a scope: inner scopes win over outer ones."""
        bound: dict[str, Binding] = {}
        for depth in range(len(scope) + 1):
            bound |= self._parameters.get(constructor, {}).get("/".join(scope[:depth]), {})
        return bound

    def expand(self, value: Any, *, inside: tuple[str, ...] = ()) -> Any:
        """The value with every macro replaced by its own; `%gin.REQUIRED` stays."""

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, Macro) or leaf.name == REQUIRED:
                return leaf
            if leaf.name in inside or leaf.name not in self.macros:
                return Unreadable()
            return self.expand(self.macros[leaf.name].value, inside=(*inside, leaf.name))

        return transform(value, change)

    @functools.cached_property
    def choices(self) -> list[tuple[Binding, set[Any]]]:
        """Bindings that took the place of others, and the macros and constructors that those others led to."""
        replaced = [found for found in self.by_name.values() if len(found) > 1]
        return [(final, set().union(*(self._led_to(b.value) for b in earlier))) for *earlier, final in replaced]

    def _led_to(self, value: Any) -> set[Any]:
        """Through any binding, one that was replaced later too."""
        found: set[Any] = set()
        pending = _mentions(value)
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                pending += self._edges[node]
        return found

    def origin(self, binding: Binding) -> Binding:
        """Where the value of a binding is written: itself, or the macro that it stands for."""
        seen = {binding.name}
        while isinstance(binding.value, Macro) and binding.value.name in self.macros:
            if binding.value.name in seen:
                break
            seen.add(binding.value.name)
            binding = self.macros[binding.value.name]
        return binding


class Walk:
    """What is reachable from the root, as gin will call it.

    gin calls `@scope/name()` in that scope, and `@name()` in the scope of whoever refers to it; a macro stands for its
    value.

    Attributes:
      problems: values that something reachable lacks, and constructors that need themselves.
    """

    def __init__(self, config: Configuration, table: Table):
        self.problems: list[ConfigProblem] = []
        self._config, self._table = config, table
        self._macros: set[str] = set()
        self._expanded: set[tuple[str, tuple[str, ...]]] = set()
        self._called: set[tuple[Constructor, tuple[str, ...]]] = set()
        self._scopes: dict[Constructor, set[tuple[str, ...]]] = collections.defaultdict(set)
        self._meant = {nearest(b.name, config.macros) for b in config.bindings if is_undeclared(b, config)}
        if config.root:
            self._call(config.root, (), (config.experiment, 0), ())
        for binding in config.bindings:
            if binding.guessed or is_undeclared(binding, config):  # wrong itself; what it uses is not unused
                self._value(binding, (), ())

    def uses(self, binding: Binding) -> bool:
        """Whether the binding has an effect."""
        if binding.is_macro:
            return binding.name in self._macros
        scope = tuple(binding.scope.split("/")) if binding.scope else ()
        return any(found[: len(scope)] == scope for found in self._scopes.get(binding.target, ()))

    def _call(self, target: Constructor, scope: tuple[str, ...], at: tuple[str, int], path: tuple[Any, ...]) -> None:
        if (target, scope) in path:
            what, fix = f"{target} is needed to construct itself", "break the circle of references"
            self.problems.append(ConfigProblem(*at, what, fix=fix))
            return
        if (target, scope) in self._called:
            return
        self._called.add((target, scope))
        self._scopes[target].add(scope)
        bound = self._table.parameters(target, scope)
        self._lacking(target, scope, bound, at)
        for binding in bound.values():
            self._value(binding, scope, (*path, (target, scope)))

    def _value(self, binding: Binding, scope: tuple[str, ...], path: tuple[Any, ...]) -> None:
        for leaf in leaves(binding.value):
            if isinstance(leaf, Reference) and leaf.target is not None:
                inner = tuple(leaf.scope.split("/")) if leaf.scope else scope
                if leaf.evaluate:
                    self._call(leaf.target, inner, (binding.file, binding.line), path)
                else:
                    self._mention(leaf.target, inner)
            elif isinstance(leaf, Macro) and leaf.name != REQUIRED:
                self._expand(leaf.name, binding, scope, path)

    def _mention(self, target: Constructor, scope: tuple[str, ...]) -> None:
        """Called later by whoever gets it, with arguments that are not known here."""
        if scope not in self._scopes[target]:
            self._scopes[target].add(scope)
            for binding in self._table.parameters(target, scope).values():
                self._value(binding, scope, ())

    def _expand(self, name: str, binding: Binding, scope: tuple[str, ...], path: tuple[Any, ...]) -> None:
        self._macros.add(name)
        if name in path:
            what = f"{name} is needed for its own value"
            self.problems.append(ConfigProblem(binding.file, binding.line, what, actual=str(binding)))
        elif name not in self._table.macros:
            if name not in self._config.macros:  # reported; the macro that was probably meant is in use
                self._macros.add(nearest(name, self._config.macros))
        elif (name, scope) not in self._expanded:
            self._expanded.add((name, scope))
            self._value(self._table.macros[name], scope, (*path, name))

    def _lacking(
        self, target: Constructor, scope: tuple[str, ...], bound: Mapping[str, Binding], at: tuple[str, int]
    ) -> None:
        """Parameters without a default that are not bound, and those bound to a macro that still has no value."""
        misspelt = {nearest(name, target.parameters) for name in bound if name not in target.parameters}
        prefix = "/".join(scope)
        for name in target.required:
            if name not in bound and name not in misspelt:
                fix = f"{scoped(prefix, str(target))}.{name} = …"
                expected = _expected(target, name)
                what = f"{target} has no value for '{name}'"
                self.problems.append(ConfigProblem(*at, what, expected=expected, fix=fix))
        for name, binding in bound.items():
            if any(leaf == Macro(REQUIRED) for leaf in leaves(self._table.expand(binding.value))):
                self._still_required(self._table.origin(binding), _expected(target, name))

    def _still_required(self, origin: Binding, expected: str) -> None:
        if origin.name not in self._meant:
            what, fix = f"{origin.name} has no value", f"{origin.name} = … in {self._config.experiment}"
            self.problems.append(ConfigProblem(origin.file, origin.line, what, expected=expected, fix=fix))


def displacing(binding: Binding, table: Table) -> Binding | None:
    """The later choice, in another source, without which the binding might have had an effect."""
    node = binding.name if binding.is_macro else binding.target
    for choice, lost in table.choices:
        if node in lost and choice.order > binding.order and _layer(choice) != _layer(binding):
            return choice
    return None


def swapped(binding: Binding, table: Table) -> Binding | None:
    """The choice, earlier or later, by which nothing reads a macro any more: another optimizer, without a peak rate."""
    return next((choice for choice, lost in table.choices if binding.is_macro and binding.name in lost), None)


def _expected(target: Constructor, parameter: str) -> str:
    return hint_text(target.hints[parameter]) if target.hints.get(parameter, UNKNOWN) is not UNKNOWN else ""


def _mentions(value: Any) -> list[Any]:
    found = [x.name if isinstance(x, Macro) else getattr(x, "target", None) for x in leaves(value)]
    return [node for node in found if node is not None]


def _layer(binding: Binding) -> str:
    """The source of a binding; the flags of one command line are one source."""
    return "--" if is_flag(binding.file) else binding.file


def key(binding: Binding) -> tuple[Any, str, str]:
    """What a binding binds: two bindings with one key are two values of one thing."""
    named = binding.selector if binding.target is None or binding.guessed else binding.target
    return (named, binding.scope, binding.parameter)


def is_undeclared(binding: Binding, config: Configuration) -> bool:
    """Whether it defines a macro outside of the closed set."""
    return binding.is_macro and binding.name not in config.macros
