"""A stream of packed rows as a seqio task, with a small exact position.

The one idea: what a position holds is what sits in buffers, so nothing large is ever buffered. Documents are shuffled
without a buffer (a keyed permutation of their numbers, one key an epoch); a buffer mixes chunks of at most T ids, as
16-bit numbers; seqio's converter packs small groups of chunks at a time. The position of a stream is then some hundred
kilobytes, and it is the iterator itself that is saved: continuing replays nothing.

  numbers -> shard -> permute -> read -> ids + end of document -> chunks -> shuffle -> groups -> converter -> [R, T]

R rows of an element, T length, G chunks of a group.
"""

from __future__ import annotations

import functools
import io
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from core.errors import UserError
from tasks import documents
from tasks.corpus import StreamSpec
from tasks.readers import modules, plain
from tasks.streams import Stream

SHUFFLE_IDS = 2**18  # of a stream: half a megabyte, filled in a fraction of a second; 1024 chunks of 256
GROUP_CHUNKS = 128  # the last row of a group is filled less: at most one row in 128 for long documents
_NAMES = {
    "inputs": "decoder_input_tokens",
    "targets": "decoder_target_tokens",
    "weights": "decoder_loss_weights",
    "segment_ids": "decoder_segment_ids",
    "positions": "decoder_positions",
}


class SeqioCorpus:
    """A `corpus.Corpus` that seqio and tf.data read; a subclass gives `documents`."""

    @property
    def parts(self) -> tuple[SeqioCorpus, ...]:
        """The sources whose documents are read: this one, or those that it mixes."""
        return (self,)

    def named_files(self) -> tuple[str, ...]:
        """See `Corpus`."""
        return ()

    def documents(self, spec: StreamSpec, *, epochs: int | None = None) -> tuple[Any, bool]:
        """Documents of one stream as {"text": string}, and whether they are this stream's alone.

        Args:
          spec: the stream.
          epochs: how often every document is read; None: without end.
        """
        raise NotImplementedError

    def provider(self, spec: StreamSpec) -> Any:
        """The seqio Task (or Mixture) of one stream."""
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

    def __next__(self) -> Mapping[str, np.ndarray]:
        """See `streams.Stream`.

        Raises:
          ValueError: a document cannot be read, or has an id outside the vocabulary.
        """
        try:
            features = next(self._iterator)
        except self._tf.errors.OpError as error:
            raise UserError(f"{self._where}: {_reason(error.message)}") from error
        raise_refused(self._corpus)
        return batch_of(features)

    def state(self) -> bytes:
        """See `streams.Stream`: the files of a tf.train.Checkpoint in a zip."""
        raise_refused(self._corpus)  # what is read ahead is part of the position
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
                f"({type(error).__name__}: {error}); continue with the version that wrote it"
            ) from error


def raise_refused(corpus: SeqioCorpus) -> None:
    """Raises ValueError where a document of the corpus, or of one that it mixes, was refused since the last call."""
    for part in corpus.parts:
        documents.intake_of(part).raise_refused()


def batch_of(features: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """Features of seqio's decoder under the names of a batch; padding is 0 (seqio begins it with `bos_id`)."""
    batch = {key: features[name].numpy() for key, name in _NAMES.items()}
    return {**batch, "inputs": batch["inputs"] * (batch["segment_ids"] > 0)}


@functools.lru_cache(maxsize=256)
def rows(corpus: SeqioCorpus, spec: StreamSpec) -> Any:
    """The dataset of a stream: features of seqio's decoder, each [R, T]. Cached, as tracing costs 0.2 s."""
    tf, seqio = modules()
    _check_not_empty(corpus, spec._replace(index=0, num_streams=1, rows=1, seed=None))
    chunks = chunk_dataset(corpus, spec)
    converter = seqio.DecoderFeatureConverter(pack=True, bos_id=spec.vocabulary.bos_id)
    lengths = {"targets": spec.length}
    groups = chunks.map(plain(lambda ids: tf.cast(ids, tf.int32))).padded_batch(GROUP_CHUNKS, [spec.length])  # [G, T]
    packed = groups.flat_map(  # with AutoGraph: seqio's packing is written for it
        lambda group: converter(tf.data.Dataset.from_tensor_slices({"targets": group}), lengths)
    )
    dataset = packed.batch(spec.rows, drop_remainder=True).prefetch(2)
    return dataset.with_options(_options())


def chunk_dataset(corpus: SeqioCorpus, spec: StreamSpec) -> Any:
    """Ids of at most T, as [<=T] integers, mixed when the spec has a seed."""
    provider = corpus.provider(spec)
    dataset = provider.get_dataset(
        sequence_length={"targets": spec.length},
        split=spec.split,
        shuffle=False,  # the task shuffles by itself, always with a seed
        seed=0 if spec.seed is None else spec.seed,
        num_epochs=1,  # its documents have no end
        try_in_mem_cache=False,  # a cache would be part of the position
    )
    return dataset.map(plain(lambda example: example["targets"]))


def task(corpus: SeqioCorpus, spec: StreamSpec) -> Any:
    """An unregistered seqio Task of one stream, so that making it twice is no clash."""
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
    """One thread a stream, nothing tuned: many streams share a host, and what runs ahead is part of the position."""
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
    """{"text"} to ids with the end of document; refuses an id of padding, or one outside the vocabulary."""
    tf, _ = modules()
    size, eos_id = spec.vocabulary.size, spec.vocabulary.eos_id
    message = f"an id of the data is 0 (padding), or not below the size of the vocabulary, {size}: least and largest"

    def tokenize(document: Mapping[str, Any]) -> Any:
        ids = tf.concat([tf.cast(encode(document["text"]), tf.int32), [eos_id]], 0)
        inside = tf.reduce_all((ids > 0) & (ids < size))
        with tf.control_dependencies([tf.debugging.Assert(inside, [message, tf.reduce_min(ids), tf.reduce_max(ids)])]):
            return tf.cast(ids, _id_type(spec))

    return dataset.map(plain(tokenize))


def _cut(dataset: Any, *, spec: StreamSpec, shard: bool) -> Any:
    """Documents to {"targets": chunk of at most T ids}; nothing is dropped."""
    tf, _ = modules()
    length = spec.length

    def cut(ids: Any) -> Any:
        starts = tf.data.Dataset.range(0, tf.size(ids, tf.int64), length)
        return starts.map(plain(lambda start: {"targets": ids[start : start + length]}))

    dataset = dataset.flat_map(plain(cut))
    return dataset.shard(spec.num_streams, spec.index) if shard else dataset


def shuffle_chunks(length: int) -> int:
    """Chunks of the buffer that mixes them: longer ones are fewer, so that a position stays small."""
    return max(SHUFFLE_IDS // length, 64)


def _mix(dataset: Any, *, seed: int | None, chunks: int) -> Any:
    """Chunks of one document no longer in a row."""
    if seed is None:
        return dataset
    return dataset.shuffle(chunks, seed=seed, reshuffle_each_iteration=False)


@functools.lru_cache(maxsize=256)
def _check_not_empty(corpus: SeqioCorpus, spec: StreamSpec) -> None:
    """An endless stream of no documents would wait for ever; a bad first line should be told at once."""
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
                "give more text, or a validation file of its own"
            )


def _reason(message: str) -> str:
    """What went wrong, without the graph that it went wrong in."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for mark in ("ValueError: ", "assertion failed: "):
        told = [line.partition(mark)[2] for line in lines if mark in line]
        if told:
            return told[-1]
    return lines[0] if lines else "unknown error"
