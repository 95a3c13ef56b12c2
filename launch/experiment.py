"""The root of a configuration: `Experiment`, whose fields define a run completely.

gin files bind its fields, and every command (train, check, report, …) reads the same value. Constructing it uses no
device and opens no data; `bind` binds it to devices.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import jax
import numpy as np

from core import logical, optimizers, parameters, slices, wrappers
from core.batches import batch_shapes, has_ids, row_length
from core.checkpoints import best
from core.errors import UserError, check_integer, check_number
from core.health.failure_diagnosis import ON_TPU, USUAL_LIMITS, Limits
from core.optimizers import Optimizer, Transformation
from core.training import hooks
from core.types import (
    CachesHidden,
    CountsFlops,
    CountsTokens,
    CouplesRows,
    Generates,
    HasPuzzles,
    HasVocabulary,
    KeepsStates,
    LimitsPositions,
    Model,
    PadsVocabulary,
    ReadsHidden,
    SplitsRows,
    Task,
    can,
    lacking,
    missing,
)
from launch import environment, phases
from launch.phases import Phase
from parallel import compiler_options
from parallel.partitioner import Partitioner, Program
from parallel.strategy import Strategy
from tasks import vocabularies

_CHOICES = {"non_finite": hooks.POLICIES, "watchdog": ("end", "report"), "frozen_dtype": ("bfloat16", "float32")}
_INTERVALS = ("log_interval", "eval_interval", "checkpoint_interval")
_KEPT = ("keep_checkpoints", "keep_params_checkpoints")
_COUNTS = {
    **dict.fromkeys(("batch_size", "total_steps", "accum_steps", *_INTERVALS, *_KEPT), 1),
    **dict.fromkeys(("eval_batches", "seed", "compare_interval", "params_checkpoint_interval"), 0),
    "statistics_interval": 0,
}
_POSITIVE = {  # whether None is allowed
    **dict.fromkeys(("step_limit_seconds", "compile_limit_seconds"), False),
    **dict.fromkeys(("silent_limit_seconds", "apart_limit_seconds", "save_limit_seconds", "max_epochs"), True),
}


def _is_sequence(value: object, kind: type) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, kind) for each in value)


def _are_texts(value: object) -> bool:
    return _is_sequence(value, str)


def _are_steps(value: object) -> bool:
    return _is_sequence(value, int)


def _are_renames(value: object) -> bool:
    return isinstance(value, Mapping) and _are_texts([*value, *value.values()])


def _are_layers(value: object) -> bool:
    """Returns whether a value maps texts to sequences of layers, counted from 0, or None."""

    def is_layer(each: object) -> bool:
        return each is None or (isinstance(each, int) and not isinstance(each, bool) and each >= 0)

    return (
        isinstance(value, Mapping)
        and _are_texts([*value])
        and all(_is_sequence(layers, object) and all(map(is_layer, layers)) for layers in value.values())
    )


_KINDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "phases": ("a sequence of launch.phases.Phase", lambda value: _is_sequence(value, Phase)),
    "phase": ("an integer", lambda value: isinstance(value, int)),
    "gather_once": ("True or False", lambda value: isinstance(value, bool)),
    "compiler_options": ("a dictionary", lambda value: isinstance(value, Mapping)),
    "init_renames": ("a dictionary of texts", _are_renames),
    "init_layers": ("layers from 0, or None, by pattern, such as {'layers/*': (0, 0, 1, None)}", _are_layers),
    **dict.fromkeys(("frozen", "init_patterns"), ("a sequence of texts, such as ('linear/w',)", _are_texts)),
    **dict.fromkeys(("profile_steps", "memory_profile_steps"), ("a sequence of steps, such as (100,)", _are_steps)),
    **dict.fromkeys(
        ("init_from", "keep_best", "persistent_directory", "prompt", "wandb_project"),
        ("text", lambda value: isinstance(value, str)),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment: model, data, strategy, optimizer and duration.

    Attributes:
      slice: the TPU slice; the SLICE argument of a command overrides it.
      strategy: how arrays are sharded over the chips.
      model: a `core.types.Model`.
      task: the data, from `tasks`.
      optimizer: from `core.optimizers`, or a transformation of optax, which becomes an `Optimizer`.
      batch_size: rows of a global batch.
      total_steps: the last step; learning rate schedules refer to it too.
      phases: changes of data, row length, batch size or strategy during the run; see `launch.phases`.
      phase: if above 0, this experiment has the settings of that phase alone, to report or plan it; 1 is the first.
      accum_steps: microbatches per step.
      gather_once: gather sharded parameters once per step instead of once per microbatch (`parallel.accumulation`).
      compiler_options: options of the TPU compiler to add or replace, by name; None removes one
        (`parallel.compiler_options`).
      init_from: parameters to start from: a run (`runs/first`), a step of it (`runs/first@1000`), or the folder of a
        published model; "" starts from `seed`.
      init_patterns: shell wildcards over the paths of the parameters to take from there; others start from `seed`.
      init_renames: names here by names there, such as `{"decoder/*": "layers/*"}`: of parameters of a run, or of
        tensors of a published folder.
      init_layers: for each layer here, the layer there that it starts from, or None if it starts from `seed`, by shell
        wildcards over paths: `{"layers/*": (0, 0, 1, None)}`. A group of layers counts as one.
      frozen: shell wildcards over the paths of parameters that are not trained, besides those that the model freezes.
      frozen_dtype: dtype in which these are stored: `bfloat16`, or `float32` as trained parameters are.
      max_epochs: the run is refused if it would read its training data more often, where the size is known.
      seed: seed of parameters, data order and random bits.
      log_interval, eval_interval, checkpoint_interval: in steps.
      eval_batches: the most validation batches per evaluation; 0: no evaluation.
      keep_checkpoints: number of latest checkpoints to keep.
      keep_best: also keep the best checkpoint by a metric of its evaluation: `validation/loss` for the lowest,
        `max:validation/accuracy` for the highest; "": only the latest ones.
      params_checkpoint_interval: steps between checkpoints of the parameters alone, beside those of the whole state;
        0: none.
      keep_params_checkpoints: number of latest ones of these to keep.
      persistent_directory: a place, such as gs://BUCKET/first, to which complete checkpoints of a local run directory
        are copied in the background; "" for none. Only for a run of one process.
      statistics_interval: steps between statistics of parameters, gradients and updates (`core.step`); 0: none.
      profile_steps: steps at which a profile of every host starts.
      memory_profile_steps: steps after which every host writes a profile of its device memory.
      prompt: text that the model continues at the end of the run.
      wandb_project: a project of Weights & Biases to which host 0 also logs; "" for none.
      non_finite: reaction to a loss or gradient that is NaN or infinite: `stop` the run, `skip` the update, or
        `roll_back` to the newest checkpoint and skip the data read since.
      step_limit_seconds: a step that takes longer ends the run, with the stacks of all threads.
      compile_limit_seconds: the same limit for steps that compile, and for reading and writing.
      silent_limit_seconds: the run ends if a host sends no message for this long; None: 120 s on a TPU, 20 s in a
        simulation.
      apart_limit_seconds: the run ends if a host saves or restores for this long while others wait for it in a step;
        None: 600 s on a TPU, 120 s in a simulation.
      watchdog: `end` ends the run when one of these four limits is exceeded; `report` only prints the host and its
        stacks.
      save_limit_seconds: a save that takes longer has failed; None: 300 s plus 20 s for each GiB on a host.
      compare_interval: steps between comparisons of replicated arrays of all hosts; 0: no comparisons.

    Raises:
      UserError: a setting has the wrong type or is out of range.
    """

    _chosen: ClassVar[tuple[int, int, int, int] | None] = None  # number, count, first and last step of that of `phase`

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
    init_from: str = ""
    init_patterns: Sequence[str] = ("*",)
    init_renames: Mapping[str, str] = dataclasses.field(default_factory=dict)
    init_layers: Mapping[str, Sequence[int | None]] = dataclasses.field(default_factory=dict)
    frozen: Sequence[str] = ()
    frozen_dtype: str = "bfloat16"
    max_epochs: float | None = None
    seed: int = 0
    log_interval: int = 10
    eval_interval: int = 1000
    eval_batches: int = 8
    checkpoint_interval: int = 1000
    keep_checkpoints: int = 3
    keep_best: str = ""
    params_checkpoint_interval: int = 0
    keep_params_checkpoints: int = 3
    persistent_directory: str = ""
    statistics_interval: int = 0
    profile_steps: Sequence[int] = ()
    memory_profile_steps: Sequence[int] = ()
    prompt: str = ""
    wandb_project: str = ""
    non_finite: str = "stop"
    step_limit_seconds: float = USUAL_LIMITS.step_seconds
    compile_limit_seconds: float = USUAL_LIMITS.slow_seconds
    compare_interval: int = 100
    silent_limit_seconds: float | None = None
    apart_limit_seconds: float | None = None
    watchdog: str = "end"
    save_limit_seconds: float | None = None

    def __post_init__(self):
        slices.get(self.slice)
        settings = list(self._wrong_settings()) or self._out_of_range()
        if problems := [*self._wrong_parts(), *settings]:
            raise UserError("Experiment: " + "; ".join(problems))
        object.__setattr__(self, "optimizer", optimizers.as_optimizer(self.optimizer))
        spans = self.spans() if self.phases else ()  # refuses settings that a phase cannot have
        if self.phase and spans:
            *bounds, chosen = spans[self.phase - 1]
            for name in (*phases.CHANGED, "phases", "phase"):
                object.__setattr__(self, name, getattr(chosen, name))
            object.__setattr__(self, "_chosen", tuple(bounds))

    @property
    def is_one_phase(self) -> bool:
        """Whether `PHASE` chose this phase from the several of an experiment."""
        return self._chosen is not None

    def _wrong_parts(self) -> Iterator[str]:
        """Yields the parts of the wrong type; gin checks annotations, but a constructor may have none."""
        for name, kinds in (("strategy", [Strategy]), ("optimizer", [Optimizer, Transformation])):
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
        """Yields the problem of states that no row continues, or of rows that no state continues."""
        owner, is_split = wrappers.field_owner(self.model, "keeps_states"), can(self.task, SplitsRows)
        if can(owner, KeepsStates) and owner.keeps_states and not is_split:
            yield (
                f"model.keeps_states = True, and task is {_told(self.task)}, whose rows are complete, so that no state "
                "would be kept: expected tasks.chunked.rows around this task, or keeps_states = False"
            )
        elif is_split and can(self.model, Model):
            carry = jax.eval_shape(self.model.init_carry, batch_shapes(self.task.spec(self.batch_size)))
            if not jax.tree.leaves(carry):
                yield (
                    "task is tasks.chunked.rows, and the model carries nothing from one chunk of a row to the next: "
                    "expected a model with keeps_states = True, or one with a carry"
                )

    def _wrong_settings(self) -> Iterator[str]:
        """Yields the settings of the wrong type, and numbers that are wrong whatever the others are."""
        for name, least in _COUNTS.items():
            yield from _refusals(functools.partial(check_integer, getattr(self, name), where=name, least=least))
        for name, may_be_none in _POSITIVE.items():
            if (value := getattr(self, name)) is not None or not may_be_none:
                yield from _refusals(functools.partial(check_number, value, where=name, is_positive=True))
        for name, (expected, is_one) in _KINDS.items():
            if not is_one(value := getattr(self, name)):
                yield f"{name} = {value!r}: expected {expected}"

    def _out_of_range(self) -> Iterator[str]:
        """Yields what is wrong with settings of the right types."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                yield f"{name} = {getattr(self, name)!r}: expected one of {', '.join(map(repr, choices))}"
        for problem in compiler_options.problems(self.compiler_options):
            yield f"compiler_options: {problem}"
        if self.keep_best:
            yield from _refusals(lambda: best.parse(self.keep_best))
            if not self.eval_batches or self.checkpoint_interval % self.eval_interval:
                yield (
                    f"keep_best = {self.keep_best!r}: expected evaluated checkpoints: checkpoint_interval (now "
                    f"{self.checkpoint_interval}) a multiple of eval_interval (now {self.eval_interval}), and "
                    f"eval_batches (now {self.eval_batches}) above 0"
                )
        yield from phases.problems(self.phases, total_steps=self.total_steps)
        if not 0 <= self.phase <= len(self.phases) + 1:
            yield f"phase = {self.phase}: expected from 1 to {len(self.phases) + 1}, or 0 for the whole run"
        if self.statistics_interval > 0 and self.statistics_interval % self.log_interval:
            yield (
                f"statistics_interval = {self.statistics_interval}: expected a multiple of log_interval = "
                f"{self.log_interval}, so that they are written with the step that they are of"
            )
        if self.step_limit_seconds > self.compile_limit_seconds:
            yield (
                f"step_limit_seconds = {self.step_limit_seconds} is above compile_limit_seconds = "
                f"{self.compile_limit_seconds}: a step that compiles takes longer than one that does not"
            )

    def spans(self) -> tuple[Span, ...]:
        """Returns the phases of the experiment in order, or the chosen one; an experiment without phases is one.

        Raises:
          UserError: a phase has settings that an experiment cannot have.
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
        """Checks that one run can train the phases.

        Raises:
          UserError: `phase` has chosen one of them, or the model carries state whose shapes differ between phases.
        """
        if self.is_one_phase:
            raise UserError("PHASE names the phase to report or plan; a run trains all of them: leave it out")
        shapes = {}
        for span in self.spans() if self.phases else ():
            batch = batch_shapes(span.experiment.task.spec(span.experiment.batch_size))
            shapes[span.number] = jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(self.model.init_carry, batch))
        if wrong := [number for number, found in shapes.items() if found != shapes[1]]:
            raise UserError(
                f"phase {wrong[0]} has other rows than phase 1, and the model carries state from batch to batch "
                "that belongs to rows: keep batch_size and the row length, or make it a run of its own (INIT_FROM)"
            )

    @property
    def limits(self) -> Limits:
        """The time limits of the health checks."""
        usual = USUAL_LIMITS if environment.read("RENGA_SIMULATE") else ON_TPU
        return Limits(
            step_seconds=self.step_limit_seconds,
            slow_seconds=self.compile_limit_seconds,
            silent_seconds=self.silent_limit_seconds or usual.silent_seconds,
            apart_seconds=self.apart_limit_seconds or usual.apart_seconds,
            reports_only=self.watchdog == "report",
        )

    @property
    def row_length(self) -> int:
        """Tokens per row: the size of the axis `length` in the task's spec; 1 for data without that axis."""
        return row_length(self.task.spec(self.task.num_streams))

    @property
    def unit(self) -> str:
        """The unit of losses and throughput: `token`, or `row` for data without ids [rows, length].

        A model whose loss couples rows has a loss for each row, whatever its data is.
        """
        if can(self.model, CouplesRows) and self.model.couples_rows:
            return "row"
        return "token" if has_ids(self.task.spec(self.task.num_streams)) else "row"

    @property
    def items_per_step(self) -> int:
        """Tokens or rows (`unit`) per global batch."""
        return self.tokens_per_step if self.unit == "token" else self.batch_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens per global batch."""
        return self.batch_size * self.row_length

    @functools.cached_property
    def flops_per_step(self) -> float | None:
        """FLOPs of a training step, without recomputation; None for a model without `flops_per_token`.

        The model counts a gradient of every matrix that it trains: 2 per entry and token, which matrices in `frozen`
        do not have.
        """
        if not can(self.model, CountsFlops):
            return None
        per_token = self.model.flops_per_token(self.row_length) - 2.0 * sum(self._frozen_products())
        return per_token * self.tokens_per_step

    def _frozen_products(self) -> Iterator[int]:
        """Yields the sizes of the matrices in `frozen` by which every token is multiplied; experts are left out."""
        if not self.frozen:
            return
        batch = batch_shapes(self.task.spec(self.task.num_streams))
        shapes, specs = logical.abstract_init(self.model.init, jax.random.key(0), batch)
        chosen = parameters.matches(specs, self.frozen, where="frozen")
        has_output = any(spec.axes[-1:] == ("vocab",) for spec in jax.tree.leaves(specs))
        is_tied = can(self.model, Generates) and not has_output  # the embedding is also the output matrix
        for shape, spec, is_chosen in zip(*map(jax.tree.leaves, (shapes, specs, chosen)), strict=True):
            is_output = "vocab" in (spec.axes if is_tied else spec.axes[-1:])
            is_product = (spec.kind == "matrix" or is_output) and {"layers", None}.issuperset(spec.axes[: spec.stacked])
            if is_chosen and spec.trainable and is_product:
                yield math.prod(shape.shape)

    def data_problems(self, *, prepared: bool) -> list[str]:
        """Returns mismatches between task and model that can be found without reading the data, each with its fix.

        Args:
          prepared: whether `task.prepare` has run; only then can a vocabulary that the run trains be checked.
        """
        problems = list(self.task.problems())
        if problems:
            return problems
        vocabulary = self.task.vocabulary
        if can(self.model, HasVocabulary) and vocabulary is not None:
            problems += _refusal(
                "VOCAB_SIZE", lambda: vocabularies.check_fits(vocabulary, vocab_size=self.model.vocab_size)
            )
        most = self.model.max_positions if can(self.model, LimitsPositions) else None
        if most is not None and self.row_length > most:
            problems.append(
                f"LENGTH = {self.row_length}: the model has {most} positions; set LENGTH = {most} or less (or its "
                "max_positions, to train it for more)"
            )
        problems += self._hidden_problems()
        if prepared and can(self.model, HasPuzzles) and can(self.task, HasPuzzles):
            needed = self.task.num_puzzles
            if self.model.num_puzzles < needed:
                problems.append(
                    f"the model has num_puzzles {self.model.num_puzzles}, but the data has {needed} puzzle "
                    f"identifiers: set its num_puzzles = {needed} (more is allowed)"
                )
        if self.prompt and vocabulary is None:
            problems.append(
                f"PROMPT = {self.prompt!r}: {type(self.task).__name__} has no vocabulary to read it with; "
                "set PROMPT = ''"
            )
        elif self.prompt and "inputs" not in self.task.spec(self.task.num_streams):
            problems.append(
                f"PROMPT = {self.prompt!r}: a batch of {type(self.task).__name__} has no field `inputs`; "
                "set PROMPT = ''"
            )
        elif prepared and self.prompt:
            problems += _refusal(f"PROMPT = {self.prompt!r}", lambda: vocabulary.encode(self.prompt))
        return problems

    def _hidden_problems(self) -> list[str]:
        """Returns mismatches between the model and hidden states computed before."""
        if not can(self.task, CachesHidden):
            return []
        if not can(self.model, ReadsHidden):
            return [f"the data are hidden states computed before: {lacking(self.model, ReadsHidden)}"]
        if self.model.chunk == self.task.chunk:
            return []
        return [
            f"the chunk of the model is {self.model.chunk}, and the hidden states of the data were computed with "
            f"{self.task.chunk}: set it to that, or compute them again (launch/run hidden)"
        ]

    def bind(self, devices: Sequence[jax.Device]) -> Program:
        """Binds the experiment to devices; returns its training and evaluation steps.

        Raises:
          UserError: model, batch, strategy and slice do not fit; lists every mismatch.
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
      number: of the phase, from 1.
      count: number of phases.
      first_step, last_step: the steps done before it and after it.
      experiment: the experiment of this phase alone, with the same `total_steps`.
    """

    number: int
    count: int
    first_step: int
    last_step: int
    experiment: Experiment

    @property
    def seed(self) -> int:
        """The seed of the order of its data; that of the first phase is the experiment's."""
        seed = self.experiment.seed
        return seed if self.number == 1 else int(np.random.SeedSequence((seed, self.number)).generate_state(1)[0])

    @property
    def epochs(self) -> float | None:
        """How often it reads its training data, counting padding as tokens; None if their size is not known."""
        task = self.experiment.task
        tokens = task.train_tokens() if can(task, CountsTokens) else None
        return (self.last_step - self.first_step) * self.experiment.tokens_per_step / tokens if tokens else None

    def step_of_epoch(self, epochs: float) -> int:
        """Returns the step after which the training data have been read so many times."""
        assert self.epochs
        return self.first_step + int((self.last_step - self.first_step) * epochs / self.epochs)

    def repeats(self) -> list[str]:
        """Returns the problem of reading the training data more often than `max_epochs`, if it is one."""
        most = self.experiment.max_epochs
        if most is None or not self.epochs or self.epochs <= most:
            return []
        return [
            f"{self.experiment.task.describe()}: read {self.epochs:.2f} times by step {self.last_step:,}, and "
            f"max_epochs = {most:g}: end after step {self.step_of_epoch(most):,}, or use more data"
        ]

    def __str__(self) -> str:
        return f"phase {self.number} of {self.count}"


def padding(model: Model) -> str:
    """Returns `; vocabulary 50,257 stored as 50,304` if the model rounds its vocabulary up, otherwise ''."""
    if not can(model, PadsVocabulary) or model.stored_vocab_size in (None, model.vocab_size):
        return ""
    return f"; vocabulary {model.vocab_size:,} stored as {model.stored_vocab_size:,}"


def _told(part: object) -> str:
    if part is None:
        return "None"
    return f"the class {part.__name__}, not called" if inspect.isclass(part) else f"of type {type(part).__name__}"


def _refusal(name: str, look: Callable[[], object]) -> list[str]:
    return [f"{name}: {said}" for said in _refusals(look)]


def _refusals(look: Callable[[], object]) -> list[str]:
    try:
        look()
    except UserError as error:
        return [str(error)]
    return []
