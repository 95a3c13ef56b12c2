"""The settings of an experiment in groups, each of which checks itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from core.checkpoints import best
from core.errors import UserError, check_integer, check_number
from core.hosts.failure_diagnosis import USUAL_LIMITS, Limits

PROFILED_STEPS = 3  # of a planned profile

_Check = Callable[[str, Any], object]  # (a field's name, its value); raises UserError


def count(least: int) -> _Check:
    """Returns a check for integers from `least` up."""
    return lambda name, value: check_integer(value, where=name, least=least)


def positive(*, may_be_none: bool = False) -> _Check:
    """Returns a check for finite numbers above 0; `may_be_none` also allows None."""

    def check(name: str, value: Any) -> None:
        if value is not None or not may_be_none:
            check_number(value, where=name, is_positive=True)

    return check


def expecting(expected: str, is_one: Callable[[Any], bool]) -> _Check:
    """Returns a check for values that satisfy `is_one`; `expected` describes them in errors."""

    def check(name: str, value: Any) -> None:
        if not is_one(value):
            raise UserError(f"{name} = {value!r}: expected {expected}")

    return check


def choice(*choices: str) -> _Check:
    """Returns a check for one of the choices."""
    return expecting(f"one of {', '.join(map(repr, choices))}", lambda value: value in choices)


def is_sequence(value: Any, kind: type) -> bool:
    """Returns whether a value is a sequence of `kind`, but not a string."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, kind) for each in value)


TEXT = expecting("text", lambda value: isinstance(value, str))
TEXTS = expecting("a sequence of texts, such as ('linear/w',)", lambda value: is_sequence(value, str))
_STEPS = expecting(
    "a sequence of steps from 1 up, such as (100,)",
    lambda value: is_sequence(value, int) and all(step >= 1 and not isinstance(step, bool) for step in value),
)
_RENAMES = expecting(
    "a dictionary of texts", lambda value: isinstance(value, Mapping) and is_sequence([*value, *value.values()], str)
)


def _are_layers(value: Any) -> bool:
    if not isinstance(value, Mapping) or not all(is_sequence(layers, object) for layers in value.values()):
        return False
    layers = [layer for layers in value.values() for layer in layers if layer is not None]
    return is_sequence([*value], str) and all(type(layer) is int and layer >= 0 for layer in layers)


_LAYERS = expecting("layers from 0, or None, by pattern, such as {'layers/*': (0, 0, 1, None)}", _are_layers)


def problems(part: Any, checks: Mapping[str, _Check]) -> list[str]:
    """Returns the messages of the checks that fail; `checks` is by field name."""
    found = []
    for name, check in checks.items():
        try:
            check(name, getattr(part, name))
        except UserError as error:
            found.append(str(error))
    return found


