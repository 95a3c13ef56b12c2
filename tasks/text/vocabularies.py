"""Vocabularies: the constructors that a gin configuration names."""

import builtins
import hashlib
from collections.abc import Callable, Iterable

from core.errors import UserError, check_text
from tasks.text.ids import PAD_ID, Vocabulary, before_end, check_ids


def check_fits(vocabulary: Vocabulary, *, vocab_size: int) -> None:
    """Raises UserError if a model has fewer embeddings than the vocabulary has ids."""
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
    eos_id = -1  # 1 is a number, as all ids are
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
        if wrong := [word for word in text.split() if not word.isdecimal()]:
            raise UserError(
                f"{wrong[0]!r} is no id of {self.describe()}: expected numbers with white space between them"
            )
        ids = [int(word) for word in text.split()]
        check_ids(ids, self)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Writes every id, also 1: here it is a number, and ends nothing."""
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
    """Returns the vocabulary of an existing SentencePiece model, local or gs://.

    Raises UserError if `path` is not text.
    """
    if path is not None and not isinstance(path, str):
        raise UserError(f"vocabularies.sentencepiece: path is {path!r}, expected the path of a .model file as a string")
    from tasks.text.sentencepieces import SentencePiece

    return SentencePiece(path or "")


def tokenizer(folder: str) -> Vocabulary:
    """Returns the tokenizer of a published model.

    `folder` has tokenizer.json and tokenizer_config.json: local, gs:// or hf://OWNER/NAME.
    """
    from tasks.text.tokenizer_folders import FolderTokenizer

    check_text(folder, where="vocabularies.tokenizer: folder")
    return FolderTokenizer(folder)


def named(name: str | None) -> Vocabulary:
    """Returns a vocabulary by its name.

    `name` is `bytes`, a SentencePiece model (.model), or the folder of a published model. With None, `problems` of the
    result says that VOCABULARY is not set.
    """
    if name == "bytes":
        return bytes()
    return sentencepiece(name) if not name or str(name).endswith(".model") else tokenizer(name)


def trained_sentencepiece(size: int) -> Vocabulary:
    """Returns a SentencePiece vocabulary of `size` ids, which a run trains before its first step.

    Raises UserError if `size` is not an integer of at least 300.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 300:
        raise UserError(f"vocabularies.trained_sentencepiece: size is {size!r}, expected an integer of at least 300")
    from tasks.text.sentencepieces import TrainedSentencePiece

    return TrainedSentencePiece(size)
