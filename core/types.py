"""The interfaces between the trainer, models, data and layouts.

A loss is a pair of sums, and the mean is taken once at the end.
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, TypeVar

import jax
import numpy as np

from core.batches import BatchSpec

Params = Mapping[str, Mapping[str, jax.Array]]
Carry = Any
Batch = Mapping[str, jax.Array]

IGNORED = -100  # label that losses and metrics ignore

if TYPE_CHECKING:
    from builtins import property as attribute
else:

    class attribute:
        """A read-only attribute of a Protocol, which a subclass may also assign in `__init__`."""

        def __init__(self, described: Callable):
            self.__doc__, self._name = described.__doc__, described.__name__

        def __get__(self, value: Any, kind: type) -> Any:
            if value is None:
                return self
            raise AttributeError(f"{kind.__name__} has no {self._name}: define it, or assign it in __init__")


class WeightedSum(NamedTuple):
    """A weighted sum and its weight, scalars, whose quotient is a mean."""

    total: jax.Array | np.floating  # [], float32
    weight: jax.Array | np.floating  # [], float32


class LossOutput(NamedTuple):
    """Sums over the rows of a batch.

    Attributes:
      loss_sum: [], float32, the sum of the losses times their weights.
      weight_sum: [], float32, the sum of these weights.
      extras: from `loss`, inputs of the optimizer besides gradients; from `evaluate`, answers. Not summed.
    """

    loss_sum: jax.Array
    weight_sum: jax.Array
    metrics: Mapping[str, WeightedSum]
    extras: Any = ()


class Model(Protocol):
    """A pure model. `init` names the axes of every parameter through `core.logical`.

    The task's `spec` describes its batches. A text task has `inputs`, `targets`, `segment_ids`, `positions` [B, T],
    int32, and `weights` [B, T], float32. Segments of a row are numbered from 1, and 0 is padding, which may have any
    id. Positions restart in each segment. A weight of 0 excludes a position from the loss. A puzzle task has `inputs`,
    `labels` [B, S] (`IGNORED` is not scored) and `puzzle_ids` [B], int32. In `loss` a batch also has `row_ids` [B],
    int32.
    """

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        """Returns the initial parameters for batches of this shape."""

    def init_carry(self, batch: Batch) -> Carry:
        """Returns the initial carry, passed from step to step; `()`: none."""

    def loss(
        self, params: Params, carry: Carry, rng: jax.Array, batch: Batch, *, is_training: bool
    ) -> tuple[Carry, LossOutput]:
        """Returns the next carry and the loss sums over the rows of `batch`.

        Args:
          carry: from `init_carry` or the step before.
          batch: rows of the global batch, with `row_ids`.
          is_training: False disables dropout and the like.
        """


class DataLayout(NamedTuple):
    """The rows of the global batch that a host supplies.

    Attributes:
      batch_size: rows of the global batch.
      rows: rows of this host, ascending, often strided (host 0 of v4-32: 0, 4, 8, 12); several hosts may have the same
        row.
      owned_rows: those of `rows` that no lower-numbered host has.
    """

    batch_size: int
    rows: tuple[int, ...]
    owned_rows: tuple[int, ...]


class Batches(Protocol):
    """An endless or finite iterator over one host's rows of the global batches."""

    @attribute
    def spec(self) -> BatchSpec:
        """Fields of the *global* batch."""

    def __next__(self) -> Mapping[str, np.ndarray]:
        """Returns this host's rows of the next global batch, ordered as `DataLayout.rows`."""

    def state(self) -> Mapping[str, bytes]:
        """Returns the positions of streams whose first row this host owns, by a name that hosts share."""

    def restore(self, state: Mapping[str, bytes]) -> None:
        """Moves to saved positions, the union of all hosts' `state`.

        Raises UserError if a stream is missing, or was saved with other data.
        """


class Task(Protocol):
    """Data to train and evaluate a model on. Constructing a task opens no files.

    Attributes:
      num_streams: number of data streams, whatever the number of hosts; divides the batch size.
      vocabulary: has `size`, `bos_id`, `encode(text) -> ids`, `decode(ids) -> text`, `describe()`; None for data that
        is not text.
    """

    num_streams: int
    vocabulary: Any

    def spec(self, batch_size: int) -> BatchSpec:
        """Returns the fields of a global batch."""

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        """Prepares the data; runs on host 0 before the others.

        Only a call with `is_host_zero` may write to the run directory.
        """

    def train(self, layout: DataLayout, *, seed: int) -> Batches:
        """Returns an endless iterator of this host's rows of training batches, in an order set by `seed`."""

    def evaluation(self, layout: DataLayout) -> Batches:
        """Returns the validation batches, the same at every call; they may end."""

    def problems(self) -> list[str]:
        """Returns problems that can be found without opening the data, each with its fix."""

    def describe(self) -> str:
        """Returns one line for the run summary."""

    def fingerprint(self) -> str:
        """Returns a hash, equal on all hosts that read the same data; `core.batches.is_same_data` compares two."""


