"""Text tasks: the constructors that a gin configuration names.

A document becomes ids followed by an end-of-document id, split into chunks of at most `length` ids, which are packed
into rows; neither attention nor targets cross the boundaries of a chunk.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from core import units
from core.batches import BatchSpec, fingerprint_of
from core.errors import Problem, UserError, check_integer, check_text
from core.files import paths
from core.types import Batches, CountsTokens, DataLayout, DefinesMetrics, OwnMetrics, can, missing
from tasks import streams
from tasks.text import vocabularies
from tasks.text.document_streams import DocumentSource
from tasks.text.documents import (
    Corpus,
    FillsCache,
    HashesContent,
    HoldsOut,
    PacksItsOwnWay,
    StreamSpec,
    TriesExamples,
)
from tasks.text.ids import ChatVocabulary, Encodes, FormatsChats, IsDefinedByTask, ReadsFile, Vocabulary
from tasks.text.text_files import TextFiles, python_library

if TYPE_CHECKING:
    from tasks.text.chat_files import ChatFiles

PYTHON_SOURCE = "renga.python_source"
# Sources of Renga's own seqio tasks by name; `tasks.text.registered` registers these tasks with seqio.
SHIPPED: Mapping[str, Callable[[], DocumentSource]] = {PYTHON_SOURCE: python_library}


@dataclasses.dataclass(frozen=True)
class TextTask:
    """A `core.types.Task` that reads text from one source with one vocabulary.

    Attributes:
      corpus: the source of documents.
      vocabulary: converts text to ids.
      length: tokens per row.
      num_streams: number of data streams; divides the batch size.
      evaluation_ends: whether an evaluation ends by itself.
    """

    corpus: Corpus
    vocabulary: Vocabulary
    length: int
    num_streams: int
    evaluation_ends: ClassVar[bool] = True

    def spec(self, batch_size: int) -> BatchSpec:
        """Returns the fields of a global batch."""
        streams.rows_per_stream(batch_size, num_streams=self.num_streams)
        return streams.batch_spec(batch_size, length=self.length)

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        """Makes the data and the vocabulary usable; called on host 0 first, then on all others.

        Raises UserError if training data are for validation, too.
        """
        self.require_apart()
        if can(self.corpus, FillsCache):
            self.corpus.fill()
        self.vocabulary.prepare(run_dir, is_host_zero=is_host_zero, sample=self.corpus.sample_texts)

    def train(self, layout: DataLayout, *, seed: int) -> Batches:
        """Returns an endless iterator over the training split, shuffled with `seed`."""
        return self._batches(layout, seed)

    def evaluation(self, layout: DataLayout) -> Batches:
        """Returns batches of one pass over the validation split, unshuffled."""
        spec = StreamSpec("validation", 0, 1, 1, self.length, None, self.vocabulary, once=True)
        return streams.PassBatches(layout, spec=self.spec(layout.batch_size), stream=self.corpus.open_stream(spec))

    def problems(self) -> list[str]:
        """Returns the problems that can be found before a run."""
        found = self.corpus.problems() or self._overlaps(remote=False)
        return [*found, *self.vocabulary.problems()]

    def require_apart(self) -> None:
        """Raises UserError if training data are for validation, too; buckets are listed."""
        if found := self._overlaps(remote=True):
            raise UserError("\n".join(found))

    def _overlaps(self, *, remote: bool) -> list[Problem]:
        return self.corpus.overlaps(remote=remote) if can(self.corpus, HoldsOut) else []

    def example_problems(self) -> list[str]:
        """Tries examples of sources that run the user's code; returns the problems."""
        return self.corpus.example_problems(self.length) if can(self.corpus, TriesExamples) else []

    def named_files(self) -> tuple[str, ...]:
        """Returns patterns, files and folders as the user wrote them."""
        model = _file(self.vocabulary)
        return (*self.corpus.named_files(), *((model,) if model else ()))

    def describe(self) -> str:
        """Returns one line for the run summary."""
        return (
            f"{self.corpus.describe()}; {self.vocabulary.describe()}; length {self.length}, "
            f"{units.counted(self.num_streams, 'stream')}"
        )

    def begins_with_bos(self) -> bool:
        """Returns whether a text begins with the begin-of-text id."""
        return True

    def stop_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a text."""
        return (self.vocabulary.eos_id,)

    def own_metrics(self, most: int) -> OwnMetrics | None:
        """Returns the metrics of seqio tasks, on at most `most` examples; None for other sources."""
        return self.corpus.own_metrics(most) if can(self.corpus, DefinesMetrics) else None

    def train_tokens(self) -> int | None:
        """Returns the number of tokens of the training split; None if it is not known."""
        return self.corpus.train_tokens() if can(self.corpus, CountsTokens) else None

    def fingerprint(self) -> str:
        """Returns a hash that is equal on hosts that read the same documents."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        listing = self.corpus.fingerprint()
        if not can(self.corpus, HashesContent):
            return listing
        return fingerprint_of(listing, self.corpus.content_hash())

    @property
    def _packing(self) -> int:
        """Version of how rows are packed; a position that was saved with another version is refused."""
        return self.corpus.packing if can(self.corpus, PacksItsOwnWay) else 2

    def _batches(self, layout: DataLayout, seed: int) -> Batches:
        def open_stream(index: int, rows: int) -> streams.Stream:
            spec = StreamSpec("train", index, self.num_streams, rows, self.length, seed, self.vocabulary)
            return self.corpus.open_stream(spec)

        source, vocabulary = self.fingerprint(), self.vocabulary.hash
        return streams.StreamBatches(
            layout,
            spec=self.spec(layout.batch_size),
            num_streams=self.num_streams,
            open_stream=open_stream,
            identity={
                "source": source,
                "vocabulary": vocabulary,
                "split": "train",
                "seed": seed,
                "packing": self._packing,
            },
        )


