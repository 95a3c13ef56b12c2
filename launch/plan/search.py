"""Loads the experiment of a plan, estimates its candidate layouts, and ranks the compiled ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from core import slices, wrappers
from core.errors import UserError
from core.slices import Slice
from launch import program_identity
from launch.config import LoadedConfig, Macro, Reference, changes, leaves, loader
from launch.config.changes import Changes
from launch.config.statements import expand, flag, is_flag
from launch.experiment import Experiment
from parallel import strategies
from parallel.pipeline import schedules
from parallel.planning import candidates, model_trace, selection
from parallel.planning.candidate_metrics import CandidateMetrics
from parallel.planning.candidates import Candidate, Layout
from parallel.planning.records import Record
from parallel.planning.selection import JudgedCandidate

_CHOSEN_BY_PLANS = (strategies.__name__, schedules.__name__)  # modules of the constructors of layouts


@dataclasses.dataclass(frozen=True)
class Question:
    """The input of a plan: an experiment or one of its phases, a slice, and batch sizes."""

    path: str
    config: LoadedConfig
    experiment: Experiment
    num_steps: int  # with the experiment's own batch size; for a phase, the steps of that phase
    bindings: tuple[str, ...]
    slice: Slice
    batch_sizes: tuple[int, ...]
    num_chosen: int = 0  # how many of the first bindings belong to a layout, and not to all candidates
    others: Mapping[int, Experiment] = dataclasses.field(default_factory=dict)  # with other batch sizes, by rows

    @property
    def total_tokens(self) -> int:
        """The number of tokens that the experiment, or its phase, trains on."""
        return self.num_steps * self.experiment.tokens_per_step

    def as_written(self) -> tuple[LoadedConfig, Experiment]:
        """Returns the configuration and the experiment, without the bindings of a chosen layout."""
        if not self.num_chosen:
            return self.config, self.experiment
        config = loader.load(self.path, bindings=self.bindings[self.num_chosen :], slice_name=self.slice.name)
        return config, config.build().spans()[0].experiment

    def of_rows(self, batch_size: int) -> Experiment:
        """Returns the experiment with a batch size, and what it binds to the number of steps."""
        return self.others.get(batch_size, self.experiment)

    def steps(self, batch_size: int) -> int:
        """Returns the smallest number of steps with `batch_size` rows that train on at least `total_tokens`."""
        return -(-self.num_steps * self.experiment.batch_size // batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option(JudgedCandidate):
    """A candidate with its estimate and, computed when needed, its gin bindings and program identity."""

    question: Question = dataclasses.field(repr=False, compare=False)
    writer: Writer = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def bindings(self) -> tuple[str, ...]:
        """The gin bindings that change the experiment to the candidate."""
        return tuple(self.writer.bindings(self.candidate))

    @functools.cached_property
    def text(self) -> str:
        """The identity of the program, by which its record is found; "" without an estimate."""
        if self.estimate is None:
            return ""
        return program_identity.program_text(self.made, self.question.config)

    @property
    def made(self) -> Experiment:
        """The experiment with the candidate's settings."""
        return apply(self.question.of_rows(self.candidate.batch_size), self.candidate)


Compiled = Sequence[tuple[Option, Record]]


class PhaseSetsLayoutError(UserError):
    """A phase sets its own strategy or accumulation, which a candidate's bindings would not replace."""


def ask(
    path: str,
    *,
    slice_name: str,
    bindings: Sequence[str] = (),
    batch_sizes: Sequence[int] = (),
    chosen: Sequence[str] = (),
) -> Question:
    """Loads the experiment that a plan is for; of several phases the first.

    Args:
      bindings: override the experiment's; `PHASE = N` chooses another phase.
      chosen: bindings of a layout, which come before; candidates need not have them.
      batch_sizes: batch sizes to compare, in rows; empty: only the experiment's.

    Raises:
      PhaseSetsLayoutError: PHASE names a phase that sets its own strategy or accumulation.
      UserError: the experiment has mistakes, or cannot have one of the batch sizes.
    """
    slice_, bindings = slices.get(slice_name), (*chosen, *bindings)
    config = loader.load(path, bindings=bindings, slice_name=slice_name)
    *_, first_step, last_step, experiment = config.build().spans()[0]  # PHASE = N plans another phase
    writer = Writer(config, experiment)
    require_bindable(path, config, experiment, bindings=bindings, slice_name=slice_name)
    others = sorted(set(batch_sizes) - {experiment.batch_size})
    if others and experiment.is_one_phase:
        raise UserError(
            f"--batch-size {others[0]}: the phase has {experiment.batch_size} rows, and no binding changes them "
            "without changing other phases. Leave --batch-size out; bind the batch size of the phase to plan other rows"
        )
    built = {}
    for size in others:
        added = writer.bindings(Candidate(None, None, experiment.accum_steps, size))
        try:
            made = changes.load(path, added, bindings=bindings, slice_name=slice_name).build()
        except UserError as error:  # too few steps for the experiment
            steps = total_steps(experiment, size)
            raise UserError(f"--batch-size {size}, {steps} steps for as many tokens: {error}") from error
        built[size] = made.spans()[0].experiment
    sizes = tuple(dict.fromkeys(batch_sizes)) or (experiment.batch_size,)
    return Question(path, config, experiment, last_step - first_step, bindings, slice_, sizes, len(chosen), built)


