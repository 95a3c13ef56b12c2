"""Reads registered seqio tasks live: with tf.data in the run's process, without a token cache.

The position of a stream is its tf.data iterator with its buffers, which can be read only by the version of TensorFlow
that wrote it. R: rows per element. T: tokens per row.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import pathlib
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from core.errors import UserError
from core.hosts import log_filters
from core.types import OwnMetrics
from tasks.streams import Stream
from tasks.text import seqio_metrics, seqio_pipeline, seqio_tasks
from tasks.text.documents import Corpus, StreamSpec
from tasks.text.seqio_pipeline import Asked
from tasks.text.tfds_source import tensorflow

_HARMLESS = (
    # The position of a stream includes the shuffle buffers, so a restart changes nothing.
    "Using an uncached FunctionDataset for training is not recommended since it often results in insufficient "
    "shuffling on restarts, resulting in overfitting. It is highly recommended that you cache this task before "
    "training with it or use a data source that supports lower-level shuffling (e.g., FileDataSource).",
    # A row has only the task's output features; other features, such as texts before tokenization, are by-products.
    "Features not in `features_length` will be removed during packing: %s",
)
_ZERO = "an id is 0, which is padding in live rows: read the task from a cache, without text.seqio.live"
_NAMES = {
    "inputs": "decoder_input_tokens",
    "targets": "decoder_target_tokens",
    "weights": "decoder_loss_weights",
    "segment_ids": "decoder_segment_ids",
    "positions": "decoder_positions",
}


@dataclasses.dataclass(frozen=True)
class LiveSeqio(Corpus):
    """A `documents.Corpus` of a registered task or mixture, whose pipeline runs in this process."""

    asked: Asked

    def named_files(self) -> tuple[str, ...]:
        return ()

    def open_stream(self, spec: StreamSpec) -> Stream:
        return SeqioStream(self, spec)

    def sample_texts(self) -> Iterator[str]:
        return iter(())

    @functools.cached_property
    def _definition(self) -> Mapping[str, Any]:
        return seqio_pipeline.definition(self.asked)

    def problems(self) -> list[str]:
        try:
            _ = self._definition
        except UserError as error:
            return [str(error)]
        return []

    def example_problems(self, length: int) -> list[str]:
        return self._definition["problems"]

    def lengths(self, length: int) -> dict[str, int]:
        """Returns the maximum number of ids of each feature in a row of `length` ids.

        Inputs that would fill the row get half of it.
        """
        if self.asked.inputs is None:
            return {"targets": length}
        inputs = self.asked.inputs if self.asked.inputs < length else length // 2
        return {"inputs": inputs, "targets": length - inputs}

    def describe(self) -> str:
        return (
            f"{self._named()}, read live: each start imports TensorFlow, and a resume needs TensorFlow "
            f"{importlib.metadata.version('tensorflow')}"
        )

    def own_metrics(self, most: int) -> OwnMetrics:
        seqio_metrics.require_metrics(self.asked.name, self.asked.module)
        return self.asked.measured(most)

    def _named(self) -> str:
        inputs = f", inputs of up to {self.asked.inputs} ids" if self.asked.inputs else ""
        return f"text.seqio: {self.asked.name}{inputs}"

    def fingerprint(self) -> str:
        return hashlib.sha256(self._named().encode()).hexdigest()


class SeqioStream(Stream):
    """A `streams.Stream` over a tf.data iterator."""

    def __init__(self, corpus: LiveSeqio, spec: StreamSpec) -> None:
        self._tf = tensorflow()
        self._where = f"{corpus.describe()}, {spec.split} stream {spec.index} of {spec.num_streams}"
        self._once, self._has_read = spec.once, False
        self._iterator = iter(rows(corpus, spec))

    def __next__(self) -> Mapping[str, np.ndarray]:
        try:
            found = batch_of(next(self._iterator))
            self._has_read = True
            return found
        except StopIteration:
            if self._once and self._has_read:
                raise
            fix = "add examples to this split" if self._once else "use more examples, or a lower NUM_STREAMS"
            raise UserError(f"{self._where}: no example; {fix}") from None
        except self._tf.errors.OpError as error:
            raise UserError(f"{self._where}: {error.message.strip().splitlines()[0]}") from error

    def state(self) -> bytes:
        """Returns a zip archive of the files of a tf.train.Checkpoint."""
        buffer = io.BytesIO()
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._tf.train.Checkpoint(iterator=self._iterator).write(f"{folder}/position")
            except self._tf.errors.OpError as error:
                raise UserError(
                    f"{self._where}: TensorFlow cannot save a position in it, as where a pipeline calls Python "
                    f"({error.message.strip().splitlines()[0]}): read it from a cache, without text.seqio.live"
                ) from error
            with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for path in sorted(pathlib.Path(folder).iterdir()):
                    archive.write(path, path.name)
        return buffer.getvalue()

    def restore(self, state: bytes) -> None:
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


def batch_of(features: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """Renames seqio's decoder features, each [R, T], to the fields of a batch."""
    batch = {key: features[name].numpy() for key, name in _NAMES.items()}
    return {**batch, "inputs": batch["inputs"] * (batch["segment_ids"] > 0)}


