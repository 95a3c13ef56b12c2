"""Text tasks: the constructors that a gin configuration names.

A constructor only records its arguments, so a configuration is checked in milliseconds on any machine; the data is
opened later. A document becomes ids followed by an end-of-document id, split into chunks of at most `length` ids.
Chunks are packed into rows; neither attention nor targets cross the boundaries of a chunk.

T: tokens per row. S: number of streams.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from core import units
from core.batches import BatchSpec, fingerprint_of
from core.errors import UserError, check_integer, check_text
from core.types import Batches, CountsTokens, DataLayout, DefinesMetrics, OwnMetrics, can, missing
from tasks import streams
from tasks.text import vocabularies
from tasks.text.document_streams import DocumentSource
from tasks.text.documents import Corpus, FillsCache, HashesContent, StreamSpec, TriesExamples
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
      length: T, tokens per row.
      num_streams: S, number of data streams; must divide the batch size. It changes the order of the data.
      evaluation_ends: whether an evaluation reads finite data once and then ends (`core.types.EndsEvaluation`).
    """

    corpus: Corpus
    vocabulary: Vocabulary
    length: int
    num_streams: int
    evaluation_ends: ClassVar[bool] = True

    def spec(self, batch_size: int) -> BatchSpec:
        """Returns the fields of a global batch. Raises UserError if the streams do not divide it."""
        streams.rows_per_stream(batch_size, num_streams=self.num_streams)
        return streams.batch_spec(batch_size, length=self.length)

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        """Makes the data and the vocabulary usable. It is called on host 0 first and, after a barrier, on all others.

        Raises:
          UserError: the vocabulary cannot be read or trained, or differs from that of the run; or a cache cannot be
            written.
        """
        if can(self.corpus, FillsCache):
            self.corpus.fill()
        self.vocabulary.prepare(run_dir, is_host_zero=is_host_zero, sample=self.corpus.sample_texts)

    def train(self, layout: DataLayout, *, seed: int) -> Batches:
        """Returns an endless iterator over the training split, shuffled with `seed`.

        Raises:
          UserError: the data cannot be opened, or the streams do not divide the batch.
        """
        return self._batches(layout, seed)

    def evaluation(self, layout: DataLayout) -> Batches:
        """Returns batches of one pass over the validation split, unshuffled and the same at every call.

        Its rows do not depend on streams, batch size or hosts, because the split is read as one stream.

        Raises:
          UserError: the data cannot be opened, or the streams do not divide the batch.
        """
        spec = StreamSpec("validation", 0, 1, 1, self.length, None, self.vocabulary, once=True)
        return streams.PassBatches(layout, spec=self.spec(layout.batch_size), stream=self.corpus.open_stream(spec))

    def problems(self) -> list[str]:
        """Returns the problems that can be found before a run, in its settings and in local data, each with its fix."""
        return [*self.corpus.problems(), *self.vocabulary.problems()]

    def example_problems(self) -> list[str]:
        """Tries examples of sources that run the user's code (seqio tasks); returns a problem for each failure."""
        return self.corpus.example_problems(self.length) if can(self.corpus, TriesExamples) else []

    def named_files(self) -> tuple[str, ...]:
        """Returns patterns, files and folders as the user wrote them, for messages about files that cannot be read."""
        model = _file(self.vocabulary)
        return (*self.corpus.named_files(), *((model,) if model else ()))

    def describe(self) -> str:
        """Returns one line for the run summary."""
        return (
            f"{self.corpus.describe()}; {self.vocabulary.describe()}; length {self.length}, "
            f"{units.counted(self.num_streams, 'stream')}"
        )

    def begins_with_bos(self) -> bool:
        """Returns True: every text begins with the begin-of-text id."""
        return True

    def stop_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a text."""
        return (self.vocabulary.eos_id,)

    def own_metrics(self, most: int) -> OwnMetrics | None:
        """Returns the metrics of seqio tasks, on at most `most` examples of each task; None for other sources.

        Raises UserError if there are none, or if one of them cannot be computed.
        """
        return self.corpus.own_metrics(most) if can(self.corpus, DefinesMetrics) else None

    def train_tokens(self) -> int | None:
        """Returns the number of tokens of the training split if it is in one token cache; otherwise None."""
        return self.corpus.train_tokens() if can(self.corpus, CountsTokens) else None

    def fingerprint(self) -> str:
        """Returns a hash that is equal on hosts that read the same documents; lists and reads the source's files."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        listing = self.corpus.fingerprint()
        if not can(self.corpus, HashesContent):
            return listing
        return fingerprint_of(listing, self.corpus.content_hash())

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
            identity={"source": source, "vocabulary": vocabulary, "split": "train", "seed": seed, "packing": 2},
        )