@dataclasses.dataclass(frozen=True)
class ChatTask(TextTask):
    """A `TextTask` of conversations, which the chat template of the vocabulary formats."""

    corpus: "ChatFiles"
    vocabulary: ChatVocabulary

    def example_problems(self) -> list[str]:
        from tasks.text import chat_files

        if chat := self.corpus.first_conversation():
            try:
                chat_files.segment(chat, self.vocabulary)
            except UserError as error:
                return [f"text.chats: {error}"]
        return []

    def describe(self) -> str:
        if self.vocabulary.problems():
            return super().describe()
        ends = ", ".join(map(self.vocabulary.token_of, self.vocabulary.turn_ends))
        if not ends and (self.corpus.problems() or not self.corpus.first_conversation()):
            return super().describe()
        none = "no token, so generation does not stop after them: let the chat_template write eos_token there"
        return f"{super().describe()}; answers end with {ends or none}"

    def begins_with_bos(self) -> bool:
        return self.vocabulary.begins_with_bos

    def stop_ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys([self.vocabulary.eos_id, *self.vocabulary.turn_ends]))


def python_source(*, length: int, num_streams: int, vocabulary: Vocabulary | None = None) -> TextTask:
    """Returns a task of the source files of Python's standard library.

    About 5% of the files are for validation.

    Args:
      length: tokens per row.
      num_streams: number of data streams; divides the batch size.
      vocabulary: None: bytes.
    """
    return _task("python_source", SHIPPED[PYTHON_SOURCE](), (length, num_streams, vocabulary))


def files(
    *,
    train: str | Sequence[str] | None,
    validation: str | Sequence[str] | None = None,
    field: str = "text",
    length: int,
    num_streams: int,
    vocabulary: Vocabulary | None = None,
) -> TextTask:
    """Returns a task that reads .txt, .jsonl or .parquet files.

    A document is a .txt file, a line of .jsonl, or a row of .parquet.

    Args:
      train: patterns (`/data/*.txt`, `gs://bucket/part-*.jsonl.zst`); .txt and .jsonl may be compressed (.gz, .zst,
        .bz2). None: an error, which `problems` reports.
      validation: patterns. None: about 5% of the files, lines or rows.
      field: the JSON key, or the column, that has the text.
      length: tokens per row.
      num_streams: number of data streams; divides the batch size.
      vocabulary: None: bytes.
    """
    check_text(field, where="text.files.field")
    corpus = TextFiles(_patterns(train, "files.train"), _patterns(validation, "files.validation"), field)
    return _task("files", corpus, (length, num_streams, vocabulary))


