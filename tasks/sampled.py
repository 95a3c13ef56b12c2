"""Base class of tasks whose rows are drawn independently."""

import abc
import dataclasses
import enum
import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from core import identity
from core.batches import BatchSpec
from core.errors import UserError
from core.types import Batches, DataLayout, Task
from tasks import streams

_TRAIN, _VALIDATION = 0, 1
# Values whose `repr` has all of them, and is the same in every process.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, type, np.dtype, np.generic, pathlib.PurePath)


class SampledTask(Task, abc.ABC):
    """A task whose subclass defines `num_streams`, `spec` and `row`; usually a frozen dataclass.

    Attributes:
      num_streams: number of data streams; divides the batch size.
      vocabulary: converts between text and ids; None if rows have no text.
    """

    vocabulary: Any = None

    @abc.abstractmethod
    def spec(self, batch_size: int) -> BatchSpec:
        """Returns the fields of a global batch."""

    @abc.abstractmethod
    def row(self, rng: np.random.Generator, *, is_training: bool) -> Mapping[str, np.ndarray]:
        """Returns one row: each field of `spec` without its first dimension."""

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        del run_dir, is_host_zero

    def train(self, layout: DataLayout, *, seed: int) -> Batches:
        """Returns an endless iterator of batches.

        The iterator raises UserError if a row does not fit `spec`.
        """
        return self._batches(layout, (_TRAIN, seed))

    def evaluation(self, layout: DataLayout) -> Batches:
        """Returns an endless iterator of batches, drawn independently of training batches."""
        return self._batches(layout, (_VALIDATION, 0))

    def problems(self) -> list[str]:
        return []

    def describe(self) -> str:
        return _told(self)

    def fingerprint(self) -> str:
        """Returns a hash of the task's fields; of its attributes if it is no dataclass."""
        return hashlib.sha256(_told(self).encode()).hexdigest()[:16]

    def _batches(self, layout: DataLayout, key: tuple[int, int]) -> Batches:
        spec = self.spec(layout.batch_size)
        return streams.StreamBatches(
            layout,
            spec=spec,
            num_streams=self.num_streams,
            open_stream=lambda index, rows: _SampledStream(self, spec, (*key, index), rows),
            identity={"source": self.fingerprint(), "split": key[0], "seed": key[1]},
        )


def _told(value: Any) -> str:
    """Returns a text that tells a value from others, and is the same in every process.

    Of plain values, and lists, tuples, dictionaries and most dataclasses of them, it is their `repr`, whose hash is in
    earlier checkpoints.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if type(value) is list:
        return f"[{', '.join(map(_told, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_told, value))}{',' * (len(value) == 1)})"
    if type(value) is dict:
        return f"{{{', '.join(f'{_told(key)}: {_told(item)}' for key, item in value.items())}}}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__}({_told(dict(value))})"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(_told, value)))})"
    if isinstance(value, np.ndarray) and value.dtype == object:
        return f"array({value.shape}, {_told(value.tolist())})"
    if isinstance(value, tuple) and (fields := getattr(value, "_fields", None)):
        return f"{type(value).__name__}({', '.join(f'{name}={_told(getattr(value, name))}' for name in fields)})"
    if dataclasses.is_dataclass(value):  # a field that is no argument and not shown follows from the others
        names = [field.name for field in dataclasses.fields(value) if field.init or field.repr]
    elif isinstance(value, SampledTask):
        names = [name for name in sorted(vars(value)) if not _is_cached(value, name)]
    elif _has_parts(value):
        return identity.text(value)
    else:  # such as a range or a date
        return repr(value)
    return f"{type(value).__qualname__}({', '.join(f'{name}={_told(getattr(value, name))}' for name in names)})"


def _has_parts(value: Any) -> bool:
    """Returns whether `core.identity` finds what a value consists of: its entries, code or attributes."""
    if callable(value) or hasattr(value, "__array__") or getattr(value, "__dict__", None):
        return True
    kinds = type(value).__mro__
    is_bare = hasattr(value, "__dict__") and not any("__repr__" in vars(kind) for kind in kinds[:-1])
    return is_bare or any(getattr(kind, "__slots__", ()) for kind in kinds)


def _is_cached(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), functools.cached_property)


class _SampledStream:
    def __init__(self, task: SampledTask, spec: BatchSpec, key: tuple[int, ...], rows: int) -> None:
        self._task, self._spec, self._key, self._rows = task, spec, key, rows
        self._index = 0  # rows returned so far

    def __next__(self) -> Mapping[str, np.ndarray]:
        rows = [self._row(self._index + i) for i in range(self._rows)]
        self._index += self._rows
        return {name: np.stack([row[name] for row in rows]) for name in self._spec}

    def state(self) -> bytes:
        return json.dumps({"rows": self._index}).encode()

    def restore(self, state: bytes) -> None:
        self._index = streams.read_position(state, rows=int)["rows"]

    def _row(self, index: int) -> Mapping[str, np.ndarray]:
        rng = np.random.default_rng(np.random.SeedSequence((*self._key, index)))
        row = self._task.row(rng, is_training=self._key[0] == _TRAIN)
        found = {name: f"{np.asarray(a).dtype}{list(np.shape(a))}" for name, a in row.items()}
        expected = {name: f"{field.dtype}{list(field.shape[1:])}" for name, field in self._spec.items()}
        if wrong := [name for name in found | expected if found.get(name) != expected.get(name)]:
            lines = (f"{n!r} is {found.get(n, 'missing')}, spec says {expected.get(n, 'no such field')}" for n in wrong)
            raise UserError(
                f"{type(self._task).__name__}.row: {'; '.join(lines)}. A row has every field of spec, without the "
                "first dimension"
            )
        return row