# Optional abilities of models, tested with `can`.


class Evaluates(Protocol):
    """A model whose evaluation differs from its training loss.

    Enables: validation metrics of the model's own, and answers for a task that judges them (`launch/run evaluate`).
    """

    def evaluate(self, params: Params, rng: jax.Array, batch: Batch) -> LossOutput:
        """Returns sums, which replace those of `loss`; `extras` may have answers `{name: [B, ...]}`."""


class Generates(Protocol):
    """A model that can continue a prompt.

    Enables: a text sample at the end of a run (`PROMPT`); logits in `launch/run bisect`.
    """

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the logits of the next token at each position, [B, T, V], float32."""


class ExtendsCache(Protocol):
    """A model that generates from a cache.

    Enables: generation that runs each position once, instead of all positions again for each token.
    """

    def empty_cache(self, rows: int, length: int) -> Any:
        """Returns an empty cache for `rows` rows of at most `length` slots."""

    def extend(self, params: Params, cache: Any, ids: Any, start: Any, padding: Any) -> tuple[jax.Array, Any]:
        """Runs new ids; returns logits after the last id, [B, V], float32, and the cache.

        Args:
          cache: filled in all slots before `start`.
          ids: [B, T], int32; the id in slot s has position s - padding.
          start: slot of the first new id, [], int32.
          padding: [B], int32: the number of empty slots at the beginning of each row.
        """


class ExtendsLayers(Protocol):
    """A model whose `extend` is `before_layers`, then `extend_layers` for successive layers, then `after_layers`.

    Its cache is a tuple: the states of all layers, followed by other entries.

    Enables: generation on a CPU from small programs of a few layers, compiled once for layers of equal kinds.
    """

    num_layers: int

    @property
    def num_first_layers(self) -> int:
        """How many layers come before those that repeat; no call of `extend_layers` has layers of both."""

    def layer_kind(self, layer: int) -> Hashable:
        """Returns the kind of a layer; layers of one kind differ in arrays alone."""

    def before_layers(self, params: Params, others: Any, ids: Any, start: Any, padding: Any) -> tuple[Any, Any, Any]:
        """Returns the input of the first layer, arrays that all layers read, and the new `others`.

        Args:
          others: entries of the cache after the states of layers.
          ids, start, padding: as in `ExtendsCache.extend`.
        """

    def extend_layers(self, params: Params, x: Any, side: Any, states: Any, start: Any, *, kinds: Any) -> Any:
        """Runs successive layers on new ids; returns x and the states of these layers.

        Args:
          params: the parameters; the stacked ones are of these layers alone.
          side: the arrays from `before_layers`.
          states: of these layers, from the cache.
          kinds: from `layer_kind`.
        """

    def after_layers(self, params: Params, x: Any) -> jax.Array:
        """Returns the logits after the last id, [B, V], float32."""


class LimitsPositions(Protocol):
    """A model that may limit the number of positions; `max_positions` is None if it has no limit.

    Enables: an error for prompts and training rows that are too long.
    """

    max_positions: int | None


class LimitsCache(Protocol):
    """A model whose KV cache is right up to `max_cached_positions` positions; None: up to any number.

    Enables: generation beyond a length at which cached keys would have to change.
    """

    max_cached_positions: int | None

    def for_longer_rows(self) -> Model:
        """Returns the model whose cache is right for all rows of more positions."""


class HasTextPart(Protocol):
    """A model of which `text_part` reads text alone, with some of the model's parameters.

    Enables: text without images from a model of images and text, in samples, `generate` and scores.
    """

    text_part: Model


class Shrinks(Protocol):
    """A model that can be made small for smoke runs and tests.

    Enables: `--check smoke`; small sizes in `launch/run agreement --experiment` and `bisect`.
    """

    def shrink(self, multiples: Mapping[str, int]) -> Model:
        """Returns a small model, whose logical axes have sizes that are multiples of these."""


class ReadsPublished(Protocol):
    """A model whose parameters can be read from the folder of a published model.

    Attributes:
      added_parameters: shell wildcards over paths of parameters that a source may lack.

    Enables: `INIT_FROM` with the folder of a published model, or with a source that lacks what the model adds.
    """

    added_parameters: Sequence[str]

    def published(self, folder: str) -> Any:
        """Returns the folder's parameters, a `core.checkpoints.warm_start.ParameterSource`."""


