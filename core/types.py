"""What a trainer needs of a model, of data and of a layout, and nothing more.

Models, strategies and data never import one another; each satisfies a small interface here. The one idea: a loss is a
pair of sums. Means are taken once, at the end, over everything that was summed, so that gradient accumulation, padding
and several hosts average correctly without any of them knowing of the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar

import jax
import numpy as np

Params = Mapping[str, Mapping[str, jax.Array]]
Carry = Any
Batch = Mapping[str, jax.Array]
Shapes = Mapping[str, jax.ShapeDtypeStruct]  # of a batch

IGNORED = -100  # a label that no loss and no metric looks at


class WeightedSum(NamedTuple):
    """A mean that has not been taken yet; on the host, of numbers of numpy."""

    total: jax.Array | np.floating  # [], float32
    weight: jax.Array | np.floating  # [], float32


class LossOutput(NamedTuple):
    """Sums over the rows of a batch.

    Attributes:
      loss_sum: [], float32.
      weight_sum: [], float32, the number of supervised items.
      metrics: further means to report, by name.
      extras: what an optimizer needs beside gradients: `{path of a table: rows that were read [N], int32}` for
        `core.optimizers.with_table`. Not summed over microbatches.
    """

    loss_sum: jax.Array
    weight_sum: jax.Array
    metrics: Mapping[str, WeightedSum]
    extras: Any = ()


class Model(Protocol):
    """A pure model. `init` names the axes of every parameter through `core.logical`.

    A batch is what the task's `spec` says. That of a text task: `inputs`, `targets`, `segment_ids`, `positions` [B, T],
    int32 (documents of a row count from 1, 0 is padding; positions restart with each), and `weights` [B, T], float32 (0
    leaves a position out of the loss). In `loss` there is also `row_ids` [B], for `core.random_bits`.

    A puzzle's: `inputs`, `labels` [B, S] (`IGNORED` is not scored) and `puzzle_ids` [B], int32.

    Optional abilities: `Evaluates`, `Generates`, `Shrinks`, `CountsFlops`, `CountsRunFlops`, `HasVocabulary`,
    `PadsVocabulary`, `HasPuzzles`, `HasLayers`, `ChoosesDtype`, `ChoosesRemat`, `ChoosesAttention`.
    """

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        """Parameters for batches of this shape; float32."""

    def init_carry(self, batch: Batch) -> Carry:
        """State that travels from step to step beside the parameters; `()` for a language model."""

    def loss(
        self, params: Params, carry: Carry, rng: jax.Array, batch: Batch, *, is_training: bool
    ) -> tuple[Carry, LossOutput]:
        """The next carry and the loss sums over the rows of `batch`.

        `is_training` is False in evaluation, where a model without `evaluate` is asked for its loss: what only training
        does, such as dropout, is then left out.
        """


class DataLayout(NamedTuple):
    """The whole contract between a mesh and an input pipeline.

    Attributes:
      batch_size: rows of the global batch.
      rows: the rows that this host must supply, ascending, read from the sharding of the batch. On a real slice they
        are often strided (v4-32 under fsdp 16: host 0 has rows 0, 4, 8, 12), and several hosts may need the same row.
      owned_rows: those of `rows` that no lower-numbered host also has. A host saves the position of the streams
        whose first row it owns, so each is written once.
    """

    batch_size: int
    rows: tuple[int, ...]
    owned_rows: tuple[int, ...]


class Batches(Protocol):
    """An endless or finite sequence of batches, as seen by one host."""

    @property
    def spec(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the *global* batch."""

    def __next__(self) -> Mapping[str, np.ndarray]:
        """The rows of the next global batch that this host supplies, in the order of `DataLayout.rows`."""

    def state(self) -> Mapping[str, bytes]:
        """The position of every stream whose first row this host owns, by stream name (equal on every host count)."""

    def restore(self, state: Mapping[str, bytes]) -> None:
        """Continue from the union of what all hosts returned from `state`. Raises ValueError for a missing stream."""


