"""The identity of configured objects, as plain values: equal for objects that are configured alike, in any process.

Records of compiled programs are found by it. A dataclass is its class and the fields that differ from their defaults,
so a new field whose default changes nothing leaves the identity of existing configurations as it was. Classes are named
without their modules, so moving one does not change it either. Fields with the metadata `NOT_IDENTITY` are left out.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import types
from collections.abc import Mapping, Set
from typing import Any

import jax
import numpy as np

NOT_IDENTITY: Mapping[str, bool] = {"is_identity": False}  # metadata of a field that has no effect on a program


def text(value: Any) -> str:
    """Returns the identity of a value as one line of JSON."""
    return json.dumps(of(value), sort_keys=True)


def of(value: Any) -> Any:
    """Returns the identity of a value: numbers, texts, None, lists, and dictionaries with texts as keys."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, type):
        return value.__qualname__
    if dataclasses.is_dataclass(value):
        return _of_fields(value)
    if isinstance(value, np.dtype | np.generic):
        return str(value)
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        return {"array": [str(array.dtype), *array.shape], "content": hashlib.sha256(array.tobytes()).hexdigest()}
    if isinstance(value, Mapping):
        return _of_mapping(value)
    if isinstance(value, Set):
        return sorted(map(of, value), key=json.dumps)
    if isinstance(value, tuple) and (names := getattr(type(value), "_fields", None)):
        return {"class": type(value).__qualname__, **{name: of(getattr(value, name)) for name in names}}
    if isinstance(value, list | tuple):
        return [of(item) for item in value]
    return _of_object(value)


def _of_fields(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"class": type(value).__qualname__}
    for field in dataclasses.fields(value):
        if not field.metadata.get("is_identity", True):
            continue
        own = of(getattr(value, field.name))
        if field.default is not dataclasses.MISSING:
            is_default = own == of(field.default)
        else:
            is_default = field.default_factory is not dataclasses.MISSING and own == of(field.default_factory())
        if not is_default:
            found[field.name] = own
    return found


def _of_mapping(value: Mapping) -> Any:
    if all(isinstance(key, str) for key in value):
        return {key: of(item) for key, item in value.items()}
    return sorted(([of(key), of(item)] for key, item in value.items()), key=json.dumps)


def _of_object(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return {"partial": of(value.func), "args": of(value.args), "keywords": of(value.keywords)}
    if isinstance(value, types.MethodType):
        return {"method": value.__func__.__qualname__, "self": of(value.__self__)}
    if isinstance(value, types.FunctionType):
        cells = [of(cell.cell_contents) for cell in value.__closure__ or ()]
        return {"function": value.__qualname__, **({"closure": cells} if cells else {})}
    if attributes := getattr(value, "__dict__", None):
        return {"class": type(value).__qualname__, **{name: of(item) for name, item in sorted(attributes.items())}}
    return {"class": type(value).__qualname__}
