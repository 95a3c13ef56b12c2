"""The interface of vocabularies, and checks of ids that all vocabularies share."""

import datetime
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from core.errors import UserError
from core.types import attribute, can

PAD_ID = 0  # padding in the vocabularies defined in tasks/text
_CONTEXT_IDS = 16  # ids at the end of a prompt that are decoded with its continuation


class Vocabulary(Protocol):
    """Converts text to ids and back."""

    @attribute
    def size(self) -> int:
        """The number of ids, including special ids."""

    @attribute
    def pad_id(self) -> int | None:
        """0 if id 0 is reserved for padding; otherwise None or another id."""

    @attribute
    def eos_id(self) -> int:
        """The end-of-document id; -1 if there is none."""

    @attribute
    def bos_id(self) -> int:
        """The begin-of-text id; 0 or the end-of-document id if there is none."""

    @attribute
    def hash(self) -> str:
        """A hexadecimal hash of the vocabulary."""

    def encode(self, text: str) -> list[int]:
        """Converts text to ids; adds no begin-of-text or end-of-document id."""

    def decode(self, ids: Iterable[int]) -> str:
        """Converts ids to text, up to the first end-of-document id."""

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        """Makes the vocabulary usable; called first on host 0, then on the others.

        A trained vocabulary is stored in `run_dir`, where only host 0 writes. `sample` yields training documents.
        """

    def problems(self) -> list[str]:
        """Returns the problems that can be found without opening the data."""

    def describe(self) -> str:
        """Returns a short description for the run summary."""


class Encodes(Protocol):
    """Two methods that every vocabulary has, by which `can` knows one without reading a model file."""

    def encode(self, text: str) -> list[int]:
        """Converts text to ids."""

    def describe(self) -> str:
        """Returns a short description."""


class EncodesBatches(Protocol):
    """A vocabulary that converts many texts faster than one by one."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, as `encode` does."""


class ReadsFile(Protocol):
    """A vocabulary that is read from a file or folder."""

    path: str  # "" if unknown


class IsDefinedByTask(Protocol):
    """A vocabulary that a registered seqio task defines.

    Attributes:
      corpus: the examples of the task.
    """

    corpus: Any


class ListsStops(Protocol):
    """A vocabulary with several ids that end generation.

    Attributes:
      stop_ids: these ids, including the end-of-document id.
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
        """Formats a conversation. Raises UserError if the chat template is missing or fails.

        Args:
          messages: each with a role and its content.
          add_generation_prompt: whether the text ends with the beginning of the next answer.
          date: for templates that print it; None: today.
          tools: JSON schemas of functions that the model may call.
          documents: documents that the model may quote.
        """

    def marked_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        date: datetime.date | None,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[str, list[tuple[int, int]]] | None:
        """Returns a formatted conversation, and the ranges of characters marked as answers.

        None if the template does not mark them.

        Args:
          messages, date, tools, documents: as in `chat`.
        """

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a text, and the range of characters that each id covers."""


class ReadsSpecials(Protocol):
    """A vocabulary that converts special tokens written in a text, such as <s>, to their ids."""

    @attribute
    def added_ids(self) -> frozenset[int]:
        """The ids of special and added tokens."""


class ChatVocabulary(Vocabulary, FormatsChats, ReadsSpecials, Protocol):
    """The vocabulary methods that convert a conversation to ids."""

    @attribute
    def turn_ends(self) -> tuple[int, ...]:
        """The ids that end an answer in the chat template's format; may be empty."""

    def token_of(self, token_id: int) -> str:
        """Returns the text of a token, such as <|im_end|>."""

    @attribute
    def begins_with_bos(self) -> bool:
        """Whether a text begins with the begin-of-text id."""


def lowest_id(vocabulary: Vocabulary) -> int:
    """Returns the lowest id that a document may contain."""
    return 1 if vocabulary.pad_id == 0 else 0


def with_bos(ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Prepends the begin-of-text id, unless the text itself begins with it (written as <s>)."""
    has_it = list(ids[:1]) == [vocabulary.bos_id] and can(vocabulary, ReadsSpecials)
    return list(ids) if has_it else [vocabulary.bos_id, *ids]


def with_eos(ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Appends the end-of-document id, unless the text itself ends with it (written as </s>)."""
    has_it = list(ids[-1:]) == [vocabulary.eos_id] and can(vocabulary, ReadsSpecials)
    return list(ids) if has_it else [*ids, vocabulary.eos_id]


def stop_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Returns the ids that end generation."""
    return vocabulary.stop_ids if can(vocabulary, ListsStops) else (vocabulary.eos_id,)


def before_end(ids: Iterable[int], vocabulary: Vocabulary) -> list[int]:
    """Returns the ids before the first end-of-document id."""
    ids = [int(i) for i in ids]
    check_ids(ids, vocabulary)
    return list(itertools.takewhile(lambda i: i != vocabulary.eos_id, ids))


def decode_continuation(vocabulary: Vocabulary, prompt: Iterable[int], ids: Iterable[int]) -> str:
    """Converts ids that continue a prompt to the text that they add.

    Decoders such as Llama 2's strip a space at the beginning of a text, so the last ids of the prompt are decoded, too.
    """
    ids, before = list(ids), [int(i) for i in prompt][-_CONTEXT_IDS:]
    ends = [at for at, i in enumerate(before, 1) if i == vocabulary.eos_id or not 0 <= i < vocabulary.size]
    before = before[ends[-1] :] if ends else before  # decoding ends at an end-of-document id
    head, whole = vocabulary.decode(before), vocabulary.decode([*before, *ids])
    shared = head.rstrip("\ufffd")  # the continuation may complete the last character
    return whole[len(shared) :] if whole.startswith(shared) else vocabulary.decode(ids)


def check_ids(ids: Sequence[int], vocabulary: Vocabulary) -> None:
    """Raises UserError for an id outside the vocabulary."""
    bad = next((i for i in ids if not 0 <= i < vocabulary.size), None)
    if bad is not None:
        raise UserError(f"id {bad} is outside {vocabulary.describe()}: expected 0 to {vocabulary.size - 1}")
