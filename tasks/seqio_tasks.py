"""Reads a stream of packed rows as a seqio task whose exact position is small enough to checkpoint.

The saved position is the tf.data iterator with all its buffers, so the buffers are kept small. Documents are shuffled
without a buffer, by a keyed permutation of their indices (one key per epoch). A shuffle buffer holds chunks of at most
T ids as 16-bit integers, and seqio's converter packs small groups of chunks at a time. The position of a stream is then
a few hundred kilobytes, and resuming does not read any data again.

  indices -> shard -> permute -> read -> ids + end of document -> chunks -> shuffle -> groups -> converter -> [R, T]

R: rows per element. T: tokens per row. G: chunks per group.
"""

from __future__ import annotations

import functools
import io
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from core import library_noise
from core.errors import UserError
from tasks import documents
from tasks.documents import Corpus, StreamSpec
from tasks.ids import lowest_id
from tasks.streams import Stream

SHUFFLE_IDS = 2**18  # ids in a stream's shuffle buffer: 0.5 MB, for example 1024 chunks of 256 ids
GROUP_CHUNKS = 128  # only the last row of a group is partly filled: at most 1 row in 128 for long documents
_NAMES = {
    "inputs": "decoder_input_tokens",
    "targets": "decoder_target_tokens",
    "weights": "decoder_loss_weights",
    "segment_ids": "decoder_segment_ids",
    "positions": "decoder_positions",
}


@functools.cache
def modules() -> tuple[Any, Any]:
    """Imports TensorFlow and seqio without their start-up messages; takes about 5 s the first time."""
    held = library_noise.Held()
    try:
        with library_noise.holding_stderr() as held:
            import tensorflow as tf

            tf.zeros([])  # the first operation searches for devices and logs those it does not find
            import seqio
    finally:
        os.write(2, library_noise.without(held.content))
    return tf, seqio


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Excludes a function from AutoGraph, which slows every trace and which only seqio's packing needs."""
    tf, _ = modules()
    return tf.autograph.experimental.do_not_convert(function)


def reader(corpus: Corpus, read: Callable[..., bytes]) -> Callable[..., Any]:
    """Returns a TensorFlow operation that reads documents with `read` and validates them with the corpus's `Intake`.

    An exception inside TensorFlow would be logged with its traceback once per stream. An invalid document is therefore
    recorded at the intake and replaced by "?", which is never trained on: whoever takes an element from the dataset
    must call `Intake.raise_refused` before using it.
    """
    tf, _ = modules()
    intake = documents.intake_of(corpus)

    def noted(*inputs: bytes) -> bytes:
        try:
            return intake.take(read, *inputs)
        except UserError as error:
            intake.refuse(error)
            return b"?"

    def operation(*inputs: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(noted, inputs, tf.string, stateful=False), [])

    return operation


class SeqioCorpus:
    """A `documents.Corpus` that seqio and tf.data can read; subclasses implement `documents`."""

    @property
    def parts(self) -> tuple[SeqioCorpus, ...]:
        """The sources whose documents are read: this one, or the components of a mixture."""
        return (self,)

    def named_files(self) -> tuple[str, ...]:
        """See `Corpus`."""
        return ()

    def documents(self, spec: StreamSpec, *, epochs: int | None = None) -> tuple[Any, bool]:
        """Returns the documents of one stream.

        Args:
          spec: the stream.
          epochs: how many times every document is read; None repeats without end.

        Returns:
          A tf.data.Dataset of {"text": string}, and whether it is already sharded: True if it holds this stream's
          documents alone, False if it holds those of all streams.
        """
        raise NotImplementedError

    def provider(self, spec: StreamSpec) -> Any:
        """Returns the seqio Task (or Mixture) of one stream."""
        return task(self, spec)

    def open_stream(self, spec: StreamSpec) -> Stream:
        """See `Corpus`."""
        return SeqioStream(self, spec)

    def sample_texts(self) -> Iterator[str]:
        """See `Corpus`."""
        spec = StreamSpec("train", index=0, num_streams=1, rows=1, length=1, seed=None, vocabulary=None)
        for document in self.documents(spec, epochs=1)[0].as_numpy_iterator():
            raise_refused(self)
            yield document["text"].decode()

    def describe(self) -> str:
        """See `Corpus`."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """See `Corpus`."""
        raise NotImplementedError


class SeqioStream:
    """`streams.Stream` over a tf.data iterator."""

    def __init__(self, corpus: SeqioCorpus, spec: StreamSpec) -> None:
        self._tf, _ = modules()
        self._corpus = corpus
        self._where = f"{corpus.describe()}, {spec.split} stream {spec.index} of {spec.num_streams}"
        self._iterator = iter(rows(corpus, spec))
        self._zero = spec.vocabulary.size

    def __next__(self) -> Mapping[str, np.ndarray]:
        """See `streams.Stream`.

        Raises:
          UserError: a document cannot be read, or has an id outside the vocabulary.
        """
        try:
            features = next(self._iterator)
        except self._tf.errors.OpError as error:
            raise UserError(f"{self._where}: {_reason(error.message)}") from error
        raise_refused(self._corpus)
        return batch_of(features, zero=self._zero)

    def state(self) -> bytes:
        """See `streams.Stream`. The bytes are a zip of the files of a tf.train.Checkpoint."""
        raise_refused(self._corpus)  # the position includes documents that were prefetched
        buffer = io.BytesIO()
        with tempfile.TemporaryDirectory() as folder:
            self._tf.train.Checkpoint(iterator=self._iterator).write(f"{folder}/position")
            with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for path in sorted(pathlib.Path(folder).iterdir()):
                    archive.write(path, path.name)
        return buffer.getvalue()

    def restore(self, state: bytes) -> None:
        """See `streams.Stream`."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                with zipfile.ZipFile(io.BytesIO(state)) as archive:
                    archive.extractall(folder)
                checkpoint = self._tf.train.Checkpoint(iterator=self._iterator)
                checkpoint.read(f"{folder}/position").assert_consumed()
        except (zipfile.BadZipFile, AssertionError, self._tf.errors.OpError) as error:
            raise UserError(
                f"{self._where}: the saved position cannot be read by TensorFlow {self._tf.__version__} "
                f"({type(error).__name__}: {error}); resume with the version that wrote it"
            ) from error


