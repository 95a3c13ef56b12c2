"""What a gin configuration is made of, before anything in it is believed: statements with their file and line.

The one idea: a statement keeps where it was written, from the file to the last message about it. Values are plain
Python literals in which `@name` is a `Reference` and `%NAME` a `Macro`; what did not parse is `Unreadable`, which
remembers the names it mentions, so that one mistake does not look like many.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from core import units

DYNAMIC_REGISTRATION = "__gin__.dynamic_registration"
REQUIRED = "gin.REQUIRED"  # `X = %gin.REQUIRED`: a name that an experiment has to give a value


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake in a configuration.

    Attributes:
      file: the gin file, or `--gin #2` for the second binding of the command line.
      line: counted from 1; 0 where the whole file is meant.
      what: the mistake, in a sentence without a full stop.
      actual: what is written.
      expected: what would be accepted, or the nearest names to it.
      fix: what to do about it.
    """

    file: str
    line: int
    what: str
    actual: str = ""
    expected: str = ""
    fix: str = ""

    @property
    def place(self) -> str:
        """The file and line, as an editor understands them."""
        return place(self.file, self.line)

    def __str__(self) -> str:
        details = [("actual", self.actual), ("expected", self.expected), ("fix", self.fix)]
        lines = [f"{self.place}: {self.what}"] + [f"    {name}: {text.strip()}" for name, text in details if text]
        return "\n".join(line.replace("\n", "\n        ") for line in lines)


class ConfigError(ValueError):
    """A configuration with mistakes; the message lists all of them.

    Attributes:
      problems: every mistake found, in the order in which the files were read.
    """

    def __init__(self, experiment: str, problems: Sequence[ConfigProblem]):
        self.problems = tuple(problems)
        count = units.counted(len(problems), "mistake")
        super().__init__("\n".join([f"{count} in the configuration {experiment}:"] + [str(p) for p in problems]))


@dataclass(frozen=True)
class Reference:
    """`@scope/selector` or `@scope/selector()`; `target` is the constructor it names, once that is known."""

    scope: str
    selector: str
    evaluate: bool
    target: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"@{scoped(self.scope, self.selector)}{'()' if self.evaluate else ''}"


@dataclass(frozen=True)
class Macro:
    """`%NAME`."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Unreadable:
    """A value that did not parse, or is not known; `parts` are the references and macros seen in it."""

    parts: tuple[Reference | Macro, ...] = ()

    def __str__(self) -> str:
        return "…"


@dataclass(frozen=True)
class Binding:
    """`scope/selector.parameter = value`, or `NAME = value` when there is no parameter.

    Attributes:
      order: position among all bindings in the order in which they apply; the last one of a name wins.
      target: the constructor that `selector` names, once that is known; always None for a macro.
      guessed: nothing is called that; `target` is what was probably meant.
    """

    line: int
    scope: str
    selector: str
    parameter: str
    value: Any
    file: str = ""
    order: int = 0
    target: Any = field(default=None, compare=False)
    guessed: bool = False

    @property
    def is_macro(self) -> bool:
        """Whether this gives a macro its value."""
        return not self.parameter

    @property
    def name(self) -> str:
        """The left-hand side, as written."""
        return scoped(self.scope, f"{self.selector}.{self.parameter}" if self.parameter else self.selector)

    @property
    def place(self) -> str:
        """The file and line."""
        return place(self.file, self.line)

    def __str__(self) -> str:
        return f"{self.name} = {render(self.value)}"


@dataclass(frozen=True)
class Import:
    """`import module [as alias]` or `from package import module [as alias]`."""

    line: int
    module: str
    is_from: bool
    alias: str | None = None

    @property
    def symbol(self) -> str:
        """The name that the statement makes usable."""
        parts = self.module.split(".")
        return self.alias or (parts[-1] if self.is_from else parts[0])


@dataclass(frozen=True)
class Include:
    """`include 'path'`."""

    line: int
    path: str


Statement = Binding | Import | Include


@dataclass
class Source:
    """One file, or one binding of the command line, as read.

    Attributes:
      name: how messages call it.
      ancestors: the files whose includes led here.
    """

    name: str
    text: str
    ancestors: tuple[str, ...] = ()
    statements: list[Statement] = field(default_factory=list)

    @property
    def on_command_line(self) -> bool:
        """Whether this came from a flag."""
        return is_flag(self.name)

    @property
    def imports(self) -> list[Import]:
        """Its import statements, dynamic registration aside."""
        return [s for s in self.statements if isinstance(s, Import) and s.module != DYNAMIC_REGISTRATION]


def is_flag(file: str) -> bool:
    """Whether a source of that name is a flag of the command line."""
    return file.startswith("--")


def place(file: str, line: int) -> str:
    """`gin/x.gin:3`, or the flag alone."""
    return file if is_flag(file) or not line else f"{file}:{line}"


def scoped(scope: str, name: str) -> str:
    """`scope/name`, or `name` outside of every scope."""
    return f"{scope}/{name}" if scope else name


def leaves(value: Any) -> Iterator[Any]:
    """Everything in a value that is not a list, tuple or dictionary; what an unreadable value mentions as well."""
    if isinstance(value, dict):
        for pair in value.items():
            yield from leaves(list(pair))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, Unreadable):
        yield from value.parts
    else:
        yield value


def transform(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with `change` applied to all that is not a list, tuple or dictionary."""
    if isinstance(value, dict):
        return {transform(k, change): transform(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(transform(item, change) for item in value)
    if isinstance(value, Unreadable):
        return Unreadable(tuple(change(part) for part in value.parts))
    return change(value)


def render(value: Any, *, reference: Callable[[Reference], str] = str) -> str:
    """The value in gin's own syntax."""
    if isinstance(value, dict):
        return "{" + ", ".join(": ".join(render(x, reference=reference) for x in pair) for pair in value.items()) + "}"
    if isinstance(value, list | tuple):
        items = ", ".join(render(item, reference=reference) for item in value)
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    if isinstance(value, Reference):
        return reference(value)
    if isinstance(value, float):
        return repr(value).replace("inf", "1e999")  # gin reads numbers, not names
    return str(value) if isinstance(value, Macro | Unreadable) else repr(value)


def nearest(name: str, names: Iterable[str]) -> str:
    """The name most like `name`, whatever the case, or ''."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(names, reverse=True)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else ""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`one of a, b, c; did you mean 'b'?`, with the nearest few of a long list: for `expected`."""
    names = sorted(set(names))
    if len(names) <= 12:
        choices = f"one of {', '.join(names)}" if names else ""
    else:
        choices = f"one of {len(names)}, such as {', '.join(difflib.get_close_matches(name, names, n=5, cutoff=0.0))}"
    guess = nearest(name, names)
    return "; ".join(part for part in (choices, f"did you mean '{guess}'?" if guess else "") if part)
