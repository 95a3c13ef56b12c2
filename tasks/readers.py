"""Reading documents with tf.data: files, lines of JSON, and prepared datasets of the TensorFlow Datasets catalogue.

The one idea: what is shuffled are the numbers of documents, by a permutation keyed with the seed and the epoch, so
order costs no memory and no buffer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from core import library_noise
from tasks import documents
from tasks.listing import VALIDATION_PERCENT

if TYPE_CHECKING:
    from tasks.corpora import StreamSpec, Tfds, _FileCorpus

_ENDLESS = 2**62
_wrong: dict[Any, str] = {}  # by corpus: why the first document that was refused is none


@functools.cache
def modules() -> tuple[Any, Any]:
    """TensorFlow and seqio, imported without their start-up messages: 5 s the first time."""
    with _without_noise():
        import tensorflow as tf

        tf.zeros([])  # the first operation looks for devices, and speaks of those it does not find
        import seqio
    return tf, seqio


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Holds back what is written to the terminal meanwhile, then writes it without known noise."""
    sys.stderr.flush()
    terminal = os.dup(2)
    try:
        with tempfile.TemporaryFile() as held:
            os.dup2(held.fileno(), 2)
            try:
                yield
            finally:
                sys.stderr.flush()
                os.dup2(terminal, 2)
                held.seek(0)
                os.write(2, library_noise.without(held.read()))
    finally:
        os.close(terminal)


def file_documents(corpus: _FileCorpus, spec: StreamSpec, *, epochs: int | None = None) -> tuple[Any, bool]:
    """Documents of one stream as {"text": string}, and whether they are this stream's alone.

    Files are dealt to streams where there are enough of them; else training deals lines of JSON; else the caller deals
    chunks. Either way the streams together have every document once an epoch.
    """
    tf, _ = modules()
    files, field, part = corpus.files(spec.split), corpus.json_field(spec.split), corpus.line_split(spec.split)
    numbers = tf.data.Dataset.range(_ENDLESS if epochs is None else epochs * len(files))
    # A file may have none of the few lines of validation: a stream of that file alone would wait for ever.
    dealt = len(files) >= spec.num_streams and part != "validation"
    if dealt:
        numbers = numbers.shard(spec.num_streams, spec.index)
    texts = numbers.map(plain(_permuted([file.path for file in files], spec.seed)))
    if field is None:
        read = plain(_reader(corpus, documents.file_text))
        texts = texts.map(plain(lambda path: read(path, tf.io.read_file(path))))
    else:
        lines = texts.flat_map(plain(functools.partial(_json_lines, part=part)))
        if not dealt and spec.seed is not None:
            lines, dealt = lines.shard(spec.num_streams, spec.index), True
        texts = lines.map(plain(_reader(corpus, functools.partial(documents.json_text, field))))
    texts = texts.filter(plain(lambda text: tf.strings.length(text) > 0))
    return texts.map(plain(lambda text: {"text": text})), dealt


def tfds_documents(corpus: Tfds, spec: StreamSpec, *, epochs: int | None = None) -> tuple[Any, bool]:
    """As `file_documents`, for a prepared dataset of the catalogue.

    Raises:
      ValueError: the dataset is not prepared, or lacks the split or the field.
    """
    tf, _ = modules()
    import tensorflow_datasets as tfds

    builder = _tfds_builder(corpus)
    split = corpus.split if spec.split == "train" else corpus.validation_split
    by_file = len(builder.info.splits[split].file_instructions) >= spec.num_streams
    read = tfds.ReadConfig(
        shuffle_seed=spec.seed,
        shuffle_reshuffle_each_iteration=False,  # or a second iterator would have another order
        try_autocache=False,
        interleave_cycle_length=1,
        num_parallel_calls_for_interleave_files=1,
        input_context=tf.distribute.InputContext(spec.num_streams, spec.index) if by_file else None,
    )
    examples = builder.as_dataset(split=split, shuffle_files=spec.seed is not None, read_config=read)
    if corpus.field not in examples.element_spec:
        raise ValueError(
            f"text.tfds.field: {corpus.name} has no {corpus.field!r}, only {sorted(examples.element_spec)}"
        )
    texts = examples.map(plain(lambda example: {"text": example[corpus.field]}))
    texts = texts.filter(plain(lambda one: tf.strings.length(tf.strings.strip(one["text"])) > 0)).repeat(epochs)
    if not by_file and spec.seed is not None:
        return texts.shard(spec.num_streams, spec.index), True
    return texts, by_file


def sample_texts(corpus: Any, spec: StreamSpec) -> Iterator[str]:
    """Documents once each, in order."""
    for document in corpus.documents(spec, epochs=1)[0].as_numpy_iterator():
        raise_wrong(corpus)
        yield document["text"].decode(errors="replace")


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without AutoGraph, which costs time at every trace and which only seqio's own packing needs."""
    tf, _ = modules()
    return tf.autograph.experimental.do_not_convert(function)


def _permuted(items: list[str], seed: int | None) -> Callable[[Any], Any]:
    """From the number of a document since the start to its name: a permutation of all names in every epoch."""
    tf, _ = modules()
    count = len(items)

    def pick(number: Any) -> Any:
        index = number % count
        if seed is not None:
            key = tf.stack([tf.constant(seed, tf.int64), number // count])
            index = tf.random.experimental.index_shuffle(index, key, tf.constant(count - 1, tf.int64))
        return tf.gather(tf.constant(items), index)

    return pick


def _json_lines(path: Any, *, part: str | None) -> Any:
    """(path, line number, line) of a .jsonl file; of one part of the lines, chosen by hash, where a part is given."""
    tf, _ = modules()
    lines = tf.data.TextLineDataset(path).enumerate(1)
    if part is not None:
        wanted = part == "validation"
        lines = lines.filter(
            plain(lambda _, line: (tf.strings.to_hash_bucket_fast(line, 100) < VALIDATION_PERCENT) == wanted)
        )
    return lines.map(plain(lambda number, line: (path, number, line)))


def _reader(corpus: Any, read: Callable[..., bytes]) -> Callable[..., Any]:
    """An operation that reads a document by `read(path, …)`; what that refuses is kept for `raise_wrong`.

    An exception inside of TensorFlow would be logged with its traceback, once for each stream. So a document that is
    refused counts as one of a question mark, which is never trained on: whoever waits for it raises.
    """
    tf, _ = modules()

    def noted(path: bytes, *rest: Any) -> bytes:
        try:
            return read(path.decode(), *rest)
        except ValueError as error:
            _wrong.setdefault(corpus, str(error))
            return b"?"

    def operation(*inputs: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(noted, inputs, tf.string, stateful=False), [])

    return operation


def raise_wrong(corpus: Any) -> None:
    """Raises ValueError where a document of the corpus, or of one that it mixes, was refused since the last call."""
    for part in getattr(corpus, "corpora", (corpus,)):
        if said := _wrong.pop(part, ""):
            raise ValueError(f"{part.describe()}: {said}")


def _tfds_builder(corpus: Tfds) -> Any:
    import tensorflow_datasets as tfds

    builder = tfds.builder(corpus.name, data_dir=corpus.data_dir)
    if not builder.is_prepared():
        raise ValueError(
            f"text.tfds: {corpus.name} is not prepared in {builder.data_dir}: run `tfds build {corpus.name}`"
        )
    return builder