def raise_refused(corpus: SeqioCorpus) -> None:
    """Raises UserError if a document of the corpus or of a component of it was refused since the last call."""
    for part in corpus.parts:
        documents.intake_of(part).raise_refused()


def batch_of(features: Mapping[str, Any], *, zero: int) -> Mapping[str, np.ndarray]:
    """Renames seqio's decoder features to the keys of a batch.

    Args:
      features: with `zero` in place of id 0, because seqio takes 0 for padding.
      zero: the number of ids, which is itself not a valid id.

    Returns:
      Arrays [R, T]; padding is 0 everywhere (seqio starts it with `bos_id`).
    """
    batch = {key: features[name].numpy() for key, name in _NAMES.items()}
    tokens = {key: np.where(batch[key] == zero, 0, batch[key]) for key in ("inputs", "targets")}
    return {**batch, **tokens, "inputs": tokens["inputs"] * (batch["segment_ids"] > 0)}


@functools.lru_cache(maxsize=256)
def rows(corpus: SeqioCorpus, spec: StreamSpec) -> Any:
    """Returns the dataset of a stream: seqio's decoder features, each [R, T]. Cached because tracing takes 0.2 s.

    Ids have the vocabulary's size in place of 0, which seqio takes for padding; `batch_of` puts 0 back.
    """
    tf, seqio = modules()
    zero = spec.vocabulary.size
    _check_not_empty(corpus, spec._replace(index=0, num_streams=1, rows=1, seed=None))
    chunks = chunk_dataset(corpus, spec)
    converter = seqio.DecoderFeatureConverter(pack=True, bos_id=spec.vocabulary.bos_id)
    lengths = {"targets": spec.length}

    def without_zero(ids: Any) -> Any:
        ids = tf.cast(ids, tf.int32)
        return tf.where(ids == 0, zero, ids)

    groups = chunks.map(plain(without_zero)).padded_batch(GROUP_CHUNKS, [spec.length])  # [G, T]
    packed = groups.flat_map(  # with AutoGraph, which seqio's packing needs
        lambda group: converter(tf.data.Dataset.from_tensor_slices({"targets": group}), lengths)
    )
    dataset = packed.batch(spec.rows, drop_remainder=True).prefetch(2)
    return dataset.with_options(_options())


def chunk_dataset(corpus: SeqioCorpus, spec: StreamSpec) -> Any:
    """Returns a dataset of chunks, each [<=T] integer ids, shuffled if the spec has a seed."""
    provider = corpus.provider(spec)
    dataset = provider.get_dataset(
        sequence_length={"targets": spec.length},
        split=spec.split,
        shuffle=False,  # the task's own preprocessors shuffle, always with a seed
        seed=0 if spec.seed is None else spec.seed,
        num_epochs=1,  # the documents already repeat without end
        try_in_mem_cache=False,  # a cache would be saved with the position
    )
    return dataset.map(plain(lambda example: example["targets"]))


