"""Bindings of a gin configuration with the file and line of each, and the mistakes found in them.

Values are plain Python literals in which `@name` is a `Reference` and `%NAME` a `Macro`. A value that did not parse is
`Unreadable`: it keeps the names that it mentions, so that one mistake is not reported as several.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from core import units
from core.errors import UserError

if TYPE_CHECKING:
    from launch.config.constructors import Constructor

REQUIRED = "gin.REQUIRED"  # `X = %gin.REQUIRED`: a name that an experiment has to give a value


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake in a configuration.

    Attributes:
      file: the gin file, or `--gin #2` for the second binding of the command line.
      line: counted from 1; 0 for the whole file.
      what: the mistake, in a sentence without a full stop.
      actual: the text of the statement.
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
        """File and line in the form that editors understand."""
        return place(self.file, self.line)

    def __str__(self) -> str:
        details = [
            f"    {name}: {text.strip()}" for name in ("actual", "expected", "fix") if (text := getattr(self, name))
        ]
        return "\n".join(line.replace("\n", "\n        ") for line in [f"{self.place}: {self.what}", *details])


class ConfigError(UserError):
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
    """`@scope/selector` or `@scope/selector()`; `target` is the constructor it names, once names are resolved."""

    scope: str
    selector: str
    evaluate: bool
    target: Constructor | None = field(default=None, compare=False)

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
    """A value that did not parse or is not known; `parts` are the references and macros that it mentions."""

    parts: tuple[Reference | Macro, ...] = ()

    def __str__(self) -> str:
        return "…"


@dataclass(frozen=True)
class Binding:
    """`scope/selector.parameter = value`, or `NAME = value` when there is no parameter.

    Attributes:
      order: position among all bindings in the order in which they apply; the last one of a name wins.
      target: the constructor that `selector` names, once names are resolved; None for a macro.
      guessed: nothing has that name; `target` is the nearest one.
    """

    line: int
    scope: str
    selector: str
    parameter: str
    value: Any
    file: str = ""
    order: int = 0
    target: Constructor | None = field(default=None, compare=False)
    guessed: bool = False

    @property
    def is_macro(self) -> bool:
        """Returns whether this gives a macro its value."""
        return not self.parameter

    @property
    def name(self) -> str:
        """The left-hand side."""
        return scoped(self.scope, f"{self.selector}.{self.parameter}" if self.parameter else self.selector)

    @property
    def place(self) -> str:
        """The file and line."""
        return place(self.file, self.line)

    def __str__(self) -> str:
        return f"{self.name} = {render(self.value)}"

    def problem(self, what: str, **details: str) -> ConfigProblem:
        """Returns a mistake at the place of this binding; `actual` is the binding unless another text is given."""
        return ConfigProblem(self.file, self.line, what, **{"actual": str(self), **details})


def is_flag(file: str) -> bool:
    """Returns whether a source of that name is a flag of the command line."""
    return file.startswith("--")


def place(file: str, line: int) -> str:
    """Returns `gin/x.gin:3`, or the flag alone."""
    return file if is_flag(file) or not line else f"{file}:{line}"


def scoped(scope: str, name: str) -> str:
    """Returns `scope/name`, or `name` outside of every scope."""
    return f"{scope}/{name}" if scope else name


def transform(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the value with `change` applied to everything in it that is not a list, tuple or dictionary."""
    if isinstance(value, dict):
        return {transform(k, change): transform(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(transform(item, change) for item in value)
    if isinstance(value, Unreadable):
        return Unreadable(tuple(change(part) for part in value.parts))
    return change(value)


def leaves(value: Any) -> list[Any]:
    """Returns everything in a value that is not a list, tuple or dictionary."""
    found: list[Any] = []
    transform(value, found.append)
    return found


def render(value: Any) -> str:
    """Returns the value in gin's own syntax."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{render(key)}: {render(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        items = ", ".join(map(render, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    if isinstance(value, float):
        return repr(value).replace("inf", "1e999")  # gin reads numbers, not names
    return str(value) if isinstance(value, Reference | Macro | Unreadable) else repr(value)


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the name most like `name`, in upper or lower case, or ''."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(names, reverse=True)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else ""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns `one of a, b, c; did you mean 'b'?`, with the nearest few of a long list: for `expected`."""
    names = sorted(set(names))
    if len(names) <= 12:
        choices = f"one of {', '.join(names)}" if names else ""
    else:
        choices = f"one of {len(names)}, such as {', '.join(difflib.get_close_matches(name, names, n=5, cutoff=0.0))}"
    guess = nearest(name, names)
    return "; ".join(part for part in (choices, f"did you mean '{guess}'?" if guess else "") if part)
