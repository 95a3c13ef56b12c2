"""Does a value of a gin file fit the annotation of the parameter it is bound to? gin itself checks no types.

The one idea: say no only when sure. What is not annotated, or cannot be judged without constructing something, fits. An
`@constructor()` is judged by what it returns, a protocol by its methods.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from typing import Any, NamedTuple

from launch.gin_config.statements import Macro, Reference, Unreadable, render

UNKNOWN = Any
_SEQUENCES = (
    collections.abc.Sequence,
    collections.abc.Collection,
    collections.abc.Iterable,
    collections.abc.Reversible,
)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_LITERALS = {bool: bool, int: int, float: (int, float), complex: (int, float, complex), str: str, bytes: bytes}


class Misfit(NamedTuple):
    """A value, or an element of one, that does not fit.

    Attributes:
      path: where inside the value, such as `[2]`; '' for the value itself.
    """

    path: str
    value: Any
    hint: Any

    def actual(self) -> str:
        """What is written, and its type."""
        text = render(self.value)
        shown = text if len(text) <= 60 else text[:57] + "…"
        if isinstance(self.value, Reference):
            shown += _what_it_gives(self.value) + self._lacking()
        elif self.value is not None:
            shown += f" ({type(self.value).__name__})"
        return f"element {self.path}: {shown}" if self.path else shown

    def _lacking(self) -> str:
        """The methods that what is constructed would need."""
        given, protocol = (
            _plain(getattr(self.value.target, "returns", UNKNOWN)),
            typing.get_origin(self.hint) or self.hint,
        )
        if not self.value.evaluate or not inspect.isclass(given) or not getattr(protocol, "_is_protocol", False):
            return ""
        return f", which lacks {', '.join(name for name in _protocol_methods(protocol) if not hasattr(given, name))}"

    def fix(self) -> str:
        """How to write it, where that can be guessed."""
        value = self.value
        if isinstance(value, Reference) and not value.evaluate:
            return f"call it: {value}()"
        if isinstance(value, str) and _reads_as(value, self.hint):
            return f"write it without quotes: {value}"
        if isinstance(value, int | float) and misfit("", self.hint) is None:
            return f"write it in quotes: '{value}'"
        if isinstance(value, float) and value.is_integer() and misfit(int(value), self.hint) is None:
            return f"write {int(value)}"
        if misfit((value,), self.hint) is None:
            return f"write {render((value,))}"
        if misfit([value], self.hint) is None:
            return f"write {render([value])}"
        if isinstance(value, list) and misfit(tuple(value), self.hint) is None:
            return f"write a tuple: {render(tuple(value))}"
        if isinstance(value, tuple) and misfit(list(value), self.hint) is None:
            return f"write a list: {render(list(value))}"
        return ""


def misfit(value: Any, hint: Any) -> Misfit | None:
    """The first thing in `value` that does not fit `hint`; None when all fits, or nobody can tell."""
    hint = _plain(hint)
    origin = typing.get_origin(hint)
    if hint in (Any, object) or isinstance(value, Unreadable | Macro) or isinstance(hint, str | typing.TypeVar):
        return None
    if origin in (typing.Union, types.UnionType):
        return _union_misfit(value, hint)
    if isinstance(value, Reference):
        return None if _reference_fits(value, hint) else Misfit("", value, hint)
    if origin is typing.Literal:
        fits = any(type(value) is type(choice) and value == choice for choice in typing.get_args(hint))
        return None if fits else Misfit("", value, hint)
    if isinstance(value, list | tuple | dict):
        return _container_misfit(value, hint)
    return None if _scalar_fits(value, origin or hint) else Misfit("", value, hint)


def hint_text(hint: Any) -> str:
    """An annotation as one would write it."""
    hint = _plain(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(hint_text(option) for option in typing.get_args(hint))
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
    if hint is type(None):
        return "None"
    if origin is None and inspect.isclass(hint):
        return hint.__name__
    if inspect.isclass(origin) and origin is not collections.abc.Callable:
        arguments = ", ".join("..." if a is ... else hint_text(a) for a in typing.get_args(hint))
        return f"{origin.__name__}[{arguments}]"
    return str(hint).replace("typing.", "").replace("collections.abc.", "")


def _plain(hint: Any) -> Any:
    """Without `Annotated`, `NewType` and type aliases around it."""
    while True:
        if typing.get_origin(hint) is typing.Annotated:
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # `type X = ...`, Python 3.12
            hint = hint.__value__
        else:
            return type(None) if hint is None else hint


def _union_misfit(value: Any, hint: Any) -> Misfit | None:
    options = typing.get_args(hint)
    if any(misfit(value, option) is None for option in options):
        return None
    others = [option for option in options if option is not type(None)]
    inside = misfit(value, others[0]) if len(others) == 1 and value is not None else None
    return inside if inside and inside.path else Misfit("", value, hint)


def _container_misfit(value: list | tuple | dict, hint: Any) -> Misfit | None:
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if not inspect.isclass(kind):
        return None
    if isinstance(value, dict):
        return _mapping_misfit(value, hint) if kind in _MAPPINGS else Misfit("", value, hint)
    if kind is not type(value) and kind not in _SEQUENCES:
        return Misfit("", value, hint)
    if kind is tuple and arguments and arguments[-1] is not ...:
        if len(arguments) != len(value):
            return Misfit("", value, hint)
        elements = arguments
    else:
        elements = (arguments[0] if arguments else UNKNOWN,) * len(value)
    found = ((i, misfit(item, element)) for i, (item, element) in enumerate(zip(value, elements, strict=True)))
    return next((inner._replace(path=f"[{i}]{inner.path}") for i, inner in found if inner), None)


def _mapping_misfit(value: dict, hint: Any) -> Misfit | None:
    key_hint, value_hint = typing.get_args(hint) or (UNKNOWN, UNKNOWN)
    for key, item in value.items():
        inner = misfit(key, key_hint) or misfit(item, value_hint)
        if inner:
            return inner._replace(path=f"[{key!r}]{inner.path}")
    return None


def _scalar_fits(value: Any, kind: Any) -> bool:
    if kind in _LITERALS:
        return isinstance(value, _LITERALS[kind]) and (kind is bool or not isinstance(value, bool))
    if kind in _SEQUENCES or kind is collections.abc.Callable:
        return False  # a string where a list of strings belongs
    if not inspect.isclass(kind):
        return True
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol: no literal satisfies one
        return False


def _what_it_gives(reference: Reference) -> str:
    if not reference.evaluate:
        return ", the constructor itself"
    return f", which gives {hint_text(reference.target.returns)}" if reference.target is not None else ""


def _reference_fits(reference: Reference, hint: Any) -> bool:
    if reference.target is None:
        return True
    kind = typing.get_origin(hint) or hint
    if not reference.evaluate:
        return kind in (collections.abc.Callable, type, collections.abc.Hashable)
    return _result_fits(reference.target.returns, hint)


def _result_fits(result: Any, hint: Any) -> bool:
    result = _plain(result)
    if typing.get_origin(result) in (typing.Union, types.UnionType):
        return any(_result_fits(option, hint) for option in typing.get_args(result))
    actual, expected = typing.get_origin(result) or result, typing.get_origin(hint) or hint
    if actual in (Any, object) or not inspect.isclass(actual) or not inspect.isclass(expected):
        return True
    if getattr(expected, "_is_protocol", False):
        return all(hasattr(actual, method) for method in _protocol_methods(expected))
    if expected in (float, complex) and actual in (int, float):
        return True
    return issubclass(actual, expected)


def _protocol_methods(protocol: type) -> list[str]:
    """Names that a class satisfying the protocol must have; attributes without a value may be set by its `__init__`."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False) and base is not typing.Protocol]
    return [name for base in bases for name, member in vars(base).items() if _is_method(name, member)]


def _is_method(name: str, member: Any) -> bool:
    return inspect.isfunction(member) and (not name.startswith("_") or name in ("__call__", "__next__", "__iter__"))


def _reads_as(text: str, hint: Any) -> bool:
    """Whether the string would fit without its quotes."""
    for kind in (int, float):
        try:
            return misfit(kind(text), hint) is None
        except ValueError:
            continue
    return text in ("True", "False", "None") and misfit({"True": True, "False": False}.get(text), hint) is None