class ListsSettings(Protocol):
    """A model that lists what determines its results besides its parameters.

    Enables: a list of the settings in which two models differ, where `INIT_FROM` names a run.
    """

    def settings(self) -> Mapping[str, Any]:
        """Returns the settings that change results by more than rounding, by name, also those with their defaults."""


class CountsFlops(Protocol):
    """A model that can count its FLOPs.

    Enables: MFU, FLOPs in the run summary and in plans.
    """

    def flops_per_token(self, length: int) -> float:
        """Returns training FLOPs per token in rows of `length` tokens, without recomputation."""


class CountsRunFlops(Protocol):
    """A model whose FLOPs per step change during training.

    Enables: the MFU of each step, and the FLOPs of a run in the tables of suites.
    """

    def training_flops(self, length: int, *, rows: int, steps: int) -> float:
        """Returns the FLOPs of the first `steps` steps of `rows` rows, without recomputation."""


class HasVocabulary(Protocol):
    """A model with a vocabulary of `vocab_size` ids; the task's must not be larger.

    Enables: the check that the model has a row for every id of the data; `--check smoke` before text is named.
    """

    vocab_size: int


class CouplesRows(Protocol):
    """A model that says whether its loss couples the rows of a batch, as a contrastive loss does.

    Enables: errors for accumulation, pipelines and `overlap_reduction`, which would compute another loss.
    """

    couples_rows: bool


class ChoosesDtype(Protocol):
    """A dataclass with a field `dtype` for its computation dtype, such as `bfloat16`.

    Enables: `launch/run agreement` and `bisect` in float32; bytes of activations in plans.
    """

    dtype: str


class ChoosesRemat(Protocol):
    """A dataclass with a field `remat` for its rematerialization policy, such as `full`.

    Enables: plans that try every policy.
    """

    remat: str


class ChoosesKernels(Protocol):
    """A dataclass with fields for how it computes attention and the logits of its loss.

    Attributes:
      loss_chunk: positions whose logits are held at a time; 0: all; None: by `chunk_bytes`.
      chunk_bytes: limit on the bytes of these logits.

    Enables: plans with the TPU's attention kernel and logits of a chunk; the row `attention` of the summary on GPUs.
    """

    attention: str
    loss_chunk: int | None
    chunk_bytes: int

    def attention_on_gpus(self, length: int) -> str:
        """Returns how GPUs would compute attention over rows of `length` positions, as text."""


# Optional abilities of tasks.


class DescribesEvaluation(Protocol):
    """A task that can describe the data of an evaluation.

    Enables: what scores are computed on, in the run summary and beside every score.
    """

    def evaluated_on(self, most: int | None) -> str:
        """Describes the rows that an evaluation of at most `most` rows scores; None: of all rows."""


