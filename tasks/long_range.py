"""Generates synthetic rows whose last tokens can only be predicted from distant ones.

    retrieval       noise with one marked value somewhere; the answer to the question at the end is the value
    recall          pairs of keys and values, then noise; the answer to each key at the end is its value
    selective_copy  noise with values at random places; the answer to the question is all values in order

The loss covers only answers. `recall` is the associative recall of Arora et al. 2023 (Zoology); `selective_copy` is
that of Gu and Dao 2023 (Mamba).
"""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from core import units
from core.batches import BatchSpec
from core.errors import UserError, check_integer
from tasks import streams
from tasks.sampled import SampledTask
from tasks.text import vocabularies

KINDS = ("retrieval", "recall", "selective_copy")
_NOISE, _MARK, _QUESTION, _FIRST = 1, 2, 3, 4  # special ids; values start at _FIRST


@dataclasses.dataclass(frozen=True)
class LongRangeTask(SampledTask):
    """A `core.types.Task` of rows of one kind, made by `rows`."""

    kind: str
    values: int
    items: int
    length: int
    num_streams: int

    @functools.cached_property
    def vocabulary(self) -> vocabularies.Numbers:
        """Formats ids as decimal numbers: special ids, values, then the keys of `recall`."""
        return vocabularies.Numbers(_FIRST + self.values * (2 if self.kind == "recall" else 1))

    def spec(self, batch_size: int) -> BatchSpec:
        streams.rows_per_stream(batch_size, num_streams=self.num_streams)
        return streams.batch_spec(batch_size, length=self.length)

    def row(self, rng: np.random.Generator, *, is_training: bool) -> Mapping[str, np.ndarray]:
        """Returns a row; answers have weight 1, other targets 0."""
        del is_training
        tokens, answers = getattr(self, f"_{self.kind}")(rng)
        ones = np.ones(self.length, np.int32)
        return {
            "inputs": tokens[:-1],
            "targets": tokens[1:],
            "weights": answers[1:].astype(np.float32),
            "segment_ids": ones,
            "positions": np.arange(self.length, dtype=np.int32),
        }

    def _retrieval(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.full(self.length + 1, _NOISE, np.int32)
        place = rng.integers(0, self.length - 2)
        value = _FIRST + rng.integers(self.values)
        tokens[place : place + 2] = _MARK, value
        tokens[-2:] = _QUESTION, value
        return tokens, np.arange(self.length + 1) == self.length

    def _recall(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.full(self.length + 1, _NOISE, np.int32)
        values = _FIRST + rng.integers(self.values, size=self.items)
        keys = _FIRST + self.values + rng.choice(self.values, self.items, replace=False)
        tokens[0 : 2 * self.items : 2], tokens[1 : 2 * self.items : 2] = keys, values
        asked, start = rng.permutation(self.items), self.length + 1 - 2 * self.items
        tokens[start::2], tokens[start + 1 :: 2] = keys[asked], values[asked]
        places = np.arange(self.length + 1)
        return tokens, (places > start) & ((places - start) % 2 == 1)

    def _selective_copy(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.full(self.length + 1, _NOISE, np.int32)
        values = _FIRST + rng.integers(self.values, size=self.items)
        places = np.sort(rng.choice(self.length - self.items, self.items, replace=False))
        tokens[places] = values
        tokens[self.length - self.items] = _QUESTION
        tokens[-self.items :] = values
        return tokens, np.arange(self.length + 1) > self.length - self.items

    def describe(self) -> str:
        kind = f"{self.kind} of {units.counted(self.items, 'item')} among {self.values} values"
        return f"long_range.rows: {kind}, length {self.length}, {units.counted(self.num_streams, 'stream')}"


def rows(*, kind: str, length: int, num_streams: int, values: int = 16, items: int = 4) -> LongRangeTask:
    """Returns a task of rows of one kind.

    Args:
      kind: "retrieval", "recall" or "selective_copy".
      length: tokens per row.
      num_streams: number of data streams; divides the batch size.
      values: number of different values, and in `recall` of different keys.
      items: pairs in `recall`, values in `selective_copy`; not used by `retrieval`.

    Raises:
      UserError: `kind` is unknown, or a number is out of range.
    """
    if kind not in KINDS:
        raise UserError(f"long_range.rows.kind = {kind!r}: expected one of {', '.join(KINDS)}")
    numbers = (("length", length), ("num_streams", num_streams), ("values", values), ("items", items))
    for name, value in numbers:
        check_integer(value, where=f"long_range.rows.{name}", least=1)
    items = 1 if kind == "retrieval" else items
    if kind == "recall" and items > values:
        raise UserError(f"long_range.rows.items = {items}: expected at most values = {values}, the number of keys")
    least = {"retrieval": 4, "recall": 4 * items, "selective_copy": 2 * items + 1}[kind]
    if length < least:
        raise UserError(f"long_range.rows.length = {length}: {kind} of {items} needs at least {least} tokens")
    return LongRangeTask(kind=kind, values=values, items=items, length=length, num_streams=num_streams)
