"""Generates random tokens for rehearsals, timing and tests.

A row is a pure function of (split, seed, stream, index), so the position of a stream is one counter. The tokens are
uniform, so the best possible loss is ln(vocab_size - 1) nats per token.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import numpy as np

from core import units
from core.batches import BatchSpec
from core.errors import check_integer
from core.types import Batches, DataLayout
from tasks import streams, vocabularies

_TRAIN, _VALIDATION = 0, 1


class RandomStream:
    """`streams.Stream` of random rows: one segment each, ids uniform over 1 to vocab_size - 1."""

    def __init__(self, key: tuple[int, ...], *, vocab_size: int, length: int, rows: int) -> None:
        self._key, self._vocab_size, self._length, self._rows = key, vocab_size, length, rows
        self._index = 0  # rows returned so far

    def __next__(self) -> Mapping[str, np.ndarray]:
        """See `streams.Stream`."""
        targets = np.stack([self._row(self._index + i) for i in range(self._rows)])  # [R, T]
        self._index += self._rows
        inputs = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        positions = np.broadcast_to(np.arange(self._length, dtype=np.int32), targets.shape)
        ones = np.ones_like(targets)
        return dict(
            inputs=inputs, targets=targets, weights=ones.astype(np.float32), segment_ids=ones, positions=positions
        )

    def state(self) -> bytes:
        """See `streams.Stream`."""
        return json.dumps({"rows": self._index}).encode()

    def restore(self, state: bytes) -> None:
        """See `streams.Stream`."""
        self._index = streams.read_position(state, rows=int)["rows"]

    def _row(self, index: int) -> np.ndarray:
        generator = np.random.default_rng(np.random.SeedSequence((*self._key, index)))
        return generator.integers(1, self._vocab_size, self._length, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class SyntheticTask:
    """A `core.types.Task` of random tokens, with the batches of `text.TextTask`."""

    vocab_size: int
    length: int
    num_streams: int

    @property
    def vocabulary(self) -> vocabularies.Numbers:
        """A vocabulary that formats ids as decimal numbers."""
        return vocabularies.Numbers(self.vocab_size)

    def spec(self, batch_size: int) -> BatchSpec:
        """Returns the fields of a global batch. Raises UserError if the streams do not divide it."""
        streams.rows_per_stream(batch_size, num_streams=self.num_streams)
        return streams.batch_spec(batch_size, length=self.length)

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        """Does nothing: random tokens need no preparation."""

    def train(self, layout: DataLayout, *, seed: int) -> Batches:
        """Returns an endless iterator of batches."""
        return self._batches(layout, (_TRAIN, seed))

    def evaluation(self, layout: DataLayout) -> Batches:
        """Returns an endless iterator of batches, the same at every call and different from those of training."""
        return self._batches(layout, (_VALIDATION, 0))

    def problems(self) -> list[str]:
        """Returns no problems: nothing can be missing."""
        return []

    def describe(self) -> str:
        """Returns one line for the run summary."""
        streams = units.counted(self.num_streams, "stream")
        return f"synthetic.random_tokens: ids below {self.vocab_size}, length {self.length}, {streams}"

    def fingerprint(self) -> str:
        """Returns a hash, equal on all hosts that read the same data."""
        return self.vocabulary.hash

    def _batches(self, layout: DataLayout, key: tuple[int, int]) -> Batches:
        def open_stream(index: int, rows: int) -> RandomStream:
            return RandomStream((*key, index), vocab_size=self.vocab_size, length=self.length, rows=rows)

        return streams.StreamBatches(
            layout,
            spec=self.spec(layout.batch_size),
            num_streams=self.num_streams,
            open_stream=open_stream,
            identity={"source": self.fingerprint(), "split": key[0], "seed": key[1]},
        )


def random_tokens(*, vocab_size: int, length: int, num_streams: int) -> SyntheticTask:
    """Returns a task of random tokens, determined by (seed, stream, index).

    Args:
      vocab_size: ids are 1 to vocab_size - 1.
      length: tokens per row.
      num_streams: number of data streams; must divide the batch size.

    Raises:
      UserError: a number is not an integer or too small.
    """
    for name, value, least in (("vocab_size", vocab_size, 2), ("length", length, 1), ("num_streams", num_streams, 1)):
        check_integer(value, where=f"synthetic.random_tokens.{name}", least=least)
    return SyntheticTask(vocab_size=vocab_size, length=length, num_streams=num_streams)
