"""Cuts long rows into chunks, one per training step, for models that keep states from step to step.

If row r of a batch is chunk k of a long row, then row r of the next batch is chunk k + 1, or the first chunk of the
next long row:

    long row, positions   0 1 2 3 4 5 0 1 2 3 4 5      step   1: 0 1 2    2: 3 4 5    3: 0 1 2    4: 3 4 5
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from core.batches import BatchSpec, Field, row_length
from core.errors import UserError, check_integer
from core.types import Batches, DataLayout, DescribesEvaluation, Task, can
from tasks import streams


@dataclasses.dataclass(frozen=True)
class ChunkedTask:
    """A `core.types.Task` whose rows are chunks of another task's rows.

    Attributes:
      whole: the other task, which has all attributes that are not listed.
      length: positions per chunk.
    """

    whole: Task
    length: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "whole":  # looked up while an object is copied
            raise AttributeError(name)
        found = getattr(self.whole, name)
        if name == "evaluating":  # which returns the task with fewer rows to evaluate
            return lambda rows: dataclasses.replace(self, whole=found(rows))
        return found

    def with_rows(self, whole: Task, length: int) -> ChunkedTask:
        """Returns a task of chunks of the rows of `whole`."""
        return ChunkedTask(whole, length)

    def spec(self, batch_size: int) -> BatchSpec:
        """Returns the fields of a batch of chunks.

        Raises UserError if the rows do not divide into two or more chunks.
        """
        whole = self.whole.spec(batch_size)
        if (length := row_length(whole)) % self.length or length == self.length:
            raise UserError(
                f"chunked.rows.length = {self.length}: rows of {length} positions do not divide into two or more of "
                "these chunks; expected a divisor of the length of the rows"
            )
        return {name: _shorter(field, self.length) for name, field in whole.items()}

    def train(self, layout: DataLayout, *, seed: int) -> Batches:
        """Returns the chunks of the training batches, in order."""
        return ChunkedBatches(self.whole.train(layout, seed=seed), self.spec(layout.batch_size), self.length)

    def evaluation(self, layout: DataLayout) -> Batches:
        """Returns the chunks of the validation batches, in order."""
        return ChunkedBatches(self.whole.evaluation(layout), self.spec(layout.batch_size), self.length)

    def evaluated_on(self, most: int | None) -> str:
        """Describes the chunks of an evaluation, at most `most`; None: all of the rows that the task evaluates."""
        if most is None and can(self.whole, DescribesEvaluation):
            return f"{self.whole.evaluated_on(None)}, in chunks of {self.length:,} positions"
        count = "all" if most is None else f"{most:,}"
        return f"{count} chunks of {self.length:,} positions, batch after batch the next of the same validation rows"

    def describe(self) -> str:
        """Returns one line for the run summary."""
        return f"{self.whole.describe()}, in chunks of {self.length}"


class ChunkedBatches(Batches):
    """Implements `core.types.Batches`: yields each batch of `inner` in chunks of `length` positions."""

    def __init__(self, inner: Batches, spec: BatchSpec, length: int) -> None:
        self._inner, self._spec, self._length = inner, spec, length
        self._before = inner.state()  # state before the long rows whose chunks are being read
        self._whole: Mapping[str, np.ndarray] = {}
        self._count = row_length(inner.spec) // length
        self._next = self._count

    @property
    def spec(self) -> BatchSpec:
        return self._spec

    def __iter__(self) -> ChunkedBatches:
        return self

    def __next__(self) -> Mapping[str, np.ndarray]:
        if self._next == self._count:
            self._before = self._inner.state()
            self._whole, self._next = next(self._inner), 0
        begin = self._next * self._length
        self._next += 1
        return {
            name: np.ascontiguousarray(a[:, begin : begin + self._length]) if _is_long(self._inner.spec[name]) else a
            for name, a in self._whole.items()
        }

    def state(self) -> Mapping[str, bytes]:
        is_between = self._next == self._count
        done, places = (0, self._inner.state()) if is_between else (self._next, self._before)
        header = json.dumps({"chunks": done, "length": self._length}).encode()
        return {name: header + b"\n" + place for name, place in places.items()}

    def restore(self, state: Mapping[str, bytes]) -> None:
        parts = {name: place.partition(b"\n") for name, place in state.items()}
        headers = [streams.read_position(header, chunks=int, length=int) for header, _, _ in parts.values()]
        if lengths := {header["length"] for header in headers} - {self._length}:
            raise UserError(
                f"the saved data position is of chunks of {lengths.pop()} positions, and chunked.rows.length = "
                f"{self._length}: resume with the length of the checkpoint, or use a new run directory"
            )
        self._inner.restore({name: place for name, (_, _, place) in parts.items()})
        self._next = self._count
        if done := max((header["chunks"] for header in headers), default=0):  # equal in all streams
            self._before = self._inner.state()
            self._whole, self._next = next(self._inner), done


def rows(*, task: Task, length: int) -> ChunkedTask:
    """Returns a task that gives each step the next chunks of another task's rows.

    `length` is the number of positions per chunk, and divides the length of the rows.
    """
    check_integer(length, where="chunked.rows.length", least=1)
    return ChunkedTask(task, length)


def _is_long(field: Field) -> bool:
    return "length" in field.axes


def _shorter(field: Field, chunk: int) -> Field:
    if not _is_long(field):
        return field
    if field.axes.index("length") != 1:
        raise UserError(f"chunked.rows: {field}: expected the axis 'length' after 'batch'")
    return Field((field.shape[0], chunk, *field.shape[2:]), field.dtype, field.axes)
