"""Tasks of text: what gin names to say what a model reads.

The one idea: a constructor only writes down what is wanted, so configuration is checked in milliseconds and on any
machine; TensorFlow and the data come with the first batch. A document becomes ids and an end of document, cut into
chunks of at most `length`; chunks are packed into rows, and no attention or target crosses from one to the next.

T length, S streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from core import units
from core.errors import UserError
from core.types import Batches, DataLayout, can
from tasks import streams, vocabularies
from tasks.catalogue import Tfds
from tasks.checks import check_integer, check_text
from tasks.corpus import Corpus, StreamSpec
from tasks.huggingface import HuggingFace
from tasks.ids import HasSeqio, ReadsFile, Vocabulary
from tasks.mixture import Mixture
from tasks.text_files import TextFiles, python_library


@dataclasses.dataclass(frozen=True)
class TextTask:
    """Text of one source in one vocabulary.

    Attributes:
      corpus: where documents come from.
      vocabulary: how they become ids.
      length: T, tokens of a row.
      num_streams: S, streams of the input; divides the batch size and is a part of the order of the data.
    """

    corpus: Corpus
    vocabulary: Vocabulary
    length: int
    num_streams: int

    def spec(self, batch_size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a global batch. Raises ValueError where the streams do not divide it."""
        streams.rows_per_stream(batch_size, num_streams=self.num_streams)
        return streams.batch_spec(batch_size, length=self.length)

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        """Makes the vocabulary usable. Host 0 first, then a barrier, then all others.

        Raises:
          ValueError: the vocabulary is absent or not the one of this run.
        """
        self.vocabulary.prepare(run_dir, is_host_zero=is_host_zero, sample=self.corpus.sample_texts)

    def train(self, layout: DataLayout, *, seed: int) -> Batches:
        """Endless batches of the training split, in an order of this seed.

        Raises:
          ValueError: the data cannot be opened, or the streams do not divide the batch.
        """
        return self._batches(layout, "train", seed)

    def evaluation(self, layout: DataLayout) -> Batches:
        """The validation split from its start, unshuffled and endless: the same batches at every call.

        Raises:
          ValueError: as `train`.
        """
        return self._batches(layout, "validation", None)

    def problems(self) -> list[str]:
        """Everything wrong that shows without opening the data, each with its fix."""
        return [*self.corpus.problems(), *self.vocabulary.problems()]

    def named_files(self) -> tuple[str, ...]:
        """Patterns, files and folders as the user named them, so that a check can say which it could not look at."""
        model = _file(self.vocabulary)
        return (*self.corpus.named_files(), *((model,) if model else ()))

    def describe(self) -> str:
        """One line for the card of a run."""
        return (
            f"{self.corpus.describe()}; {self.vocabulary.describe()}; length {self.length}, "
            f"{units.counted(self.num_streams, 'stream')}"
        )

    def fingerprint(self) -> str:
        """Equal on all hosts that read the same documents; lists the files of the source."""
        return self.corpus.fingerprint()

    def _batches(self, layout: DataLayout, split: str, seed: int | None) -> Batches:
        def open_stream(index: int, rows: int) -> streams.Stream:
            spec = StreamSpec(split, index, self.num_streams, rows, self.length, seed, self.vocabulary)
            return self.corpus.open_stream(spec)

        source, vocabulary = self.corpus.fingerprint(), self.vocabulary.hash
        return streams.StreamBatches(
            layout,
            spec=self.spec(layout.batch_size),
            num_streams=self.num_streams,
            open_stream=open_stream,
            identity={"source": source, "vocabulary": vocabulary, "split": split, "seed": seed},
        )


def python_source(*, length: int, num_streams: int, vocabulary: Vocabulary | None = None) -> TextTask:
    """The source files of the running Python's own standard library: real text on every machine, no download.

    Files are set aside for validation by the hash of their name, about 5 %. Tests of the library are left out, as some
    installations lack them.

    Args:
      length: tokens of a row.
      num_streams: streams of the input.
      vocabulary: bytes where not given.
    """
    return _task("python_source", python_library(), (length, num_streams, vocabulary))


