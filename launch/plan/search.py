"""Loads the experiment of a plan, judges its candidate layouts, and ranks the compiled ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from core import slices
from core.errors import UserError
from core.slices import Slice
from launch import configuration, program_identity
from launch.config import LoadedConfig
from launch.experiment import Experiment
from launch.plan import candidate_bindings
from launch.plan.records import Record
from parallel.planning import candidates, model_trace, selection
from parallel.planning.candidate_metrics import CandidateMetrics
from parallel.planning.candidates import Candidate
from parallel.planning.selection import JudgedCandidate


@dataclasses.dataclass(frozen=True)
class Question:
    """The input of a plan: an experiment, a slice and batch sizes.

    Attributes:
      path: the experiment file.
      config, experiment: the configuration as written, and the object built from it.
      bindings: from the command line.
      slice: the slice to plan for.
      batch_sizes: batch sizes to try.
    """

    path: str
    config: LoadedConfig
    experiment: Experiment
    bindings: tuple[str, ...]
    slice: Slice
    batch_sizes: tuple[int, ...]

    @property
    def total_tokens(self) -> int:
        """Tokens that the experiment trains on in total; equal for all batch sizes of the plan."""
        return self.experiment.total_steps * self.experiment.tokens_per_step

    def steps(self, batch_size: int) -> int:
        """Returns how many steps of `batch_size` rows train on all tokens."""
        return candidate_bindings.total_steps(self.experiment, batch_size)


@dataclasses.dataclass(frozen=True)
class Option(JudgedCandidate):
    """A candidate with its estimate, its gin bindings and the identity of its program.

    Attributes:
      bindings: gin bindings that change the experiment to the candidate.
      text: the identity of its program, from which the name of its record is made; empty if its tables were refused.
    """

    bindings: tuple[str, ...] = ()
    text: str = ""


Compiled = Sequence[tuple[Option, Record]]


def ask(path: str, *, slice_name: str, bindings: Sequence[str] = (), batch_sizes: Sequence[int] = ()) -> Question:
    """Loads the experiment that a plan is for.

    Raises:
      UserError: an unknown slice, a mistake in the configuration, a batch size below 1 or too large.
    """
    slice_ = slices.get(slice_name)
    config = configuration.load(path, bindings=bindings, slice_name=slice_name)
    experiment = config.build()
    for size in batch_sizes:
        if size < 1:
            raise UserError(f"--batch {size}: expected at least 1 row")
    writer = candidate_bindings.Writer(config, experiment)
    for size in set(batch_sizes) - {experiment.batch_size}:
        added = writer.bindings(Candidate(None, None, experiment.accum_steps, size))
        try:
            configuration.load(path, bindings=[*bindings, *added], slice_name=slice_name).build()
        except UserError as error:  # so few steps that the experiment refuses them
            steps = candidate_bindings.total_steps(experiment, size)
            raise UserError(f"--batch {size}, {steps} steps for as many tokens: {error}") from error
    sizes = tuple(dict.fromkeys(batch_sizes)) or (experiment.batch_size,)
    return Question(path, config, experiment, tuple(bindings), slice_, sizes)


def options(question: Question, *, only: Sequence[str] = ()) -> list[Option]:
    """Returns every candidate with its estimate, or the reason why it cannot work; the likely fastest first.

    Args:
      question: the input of the plan.
      only: strategies to try; empty for all of them and the experiment's own.

    Raises:
      UserError: an unknown strategy.
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
    layouts = candidates.layouts(question.slice, only=only)
    own = () if any(layout.strategy() == experiment.strategy for layout in layouts) or only else (None,)
    tried = candidates.candidates(
        [*own, *layouts],
        own=experiment.strategy,
        slice=question.slice,
        model=experiment.model,
        batch_sizes=question.batch_sizes,
    )
    judge = selection.Judge(trace, experiment.strategy, num_streams=experiment.task.num_streams)
    writer = candidate_bindings.Writer(question.config, experiment)
    judged = (judge.judge(one) for one in tried if writer.can_write(one))
    return sorted((_option(question, writer, one) for one in judged), key=selection.rank)


def _option(question: Question, writer: candidate_bindings.Writer, judged: JudgedCandidate) -> Option:
    bindings = tuple(writer.bindings(judged.candidate))
    option = Option(**vars(judged), bindings=bindings)
    if judged.estimate is None:
        return option
    made = candidate_bindings.apply(question.experiment, judged.candidate)
    text = program_identity.program_text(made, question.config)
    return dataclasses.replace(option, text=text, is_as_written=made == question.experiment)


def ranked(found: Compiled) -> list[tuple[Option, Record]]:
    """Sorts compiled candidates by seconds per row, counting as hidden the traffic that the compiler overlapped."""
    fit = [(one, record) for one, record in found if record.time]
    return sorted(fit, key=lambda pair: pair[1].time.scheduled / pair[0].candidate.batch_size)


def metrics(question: Question, option: Option, record: Record | None = None) -> CandidateMetrics:
    """Returns the metrics of a candidate from its record or, without one, from arithmetic."""
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
        time=record.time if record and record.time else estimate.time,
        bubble=record.bubble if record else estimate.bubble,
        compile_seconds=record.compile_seconds if record else None,
        is_as_written=option.is_as_written,
    )