def require_bindable(
    path: str,
    config: LoadedConfig,
    experiment: Experiment,
    *,
    bindings: Sequence[str],
    slice_name: str,
    names: Sequence[str] = ("strategy", "accum_steps"),
) -> None:
    """Checks that bindings can change the layout of the phase that PHASE names, if it names one.

    Args:
      config, experiment: loaded from the file `path` with these bindings.
      names: the fields of the experiment that must change.

    Raises:
      PhaseSetsLayoutError: the phase sets one of them itself.
    """
    if not experiment.is_one_phase:
        return
    layouts = (Layout("fsdp", (("fsdp", -1),)), Layout("data_parallel", (("data", -1),)))
    other = next(layout for layout in layouts if layout.strategy() != experiment.strategy)
    wanted = Candidate(other, None, 2 if experiment.accum_steps == 1 else 1, experiment.batch_size)
    added = Writer(config, experiment).bindings(wanted)
    made = changes.load(path, added, bindings=bindings, slice_name=slice_name).build()
    if kept := [name for name in names if getattr(made, name) == getattr(experiment, name)]:
        raise PhaseSetsLayoutError(
            f"the phase sets {' and '.join(kept)} itself, so no other can be bound: take it out of the phase, compare, "
            "and set what is best"
        )


def options(question: Question, *, only: Sequence[str] = ()) -> list[Option]:
    """Returns the candidates: those that may fit from the fastest, then the others with reasons.

    `only`: names of the strategies to try; empty: all that a plan can try, and the experiment's own.
    """
    experiment = question.experiment
    spec = experiment.task.spec(experiment.batch_size)
    trace = model_trace.trace(
        experiment.model,
        experiment.optimizer,
        spec,
        slice=slices.get(experiment.slice),
        seed=experiment.seed,
        frozen=experiment.frozen,
        frozen_dtype=experiment.frozen_dtype,
    )
    has_experts = any("expert" in axes.names for axes in jax.tree.leaves(trace.axes.params))
    has_long_rows = experiment.row_length >= candidates.LONG_ROW
    layouts = candidates.layouts(
        question.slice,
        only=only,
        given=_given(question.config, num_chosen=question.num_chosen),
        has_experts=has_experts,
        has_long_rows=has_long_rows,
    )
    equal = [layout for layout in layouts if layout.strategy() == experiment.strategy]
    own: Sequence[Layout | None] = equal or ([] if only else [None])
    written = [
        Candidate(layout, candidates.remat_of(experiment.model), experiment.accum_steps, experiment.batch_size)
        for layout in own[:1]
        if experiment.batch_size in question.batch_sizes
    ]
    tried = candidates.candidates(
        [None, *layouts] if own == [None] else layouts,
        own=experiment.strategy,
        slice=question.slice,
        model=experiment.model,
        batch_sizes=question.batch_sizes,
    )
    judge = selection.Judge(
        trace, experiment.strategy, num_streams=experiment.task.num_streams, gather_once=experiment.gather_once
    )
    writer = Writer(*question.as_written())
    remats = trace.distinct_remats(candidates.remat_of(experiment.model))
    judged = (
        judge.judge(one)
        for one in dict.fromkeys([*written, *tried])
        if one.remat in (None, *remats) and writer.can_write(one)
    )

    def option(one: JudgedCandidate) -> Option:
        is_as_written = one.estimate is not None and _is_as_written(experiment, one.candidate)
        return Option(**{**vars(one), "is_as_written": is_as_written}, question=question, writer=writer)

    return sorted(map(option, judged), key=selection.rank)


def _given(config: LoadedConfig, *, num_chosen: int) -> dict[str, dict[str, Any]]:
    """Returns the arguments of strategies and schedules that flags give, by constructor and parameter.

    A schedule is given by the name of its constructor; "" is one that a plan does not know.
    """
    macros = {binding.name: binding for binding in config.bindings if binding.is_macro}
    chosen = {flag(number) for number in range(1, num_chosen + 1)}
    found: dict[str, dict[str, Any]] = {}
    for binding in config.bindings:
        if binding.is_macro or binding.scope or binding.target.module not in _CHOSEN_BY_PLANS:
            continue
        of_macro = [macros[leaf.name] for leaf in leaves(binding.value) if isinstance(leaf, Macro)]
        if any(is_flag(one.file) and one.file not in chosen for one in (binding, *of_macro)):
            value = expand(binding.value, macros)
            if isinstance(value, Reference):
                value = value.target.name if value.target.module == schedules.__name__ and not value.scope else ""
            found.setdefault(binding.target.name, {})[binding.parameter] = value
    return found


