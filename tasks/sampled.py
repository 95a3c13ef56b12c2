"""Base class of tasks whose rows are drawn independently."""

import abc
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from core.batches import BatchSpec
from core.errors import UserError
from core.types import Batches, DataLayout, Task
from tasks import streams

_TRAIN, _VALIDATION = 0, 1


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
        return repr(self)

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def _batches(self, layout: DataLayout, key: tuple[int, int]) -> Batches:
        spec = self.spec(layout.batch_size)
        return streams.StreamBatches(
            layout,
            spec=spec,
            num_streams=self.num_streams,
            open_stream=lambda index, rows: _SampledStream(self, spec, (*key, index), rows),
            identity={"source": self.fingerprint(), "split": key[0], "seed": key[1]},
        )


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
