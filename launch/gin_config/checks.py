"""All mistakes of a configuration at once, and what is left of it when there is none.

The one idea: each kind of mistake is a function from the whole configuration to problems, and none of them waits for
another: a misspelt name stands for what was probably meant, so that it is reported alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from launch.gin_config.graph import Configuration, Table, Walk, displacing, is_undeclared, key, swapped
from launch.gin_config.statements import (
    REQUIRED,
    Binding,
    ConfigProblem,
    Macro,
    did_you_mean,
    leaves,
    nearest,
    render,
    scoped,
)
from launch.gin_config.types import UNKNOWN, hint_text, misfit


class Verdict(NamedTuple):
    """What came of the checks.

    Attributes:
      problems: all mistakes.
      notes: bindings left out because a later source chose otherwise.
      kept: the bindings that count: the last of each name, reachable from the root.
      plain: the same without macros, each of which is replaced by its value.
    """

    problems: list[ConfigProblem]
    notes: list[str]
    kept: list[Binding]
    plain: list[Binding]


def check(config: Configuration) -> Verdict:
    """Every mistake in a configuration, and what is left of it if there is none."""
    table = Table(config)
    problems = [*_undeclared(config, table), *_duplicates(config), *_too_early(config, table), *_parameters(config)]
    if config.root is None:
        return Verdict(problems, [], [], [])
    walk = Walk(config, table)
    unused, displaced = _unused(config, table, walk)
    if config.complete:
        problems += walk.problems + unused
    problems += _types(table, [b for b in table.final if b.order not in displaced])
    left_out = [(b, displaced[b.order]) for b in config.bindings if b.order in displaced]
    notes = [f"{b.place}: {b} is left out, {choice.place} chose {choice}" for b, choice in left_out]
    kept = [b for b in table.final if walk.uses(b)]
    plain = [dataclasses.replace(b, value=table.expand(b.value)) for b in kept if not b.is_macro]
    return Verdict(list(dict.fromkeys(problems)), notes, kept, plain)


def _undeclared(config: Configuration, table: Table) -> Iterator[ConfigProblem]:
    """Macros outside of the closed set, and macros that nothing defines."""
    for binding in config.bindings:
        if is_undeclared(binding, config):
            close = nearest(binding.name, config.macros)
            otherwise = "bind a parameter: module.constructor.parameter = …"
            fix = f"{close} = {render(binding.value)}" if close else otherwise
            what = f"{binding.name} is not one of the macros that {config.defaults} declares"
            yield _problem(binding, what, expected=did_you_mean(binding.name, config.macros), fix=fix)
        for leaf in leaves(binding.value):
            if isinstance(leaf, Macro) and leaf.name not in table.macros and leaf.name != REQUIRED:
                yield from _undefined(leaf.name, binding, config)


def _undefined(name: str, binding: Binding, config: Configuration) -> Iterator[ConfigProblem]:
    if name not in config.macros:
        what = f"%{name} is not one of the macros that {config.defaults} declares"
        yield _problem(binding, what, expected=did_you_mean(name, config.macros))
    elif config.complete:
        yield _problem(binding, f"%{name} is not defined", fix=f"include '{config.defaults}', or {name} = …")


def _duplicates(config: Configuration) -> Iterator[ConfigProblem]:
    """One name given two values in one file, where only the last would count."""
    first: dict[Any, Binding] = {}
    for binding in config.bindings:
        before = first.setdefault((binding.file, *key(binding)), binding)
        if before is not binding:
            actual = f"line {before.line}: {before}; line {binding.line}: {binding}"
            what = f"{binding.name} is given twice in this file, on lines {before.line} and {binding.line}"
            yield _problem(binding, what, actual=actual, fix="keep one of them")


def _too_early(config: Configuration, table: Table) -> Iterator[ConfigProblem]:
    """A value above an include that sets the same name: the included file would silently win."""
    for bindings in table.by_name.values():
        for before, after in itertools.pairwise(bindings):
            if before.file in config.sources[after.file].ancestors:
                what = f"{before.name} has no effect: a file included below it sets it again"
                fix = "move it below the include"
                yield _problem(before, what, actual=f"{before}; then {after.place}: {after}", fix=fix)


def _parameters(config: Configuration) -> Iterator[ConfigProblem]:
    """Parameters that the constructor does not have."""
    for binding in config.bindings:
        target = binding.target
        if target is None or binding.guessed or target.takes_any or binding.parameter in target.parameters:
            continue
        close = nearest(binding.parameter, target.parameters)
        fix = f"{scoped(binding.scope, binding.selector)}.{close} = {render(binding.value)}" if close else ""
        what = f"{target} has no parameter '{binding.parameter}'"
        yield _problem(binding, what, expected=did_you_mean(binding.parameter, target.parameters), fix=fix)


def _types(table: Table, bindings: Iterable[Binding]) -> Iterator[ConfigProblem]:
    """Values that the annotation of their parameter does not allow."""
    for binding in bindings:
        if binding.target is None:
            continue
        hint = binding.target.hints.get(binding.parameter, UNKNOWN)
        value = table.expand(binding.value)
        wrong = None if _is_default(value, binding) else misfit(value, hint)
        if wrong:
            origin = table.origin(binding)
            feeds = f", which {binding.target}.{binding.parameter} takes," if origin is not binding else ""
            what = f"{origin.name}{feeds} has the wrong type"
            yield _problem(origin, what, actual=wrong.actual(), expected=hint_text(hint), fix=wrong.fix())


def _is_default(value: Any, binding: Binding) -> bool:
    """Whether the constructor itself has this value, whatever it says of its type (`x: int = None`)."""
    parameter = binding.target.parameters.get(binding.parameter)
    return parameter is not None and type(value) is type(parameter.default) and value == parameter.default


def _unused(config: Configuration, table: Table, walk: Walk) -> tuple[list[ConfigProblem], dict[int, Binding]]:
    """Bindings that nothing reachable uses: mistakes, or, by their order, the choices that displaced them."""
    problems, displaced = [], {}
    for binding in config.bindings:
        offered = binding.file == config.defaults  # defaults are there for whoever wants them
        wrong = binding.guessed or is_undeclared(binding, config)
        if offered or wrong or walk.uses(binding):
            continue
        choice = displacing(binding, table) or swapped(binding, table)
        if choice is not None:
            displaced[binding.order] = choice
        else:
            name = binding.name if binding.is_macro else str(binding.target)
            what = f"{binding.name} has no effect: nothing that the experiment uses reads {name}"
            problems.append(_problem(binding, what, fix=_how_to_use(binding)))
    return problems, displaced


def _how_to_use(binding: Binding) -> str:
    if binding.is_macro:
        return f"remove it, or choose something that takes %{binding.name}"
    return f"remove it, or choose it: SOMETHING = @{scoped(binding.scope, binding.selector)}()"


def _problem(binding: Binding, what: str, *, actual: str = "", expected: str = "", fix: str = "") -> ConfigProblem:
    return ConfigProblem(binding.file, binding.line, what, actual=actual or str(binding), expected=expected, fix=fix)