def _is_as_written(experiment: Experiment, candidate: Candidate) -> bool:
    return (
        (candidate.layout is None or candidate.layout.strategy() == experiment.strategy)
        and candidate.remat in (None, candidates.remat_of(experiment.model))
        and candidate.accum_steps == experiment.accum_steps
        and candidate.batch_size == experiment.batch_size
    )


def ranked(found: Compiled) -> list[tuple[Option, Record]]:
    """Returns the candidates that fit, from the fewest predicted seconds per row."""
    fit = [(record.time.scheduled / one.candidate.batch_size, one, record) for one, record in found if record.time]
    return [(one, record) for _, one, record in sorted(fit, key=lambda each: each[0])]


def metrics(question: Question, option: Option, record: Record | None = None) -> CandidateMetrics:
    """Returns the metrics of a candidate from its record or, without one, from its estimate."""
    experiment, rows, estimate = question.experiment, option.candidate.batch_size, option.estimate
    assert estimate is not None, option.name
    flops = experiment.flops_per_step
    return CandidateMetrics(
        slice=question.slice,
        name=option.name,
        rows=rows,
        tokens=rows * experiment.row_length,
        steps=question.steps(rows),
        flops=flops * rows / experiment.batch_size if flops else None,
        used_bytes=record.needed_bytes if record else estimate.peak_bytes,
        used_is_bound=record is not None and record.needed_is_bound,
        time=record.time if record and record.time else estimate.time,
        bubble=estimate.bubble,
        compile_seconds=record.compile_seconds if record else None,
        is_as_written=option.is_as_written,
    )


class Writer:
    """Expresses the candidates for one experiment as gin bindings."""

    def __init__(self, config: LoadedConfig, experiment: Experiment):
        self._experiment = experiment
        self._changes = Changes(config, experiment.model)

    def can_write(self, candidate: Candidate) -> bool:
        """Returns whether gin bindings can express the candidate's `remat`."""
        return self._changes.constructor("remat") is not None or candidate.remat in (
            None,
            candidates.remat_of(self._experiment.model),
        )

    def bindings(self, candidate: Candidate) -> list[str]:
        """Returns the bindings that change the experiment to the candidate."""
        statements = self._layout(candidate.layout) if candidate.layout else []
        if candidate.remat not in (None, candidates.remat_of(self._experiment.model)):
            statements += self._changes.of_model("remat", repr(candidate.remat))
        if candidate.accum_steps != self._experiment.accum_steps:
            statements += self._changes.of_experiment("accum_steps", str(candidate.accum_steps))
        if candidate.batch_size != self._experiment.batch_size:
            statements += self._changes.of_experiment("batch_size", str(candidate.batch_size))
            steps = total_steps(self._experiment, candidate.batch_size)
            statements += self._changes.of_experiment("total_steps", str(steps))
        return statements

    def _layout(self, layout: Layout) -> list[str]:
        # All arguments, defaults included: the experiment may bind some of them.
        home = f"strategies.{layout.constructor}"
        statements = ["from parallel import strategies", *self._changes.of_experiment("strategy", f"@{home}()")]
        statements += [f"{home}.{name} = {value!r}" for name, value in layout.all_arguments.items()]
        if layout.choice:
            schedule = f"schedules.{layout.choice.constructor}"
            statements += ["from parallel.pipeline import schedules", f"{home}.schedule = @{schedule}()"]
            statements += [f"{schedule}.{name} = {value!r}" for name, value in layout.choice.all_arguments.items()]
        return statements

    def file(self, candidate: Candidate, header: list[str]) -> str:
        """Returns the text of a gin file for the candidate, to include after the experiment's statements."""
        return changes.file(self.bindings(candidate), header=header)


def total_steps(experiment: Experiment, batch_size: int) -> int:
    """Returns the smallest number of steps with `batch_size` rows for the experiment's tokens."""
    return -(-experiment.total_steps * experiment.batch_size // batch_size)


def apply(experiment: Experiment, candidate: Candidate) -> Experiment:
    """Returns a copy of a built experiment with a candidate's settings."""
    model = experiment.model
    if candidate.remat not in (None, candidates.remat_of(model)):
        model = wrappers.with_field(model, "remat", candidate.remat)
    return dataclasses.replace(
        experiment,
        model=model,
        strategy=candidate.layout.strategy() if candidate.layout else experiment.strategy,
        accum_steps=candidate.accum_steps,
        batch_size=candidate.batch_size,
        total_steps=total_steps(experiment, candidate.batch_size),
    )
