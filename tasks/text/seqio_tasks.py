"""Reads tasks and mixtures that a module of the user registered with seqio, and computes their metrics.

Examples are packed by seqio's own converter. A task has `targets`, or `inputs` and `targets`: then the targets follow
the inputs in a row, and only they have weight 1.

The position of a stream is its tf.data iterator with all its buffers, which the task's own shuffling can make large. It
can be read only by the version of TensorFlow that wrote it.

R: rows per element. T: tokens per row.
"""

import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import io
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from core.errors import UserError
from core.hosts import log_filters
from tasks.streams import Stream
from tasks.text.documents import Corpus, StreamSpec
from tasks.text.ids import Vocabulary, before_end
from tasks.text.tfds_source import tensorflow

_SAMPLES = ("The quick brown fox jumps over 13 lazy dogs.", "  x = [1, 2]\n", "naïve café, 你好")

_SHOWN = 400  # characters of an error
_HARMLESS = (
    # The position of a stream includes the buffers in which its examples are shuffled, so a restart changes nothing.
    "Using an uncached FunctionDataset for training is not recommended since it often results in insufficient "
    "shuffling on restarts, resulting in overfitting. It is highly recommended that you cache this task before "
    "training with it or use a data source that supports lower-level shuffling (e.g., FileDataSource).",
    # A row has the task's output features only; others, such as texts before they are tokenized, are by-products.
    "Features not in `features_length` will be removed during packing: %s",
)

_NAMES = {
    "inputs": "decoder_input_tokens",
    "targets": "decoder_target_tokens",
    "weights": "decoder_loss_weights",
    "segment_ids": "decoder_segment_ids",
    "positions": "decoder_positions",
}


def _seqio() -> Any:
    """Imports seqio. Raises UserError if it is not installed."""
    if importlib.util.find_spec("seqio") is None:
        raise UserError(
            "text.seqio and --seqio need the package seqio: .venv/bin/python -m pip install seqio (requirements.txt "
            "leaves it out on Python 3.13, where pip compiles its dependency editdistance with a C++ compiler)"
        )
    tensorflow()
    import seqio

    return seqio


@functools.cache
def _registered(name: str, where: str = "text.seqio.name") -> Any:
    """Returns the seqio Task or Mixture. Raises UserError if there is none of that name or its features are others."""
    seqio = _seqio()
    names = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"registered are {', '.join(sorted(names)[:8]) or 'none'}"
        raise UserError(
            f"{where}: no seqio task or mixture {name!r}; {hint}. Import the module that registers it, in the gin file "
            "or with --gin 'import MODULE'"
        )
    found = seqio.get_mixture_or_task(name)
    if set(found.output_features) not in ({"targets"}, {"inputs", "targets"}):
        raise UserError(
            f"{where}: {name} has features {sorted(found.output_features)}, expected targets, or inputs and targets, "
            "as for a decoder"
        )
    first, *others = (feature.vocabulary for feature in found.output_features.values())
    if any(vocabulary != first for vocabulary in others):
        raise UserError(f"{where}: the inputs and targets of {name} have different vocabularies, expected the same one")
    return found


