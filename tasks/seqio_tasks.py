"""Reads tasks and mixtures that a module of the user registered with seqio, packed by seqio's own converter.

The position of a stream is its tf.data iterator with all its buffers, which the task's own shuffling can make large. It
can be read only by the version of TensorFlow that wrote it.

R: rows per element. T: tokens per row.
"""

import dataclasses
import difflib
import functools
import hashlib
import io
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from core.errors import UserError
from tasks.catalogue import tensorflow
from tasks.documents import StreamSpec
from tasks.ids import before_end
from tasks.streams import Stream

_NAMES = {
    "inputs": "decoder_input_tokens",
    "targets": "decoder_target_tokens",
    "weights": "decoder_loss_weights",
    "segment_ids": "decoder_segment_ids",
    "positions": "decoder_positions",
}


def _seqio() -> Any:
    tensorflow()
    import seqio

    return seqio


@functools.cache
def _registered(name: str) -> Any:
    """Returns the seqio Task or Mixture. Raises UserError if there is none of that name or it has no `targets`."""
    seqio = _seqio()
    names = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"registered are {', '.join(sorted(names)[:8]) or 'none'}"
        raise UserError(
            f"text.seqio.name: no seqio task or mixture {name!r}; {hint} (the gin file must import the module that "
            "registers it)"
        )
    found = seqio.get_mixture_or_task(name)
    if set(found.output_features) != {"targets"}:
        raise UserError(
            f"text.seqio.name: {name} has features {sorted(found.output_features)}, expected targets alone, as for a "
            "decoder"
        )
    return found


@dataclasses.dataclass(frozen=True)
class SeqioVocabulary:
    """The vocabulary of a registered task, as `tasks.ids.Vocabulary`."""

    name: str
    pad_id = 0
    bos_id = 0

    @property
    def _theirs(self) -> Any:
        return _registered(self.name).output_features["targets"].vocabulary

    @property
    def size(self) -> int:
        """See `Vocabulary`."""
        return int(self._theirs.vocab_size)

    @property
    def eos_id(self) -> int:
        """See `Vocabulary`."""
        return int(self._theirs.eos_id)

    @property
    def hash(self) -> str:
        """See `Vocabulary`."""
        model = getattr(self._theirs, "sp_model", None) or repr((type(self._theirs).__name__, self.size)).encode()
        return hashlib.sha256(model).hexdigest()

    def encode(self, text: str) -> list[int]:
        """See `Vocabulary`."""
        return list(self._theirs.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        """See `Vocabulary`."""
        return self._theirs.decode(before_end(ids, self))

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        """Reads the vocabulary, so that an invalid one is refused before the first step."""
        _ = self.size

    def problems(self) -> list[str]:
        """See `Vocabulary`."""
        return []

    def describe(self) -> str:
        """See `Vocabulary`."""
        return f"the vocabulary of {self.name}"


@dataclasses.dataclass(frozen=True)
class SeqioCorpus:
    """A `documents.Corpus`: a registered task or mixture."""

    name: str

    def named_files(self) -> tuple[str, ...]:
        """See `Corpus`."""
        return ()

    def open_stream(self, spec: StreamSpec) -> Stream:
        """See `Corpus`."""
        return SeqioStream(self, spec)

    def sample_texts(self) -> Iterator[str]:
        """See `Corpus`. Yields nothing: the task has a vocabulary."""
        return iter(())

    def problems(self) -> list[str]:
        """See `Corpus`."""
        try:
            missing = {"train", "validation"} - set(_registered(self.name).splits)
        except UserError as error:
            return [str(error)]
        return [f"text.seqio.name: {self.name} has no split {split!r}" for split in sorted(missing)]

    def describe(self) -> str:
        """See `Corpus`."""
        return f"text.seqio: {self.name}"

    def fingerprint(self) -> str:
        """See `Corpus`. Depends on the name alone: what the task reads is not known."""
        return hashlib.sha256(self.describe().encode()).hexdigest()


class SeqioStream:
    """`streams.Stream` over a tf.data iterator."""

    def __init__(self, corpus: SeqioCorpus, spec: StreamSpec) -> None:
        self._tf = tensorflow()
        self._where = f"{corpus.describe()}, {spec.split} stream {spec.index} of {spec.num_streams}"
        self._iterator = iter(rows(corpus, spec))

    def __next__(self) -> Mapping[str, np.ndarray]:
        """See `streams.Stream`. Raises UserError if the task fails."""
        try:
            return batch_of(next(self._iterator))
        except self._tf.errors.OpError as error:
            raise UserError(f"{self._where}: {error.message.strip().splitlines()[0]}") from error

    def state(self) -> bytes:
        """See `streams.Stream`. The bytes are a zip of the files of a tf.train.Checkpoint."""
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


def batch_of(features: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """Renames seqio's decoder features, each [R, T], to the keys of a batch; padding is 0 everywhere."""
    batch = {key: features[name].numpy() for key, name in _NAMES.items()}
    return {**batch, "inputs": batch["inputs"] * (batch["segment_ids"] > 0)}


def rows(corpus: SeqioCorpus, spec: StreamSpec) -> Any:
    """Returns the dataset of a stream: seqio's decoder features, each [R, T]."""
    tf, seqio = tensorflow(), _seqio()
    lengths = {"targets": spec.length}
    examples = _registered(corpus.name).get_dataset(
        lengths,
        split=spec.split,
        shuffle=spec.seed is not None,
        seed=spec.seed,
        num_epochs=None,
        shard_info=seqio.ShardInfo(spec.index, spec.num_streams),
        try_in_mem_cache=False,  # a cache would be saved with the position
    )
    packed = seqio.DecoderFeatureConverter(pack=True)(examples, lengths)
    options = tf.data.Options()  # everything that tf.data prefetches is saved with the position
    options.deterministic = True
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    options.threading.private_threadpool_size = 1
    return packed.batch(spec.rows, drop_remainder=True).prefetch(2).with_options(options)
