"""Vocabularies: the constructors that a gin configuration names.

A vocabulary's size, special ids and hash are known before the first step. A model with too few embeddings, or a host
with another vocabulary file, is then an error. Bytes, numbers and trained models reserve id 0 for padding, so an id of
0 inside a document is an error; for a vocabulary with another `pad_id`, or none, 0 is an ordinary token. An id at or
above the size is always an error, never clipped.
"""

import builtins
import hashlib
from collections.abc import Callable, Iterable

from core.errors import UserError, check_text
from tasks.text.ids import PAD_ID, Vocabulary, before_end, check_ids


def check_fits(vocabulary: Vocabulary, *, vocab_size: int) -> None:
    """Checks that a model has an embedding for every id.

    Raises:
      UserError: the model's vocabulary is smaller than the data's.
    """
    if vocab_size < vocabulary.size:
        raise UserError(
            f"the model has vocab_size {vocab_size}, but {vocabulary.describe()} has {vocabulary.size} ids: "
            f"set VOCAB_SIZE = {vocabulary.size} (more is allowed) or take a smaller vocabulary; of a published model, "
            "take config.json and tokenizer.json from the same folder"
        )


class Bytes(Vocabulary):
    """UTF-8 bytes: id = byte + 3. Id 0 is padding, 1 the end of a document, 2 unknown."""

    size = 259
    pad_id = PAD_ID
    eos_id = 1
    bos_id = PAD_ID
    _offset = 3

    @property
    def hash(self) -> str:
        return hashlib.sha256(b"bytes: 3 special ids, then 256 bytes").hexdigest()

    def encode(self, text: str) -> list[int]:
        return [byte + self._offset for byte in text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        """Converts ids before the first end-of-document id to text; bytes that are not UTF-8 are skipped.

        Raises UserError for an id outside the vocabulary.
        """
        body = before_end(ids, self)
        kept = [i - self._offset for i in body if i >= self._offset]
        return builtins.bytes(kept).decode(errors="ignore")

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        """Does nothing."""

    def problems(self) -> list[str]:
        return []

    def describe(self) -> str:
        return "bytes (259 ids)"


class Numbers(Vocabulary):
    """Writes ids as decimal numbers, for data that is not text."""

    pad_id = PAD_ID
    eos_id = 1
    bos_id = PAD_ID

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    @property
    def hash(self) -> str:
        return hashlib.sha256(f"numbers below {self.size}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Converts numbers with white space between them.

        Raises UserError for a word that is not a number, or a number outside the vocabulary.
        """
        if wrong := [word for word in text.split() if not word.isdecimal()]:
            raise UserError(
                f"{wrong[0]!r} is no id of {self.describe()}: expected numbers with white space between them"
            )
        ids = [int(word) for word in text.split()]
        check_ids(ids, self)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Writes every id, also 1: here it is a number, and ends nothing.

        Raises UserError for an id outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        check_ids(ids, self)
        return " ".join(map(str, ids))

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        """Does nothing."""

    def problems(self) -> list[str]:
        return []

    def describe(self) -> str:
        return f"numbers ({self.size} ids)"


def bytes() -> Bytes:  # shadows the builtin, so that gin files can say `vocabularies.bytes()`
    """Returns the vocabulary of UTF-8 bytes: 256 bytes and 3 special ids."""
    return Bytes()


def sentencepiece(path: str | None = None) -> Vocabulary:
    """Returns the vocabulary of an existing SentencePiece model.

    Args:
      path: the model file, local or gs://. `problems` reports an error if it is None, or a local file that does not
        exist.

    Raises:
      UserError: `path` is not a string.
    """
    if path is not None and not isinstance(path, str):
        raise UserError(f"vocabularies.sentencepiece: path is {path!r}, expected the path of a .model file as a string")
    from tasks.text.sentencepieces import SentencePiece

    return SentencePiece(path or "")


def tokenizer(folder: str) -> Vocabulary:
    """Returns the tokenizer of a published model.

    Args:
      folder: the folder with tokenizer.json and tokenizer_config.json: local, gs:// or hf://OWNER/NAME.

    Raises:
      UserError: `folder` is not a string.
    """
    from tasks.text.tokenizer_folders import FolderTokenizer

    check_text(folder, where="vocabularies.tokenizer: folder")
    return FolderTokenizer(folder)


def named(name: str | None) -> Vocabulary:
    """Returns a vocabulary by its name.

    Args:
      name: `bytes`, a SentencePiece model (.model, local or gs://), or the folder of a published model (local, gs:// or
        hf://OWNER/NAME). None is an error, which `problems` reports.

    Raises:
      UserError: `name` is not a string.
    """
    if name == "bytes":
        return bytes()
    return sentencepiece(name) if not name or str(name).endswith(".model") else tokenizer(name)


def trained_sentencepiece(size: int) -> Vocabulary:
    """Returns a SentencePiece vocabulary of `size` ids, which a run trains before its first step.

    Raises:
      UserError: `size` is not an integer of at least 300; the first 259 ids are 3 special ids and 256 bytes.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 300:
        raise UserError(f"vocabularies.trained_sentencepiece: size is {size!r}, expected an integer of at least 300")
    from tasks.text.sentencepieces import TrainedSentencePiece

    return TrainedSentencePiece(size)