@dataclasses.dataclass(frozen=True)
class SeqioVocabulary(Vocabulary):
    """The vocabulary of a registered task, as `tasks.text.ids.Vocabulary`."""

    name: str
    pad_id = 0
    bos_id = 0

    @property
    def _theirs(self) -> Any:
        return _registered(self.name).output_features["targets"].vocabulary

    @property
    def size(self) -> int:
        return int(self._theirs.vocab_size)

    @property
    def eos_id(self) -> int:
        return int(self._theirs.eos_id)

    @property
    def hash(self) -> str:
        model = getattr(self._theirs, "sp_model", None) or repr((type(self._theirs).__name__, self.size)).encode()
        return hashlib.sha256(model).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(self._theirs.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        return self._theirs.decode(before_end(ids, self))

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        """Reads the vocabulary, so that an invalid one is refused before the first step."""
        _ = self.size

    def problems(self) -> list[str]:
        return []

    def describe(self) -> str:
        return f"the vocabulary of {self.name}"


@dataclasses.dataclass(frozen=True)
class SeqioCorpus(Corpus):
    """A `documents.Corpus`: a registered task or mixture.

    Attributes:
      name: of the task or mixture.
      inputs_length: the most ids of `inputs` in a row; None for a task without inputs.
    """

    name: str
    inputs_length: int | None = None

    def named_files(self) -> tuple[str, ...]:
        return ()

    def open_stream(self, spec: StreamSpec) -> Stream:
        return SeqioStream(self, spec)

    def sample_texts(self) -> Iterator[str]:
        """Yields nothing: the task has a vocabulary."""
        return iter(())

    def problems(self) -> list[str]:
        try:
            found = _registered(self.name)
            missing = {"train", "validation"} - set(found.splits)
        except UserError as error:
            return [str(error)]
        if ("inputs" in found.output_features) != (self.inputs_length is not None):
            features = sorted(found.output_features)
            return [
                f"text.seqio.inputs_length is {self.inputs_length}, and {self.name} has the features {features}: give "
                "it for a task with inputs, and for no other"
            ]
        return [f"text.seqio.name: {self.name} has no split {split!r}" for split in sorted(missing)]

    def example_problems(self, length: int) -> list[str]:
        """See `documents.TriesExamples`."""
        tasks = _seqio().get_subtasks(_registered(self.name))
        lengths = self.lengths(length)
        found = (_example_problem(task, split, lengths) for task in tasks for split in ("train", "validation"))
        return [f"text.seqio: {problem}" for problem in found if problem]

    def lengths(self, length: int) -> dict[str, int]:
        """Returns the most ids of each feature in a row of `length` tokens; inputs have half of a smoke run's rows."""
        if self.inputs_length is None:
            return {"targets": length}
        inputs = self.inputs_length if self.inputs_length < length else length // 2
        return {"inputs": inputs, "targets": length - inputs}

    def describe(self) -> str:
        return f"text.seqio: {self.name}{f', inputs of up to {self.inputs_length} ids' if self.inputs_length else ''}"

    def fingerprint(self) -> str:
        """Depends on the name alone: what the task reads is not known."""
        return hashlib.sha256(self.describe().encode()).hexdigest()


class SeqioStream(Stream):
    """`streams.Stream` over a tf.data iterator."""

    def __init__(self, corpus: SeqioCorpus, spec: StreamSpec) -> None:
        self._tf = tensorflow()
        self._where = f"{corpus.describe()}, {spec.split} stream {spec.index} of {spec.num_streams}"
        self._once, self._has_read = spec.once, False
        self._iterator = iter(rows(corpus, spec))

    def __next__(self) -> Mapping[str, np.ndarray]:
        """Raises UserError if the task fails, or has no example for this stream."""
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
        """The bytes are a zip of the files of a tf.train.Checkpoint."""
        buffer = io.BytesIO()
        with tempfile.TemporaryDirectory() as folder:
            self._tf.train.Checkpoint(iterator=self._iterator).write(f"{folder}/position")
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
    """Renames seqio's decoder features, each [R, T], to the keys of a batch; padding is 0 everywhere."""
    batch = {key: features[name].numpy() for key, name in _NAMES.items()}
    return {**batch, "inputs": batch["inputs"] * (batch["segment_ids"] > 0)}


def rows(corpus: SeqioCorpus, spec: StreamSpec) -> Any:
    """Returns the dataset of a stream: seqio's decoder features, each [R, T]."""
    tf, seqio = tensorflow(), _seqio()
    lengths = corpus.lengths(spec.length)
    with log_filters.without_records(*_HARMLESS):
        examples = _registered(corpus.name).get_dataset(
            lengths,
            split=spec.split,
            shuffle=spec.seed is not None,
            seed=spec.seed,
            num_epochs=1 if spec.once else None,
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


def _example_problem(task: Any, split: str, lengths: Mapping[str, int]) -> str:
    """Reads the first example of a split of a seqio Task; returns what fails, or ''."""
    if split not in task.splits:
        return ""  # a mixture leaves out the tasks without the split
    try:
        examples = task.get_dataset(lengths, split=split, shuffle=False, num_epochs=1, try_in_mem_cache=False)
        if next(iter(examples.take(1)), None) is not None:
            return ""
    except Exception as error:  # a source and its preprocessors are code of the user
        said = " ".join(str(error).split())
        shown = said if len(said) <= _SHOWN else f"… {said[-_SHOWN:]}"  # TensorFlow's messages end with the cause
        return f"task {task.name} fails on the first example of its {split} split: {type(error).__name__}: {shown}"
    return f"task {task.name} has no example in its {split} split: its source is empty, or its preprocessors leave none"


def require_metrics(name: str) -> Any:
    """Returns a registered task or mixture with metrics of predictions or scores.

    Raises:
      UserError: there is no such task, or none of its metrics can be computed here.
    """
    seqio, found = _seqio(), _registered(name, "--seqio")
    kinds = seqio.metrics.ModelOutputType
    wanted = {metric.model_output_type for task in seqio.get_subtasks(found) for metric in task.metric_objs}
    if not wanted or wanted - {kinds.PREDICTION, kinds.PREDICTION_WITH_AUX, kinds.SCORE}:
        has = ", ".join(sorted(kind.name for kind in wanted)) or "no metrics"
        raise UserError(f"{name} has {has}: expected metrics of predictions or scores (metric_fns or metric_objs)")
    return found


def has_ids_of(name: str, vocabulary: Any) -> bool:
    """Returns whether a registered task has the ids of a vocabulary, as far as a few texts show."""
    theirs = SeqioVocabulary(name)
    if vocabulary is None or theirs.hash == vocabulary.hash:
        return vocabulary is not None
    return theirs.size == vocabulary.size and all(theirs.encode(text) == vocabulary.encode(text) for text in _SAMPLES)


def evaluate(
    name: str,
    *,
    most: int | None,
    score: Callable[[Sequence[tuple[list[int], list[int]]]], Sequence[float]],
    predict: Callable[[Sequence[list[int]], int], Sequence[list[int]]],
) -> dict[str, dict[str, float]]:
    """Computes the metrics of a registered task, or of each task of a mixture, on its validation split.

    Args:
      name: of the task or mixture.
      most: the most examples of each task; None: all.
      score: returns the log-likelihood of each continuation, given as pairs of ids (context, continuation).
      predict: returns the continuation of each prompt, given as ids, of at most so many ids.

    Returns:
      The scalar metrics of each task that has any.

    Raises:
      UserError: there is no such task, none of its metrics can be computed here, or one of them fails.
    """
    seqio, found = _seqio(), require_metrics(name)
    kinds = seqio.metrics.ModelOutputType
    eos_id = int(found.output_features["targets"].vocabulary.eos_id)
    evaluator = seqio.Evaluator(
        name,
        seqio.DecoderFeatureConverter(pack=False),
        eval_split="validation",
        num_examples=most,
        async_compute_metrics=False,
    )

    def scores(dataset: Any) -> list[tuple[int, float]]:
        return list(enumerate(score(_pairs(dataset))))

    def predicted(dataset: Any) -> list[list[int]]:
        known = _pairs(dataset)
        return list(predict([context for context, _ in known], max(len(targets) for _, targets in known)))

    def predictions(dataset: Any) -> list[tuple[int, list[int]]]:
        return list(enumerate(_padded(predicted(dataset), eos_id)))

    def with_scores(dataset: Any) -> tuple[list[tuple[int, list[int]]], dict[str, list[float]]]:
        answers = predicted(dataset)
        given = [(context, [*ids, eos_id]) for (context, _), ids in zip(_pairs(dataset), answers, strict=True)]
        return list(enumerate(_padded(answers, eos_id))), {"scores": list(score(given))}

    outputs = {kinds.SCORE: scores, kinds.PREDICTION: predictions, kinds.PREDICTION_WITH_AUX: with_scores}
    try:
        metrics, _ = evaluator.evaluate(compute_metrics=True, model_fns=outputs)
        values = metrics.result()
    except UserError:  # of the model, such as a prompt that is too long
        raise
    except Exception as error:  # a metric is a function of the user
        raise UserError(f"the metrics of {name} fail: {type(error).__name__}: {error}") from error
    return {task: dict(_scalars(each)) for task, each in values.items()}


def _pairs(dataset: Any) -> list[tuple[list[int], list[int]]]:
    """Returns, of each example, the ids before the targets, beginning with the begin-of-text id 0, and the targets."""
    examples = [example for _, example in dataset.as_numpy_iterator()]
    if not examples:
        raise UserError("the validation split of the task has no examples")
    rows = [(each["decoder_target_tokens"], each["decoder_loss_weights"] > 0) for each in examples]
    return [([0, *ids[: np.argmax(is_target)].tolist()], ids[is_target].tolist()) for ids, is_target in rows]


def _padded(answers: Sequence[list[int]], eos_id: int) -> list[list[int]]:
    """Returns answers of equal lengths, as seqio expects: each ends with the end-of-document id, then zeros follow."""
    longest = max(map(len, answers))
    return [[*ids, eos_id, *[0] * (longest - len(ids))] for ids in answers]


def _scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the metrics that are numbers; others are texts, images or histograms for TensorBoard."""
    for name, metric in metrics.items():
        value = getattr(metric, "value", metric)
        if isinstance(value, int | float | np.number) or getattr(value, "shape", None) == ():
            yield name, float(value)
