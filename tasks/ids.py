"""What every vocabulary is, and the checks of ids that all share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from core.errors import UserError

PAD_ID = 0


class Vocabulary(Protocol):
    """What a task needs of a vocabulary. `size` counts every id, special ids included."""

    size: int
    pad_id: int

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""

    @property
    def bos_id(self) -> int:
        """The input at the first place of a document; 0 where the vocabulary has no such id."""

    @property
    def hash(self) -> str:
        """Hexadecimal; equal exactly when the mapping from text to ids is equal."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without the end of document."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids up to the first end of document; special ids give no text."""

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        """Make the vocabulary usable; host 0 first. `sample` yields training documents."""

    def problems(self) -> list[str]:
        """What is wrong with it, found without opening data."""

    def describe(self) -> str:
        """A few words for the card of a run."""

    def seqio(self) -> Any:
        """The same vocabulary as a seqio object. Imports TensorFlow."""


class HasSeqio(Protocol):
    """A vocabulary that seqio can use."""

    def seqio(self) -> Any:
        """The same vocabulary as a seqio object. Imports TensorFlow."""


class ReadsFile(Protocol):
    """A vocabulary that is read from a file."""

    path: str | None


def before_end(ids: Iterable[int], vocabulary: Vocabulary) -> list[int]:
    """The ids before the first end of document."""
    ids = [int(i) for i in ids]
    check_ids(ids, vocabulary)
    return list(itertools.takewhile(lambda i: i != vocabulary.eos_id, ids))


def check_ids(ids: Sequence[int], vocabulary: Vocabulary) -> None:
    """Raises ValueError for an id that the vocabulary does not have."""
    bad = next((i for i in ids if not 0 <= i < vocabulary.size), None)
    if bad is not None:
        raise UserError(f"id {bad} is outside {vocabulary.describe()}: expected 0 to {vocabulary.size - 1}")
