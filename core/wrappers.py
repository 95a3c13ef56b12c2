"""Copies a model with one field changed, or with smaller sizes, even if the model is wrapped.

A wrapper forwards unknown attributes (`__getattr__`) to the model inside.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from core.types import LimitsCache, Model, Shrinks

Path = tuple[str, ...]  # attributes that lead from a wrapper to what it wraps


def field_path(model: Any, name: str) -> Path | None:
    """Returns the attribute path to the dataclass that has a field; (): the model; None: not found."""
    return _path(model, name, lambda value: dataclasses.is_dataclass(value) and name in _fields(value))


def field_owner(model: Any, name: str) -> Any:
    """Returns the dataclass that has a field, the model or one inside it; None without such a field."""
    path = field_path(model, name)
    return None if path is None else functools.reduce(lambda value, attribute: vars(value)[attribute], path, model)


def with_field(model: Any, name: str, value: Any) -> Any:
    """Returns a copy with another value of a field, which must exist."""
    path = field_path(model, name)
    assert path is not None, (type(model).__name__, name)
    return _changed(model, path, lambda inner: dataclasses.replace(inner, **{name: value}))


def is_outside(model: Any, name: str, other: str) -> bool:
    """Returns whether a wrapper or subclass defines `name`, and passes on or inherits `other`."""
    return _depth(model, name) < _depth(model, other)


def _depth(model: Any, name: str) -> tuple[int, int]:
    path = _path(model, name, lambda value: hasattr(type(value), name)) or ()
    owner = functools.reduce(lambda value, attribute: vars(value)[attribute], path, model)
    return len(path), next((i for i, base in enumerate(type(owner).__mro__) if name in vars(base)), 0)


def shrunk(model: Shrinks, multiples: Mapping[str, int]) -> Model:
    """Returns `model.shrink(multiples)`, inside the wrappers around the model that defines `shrink`."""
    return _from_method(model, "shrink", multiples)


def for_longer_rows(model: LimitsCache) -> Model:
    """Returns `model.for_longer_rows()`, inside the wrappers around the model that defines it."""
    return _from_method(model, "for_longer_rows")


def _from_method(model: Any, name: str, *arguments: Any) -> Any:
    path = _path(model, name, lambda value: hasattr(type(value), name))
    return _changed(model, path or (), lambda inner: getattr(inner, name)(*arguments))


def _path(value: Any, name: str, owns: Callable[[Any], bool]) -> Path | None:
    if owns(value):
        return ()
    for attribute, part in getattr(value, "__dict__", {}).items():
        if hasattr(part, name) and (rest := _path(part, name, owns)) is not None:
            return (attribute, *rest)
    return None


def _changed(value: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    inner = _changed(vars(value)[path[0]], path[1:], change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and path[0] in _fields(value):
        return dataclasses.replace(value, **{path[0]: inner})
    copy = object.__new__(type(value))  # copy.copy would ask the wrapper's __getattr__ for its own attributes
    vars(copy).update({**vars(value), path[0]: inner})
    return copy


def _fields(value: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(value) if field.init}
