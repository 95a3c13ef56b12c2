"""Checks the values of a gin file against the type annotations of constructors.

A value is an error only if it is certainly wrong. `@constructor()` is checked by its return type or, if a protocol is
expected, by the methods of that type. Type-checking libraries need the constructed object, so they are not used.
"""

import ast
import collections.abc
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from launch.config.statements import Macro, Reference, render

UNKNOWN = Any  # for a missing annotation, or one that only a static type checker can evaluate

_UNIONS = (typing.Union, types.UnionType)
_SEQUENCES = tuple(getattr(collections.abc, name) for name in ("Sequence", "Collection", "Iterable", "Reversible"))
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_LITERALS: dict = {bool: bool, int: int, float: (int, float), complex: (int, float, complex), str: str, bytes: bytes}


@dataclass(frozen=True, eq=False)
class Constructor:
    """A public function or class that gin may name."""

    target: Callable[..., Any]
    module: str  # the module from which the configuration imports it; another may define it
    name: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.name}"

    @property
    def full_name(self) -> str:
        """The names of the module and of the constructor, joined by a dot."""
        return f"{self.module}.{self.name}"

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters that gin can bind, by name."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {name: p for name, p in self._signature.parameters.items() if p.kind in kinds}

    @cached_property
    def takes_any(self) -> bool:
        """Whether the constructor accepts `**kwargs`, or its signature is not known."""
        return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._signature.parameters.values())

    def hint(self, parameter: str) -> Any:
        """Returns the annotation of a parameter, or UNKNOWN."""
        return self._evaluated(self.parameters[parameter].annotation) if parameter in self.parameters else UNKNOWN

    @cached_property
    def returns(self) -> Any:
        """The type of a call's result, or UNKNOWN."""
        return self.target if inspect.isclass(self.target) else self._evaluated(self._signature.return_annotation)

    @cached_property
    def _signature(self) -> inspect.Signature:
        try:
            return inspect.signature(self.target)
        except (TypeError, ValueError):  # a builtin without a signature
            return inspect.signature(lambda **anything: None)

    def _evaluated(self, annotation: Any) -> Any:
        """Evaluates one annotation alone, so that one that fails does not affect others."""
        if annotation is inspect.Signature.empty:
            return UNKNOWN
        known = dict(getattr(inspect.unwrap(self.target), "__globals__", {}))
        for home in reversed(inspect.getmro(self.target)) if inspect.isclass(self.target) else [self.target]:
            known |= vars(sys.modules[home.__module__])
        try:
            return typing.get_type_hints(types.SimpleNamespace(__annotations__={"x": annotation}), globalns=known)["x"]
        except Exception:  # an annotation is any expression, and may raise anything
            return UNKNOWN


def why_not_a_constructor(target: Any) -> str:
    """Returns why a Python object cannot be a constructor in gin, or ''."""
    if inspect.ismodule(target):
        return "is a module, not a constructor"
    if not inspect.isclass(target) and not inspect.isroutine(target):
        return f"is a value ({type(target).__name__}), not a constructor"
    if getattr(target, "_is_protocol", False) or inspect.isabstract(target):
        return "is an interface, which cannot be constructed"
    return ""


class Misfit(NamedTuple):
    """A value, or an element of it, that does not fit its annotation."""

    path: str  # the position inside the value, such as `[2]`; '' for the value itself
    value: Any  # the value or element
    hint: Any  # the annotation that it does not fit

    def actual(self) -> str:
        """Formats the value with its type, for an error message."""
        text = render(self.value)
        shown = text if len(text) <= 60 else text[:57] + "…"
        if isinstance(self.value, Reference):
            shown += _result(self.value, self.hint)
        elif self.value is not None:
            shown += f" ({type(self.value).__name__})"
        return f"element {self.path}: {shown}" if self.path else shown

    def fix(self) -> str:
        """Suggests how to write the value; '' without a suggestion."""
        value = self.value
        if isinstance(value, Reference) and not value.evaluate:
            return f"call it: {value}()"
        if isinstance(value, str) and _reads_as(value, self.hint):
            return f"write it without quotes: {value}"
        if isinstance(value, int | float) and misfit("", self.hint) is None:
            return f"write it in quotes: '{value}'"
        others: list[tuple[str, Any]] = [("write", (value,)), ("write", [value])]
        if isinstance(value, float) and value.is_integer():
            others.insert(0, ("write", int(value)))
        if isinstance(value, list | tuple):
            others += [("write a tuple:", tuple(value)), ("write a list:", list(value))]
        return next((f"{how} {render(other)}" for how, other in others if misfit(other, self.hint) is None), "")


