"""Describes configured objects by plain values, to compare them across processes.

Fields with their default or with the metadata `NOT_IDENTITY` are left out, so a changed default does not show.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import types
from collections.abc import Iterable, Mapping, Set
from typing import Any

import jax
import numpy as np

NOT_IDENTITY: Mapping[str, bool] = {"is_identity": False}  # metadata of a field that has no effect on a program


def text(value: Any) -> str:
    """Returns the identity of a value as one line of JSON."""
    return json.dumps(of(value), sort_keys=True)


def of(value: Any) -> Any:
    """Returns a description of a value, of JSON types."""
    return _of(value, frozenset())


def _of(value: Any, around: frozenset[int]) -> Any:
    """`around` has the ids of the objects that contain `value`."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, type | types.BuiltinFunctionType):
        return value.__qualname__
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, types.CodeType):
        return _of_code(value, around)
    if id(value) in around:
        return "..."
    around |= {id(value)}
    if dataclasses.is_dataclass(value):
        return _of_fields(value, around)
    if isinstance(value, np.dtype | np.generic):
        return str(value)
    if isinstance(value, np.ndarray | jax.Array):
        return _of_array(value)
    if isinstance(value, Mapping):
        pairs = [(_of(key, around), _of(item, around)) for key, item in value.items()]
        return dict(pairs) if all(isinstance(key, str) for key in value) else sorted(map(list, pairs), key=json.dumps)
    if isinstance(value, Set):
        return sorted((_of(item, around) for item in value), key=json.dumps)
    if isinstance(value, tuple) and (names := getattr(type(value), "_fields", None)):
        return _of_attributes(value, names, around)
    if isinstance(value, list | tuple):
        return [_of(item, around) for item in value]
    return _of_object(value, around)


def _of_fields(value: Any, around: frozenset[int]) -> dict[str, Any]:
    found: dict[str, Any] = {"class": type(value).__qualname__}
    for field in dataclasses.fields(value):
        if not field.metadata.get("is_identity", True):
            continue
        own, default = _of(getattr(value, field.name), around), dataclasses.MISSING
        if field.default is not dataclasses.MISSING:
            default = _of(field.default, around)
        elif field.default_factory is not dataclasses.MISSING:
            default = _of(field.default_factory(), around)
        if default is dataclasses.MISSING or json.dumps(own) != json.dumps(default):  # 1 == True, but not in JSON
            found[field.name] = own
    return found


def _of_array(value: Any) -> dict[str, Any]:
    is_key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(value) if is_key else value)
    return {"array": [str(value.dtype), *array.shape], "content": hashlib.sha256(array.tobytes()).hexdigest()}


def _of_attributes(value: Any, names: Iterable[str], around: frozenset[int]) -> dict[str, Any]:
    found = {name: _of(getattr(value, name), around) for name in names if name in dir(value)}
    return {"class": type(value).__qualname__, **found}


def _of_object(value: Any, around: frozenset[int]) -> Any:
    if isinstance(value, functools.partial):
        return {"partial": [_of(part, around) for part in (value.func, value.args, value.keywords)]}
    if isinstance(value, types.MethodType):
        return {"method": value.__func__.__qualname__, "self": _of(value.__self__, around)}
    if isinstance(value, types.FunctionType):
        return _of_function(value, around)
    if callable(value) and (inner := getattr(value, "__wrapped__", None)) is not None:  # as of `jax.jit`
        return {"class": type(value).__qualname__, "wraps": _of(inner, around)}
    slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    return _of_attributes(value, sorted({*getattr(value, "__dict__", ()), *slots}), around)


def _of_function(value: types.FunctionType, around: frozenset[int]) -> dict[str, Any]:
    found: dict[str, Any] = {"function": value.__qualname__}
    cells = [_of(cell.cell_contents, around) for cell in value.__closure__ or ()]
    more: dict[str, Any] = {"defaults": [value.__defaults__ or (), value.__kwdefaults__ or {}], "closure": cells}
    if "<" in value.__qualname__:  # <lambda>, <locals>
        more["code"] = value.__code__
    plain = {name: _of(part, around) for name, part in more.items()}
    return found | {name: part for name, part in plain.items() if part not in ([], [[], {}])}


def _of_code(code: types.CodeType, around: frozenset[int]) -> str:
    plain = [code.co_code.hex(), [_of(constant, around) for constant in code.co_consts], list(code.co_names)]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()
