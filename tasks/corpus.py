"""The interface of a source of documents, and the description of one stream of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from tasks.ids import Vocabulary
from tasks.streams import Stream


class StreamSpec(NamedTuple):
    """Describes one stream of one split.

    Attributes:
      split: "train" or "validation".
      index: this stream's index among `num_streams`.
      num_streams: number of streams that the split is divided into.
      rows: R, rows per element of the stream.
      length: T, tokens per row.
      seed: shuffles the documents; None reads them in order.
      vocabulary: converts text to ids; None if only texts are read.
    """

    split: str
    index: int
    num_streams: int
    rows: int
    length: int
    seed: int | None
    vocabulary: Vocabulary | None


class Corpus(Protocol):
    """A source of documents, as a task uses it."""

    def open_stream(self, spec: StreamSpec) -> Stream:
        """Opens one stream at its start, and imports the library that reads the source."""

    def sample_texts(self) -> Iterator[str]:
        """Yields each training document once, in a fixed order."""

    def problems(self) -> list[str]:
        """Returns the problems that can be found without opening the data."""

    def named_files(self) -> tuple[str, ...]:
        """Returns file patterns and folders as the user wrote them."""

    def describe(self) -> str:
        """Returns a short description for the run summary, without secrets."""

    def fingerprint(self) -> str:
        """Returns a hexadecimal hash, equal for sources that give the same documents in the same order."""
