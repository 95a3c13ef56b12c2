"""Finds the mistakes in a configuration, and the bindings that have an effect.

Macros and constructors are the nodes of a graph, and bound values its edges. The root is the constructor of the object
to build; nodes that cannot be reached from it have no effect. A walk over the graph predicts which constructors gin
will call.
"""

import collections
import collections.abc
import difflib
import itertools
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from launch.config.names import Names
from launch.config.signatures import UNKNOWN, Constructor, hint_text, misfit
from launch.config.sources import Reader
from launch.config.statements import (
    REQUIRED,
    Binding,
    ConfigProblem,
    Macro,
    Reference,
    did_you_mean,
    expand,
    is_flag,
    leaves,
    nearest,
    render,
    scoped,
)

Scope = tuple[str, ...]


class Configuration:
    """All bindings of a configuration, with names resolved to constructors.

    Attributes:
      reader: files and flags, as read.
      root: constructor of the object that the configuration builds.
      defaults: name of the file that declares the macros.
      known: valid macro names.
      bindings: all bindings, in the order in which they apply.
      by_name: bindings by their left-hand side; the last one of each list takes effect.
      final: the last binding of each left-hand side, in order.
      macros: the last binding of each macro, by name.
    """

    def __init__(self, reader: Reader, names: Names, *, root: str, defaults: str, declared: Iterable[str]):
        self.reader, self.root, self.defaults = reader, names.root(root), defaults
        self.bindings = [names.resolve(binding) for binding in reader.bindings]
        self.by_name = _grouped(self.bindings, _key)
        self.final = sorted((found[-1] for found in self.by_name.values()), key=lambda b: b.order)
        self.macros = {b.name: b for b in self.final if b.is_macro}
        read = {leaf.name for b in self.bindings for leaf in leaves(b.value) if isinstance(leaf, Macro)} - {REQUIRED}
        defined, unclear = self.macros.keys(), reader.unclear
        self.known = {*declared, *(read & defined), *((read | defined) & unclear)}
        others = [b for b in self.bindings if not b.is_macro]
        misspelled = [b.name for b in others if b.target is None or _is_no_parameter(b)]
        self._doubtful = [*names.unresolved, *((read | defined) - self.known), *misspelled, *unclear]
        self._by_node = _grouped(self.final, _node)

    @property
    def is_without_defaults(self) -> bool:
        """Whether nothing is bound to the root, and the file with the defaults is not included."""
        return self.defaults not in self.reader.sources and not self.bound(self.root, ())

    def is_doubtful(self, name: str) -> bool:
        """Returns whether a name resembles one that could not be resolved or read."""
        return bool(difflib.get_close_matches(name, self._doubtful, n=1, cutoff=0.8))

    def bound(self, node: Any, scope: Scope) -> dict[str, Binding]:
        """Returns a constructor's bindings in a scope, by parameter; inner scopes override outer ones.

        Of a macro, whose name includes a scope, it returns the binding of its value.
        """
        if not isinstance(node, Constructor):
            return {b.parameter: b for b in self._by_node.get(node, ())}
        outer = ["/".join(scope[:depth]) for depth in range(len(scope) + 1)]
        found = [b for b in self._by_node.get(node, ()) if b.scope in outer]
        return {b.parameter: b for b in sorted(found, key=lambda b: outer.index(b.scope))}

    def origin(self, binding: Binding) -> Binding:
        """Follows macros from a binding, as far as they are bound, and returns the last binding."""
        for _ in self.macros:
            if isinstance(binding.value, Macro):
                binding = self.macros.get(binding.value.name, binding)
        return binding


def check(config: Configuration) -> tuple[list[ConfigProblem], list[str], list[Binding]]:
    """Returns the mistakes, notes about displaced bindings, and the bindings that take effect.

    A displaced binding is one that another choice made unused, such as one of another optimizer.
    """
    scopes, faults = _walk(config)

    def is_used(binding: Binding) -> bool:
        scope = tuple(binding.scope.split("/")) if binding.scope and not binding.is_macro else ()
        return any(found[: len(scope)] == scope for found in scopes.get(_node(binding), ()))

    set_by_user = [b for b in config.bindings if b.file != config.defaults]  # the defaults' own bindings may be unused
    unused = [b for b in set_by_user if not is_used(b) and not config.is_doubtful(b.selector)]
    displaced = {b.order: choice for b, choice in _displaced(config, unused)}
    problems = [*_unknown_macros(config), *_duplicates(config), *_too_early(config), *_parameters(config)]
    if config.reader.complete and config.is_without_defaults:
        problems.append(_without_defaults(config))
    elif config.reader.complete:
        problems += [*faults, *(_no_effect(b) for b in unused if b.order not in displaced)]
    problems += _types(config, [b for b in config.final if b.order not in displaced])
    left_out = [(b, displaced[b.order]) for b in unused if b.order in displaced]
    notes = [f"{b.place}: {b} is left out, {choice.place} chose {choice}" for b, choice in left_out]
    return problems, notes, [b for b in config.final if is_used(b)]


