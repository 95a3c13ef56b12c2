"""Reads JSON that another program, host or person wrote.

Python's parser accepts NaN, numbers beyond float64 and repeated keys.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

Kind = type | tuple[type, ...]  # the type of a JSON value, or the types that it may have
_ANY: Mapping[str, Kind] = {}
MOST_NESTED = 64  # levels of brackets; what this project writes has fewer than 10


class MalformedError(ValueError):
    """The text is not the JSON that was expected."""


def loads(text: str | bytes, *, strict: bool = True) -> Any:
    """Parses JSON; raises MalformedError if it cannot, or if brackets are nested too deeply.

    Args:
      strict: whether numbers that are not finite and repeated keys are errors.
    """
    only: Any = {"parse_float": _finite, "parse_constant": _finite, "object_pairs_hook": _unique} if strict else {}
    try:
        found = json.loads(text, **only)
    except RecursionError as error:
        raise MalformedError("brackets are nested too deeply") from error
    except MalformedError:
        raise
    except ValueError as error:  # also bytes that are not UTF-8, and integers of thousands of digits
        raise MalformedError(f"not JSON: {error}") from error
    _require_shallow(found)
    return found


def load_object(text: str | bytes, kinds: Mapping[str, Kind] = _ANY, *, strict: bool = True) -> dict[str, Any]:
    """Parses a JSON object that has at least the keys of `kinds`, with values of these types.

    Raises MalformedError for other JSON.
    """
    found = loads(text, strict=strict)
    if not isinstance(found, dict):
        raise MalformedError(f"expected an object, found {_shown(found)}")
    for key, kind in kinds.items():
        if key not in found:
            raise MalformedError(f"{key} is missing")
        if not is_a(found[key], kind):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise MalformedError(f"{key} is {_shown(found[key])}, expected {names}")
    return found


def is_a(value: Any, kind: Kind) -> bool:
    """Returns whether a JSON value has a type; an integer is a float, too, and a bool is no integer."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise MalformedError(f"the number {text[:40]} is not finite in float64")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise MalformedError(f"the key {twice[:40]!r} occurs twice in one object")
    return found


def _require_shallow(found: Any) -> None:
    level = [found]
    for _ in range(MOST_NESTED):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise MalformedError(f"more than {MOST_NESTED} levels of nested brackets")


def _children(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inner if isinstance(child, (dict, list))]


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"