def files(
    *,
    train: str | Sequence[str] | None,
    validation: str | Sequence[str] | None = None,
    field: str = "text",
    length: int,
    num_streams: int,
    vocabulary: Vocabulary | None = None,
) -> TextTask:
    """Your own text: .txt files, each a document, or .jsonl files, each line a document.

    Args:
      train: a pattern or several (`/data/*.txt`, `gs://bucket/part-*.jsonl`). None is told by `problems`.
      validation: likewise. Not given: about 5 % of the files, or of the lines of .jsonl, chosen by hash.
      field: the name of the text in a line of JSON.
      length: tokens of a row.
      num_streams: streams of the input. At least as many .jsonl files let each stream read its own.
      vocabulary: bytes where not given.
    """
    check_text(field, where="text.files.field")
    corpus = TextFiles(_patterns(train, "train"), _patterns(validation, "validation"), field)
    return _task("files", corpus, (length, num_streams, vocabulary))


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
    """A dataset of the TensorFlow Datasets catalogue that `tfds build` has prepared.

    Args:
      name: as `c4/en:3.1.0`.
      split: of training; slices such as `train[1%:]` are allowed.
      validation_split: of evaluation.
      field: the feature that holds the text.
      data_dir: local or gs://, shared by all hosts; the catalogue's own default where not given.
      length: tokens of a row.
      num_streams: streams of the input.
      vocabulary: bytes where not given.
    """
    for argument, value in {"name": name, "split": split, "validation_split": validation_split, "field": field}.items():
        check_text(value, where=f"text.tfds.{argument}")
    corpus = Tfds(name, split, validation_split, field, data_dir)
    return _task("tfds", corpus, (length, num_streams, vocabulary))


def huggingface(
    *,
    name: str,
    split: str = "train",
    validation_split: str = "validation",
    field: str = "text",
    streaming: bool = True,
    length: int,
    num_streams: int,
    vocabulary: Vocabulary | None = None,
) -> TextTask:
    """A dataset of the Hugging Face hub; needs the package `datasets`. A token comes from HF_TOKEN alone.

    Args:
      name: `owner/dataset`, or `owner/dataset:configuration`.
      split: of training.
      validation_split: of evaluation.
      field: the column that holds the text.
      streaming: read over the network while training; else download first.
      length: tokens of a row.
      num_streams: streams of the input.
      vocabulary: bytes where not given.
    """
    for argument, value in {"name": name, "split": split, "validation_split": validation_split, "field": field}.items():
        check_text(value, where=f"text.huggingface.{argument}")
    if not isinstance(streaming, bool):
        raise UserError(f"text.huggingface.streaming is {streaming!r}, expected True or False")
    corpus = HuggingFace(name, split, validation_split, field, streaming)
    return _task("huggingface", corpus, (length, num_streams, vocabulary))


def mixture(*, tasks: Sequence[TextTask], weights: Sequence[float]) -> TextTask:
    """Several tasks of one vocabulary, length and number of streams, sampled by weight.

    Args:
      tasks: what is mixed. Hugging Face datasets cannot be.
      weights: relative shares of chunks (nearly: of tokens); any positive numbers.
    """
    tasks, weights = tuple(tasks), tuple(weights)
    if not tasks or len(tasks) != len(weights):
        raise UserError(
            f"text.mixture has {len(tasks)} tasks and {len(weights)} weights, expected as many, at least one"
        )
    bad = [w for w in weights if isinstance(w, bool) or not isinstance(w, (int, float)) or not 0 < w < float("inf")]
    if bad:
        raise UserError(f"text.mixture.weights has {bad}, expected positive numbers")
    if len({task.corpus for task in tasks}) < len(tasks):
        raise UserError("text.mixture has the same source twice; name it once, with the sum of its weights")
    first = tasks[0]
    for task in tasks:
        _check_mixes(task, first)
    corpus = Mixture(tuple(task.corpus for task in tasks), tuple(map(float, weights)))
    return _task("mixture", corpus, (first.length, first.num_streams, first.vocabulary))


def _check_mixes(task: TextTask, first: TextTask) -> None:
    if isinstance(task.corpus, HuggingFace):
        raise UserError("text.mixture cannot mix text.huggingface: write it to .jsonl and use text.files")
    for name in ("length", "num_streams"):
        ours, theirs = getattr(task, name), getattr(first, name)
        if ours != theirs:
            raise UserError(f"text.mixture: {name} is {ours} in one task and {theirs} in the first; expected equal")
    same_class = type(task.vocabulary) is type(first.vocabulary)
    if not same_class or _file(task.vocabulary) != _file(first.vocabulary):
        raise UserError("text.mixture: its tasks have different vocabularies; give all the same one")


def _file(vocabulary: Vocabulary) -> str | None:
    return vocabulary.path if can(vocabulary, ReadsFile) else None


def _patterns(value: Any, name: str) -> tuple[str, ...]:
    patterns = () if value is None or value == "" else (value,) if isinstance(value, str) else tuple(value)
    for pattern in patterns:
        check_text(pattern, where=f"text.files.{name}")
    return patterns


def _task(name: str, corpus: Corpus, common: tuple[int, int, Vocabulary | None]) -> TextTask:
    length, num_streams, vocabulary = common
    check_integer(length, where=f"text.{name}.length", least=2)
    check_integer(num_streams, where=f"text.{name}.num_streams", least=1)
    vocabulary = vocabularies.bytes() if vocabulary is None else vocabulary
    if not can(vocabulary, HasSeqio):
        raise UserError(
            f"text.{name}.vocabulary is {vocabulary!r}, expected one of vocabularies, e.g. @vocabularies.bytes()"
        )
    return TextTask(corpus=corpus, vocabulary=vocabulary, length=length, num_streams=num_streams)