def _walk(config: Configuration) -> tuple[Mapping[Any, set[Scope]], list[ConfigProblem]]:
    """Returns the scopes in which gin will use each macro and constructor, and the problems found."""
    scopes: dict[Any, set[Scope]] = collections.defaultdict(set)
    problems: list[ConfigProblem] = []
    visited: set[tuple[Any, Scope, bool]] = set()

    def visit(node: Any, scope: Scope, path: tuple[Any, ...], at: Binding, *, is_called: bool = True) -> None:
        if (node, scope) in path:
            what = f"{node} refers to itself"
            problems.append(at.problem(what, fix="remove the circular reference"))
        elif (node, scope, is_called) not in visited:
            visited.add((node, scope, is_called))
            scopes[node].add(scope)
            bound = config.bound(node, scope)
            if is_called and isinstance(node, Constructor):  # `@name` without () is called by the code that gets it
                problems.extend(_lacking(config, node, scope, bound, at))
            for binding in bound.values():
                follow(binding, scope, (*path, (node, scope)))

    def follow(binding: Binding, scope: Scope, path: tuple[Any, ...]) -> None:
        for leaf in leaves(binding.value):
            if isinstance(leaf, Macro):
                visit(leaf.name, scope, path, binding)
            elif isinstance(leaf, Reference) and leaf.target is not None:
                inner = tuple(leaf.scope.split("/")) if leaf.scope else scope
                visit(leaf.target, inner, path if leaf.evaluate else (), binding, is_called=leaf.evaluate)

    visit(config.root, (), (), Binding(0, "", "", "", None, file=config.reader.experiment))
    for binding in config.bindings:
        if config.is_doubtful(binding.selector):  # its references count as used
            follow(binding, (), ())
    return scopes, problems


def _displaced(config: Configuration, unused: Iterable[Binding]) -> Iterator[tuple[Binding, Binding]]:
    """Yields displaced bindings, each with the one that displaced it, such as another `OPTIMIZER`."""
    edges = {node: _mentions(found) for node, found in _grouped(config.bindings, _node).items()}
    choices = []  # final bindings, each with the nodes that were reachable from the bindings it replaced
    for *earlier, final in config.by_name.values():
        led_to, pending = set(), _mentions(earlier)
        while pending:
            if (node := pending.pop()) not in led_to:
                led_to.add(node)
                pending += edges.get(node, ())
        choices.append((final, led_to))
    for binding in unused:
        lost = [choice for choice, led_to in choices if _node(binding) in led_to]
        later = [c for c in lost if c.order > binding.order and _layer(c) != _layer(binding)]
        if found := later or (lost if binding.is_macro else []):
            yield binding, found[0]


def _lacking(
    config: Configuration, target: Constructor, scope: Scope, bound: Mapping[str, Binding], at: Binding
) -> Iterator[ConfigProblem]:
    for name, parameter in target.parameters.items():
        is_missing = parameter.default is parameter.empty and name not in bound
        if is_missing and not config.is_doubtful(f"{target}.{name}"):
            fix = f"{scoped('/'.join(scope), str(target))}.{name} = …"
            what = f"{target} has no value for '{name}'"
            yield ConfigProblem(at.file, at.line, what, expected=_expected(target, name), fix=fix)
    for name, binding in bound.items():
        origin = config.origin(binding)
        if Macro(REQUIRED) in leaves(expand(binding.value, config.macros)) and not config.is_doubtful(origin.name):
            what, fix = f"{origin.name} has no value", f"{origin.name} = … in {config.reader.experiment}"
            yield ConfigProblem(origin.file, origin.line, what, expected=_expected(target, name), fix=fix)


def _without_defaults(config: Configuration) -> ConfigProblem:
    needed = [name for name, parameter in config.root.parameters.items() if parameter.default is parameter.empty]
    return ConfigProblem(
        config.reader.experiment,
        0,
        f"this is not yet an experiment: {config.root} has no value for {', '.join(needed)}",
        fix=f"begin with the line include '{config.defaults}', which has a value for each, and bind what differs below "
        "it; gin/quickstart.gin is an example",
    )


def _unknown_macros(config: Configuration) -> Iterator[ConfigProblem]:
    for binding in config.bindings:
        if binding.is_macro and binding.name not in config.known:
            close = nearest(binding.name, config.known)
            fix = "bind a parameter: module.constructor.parameter = …"
            what = f"{binding.name} is not one of the macros that {config.defaults} declares, and nothing reads it"
            expected = did_you_mean(binding.name, config.known)
            yield binding.problem(what, expected=expected, fix=f"{close} = {render(binding.value)}" if close else fix)
        for leaf in leaves(binding.value):
            if not isinstance(leaf, Macro) or leaf.name in {REQUIRED, *config.macros, *config.reader.unclear}:
                continue
            if leaf.name not in config.known:
                what = f"%{leaf.name} is not one of the macros that {config.defaults} declares"
                yield binding.problem(what, expected=did_you_mean(leaf.name, config.known))
            elif config.reader.complete:
                fix = f"include '{config.defaults}', or {leaf.name} = …"
                yield binding.problem(f"%{leaf.name} is not defined", fix=fix)