def _without_zero(example: Mapping[str, Any], *, names: Sequence[str]) -> Mapping[str, Any]:
    """Returns an example; reading it fails if an id of these features is 0, which seqio packs as padding."""
    tf = tensorflow()
    ids = [example[name] for name in names]
    with tf.control_dependencies([tf.debugging.assert_none_equal(each, each * 0, message=_ZERO) for each in ids]):
        return {name: tf.identity(value) for name, value in example.items()}


def _examples(found: Any, spec: StreamSpec, lengths: Mapping[str, int]) -> Any:
    """Returns the tf.data dataset of a task's or mixture's examples.

    A seqio mixture ends where its smallest task ends, so a stream that reads every example once mixes the tasks here.
    """
    seqio = seqio_tasks.library()
    tasks = [task for task in seqio.get_subtasks(found) if spec.split in task.splits]
    is_mixed_here = spec.once and len(tasks) > 1
    each = [
        source.get_dataset(
            lengths,
            split=spec.split,
            use_cached=any(task.requires_caching for task in seqio.get_subtasks(source)),
            shuffle=spec.seed is not None,
            seed=0 if spec.seed is None else spec.seed,  # without one, each host would draw otherwise
            num_epochs=1 if spec.once else None,
            shard_info=seqio.ShardInfo(spec.index, spec.num_streams),
            try_in_mem_cache=False,  # a cache would be saved with the position
        )
        for source in (tasks if is_mixed_here else [found])
    ]
    if not is_mixed_here:
        return each[0]
    kept = [examples.map(functools.partial(_only, tuple(lengths))) for examples in each]  # tasks may have others
    rates = [float(found.get_rate(task)) for task in tasks]
    return tensorflow().data.Dataset.sample_from_datasets(kept, rates, seed=0, stop_on_empty_dataset=False)


def _only(names: Sequence[str], example: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: example[name] for name in names}


def rows(corpus: LiveSeqio, spec: StreamSpec) -> Any:
    """Returns the tf.data dataset of a stream: seqio's decoder features, each [R, T]."""
    tf, seqio = tensorflow(), seqio_tasks.library()
    lengths = corpus.lengths(spec.length)
    with log_filters.without_records(*_HARMLESS):
        task = seqio_tasks.registered(corpus.asked.name, module=corpus.asked.module)
        try:
            examples = _examples(task, spec, lengths)
        except UserError:
            raise
        except (ValueError, AssertionError) as error:
            # Of a task that may not be shuffled, or whose seqio cache is missing.
            raise UserError(f"text.seqio.live = True: {corpus.asked.name} cannot be read live: {error}") from error
        if not seqio_tasks.reserves_zero(task.output_features["targets"].vocabulary):
            examples = examples.map(functools.partial(_without_zero, names=tuple(lengths)))
        packed = seqio.DecoderFeatureConverter(pack=True)(examples, lengths)
    options = tf.data.Options()  # everything that tf.data prefetches is saved with the position
    options.deterministic = True
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    options.threading.private_threadpool_size = 1
    return packed.batch(spec.rows, drop_remainder=True).prefetch(2).with_options(options)
