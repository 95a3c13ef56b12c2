"""The root of a configuration: `Experiment`, whose fields define a run.

`Experiment.bind` lays it out on devices.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from core import flops, optimizers, slices, wrappers
from core.batches import batch_shapes, has_ids, row_length
from core.errors import UserError
from core.optimizers import Optimizer, Transformation
from core.training import hooks
from core.types import (
    ChecksModel,
    CountsRunFlops,
    CountsTokens,
    CouplesRows,
    DefinesMetrics,
    Generates,
    HasVocabulary,
    LimitsPositions,
    Model,
    SplitsRows,
    Task,
    can,
    missing,
)
from launch import phases, settings
from launch.phases import Phase
from launch.settings import Checkpointing, Evaluation, Health, Initialization, Logging
from parallel.compiled import compiler_options
from parallel.partitioner import Partitioner, Program
from parallel.strategy import Strategy
from tasks.text import vocabularies

# Begins the configuration that a run of Python objects saves.
OF_PYTHON = "# An experiment of Python objects, by renga.Trainer; gin cannot build it again."

_CHECKS = {
    **dict.fromkeys(("batch_size", "total_steps", "accum_steps"), settings.count(1)),
    "seed": settings.count(0),
    "phases": settings.expecting("a sequence of launch.phases.Phase", lambda value: settings.is_sequence(value, Phase)),
    "phase": settings.expecting("an integer", lambda value: isinstance(value, int)),
    "gather_once": settings.expecting("True or False", lambda value: isinstance(value, bool)),
    "compiler_options": settings.expecting("a dictionary", lambda value: isinstance(value, Mapping)),
    "simulation_xla_flags": settings.TEXT,
    "frozen": settings.TEXTS,
    "frozen_dtype": settings.choice("bfloat16", "float32"),
    "max_epochs": settings.positive(may_be_none=True),
    "non_finite": settings.choice(*hooks.POLICIES),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment: model, data, strategy, optimizer and duration.

    Attributes:
      slice: name of the slice (`core.slices`); the SLICE argument of a command overrides it.
      strategy: how arrays are sharded over the chips.
      model: a `core.types.Model`.
      task: the data, from `tasks`.
      optimizer: an optimizer of `core.optimizers`, or a transformation of optax.
      batch_size: rows of a global batch; a multiple of `task.num_streams`.
      total_steps: number of steps of the run.
      phases: changes of data, batch size or strategy during the run (`launch.phases`).
      phase: number (from 1) of the one phase to report or plan; 0: all phases.
      accum_steps: microbatches per step.
      gather_once: gather sharded parameters once per step instead of once per microbatch.
      compiler_options: options of the TPU compiler to add or replace, by name; None removes one.
      simulation_xla_flags: XLA_FLAGS of simulated hosts, unless the environment sets them. They may change the last
        bits of a simulated run.
      frozen: shell wildcards over paths of parameters not to train, besides those that the model freezes.
      frozen_dtype: storage dtype of frozen parameters: `bfloat16` or `float32`.
      max_epochs: most times that a phase may read its training data, if their size is known; None: no limit.
      seed: seed of parameters, data order and random bits.
      non_finite: reaction to a loss or gradient that is NaN or infinite: `stop` the run, `skip` the update, or
        `roll_back` to the newest checkpoint and skip the data read since.
      initialization, logging, evaluation, checkpointing, health: further settings, in groups (`launch.settings`).

    Raises:
      UserError: a setting has the wrong type or value, or settings contradict one another.
    """

    _chosen: ClassVar[tuple[int, int, int, int] | None] = None  # of `phase`: number, count, first and last step

    slice: str
    strategy: Strategy
    model: Model
    task: Task
    optimizer: Optimizer | Transformation
    batch_size: int
    total_steps: int
    phases: Sequence[Phase] = ()
    phase: int = 0
    accum_steps: int = 1
    gather_once: bool = False
    compiler_options: compiler_options.Overrides = dataclasses.field(default_factory=dict)
    simulation_xla_flags: str = ""
    frozen: Sequence[str] = ()
    frozen_dtype: str = "bfloat16"
    max_epochs: float | None = None
    seed: int = 0
    non_finite: str = "stop"
    initialization: Initialization = dataclasses.field(default_factory=Initialization)
    logging: Logging = dataclasses.field(default_factory=Logging)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    checkpointing: Checkpointing = dataclasses.field(default_factory=Checkpointing)
    health: Health = dataclasses.field(default_factory=Health)

    def __post_init__(self):
        object.__setattr__(self, "slice", slices.get(self.slice).name)  # of v5litepod-16 and 1xv4-8, the usual name
        wrong = settings.problems(self, _CHECKS)
        if problems := [*self._wrong_parts(), *(wrong or self._out_of_range())]:
            raise UserError("Experiment: " + "; ".join(problems))
        object.__setattr__(self, "optimizer", optimizers.as_optimizer(self.optimizer))
        spans = self.spans() if self.phases else ()  # raises UserError for settings that a phase cannot have
        if self.phase and spans:
            *bounds, chosen = spans[self.phase - 1]
            for name in (*phases.CHANGED, "phases", "phase"):
                object.__setattr__(self, name, getattr(chosen, name))
            object.__setattr__(self, "_chosen", tuple(bounds))

    @property
    def is_one_phase(self) -> bool:
        """Whether `phase` has chosen one of several phases."""
        return self._chosen is not None

    def _wrong_parts(self) -> Iterator[str]:
        groups = {name: [kind] for name, kind in settings.GROUPS.items()}
        for name, kinds in {"strategy": [Strategy], "optimizer": [Optimizer, Transformation], **groups}.items():
            if not isinstance(part := getattr(self, name), tuple(kinds)):
                expected = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
                yield f"{name} is {_told(part)}, expected {expected}"
        for name, protocol in (("model", Model), ("task", Task)):
            part = getattr(self, name)
            if inspect.isclass(part):
                yield f"{name} is {_told(part)}, expected an object of it"
            elif lacks := ", ".join(missing(part, protocol)):
                yield f"{name} is {_told(part)}, which lacks {lacks}: see {protocol.__name__} in core/types.py"

        yield from self._lost_states()

    def _lost_states(self) -> Iterator[str]:
        owner, is_split = wrappers.field_owner(self.model, "keeps_states"), can(self.task, SplitsRows)
        if owner is not None and owner.keeps_states and not is_split:
            yield (
                f"model.keeps_states = True, and task is {_told(self.task)}, whose rows are complete, so that no state "
                "would be kept: expected tasks.chunked.rows around this task, or keeps_states = False"
            )
        elif is_split and self.non_finite != "stop":
            yield (
                f"non_finite = {self.non_finite!r}, and task is {_told(self.task)}: the chunk after one that is left "
                "out would continue from the state of other tokens; expected 'stop'"
            )
        elif is_split and can(self.model, Model):
            carry = jax.eval_shape(self.model.init_carry, batch_shapes(self.task.spec(self.batch_size)))
            if not jax.tree.leaves(carry):
                yield (
                    "task is tasks.chunked.rows, and the model carries nothing from one chunk of a row to the next: "
                    "expected a model with keeps_states = True, or one with a carry"
                )

    def _out_of_range(self) -> Iterator[str]:
        for problem in compiler_options.problems(self.compiler_options):
            yield f"compiler_options: {problem}"
        saves, evaluates = self.checkpointing, self.evaluation
        if saves.keep_best and (not evaluates.eval_batches or saves.checkpoint_interval % evaluates.eval_interval):
            yield (
                f"keep_best = {saves.keep_best!r}: expected evaluated checkpoints: checkpoint_interval (now "
                f"{saves.checkpoint_interval}) a multiple of eval_interval (now {evaluates.eval_interval}), and "
                f"eval_batches (now {evaluates.eval_batches}) above 0"
            )
        yield from phases.problems(self.phases, total_steps=self.total_steps)
        if not 0 <= self.phase <= len(self.phases) + 1:
            yield f"phase = {self.phase}: expected from 1 to {len(self.phases) + 1}, or 0 for the whole run"

    def spans(self) -> tuple[Span, ...]:
        """Returns the phases in order, or only the chosen one; without phases, one span.

        Raises UserError if a phase is invalid.
        """
        if self._chosen:
            return (Span(*self._chosen, self),)
        ends = [phase.after for phase in self.phases]
        bounds = zip([0, *ends], [*ends, self.total_steps], strict=True)
        own = dataclasses.replace(self, phases=(), phase=0) if self.phases else self
        found = []
        for number, (first, last) in enumerate(bounds, start=1):
            try:
                own = dataclasses.replace(own, **self.phases[number - 2].changes) if number > 1 else own
            except UserError as error:
                raise UserError(f"phase {number}: {error}") from error
            found.append(Span(number, len(ends) + 1, first, last, own))
        return tuple(found)

    def require_trainable(self) -> None:
        """Checks that a run can train this experiment with its phases.

        Raises:
          UserError: one phase is chosen, or the shapes of the model's carry or parameters differ between phases.
        """
        if self.is_one_phase:
            raise UserError("PHASE names the phase to report or plan; a run trains all of them: leave it out")
        spans = self.spans() if self.phases else ()
        batches = {span.number: batch_shapes(span.experiment.task.spec(span.experiment.batch_size)) for span in spans}
        for number in [number for number, batch in batches.items() if batch != batches[1]]:
            carry, first_carry = (_shapes(self.model.init_carry, batches[n]) for n in (number, 1))
            if carry != first_carry:
                raise UserError(
                    f"phase {number} has other rows than phase 1, and the model carries state from batch to batch "
                    "that belongs to rows: keep batch_size and the row length, or make it a run of its own (INIT_FROM)"
                )
            params, first_params = (_shapes(self.model.init, jax.random.key(0), batches[n]) for n in (number, 1))
            if params != first_params:
                raise UserError(
                    f"phase {number} has other rows than phase 1, and the model's parameters have other shapes for "
                    "them: keep the shape of a batch, or give the model parameters that do not depend on it"
                )

    @property
    def row_length(self) -> int:
        """Tokens per row: the largest axis `length` in the task's spec; 1 without one."""
        return row_length(self.task.spec(self.task.num_streams))

    @property
    def unit(self) -> str:
        """The unit of losses and throughput: `token` or `row`."""
        if can(self.model, CouplesRows) and self.model.couples_rows:
            return "row"
        return "token" if has_ids(self.task.spec(self.task.num_streams)) else "row"

    @property
    def items_per_step(self) -> int:
        """Number of tokens or rows (`unit`) per global batch."""
        return self.tokens_per_step if self.unit == "token" else self.batch_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens per global batch."""
        return self.batch_size * self.row_length

    @functools.cached_property
    def flops_per_step(self) -> float | None:
        """FLOPs of a training step, without recomputation; None if not known."""
        batch = batch_shapes(self.task.spec(self.task.num_streams))
        per_token = flops.per_token(self.model, batch, length=self.row_length, frozen=self.frozen)
        return None if per_token is None else per_token * self.tokens_per_step

    def flops_between(self, first: int, last: int) -> float | None:
        """Returns the FLOPs of the training steps after step `first`, up to `last`; None if not known."""
        if can(self.model, CountsRunFlops):
            upto = [self.model.training_flops(self.row_length, rows=self.batch_size, steps=n) for n in (first, last)]
            return upto[1] - upto[0]
        return self.flops_per_step * (last - first) if self.flops_per_step else None

    def data_problems(self, *, prepared: bool) -> list[str]:
        """Returns what is wrong with the data, or does not fit the model.

        `prepared`: whether `task.prepare` has run.
        """
        problems = list(self.task.problems())
        if problems:
            return problems
        vocabulary = self.task.vocabulary
        if can(self.model, HasVocabulary) and vocabulary is not None:
            rows = self.model.vocab_size
            problems += _refusal("VOCAB_SIZE", lambda: vocabularies.check_fits(vocabulary, vocab_size=rows))
        most = self.model.max_positions if can(self.model, LimitsPositions) else None
        if most is not None and self.row_length > most:
            problems.append(
                f"LENGTH = {self.row_length}: the model has {most} positions; set LENGTH = {most} or less (or its "
                "max_positions, to train it for more)"
            )
        if can(self.task, ChecksModel):
            problems += self.task.model_problems(self.model, prepared=prepared)
        prompt = self.evaluation.prompt
        if prompt and vocabulary is None:
            problems.append(
                f"PROMPT = {prompt!r}: {type(self.task).__name__} has no vocabulary to read it with; set PROMPT = ''"
            )
        elif prompt and "inputs" not in self.task.spec(self.task.num_streams):
            problems.append(
                f"PROMPT = {prompt!r}: a batch of {type(self.task).__name__} has no field `inputs`; set PROMPT = ''"
            )
        elif prepared and prompt:
            problems += _refusal(f"PROMPT = {prompt!r}", lambda: vocabulary.encode(prompt))
        if most := self.evaluation.metric_examples:
            problems += _refusal(f"METRIC_EXAMPLES = {most}", self._require_metrics)
        return problems

    def _require_metrics(self) -> None:
        most = self.evaluation.metric_examples
        if not (can(self.model, Generates) and can(self.task, DefinesMetrics) and self.task.own_metrics(most)):
            raise UserError(
                "needs a seqio task of your own (text.seqio.module) and a model that generates text; set "
                "METRIC_EXAMPLES = 0"
            )

    def bind(self, devices: Sequence[jax.Device]) -> Program:
        """Lays the experiment out on devices; of an experiment in phases, the first.

        Raises:
          UserError: model, batch, strategy and slice do not fit.
        """
        partitioner = Partitioner(self.strategy, slice=slices.get(self.slice), devices=devices)
        partitioner.check_streams(self.batch_size, num_streams=self.task.num_streams, accum_steps=self.accum_steps)
        return partitioner.program(
            self.model,
            self.optimizer,
            self.task.spec(self.batch_size),
            seed=self.seed,
            accum_steps=self.accum_steps,
            gather_once=self.gather_once,
            skip_non_finite=self.non_finite == "skip",
            compiler_overrides=self.compiler_options,
            frozen=self.frozen,
            frozen_dtype=self.frozen_dtype,
        )


class Span(NamedTuple):
    """One phase of an experiment.

    Attributes:
      number: number of the phase, from 1.
      count: number of phases.
      first_step, last_step: steps that the run has done when the phase begins and ends.
      experiment: the experiment of this phase alone, with the `total_steps` of the whole run.
    """

    number: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    first_step: int
    last_step: int
    experiment: Experiment

    @property
    def seed(self) -> int:
        """Seed of the data order; in the first phase, the experiment's seed."""
        seed = self.experiment.seed
        return seed if self.number == 1 else int(np.random.SeedSequence((seed, self.number)).generate_state(1)[0])

    @property
    def epochs(self) -> float | None:
        """How often the phase reads its training data; None if their size is not known.

        Padding counts as tokens.
        """
        task = self.experiment.task
        tokens = task.train_tokens() if can(task, CountsTokens) else None
        return (self.last_step - self.first_step) * self.experiment.tokens_per_step / tokens if tokens else None

    def step_of_epoch(self, epochs: float) -> int:
        """Returns the step up to which the data are read at most `epochs` times.

        `self.epochs` must be known.
        """
        assert self.epochs
        return self.first_step + int((self.last_step - self.first_step) * epochs / self.epochs)

    def repeats(self, last_step: int | None = None) -> list[str]:
        """Returns a problem if the phase reads its data more often than `max_epochs` by a step; otherwise []."""
        most, last = self.experiment.max_epochs, min(last_step or self.last_step, self.last_step)
        if most is None or not self.epochs or self.epochs <= most or last <= self.step_of_epoch(most):
            return []
        read = self.epochs * (last - self.first_step) / (self.last_step - self.first_step)
        return [
            f"{self.experiment.task.describe()}: read {read:.2f} times by step {last:,}, and "
            f"max_epochs = {most:g}: end after step {self.step_of_epoch(most):,}, or use more data"
        ]

    def __str__(self) -> str:
        return f"phase {self.number} of {self.count}"


def _shapes(function: Callable, *args: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(function, *args))


def padding(program: Program) -> str:
    """Returns `; vocabulary 50,257 stored as 50,304` if the vocabulary is padded, otherwise ''."""
    if not can(program.model, HasVocabulary):
        return ""
    params, specs = map(jax.tree.leaves, (program.abstract_state.params, program.param_specs))
    sizes = [
        size
        for param, spec in zip(params, specs, strict=True)
        for size, axis in zip(param.shape, spec.axes, strict=True)
        if axis == "vocab"
    ]
    size, stored = program.model.vocab_size, max(sizes, default=0)
    return f"; vocabulary {size:,} stored as {stored:,}" if stored > size else ""


def _told(part: object) -> str:
    if part is None:
        return "None"
    return f"the class {part.__name__}, not called" if inspect.isclass(part) else f"of type {type(part).__name__}"


def _refusal(name: str, look: Callable[[], object]) -> list[str]:
    try:
        look()
    except UserError as error:
        return [f"{name}: {error}"]
    return []