class Task(Protocol):
    """Data for one kind of model. Making one opens nothing.

    Attributes:
      length: tokens of a row.
      num_streams: streams of the input, whatever the number of hosts; divides the batch size.
      vocabulary: has `size`, `bos_id`, `encode(text) -> ids`, `decode(ids) -> text`, `describe()`; None for data that
        is no text.

    Optional abilities: `HasPuzzles`, `DescribesEvaluation`, `SizesEvaluation`, `Judges`, `Rehearses`, `NamesFiles`.
    """

    length: int
    num_streams: int
    vocabulary: Any

    def spec(self, batch_size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a global batch."""

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        """What must exist before the data is read (a trained vocabulary): host 0 first, then the others."""

    def train(self, layout: DataLayout, *, seed: int) -> Batches:
        """Endless batches."""

    def evaluation(self, layout: DataLayout) -> Batches:
        """Validation batches from their start, the same at every call and on every number of hosts; they may end."""

    def problems(self) -> list[str]:
        """Everything wrong that can be known without opening the data, each with its fix."""

    def describe(self) -> str:
        """One line."""

    def fingerprint(self) -> str:
        """Equal on all hosts that read the same data."""


# Optional abilities of models, asked for with `can`.


class Evaluates(Protocol):
    """A model that is evaluated otherwise than it is trained."""

    def evaluate(self, params: Params, rng: jax.Array, batch: Batch) -> LossOutput:
        """Sums in place of those of `loss`.

        `extras` are what the model answers to each row, `{name: [B, ...]}`, for a task that judges answers.
        """


class Generates(Protocol):
    """A model that can continue a prompt."""

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """[B, T, V], float32, of the next token."""


class Shrinks(Protocol):
    """A model that --smoke and the tests can make small."""

    def shrink(self, multiples: Mapping[str, int]) -> Model:
        """The smallest model of this kind whose dimensions are multiples of `multiples`, by logical axis."""


class CountsFlops(Protocol):
    """A model whose share of the hardware's peak can be reported."""

    def flops_per_token(self, length: int) -> float:
        """FLOPs of training, without recomputation."""


class CountsRunFlops(Protocol):
    """A model whose FLOPs change while it trains."""

    def training_flops(self, length: int, *, rows: int, steps: int) -> float:
        """FLOPs of the first `steps` steps of `rows` rows, without recomputation."""


class HasVocabulary(Protocol):
    """A model of tokens, whose vocabulary is compared with the task's."""

    vocab_size: int


class PadsVocabulary(HasVocabulary, Protocol):
    """A model that rounds its vocabulary up, so that it divides."""

    stored_vocab_size: int


class HasPuzzles(Protocol):
    """A model with a table of puzzles, or a task with identifiers of puzzles; a task, once it is prepared."""

    num_puzzles: int


class HasLayers(Protocol):
    """A model whose depth is a number of layers."""

    num_layers: int


class HasEffectiveDepth(Protocol):
    """A model that applies its layers several times in a step."""

    effective_depth: int  # layers applied in sequence in one training step


class ChoosesDtype(Protocol):
    """A dataclass with a field for the dtype of its computation."""

    dtype: str


class ChoosesRemat(Protocol):
    """A dataclass with a field for what its backward pass computes again."""

    remat: str


class ChoosesAttention(Protocol):
    """A dataclass with a field for its implementation of attention; "auto": by the accelerator."""

    attention: str


# Optional abilities of tasks.


class DescribesEvaluation(Protocol):
    """A task that says what its scores are of."""

    def evaluated_on(self, most: int | None) -> str:
        """What an evaluation of at most so many rows scores; None: of all."""


class SizesEvaluation(Protocol):
    """A task whose evaluation ends."""

    def evaluating(self, rows: int | None) -> Task:
        """This task with evaluations of so many held-out rows, always the same ones; None: of all, once."""


class AnswerJudge(Protocol):
    """Scores a model's answers by votes.

    Attributes:
      needed_answers: names of the answers that it reads, in the extras of `Evaluates.evaluate`.
    """

    needed_answers: Sequence[str]

    def votes(self, batches: Iterable[Mapping[str, np.ndarray]]) -> Any:
        """The votes of one evaluation, from answers by batch."""

    def merged(self, *several: Any) -> Any:
        """The votes of several evaluations together."""

    def scores(self, votes: Any) -> dict[str, Any]:
        """Scores of the votes as JSON."""

    def submission(self, votes: Any) -> Any:
        """Attempts for every test as JSON, for a competition."""


class Judges(Protocol):
    """A task that may score the answers of an evaluation."""

    def judge(self) -> AnswerJudge | None:
        """The judge, or None if the data has none. The task must be prepared."""


class Rehearses(Protocol):
    """A task with a small stand-in for --smoke."""

    def rehearsal(self) -> Task:
        """A task of the same shapes that needs no files."""


class NamesFiles(Protocol):
    """A task that reads files."""

    def named_files(self) -> Sequence[str]:
        """Patterns, files and folders as the user named them."""


Ability = TypeVar("Ability")


def can(value: object, ability: type[Ability]) -> TypeGuard[Ability]:
    """Whether a model, a task or a vocabulary has an optional ability, a Protocol such as `Evaluates`."""
    return not missing(value, ability)


def missing(value: Any, protocol: type) -> list[str]:
    """What `value` lacks of a protocol of this module: attributes, and methods as `init(rng, batch)`.

    A method that does not take a keyword of the protocol's counts as missing.
    """
    bases = [base for base in reversed(protocol.__mro__) if getattr(base, "_is_protocol", False)]
    attributes = [name for base in bases for name in inspect.get_annotations(base) if not hasattr(value, name)]
    members = [member for base in bases for member in vars(base).items()]
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
    """`params, batch, *, is_training`."""
    _, *parameters = inspect.signature(method).parameters.values()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    return ", ".join([*positional, *["*"][: len(keywords)], *keywords])
