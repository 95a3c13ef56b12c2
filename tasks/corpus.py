"""A source of documents as a task sees it, and one stream of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from tasks.ids import Vocabulary
from tasks.streams import Stream


class StreamSpec(NamedTuple):
    """One stream of one split.

    Attributes:
      split: "train" or "validation".
      index: which of `num_streams`.
      rows: R, rows of each element of the stream.
      length: T.
      seed: of the order of documents; None reads them in order.
      vocabulary: None where only texts are read.
    """

    split: str
    index: int
    num_streams: int
    rows: int
    length: int
    seed: int | None
    vocabulary: Vocabulary | None


class Corpus(Protocol):
    """What a task needs of a source of documents."""

    def open_stream(self, spec: StreamSpec) -> Stream:
        """One stream at its start. Imports what reads the source."""

    def sample_texts(self) -> Iterator[str]:
        """Training documents, in a fixed order, once each."""

    def problems(self) -> list[str]:
        """What is wrong, as far as it shows without opening the data."""

    def named_files(self) -> tuple[str, ...]:
        """Patterns and folders as the user named them."""

    def describe(self) -> str:
        """A few words for the card of a run. Holds no secret."""

    def fingerprint(self) -> str:
        """Hexadecimal; equal where the same documents come in the same order."""