class _Group:
    _checks: ClassVar[Mapping[str, _Check]]

    def __post_init__(self):
        if found := problems(self, self._checks) or list(self._disagreements()):
            raise UserError(f"{type(self).__name__}: {'; '.join(found)}")

    def _disagreements(self) -> Iterator[str]:
        """Yields what is wrong with fields that pass `_checks`."""
        yield from ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Initialization(_Group):
    """The parameters that a run starts from.

    Attributes:
      init_from: a run (`runs/first`), a step of it (`runs/first@1000`), or the folder of a published model; "": none.
      init_patterns: shell wildcards over paths of parameters to read from there; others start from the seed.
      init_renames: maps names in the source to names in this model, such as `{"decoder/*": "layers/*"}`.
      init_layers: maps path wildcards to the source's layer for each layer of this model, None for the seed:
        `{"layers/*": (0, 0, 1, None)}`. In a model that repeats a group of layers, an entry stands for a group.
    """

    init_from: str = ""
    init_patterns: Sequence[str] = ("*",)
    init_renames: Mapping[str, str] = dataclasses.field(default_factory=dict)
    init_layers: Mapping[str, Sequence[int | None]] = dataclasses.field(default_factory=dict)

    _checks: ClassVar = {"init_from": TEXT, "init_patterns": TEXTS, "init_renames": _RENAMES, "init_layers": _LAYERS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logging(_Group):
    """What a run writes about itself while it trains.

    Attributes:
      log_interval: steps between lines of metrics.
      statistics_interval: steps between statistics of parameters, gradients and updates, a multiple of `log_interval`;
        0: none.
      profile_steps: steps at which a profile of three steps starts, at least three apart.
      memory_profile_steps: steps after which device memory is profiled.
      wandb_project: the Weights & Biases project to which host 0 also logs; "": none.
    """

    log_interval: int = 10
    statistics_interval: int = 0
    profile_steps: Sequence[int] = ()
    memory_profile_steps: Sequence[int] = ()
    wandb_project: str = ""

    _checks: ClassVar = {
        "log_interval": count(1),
        "statistics_interval": count(0),
        "profile_steps": _STEPS,
        "memory_profile_steps": _STEPS,
        "wandb_project": TEXT,
    }

    def _disagreements(self) -> Iterator[str]:
        if self.statistics_interval % self.log_interval:
            yield (
                f"statistics_interval = {self.statistics_interval}: expected a multiple of log_interval = "
                f"{self.log_interval}, so that they are written with the step that they are of"
            )
        for first, second in itertools.pairwise(sorted(set(self.profile_steps))):
            if second - first < PROFILED_STEPS:
                yield (
                    f"profile_steps has {first} and {second}: expected steps at least {PROFILED_STEPS} apart, "
                    f"because a profile covers {PROFILED_STEPS} steps"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(_Group):
    """How a run evaluates itself.

    Attributes:
      eval_interval: steps between evaluations; the last step is evaluated, too.
      eval_batches: most validation batches per evaluation; 0: no evaluation.
      prompt: text that the model continues at the end of the run; "": none.
      metric_examples: most examples of each seqio task for the task's own metrics; 0: no such metrics. Needs
        `eval_batches` above 0.
    """

    eval_interval: int = 1000
    eval_batches: int = 8
    prompt: str = ""
    metric_examples: int = 0

    _checks: ClassVar = {
        "eval_interval": count(1),
        "eval_batches": count(0),
        "prompt": TEXT,
        "metric_examples": count(0),
    }

    def _disagreements(self) -> Iterator[str]:
        if self.metric_examples and not self.eval_batches:
            yield f"metric_examples = {self.metric_examples}: there are no evaluations; set eval_batches above 0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointing(_Group):
    """When a run saves checkpoints, and which of them it keeps.

    Attributes:
      checkpoint_interval: steps between checkpoints; the last step is saved, too.
      keep_checkpoints: number of latest checkpoints to keep.
      keep_best: also keep the best checkpoint by a metric: `validation/loss` for the lowest value,
        `max:validation/accuracy` for the highest; "": none. Needs `eval_batches` above 0 and `checkpoint_interval` a
        multiple of `eval_interval`.
      params_checkpoint_interval: steps between additional checkpoints of the parameters alone, the last at the end; 0:
        none.
      keep_params_checkpoints: number of latest checkpoints of the parameters alone to keep.
      checkpoint_mirror: where complete checkpoints of a local run directory are copied, such as gs://BUCKET/first; "":
        nowhere. Only for a run of one process.
      save_limit_seconds: a save, or a restore at a start, that takes longer fails; None: 300 s plus 20 s for each GiB
        on a host.
    """

    checkpoint_interval: int = 1000
    keep_checkpoints: int = 3
    keep_best: str = ""
    params_checkpoint_interval: int = 0
    keep_params_checkpoints: int = 3
    checkpoint_mirror: str = ""
    save_limit_seconds: float | None = None

    _checks: ClassVar = {
        "checkpoint_interval": count(1),
        "keep_checkpoints": count(1),
        "keep_best": TEXT,
        "params_checkpoint_interval": count(0),
        "keep_params_checkpoints": count(1),
        "checkpoint_mirror": TEXT,
        "save_limit_seconds": positive(may_be_none=True),
    }

    def _disagreements(self) -> Iterator[str]:
        if self.keep_best:
            yield from problems(self, {"keep_best": lambda _, value: best.parse(value)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health(_Group):
    """The limits after which a run ends because its hosts hang or disagree.

    Attributes:
      step_limit_seconds: longest time of a step; at most `compile_limit_seconds`.
      compile_limit_seconds: longest time of other work, such as compiling or evaluating, unless it has a limit of its
        own.
      heartbeat_timeout_seconds: longest silence of a host. None: 20 s in a simulation, otherwise 120 s.
      apart_limit_seconds: longest time that a host saves or restores while others wait for it in a step. None: 120 s in
        a simulation, otherwise 600 s.
      watchdog: `end` ends the run when one of these four limits is exceeded; `report` only reports it.
      replica_check_interval: steps between comparisons of the copies of replicated arrays; 0: none.
    """

    step_limit_seconds: float = USUAL_LIMITS.step_seconds
    compile_limit_seconds: float = USUAL_LIMITS.slow_seconds
    heartbeat_timeout_seconds: float | None = None
    apart_limit_seconds: float | None = None
    watchdog: str = "end"
    replica_check_interval: int = 100

    _checks: ClassVar = {
        "step_limit_seconds": positive(),
        "compile_limit_seconds": positive(),
        "heartbeat_timeout_seconds": positive(may_be_none=True),
        "apart_limit_seconds": positive(may_be_none=True),
        "watchdog": choice("end", "report"),
        "replica_check_interval": count(0),
    }

    def _disagreements(self) -> Iterator[str]:
        if self.step_limit_seconds > self.compile_limit_seconds:
            yield (
                f"step_limit_seconds = {self.step_limit_seconds} is above compile_limit_seconds = "
                f"{self.compile_limit_seconds}: a step that compiles takes longer than one that does not"
            )

    def limits(self, usual: Limits) -> Limits:
        """Returns the time limits of the health checks; limits that are None come from `usual`."""
        return Limits(
            step_seconds=self.step_limit_seconds,
            slow_seconds=self.compile_limit_seconds,
            silent_seconds=self.heartbeat_timeout_seconds or usual.silent_seconds,
            apart_seconds=self.apart_limit_seconds or usual.apart_seconds,
            reports_only=self.watchdog == "report",
        )


GROUPS: Mapping[str, type] = {  # classes of settings, by field of `Experiment`
    "initialization": Initialization,
    "logging": Logging,
    "evaluation": Evaluation,
    "checkpointing": Checkpointing,
    "health": Health,
}
HOMES = {field.name: group for group, kind in GROUPS.items() for field in dataclasses.fields(kind)}


def grouped(given: Mapping[str, Any], base: Any = None) -> dict[str, Any]:
    """Returns settings as fields of `Experiment`; those of a group become one object.

    `base`: the experiment whose other settings a group keeps; None: their defaults.

    Raises UserError if settings of a group are invalid.
    """
    found, wrong = {name: value for name, value in given.items() if name not in HOMES}, []
    for group, kind in GROUPS.items():
        if own := {name: value for name, value in given.items() if HOMES.get(name) == group}:
            try:
                found[group] = dataclasses.replace(getattr(base, group), **own) if base is not None else kind(**own)
            except UserError as error:
                wrong.append(str(error))
    if wrong:
        raise UserError("; ".join(wrong))
    return found
