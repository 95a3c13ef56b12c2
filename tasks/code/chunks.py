"""Cuts source code into chunks: every row is a piece of one file.

A file becomes ids and an end-of-document id, and is cut into rows of T ids. The last row is padded, or left out if it
has fewer than `least_tokens` ids. A file's first input is the begin-of-text id.

Training visits every row once per epoch, in an order that depends on the seed and the epoch. Evaluations visit the
held-out rows in one fixed random order. Streams take the rows of an order in turn.

T: positions per row.
"""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from core.batches import BatchSpec, Field
from core.errors import UserError
from core.types import Batches, DataLayout
from tasks import permutation, streams
from tasks.streams import Stream

SPLITS = ("train", "validation", "test")
DOCUMENTS = "documents"  # field of a batch, [B]: the number of each row's file in its split; -1 for rows of padding
_IN_ORDER_OF = (20260101,)  # key of the permutation for evaluations


class Rows(Protocol):
    """The rows of one split."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def row(self, number: int) -> Mapping[str, np.ndarray]:
        """Returns one row: each field of a batch without its first dimension."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkTask(abc.ABC):
    """A `core.types.Task` of rows that are in memory or in arrays on disk.

    Attributes:
      length: T, tokens per row.
      num_streams: number of data streams; divides the batch size.
      held_out: the split of evaluations, "validation" or "test".
      eval_rows: maximum number of rows per evaluation; None: all.
    """

    length: int
    num_streams: int
    held_out: str = "validation"
    eval_rows: int | None = None

    def __post_init__(self):
        if self.held_out not in SPLITS[1:]:
            raise UserError(f"{type(self).__name__}.held_out = {self.held_out!r}: expected 'validation' or 'test'")

    @abc.abstractmethod
    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None: ...

    @abc.abstractmethod
    def describe(self) -> str: ...

    @abc.abstractmethod
    def rows(self, split: str) -> Rows:
        """Returns the rows of a split."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Returns a hash of the data, equal on all hosts that read the same data."""

    def spec(self, batch_size: int) -> BatchSpec:
        """Returns the fields of a global batch."""
        streams.rows_per_stream(batch_size, num_streams=self.num_streams)
        documents = Field((batch_size,), np.int32, ("batch",))
        return {**streams.batch_spec(batch_size, length=self.length), DOCUMENTS: documents}

    def train(self, layout: DataLayout, *, seed: int) -> Batches:
        """Returns an endless iterator of training batches."""
        return self._batches(layout, "train", seed)

    def evaluation(self, layout: DataLayout) -> Batches:
        """Returns batches of held-out rows, at most `eval_rows`; rows of padding fill the last batch."""
        return self._batches(layout, self.held_out, None)

    def evaluating(self, rows: int | None) -> ChunkTask:
        """Returns a copy whose evaluations have at most `rows` rows; None: all."""
        return dataclasses.replace(self, eval_rows=rows)

    def evaluated_on(self, most: int | None) -> str:
        """Describes the rows of an evaluation that reads at most `most` rows; None: no limit."""
        count = len(self.rows(self.held_out))
        scored = min(n for n in (count, self.eval_rows, most) if n is not None)
        return f"{scored:,} of {count:,} {self.held_out} rows of {self.length} tokens"

    def train_tokens(self) -> int | None:
        """Returns the number of tokens of the training split, counting padding."""
        return len(self.rows("train")) * self.length

    def _batches(self, layout: DataLayout, split: str, seed: int | None) -> Batches:
        spec, rows = self.spec(layout.batch_size), self.rows(split)
        most = None if seed is not None else min(len(rows), self.eval_rows or len(rows))
        return streams.StreamBatches(
            layout,
            spec=spec,
            num_streams=self.num_streams,
            open_stream=lambda index, each: _Stream(rows, spec, (index, self.num_streams, each), seed=seed, most=most),
            identity={"source": self.fingerprint(), "split": split, "seed": seed},
        )


def evaluation_order(count: int) -> np.ndarray:
    """Returns the order in which evaluations visit `count` rows."""
    return permutation.permuted(range(count), count, key=_IN_ORDER_OF)


class _Stream(Stream):
    def __init__(
        self, rows: Rows, spec: BatchSpec, place: tuple[int, int, int], *, seed: int | None, most: int | None
    ) -> None:
        """`place` is (index, num_streams, rows per element); `most` counts the rows of all streams, None: endless."""
        self._rows, self._spec, self._seed, self._most = rows, spec, seed, most
        self._index, self._num_streams, self._each = place
        self._taken = 0

    def __next__(self) -> Mapping[str, np.ndarray]:
        if self._most is not None and self._taken * self._num_streams >= self._most:
            raise StopIteration
        numbers = [(self._taken + i) * self._num_streams + self._index for i in range(self._each)]
        self._taken += self._each
        rows = [self._row(number) for number in numbers]
        return {name: np.stack([row[name] for row in rows]) for name in self._spec}

    def state(self) -> bytes:
        return json.dumps({"rows": self._taken}).encode()

    def restore(self, state: bytes) -> None:
        self._taken = streams.read_position(state, rows=int)["rows"]

    def _row(self, number: int) -> Mapping[str, np.ndarray]:
        if self._most is not None and number >= self._most:
            empty = {name: np.zeros(field.shape[1:], field.dtype) for name, field in self._spec.items()}
            return {**empty, DOCUMENTS: np.array(-1, np.int32)}
        count = len(self._rows)
        epoch, place = divmod(number, count)
        key: tuple[int, ...] = _IN_ORDER_OF if self._seed is None else (self._seed, epoch)
        return self._rows.row(int(permutation.permuted([place], count, key=key)[0]))


class TokenRows:
    """Documents in memory, cut into rows.

    Attributes:
      names: names of the documents, in the order of their numbers.
    """

    def __init__(
        self, documents: Mapping[str, np.ndarray], *, length: int, bos_id: int, least_tokens: int, where: str
    ) -> None:
        """Cuts documents into rows.

        Args:
          least_tokens: rows with fewer ids are left out.
          where: names the documents in errors.
        """
        self.names = tuple(documents)
        self._ids, self._length, self._bos_id = tuple(documents.values()), length, bos_id
        self._places = [
            (number, start)
            for number, ids in enumerate(self._ids)
            for start in range(0, len(ids), length)
            if len(ids) - start >= least_tokens
        ]
        if not self._places:
            raise UserError(f"{where}: no file has {least_tokens} tokens or more")

    def __len__(self) -> int:
        return len(self._places)

    def row(self, number: int) -> Mapping[str, np.ndarray]:
        """Returns one row, with the number of its document."""
        document, start = self._places[number]
        ids = self._ids[document][start : start + self._length]
        before = self._ids[document][start - 1] if start else self._bos_id
        found: dict[str, Any] = {name: np.zeros(self._length, dtype) for name, dtype in streams.BATCH_DTYPES.items()}
        found["inputs"][: len(ids)] = [before, *ids[:-1]]
        found["targets"][: len(ids)] = ids
        found["weights"][: len(ids)] = 1
        found["segment_ids"][: len(ids)] = 1
        found["positions"][: len(ids)] = np.arange(len(ids))
        return {**found, DOCUMENTS: np.int32(document)}
