"""The interface of a vocabulary, and the checks of ids that all vocabularies share."""

import datetime
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from core.errors import UserError
from core.types import attribute, can

PAD_ID = 0  # of the vocabularies defined here
_CONTEXT_IDS = 16  # of a prompt, which are decoded with its continuation


class Vocabulary(Protocol):
    """Converts text to ids and back.

    Rows are padded with 0 whatever `pad_id` is: `segment_ids` and `weights` tell what is padding.
    """

    @attribute
    def size(self) -> int:
        """The number of ids, including special ids."""

    @attribute
    def pad_id(self) -> int | None:
        """0 if id 0 is reserved for padding, so that no document may contain it; None if 0 is an ordinary token."""

    @attribute
    def eos_id(self) -> int:
        """The end-of-document id."""

    @attribute
    def bos_id(self) -> int:
        """The begin-of-text id, the first input of every segment; 0 if the vocabulary has none."""

    @attribute
    def hash(self) -> str:
        """A hexadecimal hash, equal exactly for equal mappings from text to ids."""

    def encode(self, text: str) -> list[int]:
        """Converts text to ids, without an end-of-document id."""

    def decode(self, ids: Iterable[int]) -> str:
        """Converts ids to text, up to the first end-of-document id; special ids give no text."""

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        """Makes the vocabulary usable: first called on host 0, then on the others.

        Args:
          run_dir: the run directory, where a trained vocabulary is stored.
          is_host_zero: whether this is host 0, which alone writes files.
          sample: yields training documents.
        """

    def problems(self) -> list[str]:
        """Returns the problems that can be found without opening the data."""

    def describe(self) -> str:
        """Returns a short description for the run summary."""


class Encodes(Protocol):
    """Any vocabulary, recognized without reading its model."""

    def encode(self, text: str) -> list[int]:
        """Converts text to ids."""

    def describe(self) -> str:
        """Returns a short description."""


class EncodesBatches(Protocol):
    """A vocabulary that converts many texts faster than one by one."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns what `encode` does of each text."""


class ReadsFile(Protocol):
    """A vocabulary that is read from a file."""

    path: str  # "" if it is not known


class IsDefinedByTask(Protocol):
    """A vocabulary that a registered seqio task brings: known once its cache is read, or its module imported.

    Attributes:
      corpus: the examples of the task.
    """

    corpus: Any


class ListsStops(Protocol):
    """A vocabulary that has more ids that end generation than the end-of-document id.

    Attributes:
      stop_ids: all of them, the end-of-document id included.
    """

    stop_ids: tuple[int, ...]


class FormatsChats(Protocol):
    """A vocabulary with a chat template."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        date: datetime.date | None,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """Formats a conversation.

        Args:
          messages: each with a role and its content.
          add_generation_prompt: whether the text ends where the next answer begins.
          date: for templates that print the date; None: today.
          tools: descriptions of functions that the model may call, as JSON schemas.
          documents: what the model may quote, each with a title and a text.
        """

    def marked_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        date: datetime.date | None,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[str, list[tuple[int, int]]] | None:
        """Formats a conversation as `chat` does, without a prompt for an answer.

        Args:
          messages: the conversation, oldest message first.
          date: the date that the template may print.
          tools, documents: lists of objects that the template gets, or None.

        Returns:
          The text and the ranges of characters that the template marks as answers; None if it does not mark them.
        """

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a text and the range of characters that each covers."""


class ReadsSpecials(Protocol):
    """A vocabulary that converts special tokens which are written in a text, such as <s>, to their ids."""

    @attribute
    def added_ids(self) -> frozenset[int]:
        """Special and added tokens, which a text has only where they are written in it."""


class ChatVocabulary(Vocabulary, FormatsChats, ReadsSpecials, Protocol):
    """The vocabulary methods that convert a conversation to ids."""

    @attribute
    def turn_ends(self) -> tuple[int, ...]:
        """The ids that end an answer in the format of the chat template; may be empty."""

    def token_of(self, token_id: int) -> str:
        """Returns a token as it is written, such as <|im_end|>."""

    @attribute
    def begins_with_bos(self) -> bool:
        """True if a text begins with the begin-of-text id."""


def lowest_id(vocabulary: Vocabulary) -> int:
    """Returns the lowest id that a document may contain: 1 if id 0 is reserved for padding, otherwise 0."""
    return 1 if vocabulary.pad_id == 0 else 0


def with_bos(ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Returns the ids of a text after the begin-of-text id, not repeated if the text has it, written as <s>."""
    has_it = list(ids[:1]) == [vocabulary.bos_id] and can(vocabulary, ReadsSpecials)
    return list(ids) if has_it else [vocabulary.bos_id, *ids]


def with_eos(ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Returns the ids of a text and the end-of-document id, which is not repeated if the text has it, as </s>."""
    has_it = list(ids[-1:]) == [vocabulary.eos_id] and can(vocabulary, ReadsSpecials)
    return list(ids) if has_it else [*ids, vocabulary.eos_id]


def stop_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Returns the ids that end generation."""
    return vocabulary.stop_ids if can(vocabulary, ListsStops) else (vocabulary.eos_id,)


def before_end(ids: Iterable[int], vocabulary: Vocabulary) -> list[int]:
    """Returns the ids before the first end-of-document id. Raises UserError for an id outside the vocabulary."""
    ids = [int(i) for i in ids]
    check_ids(ids, vocabulary)
    return list(itertools.takewhile(lambda i: i != vocabulary.eos_id, ids))


def decode_continuation(vocabulary: Vocabulary, prompt: Iterable[int], ids: Iterable[int]) -> str:
    """Converts ids that continue a prompt to the text that they add to it.

    Decoders such as those of Llama 2 strip a space at the beginning of a text, which a continuation must keep. So some
    ids of the prompt are decoded too, and their text is cut off.

    Args:
      vocabulary: vocabulary of the ids.
      prompt: ids before the continuation; may be empty.
      ids: the continuation.
    """
    ids, before = list(ids), [int(i) for i in prompt][-_CONTEXT_IDS:]
    ends = [at for at, i in enumerate(before, 1) if i == vocabulary.eos_id or not 0 <= i < vocabulary.size]
    before = before[ends[-1] :] if ends else before  # decoding ends at an end-of-document id
    head, whole = vocabulary.decode(before), vocabulary.decode([*before, *ids])
    shared = head.rstrip("\ufffd")  # the last character may be completed by the continuation
    return whole[len(shared) :] if whole.startswith(shared) else vocabulary.decode(ids)


def check_ids(ids: Sequence[int], vocabulary: Vocabulary) -> None:
    """Raises UserError for an id outside the vocabulary."""
    bad = next((i for i in ids if not 0 <= i < vocabulary.size), None)
    if bad is not None:
        raise UserError(f"id {bad} is outside {vocabulary.describe()}: expected 0 to {vocabulary.size - 1}")