def chats(
    *,
    train: str | Sequence[str] | None,
    validation: str | Sequence[str] | None = None,
    length: int,
    num_streams: int,
    vocabulary: Vocabulary,
) -> TextTask:
    """Returns a task for fine-tuning on conversations, with a loss that covers only the answers.

    Args:
      train: patterns of .jsonl files. Each line has `messages` (a list of `role` and `content`), which the vocabulary's
        chat template formats, with optional `tools` and `documents`; or `prompt` and `completion`. None: an error,
        which `problems` reports.
      validation: patterns. None: about 5% of the lines.
      length: tokens per row. Longer conversations are cut, and skipped if no token of an answer is left.
      num_streams: number of data streams; divides the batch size.
      vocabulary: the tokenizer of a published model.

    Raises:
      UserError: `vocabulary` is not a published model's, or another argument is invalid.
    """
    if not can(vocabulary, FormatsChats):
        raise UserError(
            f"text.chats.vocabulary is {vocabulary!r}, which has no chat template: use @vocabularies.tokenizer()"
        )
    from tasks.text.chat_files import ChatFiles

    corpus = ChatFiles(_patterns(train, "chats.train"), _patterns(validation, "chats.validation"), num_streams)
    return _task("chats", corpus, (length, num_streams, vocabulary), kind=ChatTask)


def tfds(
    *,
    name: str,
    split: str = "train",
    validation_split: str = "validation",
    field: str = "text",
    data_dir: str | None = None,
    length: int,
    num_streams: int,
    vocabulary: Vocabulary | None = None,
) -> TextTask:
    """Returns a task that reads a TensorFlow Datasets dataset, which `tfds build` has prepared.

    Args:
      name: such as `c4/en:3.1.0`.
      split: the training split; slices such as `train[1%:]` are allowed.
      validation_split: the split for evaluation.
      field: the feature that holds the text.
      data_dir: the folder of datasets, local or gs://, which all hosts can read; None: TensorFlow Datasets' own.
      length: tokens per row.
      num_streams: number of data streams; divides the batch size.
      vocabulary: None: bytes.
    """
    for argument, value in {"name": name, "split": split, "validation_split": validation_split, "field": field}.items():
        check_text(value, where=f"text.tfds.{argument}")
    from tasks.text.tfds_source import Tfds

    corpus = Tfds(name, split, validation_split, field, data_dir)
    return _task("tfds", corpus, (length, num_streams, vocabulary))


def huggingface(
    *,
    name: str,
    split: str = "train",
    validation_split: str = "validation",
    field: str = "text",
    streaming: bool = True,
    where: Mapping[str, str | Sequence[str]] | None = None,
    length: int,
    num_streams: int,
    vocabulary: Vocabulary | None = None,
) -> TextTask:
    """Returns a task that reads a dataset from the Hugging Face hub; needs the package `datasets`.

    The token for gated datasets is taken from the environment variable HF_TOKEN.

    Args:
      name: `owner/dataset` or `owner/dataset:configuration`.
      split: the training split.
      validation_split: the split for evaluation.
      field: the column that holds the text.
      streaming: whether to read over the network during training; otherwise the dataset is downloaded first.
      where: keeps only documents with one of these values in each column: `{'lang': ('Python', 'Go')}`. None: all.
      length: tokens per row.
      num_streams: number of data streams; divides the batch size.
      vocabulary: None: bytes.

    Raises:
      UserError: an argument has the wrong type or is out of range.
    """
    for argument, value in {"name": name, "split": split, "validation_split": validation_split, "field": field}.items():
        check_text(value, where=f"text.huggingface.{argument}")
    if not isinstance(streaming, bool):
        raise UserError(f"text.huggingface.streaming is {streaming!r}, expected True or False")
    from tasks.text.hub_source import HuggingFace

    asked = tuple((c, (v,) if isinstance(v, str) else v) for c, v in (where or {}).items())
    for column, values in asked:
        if not isinstance(values, Sequence) or not all(isinstance(value, str) for value in values):
            raise UserError(f"text.huggingface.where: {column!r}: {values!r}: expected a text, or several")
    chosen = tuple((column, tuple(values)) for column, values in asked)
    corpus = HuggingFace(name, split, validation_split, field, streaming, chosen)
    return _task("huggingface", corpus, (length, num_streams, vocabulary))