def misfit(value: Any, hint: Any) -> Misfit | None:
    """Returns the first misfit of a value and an annotation, or None."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    wrong = Misfit("", value, hint)
    if hint in (Any, object) or isinstance(value, Macro) or isinstance(hint, str | typing.TypeVar):
        return None
    if origin in _UNIONS:
        if any(misfit(value, option) is None for option in arguments):
            return None
        others = [option for option in arguments if option is not type(None)]
        inside = misfit(value, others[0]) if len(others) == 1 and value is not None else None
        return inside if inside and inside.path else wrong
    if isinstance(value, Reference):
        return None if _reference_fits(value, hint) else wrong
    if origin is typing.Literal:
        return None if any(type(value) is type(choice) and value == choice for choice in arguments) else wrong
    if not isinstance(value, list | tuple | dict):
        return None if _scalar_fits(value, origin) else wrong
    if not inspect.isclass(origin):
        return None
    if origin is not type(value) and origin not in (_MAPPINGS if isinstance(value, dict) else _SEQUENCES):
        return wrong
    if isinstance(value, dict):
        keys, items = arguments or (UNKNOWN, UNKNOWN)
        pairs: Iterable[tuple[Any, Misfit | None]]
        pairs = ((key, misfit(key, keys) or misfit(item, items)) for key, item in value.items())
    elif origin is tuple and arguments and arguments[-1] is not ...:
        if len(arguments) != len(value):
            return wrong
        pairs = enumerate(map(misfit, value, arguments))
    else:
        pairs = enumerate(misfit(item, arguments[0] if arguments else UNKNOWN) for item in value)
    return next((inner._replace(path=f"[{at!r}]{inner.path}") for at, inner in pairs if inner), None)


def hint_text(hint: Any) -> str:
    """Formats an annotation for messages."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return " | ".join(map(hint_text, arguments))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, arguments))
    return "None" if hint is type(None) else re.sub(r"[\w.]+\.(?=\w)", "", inspect.formatannotation(hint))


def _scalar_fits(value: Any, kind: Any) -> bool:
    if kind in _LITERALS:
        return isinstance(value, _LITERALS[kind]) and (kind is bool or not isinstance(value, bool))
    if kind in _SEQUENCES or kind is collections.abc.Callable:
        return False  # a string where a list of strings is expected
    if not inspect.isclass(kind):
        return True
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol, which no literal satisfies
        return False


def _reference_fits(reference: Reference, hint: Any) -> bool:
    if reference.target is None:
        return True
    if not reference.evaluate:
        return (typing.get_origin(hint) or hint) in (collections.abc.Callable, type, collections.abc.Hashable)
    return _result_fits(reference.target.returns, hint)


def _result_fits(result: Any, hint: Any) -> bool:
    actual, expected = typing.get_origin(result) or result, typing.get_origin(hint) or hint
    if actual in _UNIONS:
        return any(_result_fits(option, hint) for option in typing.get_args(result))
    if actual in (Any, object) or not inspect.isclass(actual) or not inspect.isclass(expected):
        return True
    if getattr(expected, "_is_protocol", False):
        return not _lacking(actual, expected)
    if expected in (float, complex) and actual in (int, float):
        return True
    return issubclass(actual, expected)


def _result(reference: Reference, hint: Any) -> str:
    if not reference.evaluate:
        return ", the constructor itself"
    given = reference.target.returns
    lacks = _lacking(given, typing.get_origin(hint) or hint) if inspect.isclass(given) else []
    return f", which returns {hint_text(given)}" + (f", which lacks {', '.join(lacks)}" if lacks else "")


def _lacking(actual: type, protocol: type) -> list[str]:
    """Returns the methods of a protocol that a class lacks; with `__getattr__`, a class may have any."""
    if hasattr(actual, "__getattr__"):
        return []
    bases = [base for base in getattr(protocol, "__mro__", ()) if getattr(base, "_is_protocol", False)]
    methods = [name for base in bases for name, member in vars(base).items() if inspect.isfunction(member)]
    called = ("__call__", "__next__", "__iter__")
    return [name for name in methods if (name[0] != "_" or name in called) and not hasattr(actual, name)]


def _reads_as(text: str, hint: Any) -> bool:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return False
    return not isinstance(value, str) and misfit(value, hint) is None
