"""The data types of a configuration: bindings with their file and line, and problems found in them.

Values are plain Python literals in which `@name` is a `Reference` and `%NAME` a `Macro`.
"""

import difflib
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core import units
from core.errors import UserError

MOST_SHOWN = 20  # problems that a message lists
REQUIRED = "gin.REQUIRED"  # `X = %gin.REQUIRED`: a macro to which the experiment must give a value


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake in a configuration."""

    file: str  # the gin file, or `--gin #2` for the second binding on the command line
    line: int  # from 1; 0: the whole file
    what: str  # the mistake, in a sentence without a full stop
    actual: str = ""  # what was found, such as the text of the statement
    expected: str = ""  # the accepted values, or the most similar names
    fix: str = ""  # how to correct the mistake

    @property
    def place(self) -> str:
        """File and line as `gin/x.gin:3`, which editors can open."""
        return place(self.file, self.line)

    def __str__(self) -> str:
        details = {"actual": self.actual, "expected": self.expected, "fix": self.fix}
        lines = [
            f"{self.place}: {self.what}",
            *(f"    {name}: {text.strip()}" for name, text in details.items() if text),
        ]
        return "\n".join(line.replace("\n", "\n        ") for line in lines)


class ConfigError(UserError):
    """A configuration with mistakes.

    Attributes:
      problems: the mistakes found.
    """

    def __init__(self, experiment: str, problems: Sequence[ConfigProblem]):
        self.problems = tuple(problems)
        count = units.counted(len(problems), "mistake")
        listed = units.shortened([str(problem) for problem in problems], most=MOST_SHOWN)
        super().__init__("\n".join([f"{count} in the configuration {experiment}:", *listed]))


@dataclass(frozen=True, repr=False)
class Reference:
    """A reference to a constructor, `@scope/selector`, or to its result, `@scope/selector()`.

    `evaluate`: whether it is called. `target`: its `signatures.Constructor`; None before it is resolved.
    """

    scope: str
    selector: str
    evaluate: bool
    target: Any = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"@{scoped(self.scope, self.selector)}{'()' if self.evaluate else ''}"


@dataclass(frozen=True, repr=False)
class Macro:
    """A reference to a macro, written `%NAME`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Binding:
    """`scope/selector.parameter = value`, or `NAME = value` without a parameter.

    Attributes:
      line, file: where it is written; `file` is the name of a flag if it is from the command line.
      order: position among all bindings; the last one of a name wins.
      target: the `signatures.Constructor` of `selector`; None for a macro or an unknown name.
    """

    line: int
    scope: str
    selector: str
    parameter: str
    value: Any
    file: str = ""
    order: int = 0
    target: Any = field(default=None, compare=False)

    @property
    def is_macro(self) -> bool:
        """Whether the left-hand side is a macro."""
        return not self.parameter

    @property
    def name(self) -> str:
        """The left-hand side, such as `scope/selector.parameter` or `NAME`."""
        return scoped(self.scope, f"{self.selector}.{self.parameter}" if self.parameter else self.selector)

    @property
    def place(self) -> str:
        """The file and line."""
        return place(self.file, self.line)

    def __str__(self) -> str:
        return f"{self.name} = {render(self.value)}"

    def problem(self, what: str, **details: str) -> ConfigProblem:
        """Returns a problem at this binding's file and line."""
        return ConfigProblem(self.file, self.line, what, **{"actual": str(self), **details})


def flag(number: int) -> str:
    """Returns the name of a source that is a `--gin`; the first has the number 1."""
    return f"--gin #{number}"


def is_flag(file: str) -> bool:
    """Returns whether the name of a source is that of a flag."""
    return file.startswith("--")


def place(file: str, line: int) -> str:
    """Returns `gin/x.gin:3`; for a flag or line 0, the name alone."""
    return file if is_flag(file) or not line else f"{file}:{line}"


def scoped(scope: str, name: str) -> str:
    """Returns `scope/name`, or `name` outside of every scope."""
    return f"{scope}/{name}" if scope else name


def import_line(module: str, symbol: str = "") -> str:
    """Returns the import statement of a module, with `as symbol` if that differs."""
    package, _, name = module.rpartition(".")
    alias = f" as {symbol}" if symbol and symbol != name else ""
    return f"from {package} import {name}{alias}" if package else f"import {name}{alias}"


def symbol_for(module: str, taken: Container[str]) -> str:
    """Returns the last part of a module's name, with a number if it is taken."""
    name = module.rpartition(".")[2]
    numbered = (f"{name}{number}" for number in itertools.count(2))
    return next(symbol for symbol in itertools.chain([name], numbered) if symbol not in taken)


def transform(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to the leaves and keys of nested lists, tuples and dictionaries."""
    if isinstance(value, dict):
        return {transform(k, change): transform(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(transform(item, change) for item in value)
    return change(value)


def leaves(value: Any) -> list[Any]:
    """Returns the leaves of nested lists, tuples and dictionaries, including keys."""
    found: list[Any] = []
    transform(value, found.append)
    return found


def expand(value: Any, macros: Mapping[str, Binding], *, inside: tuple[str, ...] = ()) -> Any:
    """Replaces macros in a value by their values; macros without a value stay.

    `inside`: macros that are being replaced, which stay, too.
    """

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Macro) or leaf.name in inside or leaf.name not in macros:
            return leaf
        return expand(macros[leaf.name].value, macros, inside=(*inside, leaf.name))

    return transform(value, change)


def render(value: Any) -> str:
    """Formats a value in gin's syntax."""
    return repr(transform(value, lambda leaf: _Number(leaf) if isinstance(leaf, float) else leaf))


class _Number(float):
    def __repr__(self) -> str:
        return super().__repr__().replace("inf", "1e999")  # gin reads numbers, not names


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the most similar of `names`, ignoring case, or '' if none is similar."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(names, reverse=True)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else ""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns a hint such as `one of a, b, c; did you mean 'b'?`."""
    names = sorted(set(names))
    if len(names) <= 12:
        choices = f"one of {', '.join(names)}" if names else ""
    else:
        choices = f"one of {len(names)}, such as {', '.join(difflib.get_close_matches(name, names, n=5, cutoff=0.0))}"
    guess = nearest(name, names)
    return "; ".join(part for part in (choices, f"did you mean '{guess}'?" if guess else "") if part)
