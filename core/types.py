"""What a trainer needs of a model, of data and of a layout, and nothing more.

Models, strategies and data never import one another; each satisfies a small interface here. The one idea: a loss is a
pair of sums. Means are taken once, at the end, over everything that was summed, so that gradient accumulation, padding
and several hosts average correctly without any of them knowing of the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

Params = Mapping[str, Mapping[str, jax.Array]]
Carry = Any
Batch = Mapping[str, jax.Array]

IGNORED = -100  # a label that no loss and no metric looks at


class WeightedSum(NamedTuple):
    """A mean that has not been taken yet."""

    total: jax.Array  # [], float32
    weight: jax.Array  # [], float32


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

    Optional, each for what is named:
      evaluate(params, rng, batch): a LossOutput in place of that of `loss`, for a model that is evaluated otherwise
        than it is trained; its `extras` are what the model answers to each row, `{name: [B, ...]}`, for a task that
        judges answers. Evaluation.
      logits(params, batch): [B, T, V] of the next token, float32. Text that the trained model writes (PROMPT).
      shrink(multiples): the smallest model of this kind whose dimensions are multiples of `multiples`, a number by
        logical axis. --smoke and the tests that compile a gin file.
      flops_per_token(length): of training, without recomputation. The share of peak in what a run prints.
      vocab_size: entries of the vocabulary, held against the task's. Preflight and --smoke.
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

    Optional, each for what is named:
      num_puzzles: rows that a model's table of puzzles needs, held against the model's `num_puzzles`. Once prepared.
      evaluated_on(most): what the score of an evaluation of at most so many rows is of; None: of all. A run, at its
        start and end, and launch/run evaluate.
      evaluating(rows): this task with evaluations of so many held-out rows, always the same ones; None: of all, once.
        launch/run evaluate --rows.
      judge(): scores the answers of an evaluation (`tasks.puzzles.arc_voting.Judge`), or None. Once prepared.
      rehearsal(): a small task of the same shapes that needs no files. --smoke.
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


def missing(value: Any, protocol: type) -> list[str]:
    """What `value` lacks of a protocol of this module: attributes, and methods as `init(rng, batch)`.

    A method that does not take a keyword of the protocol's counts as missing.
    """
    attributes = [name for name in protocol.__annotations__ if not hasattr(value, name)]
    methods = {n: m for n, m in vars(protocol).items() if inspect.isfunction(m) and not n.startswith("_")}
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