def task(corpus: SeqioCorpus, spec: StreamSpec) -> Any:
    """Returns the seqio Task of one stream, unregistered so that it can be made more than once."""
    _, seqio = modules()
    texts, sharded = corpus.documents(spec)
    vocabulary = spec.vocabulary.seqio()

    def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
        return texts

    return seqio.Task(
        name=f"{type(corpus).__name__.lower()}_{corpus.fingerprint()[:12]}",
        source=seqio.FunctionDataSource(dataset_fn, splits=[spec.split]),
        preprocessors=[
            functools.partial(_tokenize, spec=spec, encode=vocabulary.encode_tf),
            functools.partial(_cut, spec=spec, shard=not sharded),
            functools.partial(_mix, seed=spec.seed, chunks=shuffle_chunks(spec.length)),
        ],
        output_features={"targets": seqio.Feature(vocabulary, add_eos=True, dtype=_id_type(spec))},
        shuffle_buffer_size=None,
    )


def _options() -> Any:
    """Returns tf.data options with one thread per stream and no autotuning.

    Many streams share a host, and everything that tf.data prefetches is saved with the position.
    """
    tf, _ = modules()
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    options.threading.private_threadpool_size = 1
    return options


def _id_type(spec: StreamSpec) -> Any:
    tf, _ = modules()
    return tf.uint16 if spec.vocabulary.size <= 2**16 else tf.int32


def _tokenize(dataset: Any, *, spec: StreamSpec, encode: Callable[[Any], Any]) -> Any:
    """Maps {"text"} to ids with an end-of-document id; fails for an id outside the vocabulary, or reserved padding."""
    tf, _ = modules()
    size, eos_id, lowest = spec.vocabulary.size, spec.vocabulary.eos_id, lowest_id(spec.vocabulary)
    below = "0, which this vocabulary reserves for padding," if lowest else "below 0"
    message = f"an id in the data is {below} or not below the vocabulary size {size}: smallest and largest"

    def tokenize(document: Mapping[str, Any]) -> Any:
        ids = tf.concat([tf.cast(encode(document["text"]), tf.int32), [eos_id]], 0)
        inside = tf.reduce_all((ids >= lowest) & (ids < size))
        with tf.control_dependencies([tf.debugging.Assert(inside, [message, tf.reduce_min(ids), tf.reduce_max(ids)])]):
            return tf.cast(ids, _id_type(spec))

    return dataset.map(plain(tokenize))


def _cut(dataset: Any, *, spec: StreamSpec, shard: bool) -> Any:
    """Splits documents into {"targets": chunk of at most T ids}; nothing is dropped."""
    tf, _ = modules()
    length = spec.length

    def cut(ids: Any) -> Any:
        starts = tf.data.Dataset.range(0, tf.size(ids, tf.int64), length)
        return starts.map(plain(lambda start: {"targets": ids[start : start + length]}))

    dataset = dataset.flat_map(plain(cut))
    return dataset.shard(spec.num_streams, spec.index) if shard else dataset


def shuffle_chunks(length: int) -> int:
    """Returns the size of the shuffle buffer in chunks: fewer if they are long, to keep the saved position small."""
    return max(SHUFFLE_IDS // length, 64)


def _mix(dataset: Any, *, seed: int | None, chunks: int) -> Any:
    """Shuffles chunks, so that those of one document do not follow one another; without a seed, keeps their order."""
    if seed is None:
        return dataset
    return dataset.shuffle(chunks, seed=seed, reshuffle_each_iteration=False)


@functools.lru_cache(maxsize=256)
def _check_not_empty(corpus: SeqioCorpus, spec: StreamSpec) -> None:
    """Raises UserError if a source has no document, which would otherwise block forever, or a bad first one."""
    tf, _ = modules()
    for part in corpus.parts:
        try:
            first = next(iter(part.documents(spec, epochs=1)[0]), None)
        except tf.errors.OpError as error:
            raise UserError(f"{part.describe()}: {_reason(error.message)}") from error
        raise_refused(part)
        if first is None:
            raise UserError(
                f"{part.describe()}: the {spec.split} split has no document; "
                "use more text, or a separate validation file"
            )


def _reason(message: str) -> str:
    """Extracts the cause from a TensorFlow error message, without the description of the graph."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for mark in ("ValueError: ", "assertion failed: "):
        told = [line.partition(mark)[2] for line in lines if mark in line]
        if told:
            return told[-1]
    return lines[0] if lines else "unknown error"
