"""A configuration as a graph: what is reachable from the root, and what a later choice has displaced.

Macros and constructors are nodes, the values bound to them edges. A binding that cannot be reached has no effect. This
predicts without constructing anything what gin will call; tests hold it against what gin builds of the same files.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from launch.config.constructors import UNKNOWN, Constructor
from launch.config.sources import Source
from launch.config.statements import (
    REQUIRED,
    Binding,
    ConfigProblem,
    Macro,
    Reference,
    Unreadable,
    is_flag,
    leaves,
    nearest,
    scoped,
    transform,
)
from launch.config.types import hint_text

Scope = tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Configuration:
    """Everything that was read, with all names resolved.

    Attributes:
      experiment: the file that was read first.
      root: the constructor that everything is read into; None if it could not be imported.
      defaults: the file that declares the macros.
      known: the names that a macro may have: those declared, and those that the files both define and read.
      bindings: in the order in which they apply.
      complete: nothing is missing from `bindings`; if not, nothing is reported as missing or unused.
    """

    experiment: str
    root: Constructor | None
    defaults: str
    known: frozenset[str]
    bindings: tuple[Binding, ...]
    sources: Mapping[str, Source]
    complete: bool

    @functools.cached_property
    def by_name(self) -> Mapping[Any, list[Binding]]:
        """Bindings by what they bind; of several with one name, the last one counts."""
        return _grouped(self.bindings, key)

    @functools.cached_property
    def final(self) -> list[Binding]:
        """The binding that counts of each name."""
        return sorted((found[-1] for found in self.by_name.values()), key=lambda b: b.order)

    @functools.cached_property
    def macros(self) -> dict[str, Binding]:
        """The binding that counts of each macro."""
        return {b.name: b for b in self.final if b.is_macro}

    @functools.cached_property
    def wrong(self) -> list[Binding]:
        """Bindings of constructors that do not exist, and of macros that are neither declared nor read."""
        return [b for b in self.bindings if b.guessed or (b.is_macro and b.name not in self.known)]

    def parameters(self, target: Constructor, scope: Scope) -> dict[str, Binding]:
        """Returns what gin passes to the constructor inside a scope: inner scopes win over outer ones."""
        outer = ["/".join(scope[:depth]) for depth in range(len(scope) + 1)]
        found = [b for b in self._by_target.get(target, ()) if b.scope in outer]
        return {b.parameter: b for b in sorted(found, key=lambda b: outer.index(b.scope))}

    def expand(self, value: Any, *, inside: tuple[str, ...] = ()) -> Any:
        """Returns the value with every macro replaced by its own; `%gin.REQUIRED` stays."""

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, Macro) or leaf.name == REQUIRED:
                return leaf
            if leaf.name in inside or leaf.name not in self.macros:
                return Unreadable()
            return self.expand(self.macros[leaf.name].value, inside=(*inside, leaf.name))

        return transform(value, change)

    def origin(self, binding: Binding) -> Binding:
        """Returns where the value of a binding is written: itself, or the macro that it stands for."""
        seen = {binding.name}
        while isinstance(binding.value, Macro) and binding.value.name in self.macros.keys() - seen:
            seen.add(binding.value.name)
            binding = self.macros[binding.value.name]
        return binding

    def displacing(self, binding: Binding) -> Binding | None:
        """Returns the choice in another source without which the binding might have had an effect.

        A choice displaces what was bound earlier. It also takes macros away that an earlier or a later file sets, as
        another optimizer does with a peak rate.
        """
        lost = [choice for choice, nodes in self._choices if _node(binding) in nodes]
        later = [c for c in lost if c.order > binding.order and _layer(c) != _layer(binding)]
        return next(iter(later or (lost if binding.is_macro else ())), None)

    @functools.cached_property
    def _by_target(self) -> Mapping[Any, list[Binding]]:
        return _grouped(self.final, lambda b: b.target)

    @functools.cached_property
    def _choices(self) -> list[tuple[Binding, set[Any]]]:
        """Bindings that took the place of others, and the macros and constructors that those others led to."""
        edges = {node: _mentions(found) for node, found in _grouped(self.bindings, _node).items()}
        choices = []
        for *earlier, final in self.by_name.values():
            led_to: set[Any] = set()
            pending = _mentions(earlier)
            while pending:
                if (node := pending.pop()) not in led_to:
                    led_to.add(node)
                    pending += edges.get(node, ())
            choices.append((final, led_to))
        return choices


class Walk:
    """Visits what is reachable from the root, as gin will call it.

    gin calls `@scope/name()` in that scope, and `@name()` in the scope of whoever refers to it; a macro stands for its
    value.

    Attributes:
      problems: values that something reachable lacks, and constructors that need themselves.
    """

    def __init__(self, config: Configuration):
        self.problems: list[ConfigProblem] = []
        self._config = config
        self._visited: set[tuple[Any, Scope, bool]] = set()
        self._scopes: dict[Any, set[Scope]] = collections.defaultdict(set)
        self._meant = {nearest(b.name, config.known) for b in config.wrong if b.is_macro}
        if config.root:
            self._call(config.root, (), (config.experiment, 0), ())
        for binding in config.wrong:  # what a wrong binding uses is not unused
            self._value(binding, (), ())

    def uses(self, binding: Binding) -> bool:
        """Returns whether the binding has an effect."""
        scope = () if binding.is_macro or not binding.scope else tuple(binding.scope.split("/"))
        return any(found[: len(scope)] == scope for found in self._scopes.get(_node(binding), ()))

    def _value(self, binding: Binding, scope: Scope, path: tuple[Any, ...]) -> None:
        for leaf in leaves(binding.value):
            if isinstance(leaf, Reference) and leaf.target is not None:
                inner = tuple(leaf.scope.split("/")) if leaf.scope else scope
                if leaf.evaluate:
                    self._call(leaf.target, inner, (binding.file, binding.line), path)
                elif self._is_new(leaf.target, inner, called=False):  # its receiver calls it later
                    for bound in self._config.parameters(leaf.target, inner).values():
                        self._value(bound, inner, ())
            elif isinstance(leaf, Macro) and leaf.name != REQUIRED:
                self._expand(leaf.name, binding, scope, path)

    def _is_new(self, node: Any, scope: Scope, *, called: bool = True) -> bool:
        """Returns whether the node was not visited in that scope before; notes that it is now."""
        is_new = (node, scope, called) not in self._visited
        self._visited.add((node, scope, called))
        self._scopes[node].add(scope)
        return is_new

    def _call(self, target: Constructor, scope: Scope, at: tuple[str, int], path: tuple[Any, ...]) -> None:
        if (target, scope) in path:
            what, fix = f"{target} is needed to construct itself", "break the circle of references"
            self.problems.append(ConfigProblem(*at, what, fix=fix))
        elif self._is_new(target, scope):
            bound = self._config.parameters(target, scope)
            self._lacking(target, scope, bound, at)
            for binding in bound.values():
                self._value(binding, scope, (*path, (target, scope)))

    def _expand(self, name: str, binding: Binding, scope: Scope, path: tuple[Any, ...]) -> None:
        if name in path:
            self.problems.append(binding.problem(f"{name} is needed for its own value"))
        elif name not in self._config.macros:  # reported; if misspelt, the macro that was probably meant is in use
            self._is_new(name if name in self._config.known else nearest(name, self._config.known), scope)
        elif self._is_new(name, scope):
            self._value(self._config.macros[name], scope, (*path, name))

    def _lacking(self, target: Constructor, scope: Scope, bound: Mapping[str, Binding], at: tuple[str, int]) -> None:
        """Parameters without a default that are not bound, and those bound to a macro that still has no value."""
        misspelt = {nearest(name, target.parameters) for name in bound if name not in target.parameters}
        for name in target.required:
            if name not in bound and name not in misspelt:
                fix = f"{scoped('/'.join(scope), str(target))}.{name} = …"
                what = f"{target} has no value for '{name}'"
                self.problems.append(ConfigProblem(*at, what, expected=_expected(target, name), fix=fix))
        for name, binding in bound.items():
            origin = self._config.origin(binding)
            if Macro(REQUIRED) in leaves(self._config.expand(binding.value)) and origin.name not in self._meant:
                what, fix = f"{origin.name} has no value", f"{origin.name} = … in {self._config.experiment}"
                expected = _expected(target, name)
                self.problems.append(ConfigProblem(origin.file, origin.line, what, expected=expected, fix=fix))


def key(binding: Binding) -> tuple[Any, str, str]:
    """Returns what a binding binds: two bindings with one key are two values of one thing."""
    named = binding.selector if binding.target is None or binding.guessed else binding.target
    return (named, binding.scope, binding.parameter)


def _expected(target: Constructor, parameter: str) -> str:
    hint = target.hints.get(parameter, UNKNOWN)
    return "" if hint is UNKNOWN else hint_text(hint)


def _node(binding: Binding) -> Any:
    return binding.name if binding.is_macro else binding.target


def _mentions(bindings: Iterable[Binding]) -> list[Any]:
    """The macros and constructors that values refer to."""
    found = [x.name if isinstance(x, Macro) else getattr(x, "target", None) for b in bindings for x in leaves(b.value)]
    return [node for node in found if node is not None]


def _grouped(bindings: Iterable[Binding], by: Callable[[Binding], Any]) -> Mapping[Any, list[Binding]]:
    groups: dict[Any, list[Binding]] = {}
    for binding in bindings:
        groups.setdefault(by(binding), []).append(binding)
    return groups


def _layer(binding: Binding) -> str:
    """The source of a binding; the flags of one command line are one source."""
    return "--" if is_flag(binding.file) else binding.file