class FramesTexts(Protocol):
    """A task of texts, which knows how its rows begin and end.

    Enables: prompts that begin as its rows do, and exports with the ids that end its texts.
    """

    def begins_with_bos(self) -> bool:
        """Returns whether a text begins with the begin-of-text id of the vocabulary."""

    def stop_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a text."""


class EndsEvaluation(Protocol):
    """A task whose evaluation scores each example of finite data once; `evaluation_ends` is True.

    Enables: `launch/run evaluate --num-examples all`, and the share of the data that was scored.
    """

    evaluation_ends: bool


class CountsTokens(Protocol):
    """A task that may know the size of its training data.

    Enables: the number of epochs in the run summary, the step after which data repeat, and `max_epochs`.
    """

    def train_tokens(self) -> int | None:
        """Returns the number of tokens of the training data; None if it is not known."""


class SizesEvaluation(Protocol):
    """A task with a finite evaluation.

    Enables: `launch/run evaluate --num-examples all`, and exactly N examples with `--num-examples N`.
    """

    def evaluating(self, rows: int | None) -> Task:
        """Returns a copy whose evaluations score the same `rows` rows each time; None: all rows."""


class AnswerJudge(Protocol):
    """Scores a model's answers by votes.

    Attributes:
      name: under which the scores are stored.
    """

    name: str
    needed_answers: Sequence[str]

    def votes(self, batches: Iterable[Mapping[str, np.ndarray]]) -> Any:
        """Counts the votes of one evaluation."""

    def merged(self, *several: Any) -> Any:
        """Adds the votes of several evaluations."""

    def scores(self, votes: Any) -> dict[str, Any]:
        """Returns the scores of the votes, of JSON types."""

    def submission(self, votes: Any) -> Any:
        """Returns the attempts in the format of a competition, of JSON types."""


class Judges(Protocol):
    """A task that may score the answers of an evaluation.

    Enables: scores by votes in `launch/run evaluate`.
    """

    def judge(self) -> AnswerJudge | None:
        """Returns the judge, None if the data has none; the task must be prepared."""


class OwnMetrics(Protocol):
    """Metrics that a task defines on a model's predictions and scores."""

    def questions(self) -> dict[str, Any]:
        """Returns what to ask a model, `{"eos_id": …, "tasks": {name: {"kinds": …, "pairs": …}}}`.

        `kinds` are kinds of output that the metrics need; `pairs` are the ids of prompts and targets.
        """

    def computed(self, outputs: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """Returns the metrics of a model's outputs, by task and name."""


class DefinesMetrics(Protocol):
    """A task that may define metrics of its own.

    Enables: the task's own metrics at every evaluation of a run (METRIC_EXAMPLES).
    """

    def own_metrics(self, most: int) -> OwnMetrics | None:
        """Returns the metrics on at most `most` examples; None if the task defines none."""


class SplitsRows(Protocol):
    """A task whose batches hold successive chunks of longer rows, those of the task `whole`.

    Enables: truncated backpropagation, by models that carry state from step to step.
    """

    whole: Task

    def with_rows(self, whole: Task, length: int) -> Task:
        """Returns a task whose batches hold chunks of `length` positions of the rows of `whole`."""


class ChecksModel(Protocol):
    """A task that only some models can be trained on.

    Enables: a check before a run.
    """

    def model_problems(self, model: Model, *, prepared: bool) -> list[str]:
        """Returns how the model does not fit the data; `prepared`: whether `prepare` ran."""


class Rehearses(Protocol):
    """A task with a small replacement for smoke runs.

    Enables: `--check smoke` without the data.
    """

    def rehearsal(self) -> Task:
        """Returns a small task of the same shapes that needs no existing files."""


class TriesExamples(Protocol):
    """A task that runs code of the user on its examples.

    Enables: a check before a run that the code works on one example of each source.
    """

    def example_problems(self) -> list[str]:
        """Reads one example of each source and split; returns a problem for each that fails."""


class NamesFiles(Protocol):
    """A task that reads files.

    Enables: checks before a run that its files exist, including those that only the hosts read.
    """

    def named_files(self) -> Sequence[str]:
        """Returns patterns, files and folders as the user wrote them."""


Ability = TypeVar("Ability")


def can(value: object, ability: type[Ability]) -> TypeGuard[Ability]:
    """Returns whether an object implements an optional Protocol such as `Evaluates`."""
    return not missing(value, ability)


def lacking(value: object, ability: type) -> str:
    """Returns a message such as `TokenModel lacks the ability Generates: add logits(params, batch)`."""
    return f"{type(value).__name__} lacks the ability {ability.__name__}: add {', '.join(missing(value, ability))}"


def missing(value: Any, protocol: type) -> list[str]:
    """Returns the attributes of a Protocol that `value` lacks, and the methods as `init(rng, batch)`."""
    bases = [base for base in reversed(protocol.__mro__) if getattr(base, "_is_protocol", False)]
    members = [member for base in bases for member in vars(base).items()]
    declared = [name for base in bases for name in inspect.get_annotations(base)]
    declared += [name for name, member in members if isinstance(member, attribute | property)]
    attributes = [name for name in declared if not hasattr(value, name)]
    methods = {name: m for name, m in members if inspect.isfunction(m) and not name.startswith("_")}
    lacking = [name for name, method in methods.items() if not _takes_keywords(getattr(value, name, None), method)]
    return [*attributes, *(f"{name}({_parameters(methods[name])})" for name in lacking)]


def _takes_keywords(found: Any, method: Callable) -> bool:
    if not callable(found):
        return False
    there = inspect.signature(found).parameters
    wanted = {p.name for p in inspect.signature(method).parameters.values() if p.kind is p.KEYWORD_ONLY}
    return wanted <= set(there) or any(p.kind is p.VAR_KEYWORD for p in there.values())


def _parameters(method: Callable) -> str:
    _, *parameters = inspect.signature(method).parameters.values()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    return ", ".join([*positional, *["*"][: len(keywords)], *keywords])