def seqio(
    *,
    name: str,
    module: str | None = None,
    cache: str | None = None,
    inputs_length: int | None = None,
    epochs: int | None = None,
    live: bool = False,
    vocabulary: Vocabulary | None = None,
    length: int,
    num_streams: int,
) -> TextTask:
    """Returns a task that reads a registered seqio task or mixture for decoders.

    The task's own preprocessors make `targets`, or `inputs` and `targets`. In a row, the targets follow the inputs, and
    the loss covers only the targets.

    Unless `live` is set, the first start of a run writes your own task to a token cache, which later starts read.

    Args:
      name: name of the seqio task or mixture.
      module: the Python module that registers it; None: one of Renga's own tasks.
      cache: the folder of the token cache, local or gs://. None: a folder in `runs/seqio`, of each host unless hosts
        share the workspace.
      inputs_length: maximum number of ids of `inputs` in a row; targets get the rest. None: the task has no `inputs`.
      epochs: number of epochs to cache if preprocessors draw random numbers. None: they must draw none.
      live: whether to read the task with tf.data during the run. A resumed run then needs the same version of
        TensorFlow.
      vocabulary: for Renga's own tasks; None: bytes, or the vocabulary of your own task's features.
      length: tokens per row.
      num_streams: number of data streams; divides the batch size.

    Raises:
      UserError: an argument is missing, out of range, or not for this task.
    """
    for argument, value in {"name": name, "module": module or name, "cache": cache or name}.items():
        check_text(value, where=f"text.seqio.{argument}")
    check_integer(length, where="text.seqio.length", least=2)
    if epochs is not None:
        check_integer(epochs, where="text.seqio.epochs", least=1)
    if inputs_length is not None:
        check_integer(inputs_length, where="text.seqio.inputs_length", least=1)
        if inputs_length >= length:
            raise UserError(f"text.seqio.inputs_length is {inputs_length}, expected less than the length {length}")
    if name in SHIPPED and module is None:
        if cache or inputs_length or epochs or live:
            raise UserError(f"text.seqio: {name} needs no cache: leave out cache, inputs_length, epochs and live")
        return _task("seqio", SHIPPED[name](), (length, num_streams, vocabulary))
    if vocabulary is not None:
        raise UserError(f"text.seqio.vocabulary: {name} has the vocabulary of its output features; leave it out")
    return _registered(name, module, cache, inputs_length, epochs, (length, num_streams), live=live)


def tokens(
    *,
    cache: str | None,
    concatenate: bool = False,
    length: int,
    num_streams: int,
    vocabulary: Vocabulary | None = None,
) -> TextTask:
    """Returns a task that reads a token cache, which `launch/run tokenize` has written.

    Args:
      cache: the folder of the cache. None: an error, which `problems` reports.
      concatenate: whether documents fill rows one after another and are cut where a row ends; otherwise only documents
        with more than `length` tokens are cut.
      length: tokens per row.
      num_streams: number of data streams; divides the batch size.
      vocabulary: the one with which the documents were converted; None: bytes.

    Raises:
      UserError: an argument has the wrong type or is out of range.
    """
    if not isinstance(concatenate, bool):
        raise UserError(f"text.tokens.concatenate is {concatenate!r}, expected True or False")
    if cache:
        check_text(cache, where="text.tokens.cache")
    from tasks.text.token_cache import TokenCache

    vocabulary = vocabularies.bytes() if vocabulary is None else vocabulary
    return _task("tokens", TokenCache(cache or "", vocabulary, concatenate), (length, num_streams, vocabulary))


def _registered(
    name: str,
    module: str | None,
    cache: str | None,
    inputs_length: int | None,
    epochs: int | None,
    rows: tuple[int, int],
    *,
    live: bool,
) -> TextTask:
    from tasks.text.seqio_pipeline import Asked

    asked = Asked(name, module, inputs_length, rows[0] - (inputs_length or 0))
    if live:
        from tasks.text.seqio_live import LiveSeqio
        from tasks.text.seqio_tasks import SeqioVocabulary

        if cache or epochs:
            raise UserError("text.seqio: cache and epochs belong to a token cache, and live = True reads without one")
        return _task("seqio", LiveSeqio(asked), (*rows, SeqioVocabulary(name, module)))
    from tasks.text.seqio_cache import DefinedVocabulary, SeqioCache

    corpus = SeqioCache(asked, cache or asked.folder, epochs)
    return _task("seqio", corpus, (*rows, DefinedVocabulary(corpus)))