def _duplicates(config: Configuration) -> Iterator[ConfigProblem]:
    first: dict[Any, Binding] = {}
    for binding in config.bindings:
        before = first.setdefault((binding.file, *_key(binding)), binding)
        if before is not binding:
            actual = f"line {before.line}: {before}; line {binding.line}: {binding}"
            what = f"{binding.name} is given twice in this file, on lines {before.line} and {binding.line}"
            yield binding.problem(what, actual=actual, fix="keep one of them")


def _too_early(config: Configuration) -> Iterator[ConfigProblem]:
    for bindings in config.by_name.values():
        for before, after in itertools.pairwise(bindings):
            if before.file in config.reader.sources[after.file].ancestors:
                what = f"{before.name} has no effect: a file included below it sets it again"
                actual = f"{before}; then {after.place}: {after}"
                yield before.problem(what, actual=actual, fix="move it below the include")


def _parameters(config: Configuration) -> Iterator[ConfigProblem]:
    for binding in filter(_is_no_parameter, config.bindings):
        names = binding.target.parameters
        close = nearest(binding.parameter, names)
        fix = f"{scoped(binding.scope, binding.selector)}.{close} = {render(binding.value)}" if close else ""
        what = f"{binding.target} has no parameter '{binding.parameter}'"
        yield binding.problem(what, expected=did_you_mean(binding.parameter, names), fix=fix)


def _types(config: Configuration, bindings: Iterable[Binding]) -> Iterator[ConfigProblem]:
    for binding in bindings:
        parameter = binding.target.parameters.get(binding.parameter) if binding.target else None
        if parameter is None:
            continue
        hint, value = binding.target.hint(binding.parameter), expand(binding.value, config.macros)
        is_default = type(value) is type(parameter.default) and value == parameter.default  # such as `x: int = None`
        if not is_default and (wrong := misfit(value, hint)):
            origin = config.origin(binding)
            feeds = f", which {binding.target}.{binding.parameter} takes," if origin is not binding else ""
            what = f"{origin.name}{feeds} has the wrong type"
            fix = wrong.fix() or _constructor_of(wrong.value, wrong.hint)
            yield origin.problem(what, actual=wrong.actual(), expected=hint_text(hint), fix=fix)


def _constructor_of(value: Any, hint: Any) -> str:
    """Returns how to write the constructor that a text names, or a schedule that a number stands for; or ""."""
    from launch.config.trust import CONSTRUCTORS

    if isinstance(value, str):
        homes = [module.rpartition(".")[2] for module, names in CONSTRUCTORS.items() if value in names]
        return f"write a constructor: @{homes[0]}.{value}()" if len(homes) == 1 else ""
    if isinstance(value, int | float) and typing.get_origin(hint) is collections.abc.Callable:
        return f"write a constructor, such as @optimizers.constant() with optimizers.constant.value = {value!r}"
    return ""


def _no_effect(binding: Binding) -> ConfigProblem:
    name = binding.name if binding.is_macro else str(binding.target)
    fix = f"remove it, or choose it: SOMETHING = @{scoped(binding.scope, binding.selector)}()"
    if binding.is_macro:
        fix = f"remove it, or choose something that takes %{binding.name}"
    return binding.problem(f"{binding.name} has no effect: nothing that the experiment uses reads {name}", fix=fix)


def _key(binding: Binding) -> tuple[Any, str, str]:
    return (binding.target or binding.selector, binding.scope, binding.parameter)


def _node(binding: Binding) -> Any:
    return binding.name if binding.is_macro else binding.target


def _is_no_parameter(binding: Binding) -> bool:
    target = binding.target
    return target is not None and not target.takes_any and binding.parameter not in target.parameters


def _expected(target: Constructor, parameter: str) -> str:
    hint = target.hint(parameter)
    return "" if hint is UNKNOWN else hint_text(hint)


def _mentions(bindings: Iterable[Binding]) -> list[Any]:
    found = [x.name if isinstance(x, Macro) else getattr(x, "target", None) for b in bindings for x in leaves(b.value)]
    return [node for node in found if node is not None]


def _grouped(bindings: Iterable[Binding], by: Callable[[Binding], Any]) -> Mapping[Any, list[Binding]]:
    groups: dict[Any, list[Binding]] = {}
    for binding in bindings:
        groups.setdefault(by(binding), []).append(binding)
    return groups


def _layer(binding: Binding) -> str:
    return "--" if is_flag(binding.file) else binding.file
