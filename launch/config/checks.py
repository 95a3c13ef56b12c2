"""Finds all mistakes of a configuration at once, and what is left of it when there is none.

Each kind of mistake is a function from the whole configuration to problems. None waits for another: a misspelt name
stands for what was probably meant, so that it is reported alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from launch.config.constructors import UNKNOWN
from launch.config.graph import Configuration, Walk, key
from launch.config.statements import (
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
from launch.config.types import hint_text, misfit


class Verdict(NamedTuple):
    """The result of the checks.

    Attributes:
      problems: all mistakes.
      notes: bindings left out because a later source chose otherwise.
      kept: the bindings that count: the last of each name, reachable from the root.
      expanded: the same without macros, each of which is replaced by its value.
    """

    problems: list[ConfigProblem]
    notes: list[str]
    kept: list[Binding]
    expanded: list[Binding]


def check(config: Configuration) -> Verdict:
    """Returns every mistake in a configuration, and what is left of it if there is none."""
    problems = [*_unknown_macros(config), *_duplicates(config), *_too_early(config), *_parameters(config)]
    if config.root is None:
        return Verdict(problems, [], [], [])
    walk = Walk(config)
    set_by_user = [b for b in config.bindings if b.file != config.defaults]  # nobody needs to use the defaults
    unused = [b for b in set_by_user if b not in config.wrong and not walk.uses(b)]
    displaced = {b.order: choice for b in unused if (choice := config.displacing(b))}
    if config.complete:
        problems += [*walk.problems, *(_no_effect(b) for b in unused if b.order not in displaced)]
    problems += _types(config, [b for b in config.final if b.order not in displaced])
    left_out = [(b, displaced[b.order]) for b in unused if b.order in displaced]
    notes = [f"{b.place}: {b} is left out, {choice.place} chose {choice}" for b, choice in left_out]
    kept = [b for b in config.final if walk.uses(b)]
    expanded = [dataclasses.replace(b, value=config.expand(b.value)) for b in kept if not b.is_macro]
    return Verdict(list(dict.fromkeys(problems)), notes, kept, expanded)


def _unknown_macros(config: Configuration) -> Iterator[ConfigProblem]:
    """Macros that are neither declared nor read, and macros that nothing defines."""
    for binding in config.bindings:
        if binding.is_macro and binding in config.wrong:
            close = nearest(binding.name, config.known)
            fix = "bind a parameter: module.constructor.parameter = …"
            what = f"{binding.name} is not one of the macros that {config.defaults} declares, and nothing reads it"
            expected = did_you_mean(binding.name, config.known)
            yield binding.problem(what, expected=expected, fix=f"{close} = {render(binding.value)}" if close else fix)
        for leaf in leaves(binding.value):
            if not isinstance(leaf, Macro) or leaf.name in config.macros or leaf.name == REQUIRED:
                continue
            if leaf.name not in config.known:
                what = f"%{leaf.name} is not one of the macros that {config.defaults} declares"
                yield binding.problem(what, expected=did_you_mean(leaf.name, config.known))
            elif config.complete:
                fix = f"include '{config.defaults}', or {leaf.name} = …"
                yield binding.problem(f"%{leaf.name} is not defined", fix=fix)


def _duplicates(config: Configuration) -> Iterator[ConfigProblem]:
    """One name given two values in one file, of which only the last would count."""
    first: dict[Any, Binding] = {}
    for binding in config.bindings:
        before = first.setdefault((binding.file, *key(binding)), binding)
        if before is not binding:
            actual = f"line {before.line}: {before}; line {binding.line}: {binding}"
            what = f"{binding.name} is given twice in this file, on lines {before.line} and {binding.line}"
            yield binding.problem(what, actual=actual, fix="keep one of them")


def _too_early(config: Configuration) -> Iterator[ConfigProblem]:
    """A value above an include that sets the same name: the included file would silently win."""
    for bindings in config.by_name.values():
        for before, after in itertools.pairwise(bindings):
            if before.file in config.sources[after.file].ancestors:
                what = f"{before.name} has no effect: a file included below it sets it again"
                actual = f"{before}; then {after.place}: {after}"
                yield before.problem(what, actual=actual, fix="move it below the include")


def _parameters(config: Configuration) -> Iterator[ConfigProblem]:
    """Parameters that the constructor does not have."""
    for binding in config.bindings:
        target = binding.target
        if target is None or binding.guessed or target.takes_any or binding.parameter in target.parameters:
            continue
        close = nearest(binding.parameter, target.parameters)
        fix = f"{scoped(binding.scope, binding.selector)}.{close} = {render(binding.value)}" if close else ""
        what = f"{target} has no parameter '{binding.parameter}'"
        yield binding.problem(what, expected=did_you_mean(binding.parameter, target.parameters), fix=fix)


def _types(config: Configuration, bindings: Iterable[Binding]) -> Iterator[ConfigProblem]:
    """Values that the annotation of their parameter does not allow."""
    for binding in bindings:
        if binding.target is None:
            continue
        hint = binding.target.hints.get(binding.parameter, UNKNOWN)
        value = config.expand(binding.value)
        wrong = None if _is_default(value, binding) else misfit(value, hint)
        if wrong:
            origin = config.origin(binding)
            feeds = f", which {binding.target}.{binding.parameter} takes," if origin is not binding else ""
            what = f"{origin.name}{feeds} has the wrong type"
            yield origin.problem(what, actual=wrong.actual(), expected=hint_text(hint), fix=wrong.fix())


def _is_default(value: Any, binding: Binding) -> bool:
    """Returns whether the constructor itself has this value, whatever it says of its type (`x: int = None`)."""
    parameter = binding.target.parameters.get(binding.parameter)
    return parameter is not None and type(value) is type(parameter.default) and value == parameter.default


def _no_effect(binding: Binding) -> ConfigProblem:
    name = binding.name if binding.is_macro else str(binding.target)
    fix = f"remove it, or choose it: SOMETHING = @{scoped(binding.scope, binding.selector)}()"
    if binding.is_macro:
        fix = f"remove it, or choose something that takes %{binding.name}"
    return binding.problem(f"{binding.name} has no effect: nothing that the experiment uses reads {name}", fix=fix)