def mixture(*, tasks: Sequence[TextTask], weights: Sequence[float]) -> TextTask:
    """Returns a task that mixes the rows of several text tasks by weight.

    Args:
      tasks: tasks with the same vocabulary, length and number of streams; not `chats` or live `seqio`.
      weights: relative shares of rows, positive.

    Raises:
      UserError: weights are invalid, or tasks are missing, repeated or do not mix.
    """
    tasks, weights = tuple(tasks), tuple(weights)
    if not tasks or len(tasks) != len(weights):
        raise UserError(
            f"text.mixture has {units.counted(len(tasks), 'task')} and {units.counted(len(weights), 'weight')}, "
            "expected one weight for each of at least one task"
        )
    bad = [w for w in weights if isinstance(w, bool) or not isinstance(w, (int, float)) or not 0 < w < float("inf")]
    if bad:
        raise UserError(f"text.mixture.weights has {bad}, expected positive numbers")
    if len({task.corpus for task in tasks}) < len(tasks):
        raise UserError("text.mixture has the same source twice; name it once, with the sum of its weights")
    first = tasks[0]
    for task in tasks:
        _check_mixes(task, first)
    from tasks.text.mixed_documents import Mixture

    defined = any(can(task.vocabulary, IsDefinedByTask) for task in tasks)
    corpus = Mixture(
        tuple(cast(DocumentSource, task.corpus) for task in tasks),  # checked by `_check_mixes`
        tuple(map(float, weights)),
        tuple(task.vocabulary for task in tasks) if defined else (),
    )
    return _task("mixture", corpus, (first.length, first.num_streams, first.vocabulary))


def _check_mixes(task: TextTask, first: TextTask) -> None:
    if not isinstance(task.corpus, DocumentSource):
        raise UserError(
            f"text.mixture cannot mix {task.corpus.describe()}: only tasks of documents (python_source, files, tokens, "
            "tfds, huggingface, seqio from a cache)"
        )
    for name in ("length", "num_streams"):
        found, expected = getattr(task, name), getattr(first, name)
        if found != expected:
            what = f"{name} is {found} in a task of {type(task.corpus).__name__}"
            raise UserError(f"text.mixture: {what} and {expected} in the first task; expected equal")
    if any(can(each.vocabulary, IsDefinedByTask) for each in (task, first)):
        return  # `Mixture.problems` compares them
    if _identity(task.vocabulary) != _identity(first.vocabulary):
        raise UserError("text.mixture: its tasks have different vocabularies; use the same one for all")


def _identity(vocabulary: Vocabulary) -> tuple[type, str | None, int | None]:
    """Returns what tells a vocabulary from others without opening its file."""
    from tasks.text.sentencepieces import TrainedSentencePiece

    return (
        type(vocabulary),
        _file(vocabulary),
        vocabulary.size if isinstance(vocabulary, TrainedSentencePiece) else None,
    )


def _file(vocabulary: Vocabulary) -> str | None:
    return vocabulary.path if can(vocabulary, ReadsFile) else None


def _patterns(value: Any, name: str) -> tuple[str, ...]:
    patterns = paths.patterns(value)
    for pattern in patterns:
        check_text(pattern, where=f"text.{name}")
    return patterns


def _task(name: str, corpus: Corpus, common: tuple[int, int, Any], *, kind: type[TextTask] = TextTask) -> TextTask:
    length, num_streams, vocabulary = common
    check_integer(length, where=f"text.{name}.length", least=2)
    check_integer(num_streams, where=f"text.{name}.num_streams", least=1)
    vocabulary = vocabularies.bytes() if vocabulary is None else vocabulary
    if missing(vocabulary, Encodes):
        raise UserError(
            f"text.{name}.vocabulary is {vocabulary!r}, expected one of vocabularies, e.g. @vocabularies.bytes()"
        )
    return kind(corpus=corpus, vocabulary=vocabulary, length=length, num_streams=num_streams)