@dataclasses.dataclass(frozen=True)
class ChatTask(TextTask):
    """A `TextTask` of conversations, which the chat template of the vocabulary formats."""

    corpus: "ChatFiles"
    vocabulary: ChatVocabulary

    def example_problems(self) -> list[str]:
        """Formats the first conversation with the chat template; returns a problem if that fails."""
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
        """Returns whether a text begins with the begin-of-text id; a chat template may write it itself."""
        return self.vocabulary.begins_with_bos

    def stop_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a text, or an answer in the chat template's format."""
        return tuple(dict.fromkeys([self.vocabulary.eos_id, *self.vocabulary.turn_ends]))


def python_source(*, length: int, num_streams: int, vocabulary: Vocabulary | None = None) -> TextTask:
    """Returns the task `renga.python_source`, the source files of Python's standard library: text without a download.

    `text.seqio` with this name returns the same task. The validation split is about 5% of the files, chosen by the hash
    of their name. The library's tests are left out, because some installations lack them.

    Args:
      length: tokens per row, at least 2.
      num_streams: number of data streams; must divide the batch size.
      vocabulary: default: bytes.

    Raises:
      UserError: a setting has the wrong type or is out of range.
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
    """Returns a task that reads your text: .txt files (a document each), .jsonl (one per line), .parquet (one per row).

    Args:
      train: one or more patterns (`/data/*.txt`, `gs://bucket/part-*.jsonl.zst`); .txt and .jsonl may be compressed
        (.gz, .zst, .bz2). `train = None` is an error, which `problems` reports.
      validation: one or more patterns. Default: about 5% of the .txt files, or of the lines and rows, chosen by hash.
      field: the JSON key, or the column, that has the text.
      length: tokens per row, at least 2.
      num_streams: number of data streams; must divide the batch size.
      vocabulary: default: bytes.

    Raises:
      UserError: a setting has the wrong type or is out of range.
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
      train: one or more patterns of .jsonl files (`/data/*.jsonl`, gs://), which may be compressed. Each line has
        `messages` (a list of `role` and `content`), which the chat template of the vocabulary's folder formats, with
        `tools` and `documents` if the template needs them; or `prompt` and `completion`. `train = None` is an error,
        which `problems` reports.
      validation: one or more patterns. Default: about 5% of the lines, chosen by hash.
      length: tokens per row, at least 2. Longer conversations are cut, and skipped if no token of an answer is left;
        both are counted and reported.
      num_streams: number of data streams; must divide the batch size. There must be a training conversation for each.
      vocabulary: the tokenizer of a published model (`vocabularies.tokenizer`).

    Raises:
      UserError: the vocabulary has no chat template, or a setting has the wrong type or is out of range.
    """
    if not can(vocabulary, FormatsChats):
        raise UserError(
            f"text.chats.vocabulary is {vocabulary!r}, which has no chat template: use @vocabularies.tokenizer()"
        )
    from tasks.text.chat_files import ChatFiles

    corpus = ChatFiles(
        _patterns(train, "chat_files.train"), _patterns(validation, "chat_files.validation"), num_streams
    )
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
      name: the dataset's name, such as `c4/en:3.1.0`; a name `namespace:dataset` is an error, which
        `problems` reports.
      split: the training split; slices such as `train[1%:]` are allowed.
      validation_split: the split for evaluation.
      field: the feature that holds the text.
      data_dir: the folder of datasets, local or gs://, which all hosts can read; default: TensorFlow Datasets' own.
      length: tokens per row, at least 2.
      num_streams: number of data streams; must divide the batch size.
      vocabulary: default: bytes.

    Raises:
      UserError: a setting has the wrong type or is out of range.
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
      name: the dataset, as `owner/dataset` or `owner/dataset:configuration`.
      split: the training split.
      validation_split: the split for evaluation.
      field: the column that holds the text.
      streaming: whether to read over the network during training; otherwise the dataset is downloaded first.
      where: keeps only documents with one of these values in each column: `{'lang': ('Python', 'Go')}`. None: all.
      length: tokens per row, at least 2.
      num_streams: number of data streams; must divide the batch size.
      vocabulary: default: bytes.

    Raises:
      UserError: a setting has the wrong type or is out of range.
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
    """Returns a registered seqio task or mixture for decoders: `renga.python_source`, or one from your own module.

    The task's own preprocessors make `targets`, or `inputs` and `targets`, from its source. Features that are too long
    are cut, as seqio does, and several examples are packed into a row. If a task has `inputs`, the targets follow the
    inputs, and the loss covers only the targets.

    Unless `live` is set, the first start of a run executes the task once, in other processes, and writes a token cache,
    as `launch/run tokenize --task NAME` does. Later starts read this cache.
    `renga.python_source` is read from its files, without a cache or seqio.

    Args:
      name: name of the seqio task or mixture.
      module: the Python module that registers it, such as `my_tasks`; None: one of Renga's own tasks.
      cache: the folder of the token cache, local or gs://. Default: a folder in `runs/seqio` named after the task
        and its lengths; one per host unless hosts share the workspace.
      inputs_length: maximum number of ids of `inputs` in a row, below `length`; targets get the rest. None: the task
        has no `inputs`.
      epochs: if preprocessors draw random numbers: number of epochs to cache, each with its own random numbers; these
        epochs are then repeated. None: they must draw none.
      live: whether to read the task with tf.data during the run, without a cache. A resumed run then needs the same
        version of TensorFlow, and the position of each stream includes its buffers.
      vocabulary: for Renga's own tasks, which take none of `cache`, `inputs_length`, `epochs` and `live`; default:
        bytes. Your own task uses the vocabulary of its features.
      length: tokens per row, at least 2.
      num_streams: number of data streams; must divide the batch size.

    Raises:
      UserError: a setting has the wrong type, is out of range, or is not one of this task or of its way of reading.
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
    """Returns a task that reads a token cache: documents that `launch/run tokenize` has converted to ids.

    Args:
      cache: the folder of the cache, local or gs://. None is an error, which `problems` reports.
      concatenate: whether documents fill rows one after another and are cut where a row ends. By default documents are
        packed whole, and only those with more than `length` tokens are cut.
      length: tokens per row, at least 2; runs may use one cache with different lengths.
      num_streams: number of data streams; must divide the batch size.
      vocabulary: the vocabulary with which the documents were converted; default: bytes.

    Raises:
      UserError: a setting has the wrong type or is out of range.
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
    """Returns the task that a module registers; rows: (length, number of streams).

    Raises UserError if `live` is given with `cache` or `epochs`.
    """
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
      tasks: tasks with the same vocabulary, length and number of streams, except `chats` and live `seqio` tasks, which
        cannot be mixed.
      weights: relative shares of rows, as positive numbers. In any number of consecutive rows, each source has its
        share to within a few rows.

    Raises:
      UserError: the tasks do not match, a source occurs twice, or a weight is not positive.
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
        ours, theirs = getattr(task, name), getattr(first, name)
        if ours != theirs:
            what = f"{name} is {ours} in a task of {type(task.corpus).__name__}"
            raise UserError(f"text.mixture: {what} and {theirs} in the first task; expected equal")
    if any(can(each.vocabulary, IsDefinedByTask) for each in (task, first)):
        return  # `Mixture.problems` compares them
    same_class = type(task.vocabulary) is type(first.vocabulary)
    if not same_class or _file(task.vocabulary) != _file(first.vocabulary):
        raise UserError("text.mixture: its tasks have different vocabularies; use the same one for all")


def _file(vocabulary: Vocabulary) -> str | None:
    return vocabulary.path if can(vocabulary, ReadsFile) else None


def _patterns(value: Any, name: str) -> tuple[str, ...]:
    patterns = () if value is None or value == "" else (value,) if isinstance(value, str) else tuple(value)
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
