"""SentencePiece vocabularies: an existing model, or one that a run trains on its own text when it first starts."""

import functools
import hashlib
import io
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from core.checkpoints import steps
from core.errors import Problem, UserError
from core.files import paths
from tasks.text.ids import PAD_ID, Vocabulary, before_end

TRAINING_SAMPLE_BYTES = 8 * 2**20
_LONGEST_SENTENCE_BYTES = 4096  # the trainer silently skips sentences above its max_sentence_length


class SentencePiece(Vocabulary):
    """An existing SentencePiece model, local or gs://, read at first use."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def of_model(cls, model: bytes) -> "SentencePiece":
        found = cls("")
        found.__dict__["_model"] = model
        return found

    @functools.cached_property
    def _model(self) -> bytes:
        try:
            return paths.resolve(self.path).read_bytes()
        except FileNotFoundError as error:
            raise UserError(f"no SentencePiece model at {self.path!r}: set VOCABULARY to an existing .model") from error

    @functools.cached_property
    def _processor(self) -> Any:
        import sentencepiece

        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=self._model)
        except RuntimeError as error:
            raise UserError(f"{self.path} is not a SentencePiece model: set VOCABULARY to a .model file") from error
        if processor.eos_id() < 0:
            raise UserError(f"{self.path}: the model has no end-of-document id; train it with eos_id=1")
        return processor

    @property
    def size(self) -> int:
        return self._processor.get_piece_size()

    @property
    def pad_id(self) -> int | None:
        return self._processor.pad_id() if self._processor.pad_id() >= 0 else None

    @property
    def eos_id(self) -> int:
        return self._processor.eos_id()

    @property
    def bos_id(self) -> int:
        return max(self._processor.bos_id(), 0)

    @property
    def hash(self) -> str:
        return hashlib.sha256(self._model).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        specials = {self._processor.pad_id(), self._processor.bos_id()}
        return self._processor.decode([i for i in before_end(ids, self) if i not in specials])

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        _ = self._processor

    def problems(self) -> list[str]:
        if not self.path:
            return [
                "VOCABULARY is not set: bind it to a SentencePiece model, e.g. --gin \"VOCABULARY = '/data/my.model'\""
            ]
        if not paths.is_remote(self.path) and not paths.resolve(self.path).is_file():
            said = f"no SentencePiece model at {self.path!r}"
            return [Problem(said, setting="VOCABULARY", file=self.path, fix="give an existing .model file")]
        return []

    def describe(self) -> str:
        if self.problems():
            return f"SentencePiece {self.path or '(VOCABULARY is not set)'} (absent)"
        return f"SentencePiece {self.path} ({self.size} ids, sha256 {self.hash[:12]})"


class TrainedSentencePiece(SentencePiece):
    """A SentencePiece model of `size` ids that host 0 trains once on the task's text."""

    pad_id = PAD_ID

    def __init__(self, size: int) -> None:
        super().__init__(path="")
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        """Trains a model on host 0 unless the run has a checkpoint, which was trained with one; the others read it.

        Without a checkpoint, a model there may be of other data, for which an earlier start was refused or stopped.

        Raises UserError if it is missing or changed.
        """
        folder = paths.resolve(run_dir) / "vocabulary"
        model, digest = folder / f"sentencepiece_{self._size}.model", folder / f"sentencepiece_{self._size}.sha256"

        def is_kept() -> bool:
            return digest.exists() and (self.path == str(model) or bool(steps.complete(folder.parent / steps.FOLDER)))

        if is_host_zero and not is_kept():
            trained = _train(sample(), self._size)
            _write(trained, model)
            paths.write_text_atomically(digest, hashlib.sha256(trained).hexdigest())
        if not digest.exists():
            raise UserError(
                f"no vocabulary at {model}: host 0 trains it first; is the run directory shared by all hosts?"
            )
        self.path = str(model)
        self.__dict__.pop("_model", None)
        self.__dict__.pop("_processor", None)
        expected = digest.read_text().strip()
        if self.hash != expected:
            raise UserError(
                f"{model} ({len(self._model):,} bytes) is not the model that was trained for this run: delete {folder} "
                "to train it again"
            )

    def problems(self) -> list[str]:
        return []

    def describe(self) -> str:
        state = f"sha256 {self.hash[:12]}" if self.path else "trained at the start of the run"
        return f"SentencePiece ({self._size} ids, {state})"

    @functools.cached_property
    def _model(self) -> bytes:
        if not self.path:
            raise UserError("the SentencePiece model is not trained yet: call the task's prepare(run_dir, ...) first")
        return paths.resolve(self.path).read_bytes()


def _write(model: bytes, to: Any) -> None:
    with tempfile.NamedTemporaryFile(suffix=".model") as file:
        file.write(model)
        file.flush()
        paths.copy_file(file.name, to=to)


def _sentences(documents: Iterable[str]) -> Iterator[str]:
    left = TRAINING_SAMPLE_BYTES
    for document in documents:
        for line in document.splitlines(keepends=True):
            for start in range(0, len(line), _LONGEST_SENTENCE_BYTES // 4):
                yield line[start : start + _LONGEST_SENTENCE_BYTES // 4].rstrip("\n")
        left -= len(document.encode())
        if left <= 0:
            return


def _train(documents: Iterable[str], size: int) -> bytes:
    """Trains a byte-pair model and returns it serialized; one thread makes it deterministic."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=filter(None, _sentences(documents)),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=_LONGEST_SENTENCE_BYTES + 1,
            num_threads=1,
            minloglevel=1,
            pad_id=PAD_ID,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
        )
    except RuntimeError as error:
        raise UserError(
            f"SentencePiece could not train {size} pieces on this text: {error}. Use more text or a smaller size, or a "
            "larger size if the text has too many different characters"
        ) from error
    return model.getvalue()
