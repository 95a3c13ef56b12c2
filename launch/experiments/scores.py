"""Evaluates checkpoints, writes their scores as JSON to the run directory and prints them as tables.

The scores of one checkpoint are in step_N.json. Votes of several checkpoints together are an ensemble: their scores are
in cumulative.json and labelled as such. Only the sum of the votes over checkpoints is kept, because the votes of one
checkpoint can be hundreds of thousands of grids.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table

from core import paths
from core.checkpoints.store import Checkpoints
from core.errors import UserError
from core.health import phase
from core.training import trainer
from core.training.evaluation_pass import EvaluationPass
from core.types import AnswerJudge, Evaluates, can
from launch import terminal
from launch.experiments.held_out import HeldOut
from launch.runs.prepared_run import Run
from launch.runs.progress import curves_apart
from parallel.partitioner import Program

FOLDER, CUMULATIVE = "evaluation", "cumulative.json"
FIRST = ("loss", "exact_accuracy", "accuracy", "q_halt_accuracy")
SECONDS_BETWEEN_LINES = 15.0
_CONSTANT = ("steps", "halted")  # the same in every evaluation
_WIDTH = 140  # without a terminal


class CheckpointScore(NamedTuple):
    """The result of evaluating one checkpoint.

    Attributes:
      step: of the checkpoint.
      means: by metric.
      scored: number of supervised items in the mean of the loss: puzzles, or tokens.
      same_data: whether the checkpoint was trained on the data whose held-out rows are evaluated.
      votes: of the answers; None without a judge, and on hosts other than host 0.
    """

    step: int
    means: Mapping[str, float]
    scored: int
    same_data: bool
    votes: Any


def require_answers(program: Program, judge: AnswerJudge) -> None:
    """Checks, without using a device, that the model returns the answers that a judge needs.

    Raises:
      UserError: it does not.
    """
    answered = program.abstract_answers()
    if missing := [name for name in judge.needed_answers if name not in answered]:
        lacks = f"the extras of its `evaluate` lack {', '.join(missing)}"
        raise UserError(
            "the task is scored by votes of the model's answers, but "
            f"{type(program.model).__name__} returns none: "
            f"{lacks if can(program.model, Evaluates) else 'it has no `evaluate`'}. "
            f"Expected {', '.join(judge.needed_answers)} by row in the extras of its `evaluate`, as in models/trm"
        )


def score(
    run: Run, checkpoints: Checkpoints, step: int, *, held_out: HeldOut, judge: AnswerJudge | None
) -> CheckpointScore | None:
    """Evaluates the checkpoint of one step, with averaged weights if the optimizer keeps an average.

    Returns:
      The score; None, on every host, if a run that is training removed the checkpoint meanwhile.

    Raises:
      UserError: the checkpoint does not fit the model, or there are no held-out rows.
    """
    with phase.enter(phase.RESTORING):
        restored = checkpoints.restore_if_there(step, run.program.abstract_state)
    if restored is None:
        return None
    state, _, meta = restored
    layout = run.program.partitioner.data_layout(run.experiment.batch_size)
    evaluation = EvaluationPass(run.program, state, held_out.open(layout), answering=judge is not None)
    answers = evaluation.answers()
    if run.host.is_zero:
        answers = _with_progress(answers, f"step {step}", rows=run.experiment.batch_size)
    votes = judge.votes(answers) if judge and run.host.is_zero else None
    for _ in answers:  # runs the pass where nobody counts votes
        pass
    if not evaluation.sums:
        raise UserError("there are no held-out rows to evaluate")
    same_data = meta.get("data") == run.meta["data"]
    scored = round(float(evaluation.sums["loss"].weight))
    return CheckpointScore(step, trainer.means(evaluation.sums), scored, same_data, votes)


def _with_progress(batches: Iterator[Any], what: str, *, rows: int) -> Iterator[Any]:
    """The same batches; prints a line now and then."""
    began = last = time.monotonic()
    for number, batch in enumerate(batches, 1):
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            print(f"{what}: {number * rows:,} rows, {number * rows / (now - began):.3g} rows/s", flush=True)
        yield batch


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of all checkpoints that one command evaluated.

    Attributes:
      run_dir: of the run; files are written into its folder `evaluation`.
      about: entries of every file: `evaluated_on`, `slice`, `strategy`, `git_revision`.
      judge: of the answers; None without one.
      cumulative: whether to score also the votes of the first checkpoint, of the first two together, and so on.
      checkpoints: the content of each step_N.json, in the order evaluated.
      ensembles: the content of cumulative.json.
      votes: of all checkpoints together.
    """

    run_dir: str
    about: Mapping[str, Any]
    judge: AnswerJudge | None
    cumulative: bool
    checkpoints: Sequence[Mapping[str, Any]] = ()
    ensembles: Sequence[Mapping[str, Any]] = ()
    votes: Any = None

    def with_checkpoint(self, found: CheckpointScore) -> Scores:
        """Adds the score of a checkpoint and writes it at once: the next checkpoint may take hours."""
        plain, curves = curves_apart(found.means)
        content = {
            "step": found.step,
            **self.about,
            "scored": found.scored,
            "same_data_as_in_training": found.same_data,
            "means": plain,
            "by_step": curves,
            **({"arc": self.judge.scores(found.votes)} if self.judge else {}),
        }
        self._write(f"step_{found.step}.json", content)
        more = dataclasses.replace(self, checkpoints=(*self.checkpoints, content))
        if not self.judge:
            return more
        votes = found.votes if self.votes is None else self.judge.merged(self.votes, found.votes)
        if not self.cumulative:
            return dataclasses.replace(more, votes=votes)
        ensembles = (*self.ensembles, {"steps": more.steps, **self.judge.scores(votes)})
        self._write(CUMULATIVE, {**self.about, "cumulative": ensembles})
        return dataclasses.replace(more, votes=votes, ensembles=ensembles)

    def submission(self) -> str:
        """Returns two attempts for every test as JSON, from the votes of all checkpoints together."""
        return json.dumps(self.judge.submission(self.votes)) + "\n"

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints."""
        return [found["step"] for found in self.checkpoints]

    @property
    def of(self) -> str:
        """The checkpoints as text."""
        steps = ", ".join(f"{step:,}" for step in self.steps)
        return f"step {steps}" if len(self.steps) == 1 else f"steps {steps} together"

    @property
    def files(self) -> list[str]:
        """The files that were written."""
        names = [f"step_{step}.json" for step in self.steps] + [CUMULATIVE] * bool(self.ensembles)
        return [str(paths.resolve(self.run_dir) / FOLDER / name) for name in names]

    def show(self) -> None:
        """Prints the tables."""
        console = terminal.console(_WIDTH)
        first = self.checkpoints[0]
        print(f"\n{self.about['evaluated_on']}; {first['scored']:,} scored")
        means = [found["means"] for found in self.checkpoints]
        names = [n for n in FIRST if n in means[0]] + sorted(set(means[0]) - {*FIRST, *_CONSTANT})
        console.print(_table(names, [[m[name] for name in names] for m in means], labels=self._labels()))
        for name in first["by_step"]:
            rows = [found["by_step"][name] for found in self.checkpoints]
            headings = [str(step) for step in range(1, len(rows[0]) + 1)]
            table = _table(headings, rows, labels=self._labels(), digits=3)
            console.print(Group(f"{name} after each recursion step", table))
        if self.judge:
            console.print(self._pass_at_k())

    def _pass_at_k(self) -> Group:
        found, labels = [checkpoint["arc"] for checkpoint in self.checkpoints], self._labels()
        if len(self.ensembles) > 1:
            found, labels = [*found, self.ensembles[-1]], [*labels, f"{self.of} (cumulative)"]
        first = found[0]
        return Group(
            f"pass@k of {first['puzzles']:,} puzzles; {first['tests_with_votes']:,} of their {first['tests']:,} tests "
            f"have votes, {first['votes']:,} votes from the first checkpoint",
            _table(
                [f"pass@{k}" for k in first["pass_at"]], [list(f["pass_at"].values()) for f in found], labels=labels
            ),
        )

    def _labels(self) -> list[str]:
        return [f"step {step:,}" for step in self.steps]

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        paths.write_text_atomically(paths.resolve(self.run_dir) / FOLDER / name, json.dumps(value, indent=1) + "\n")


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[float]], *, labels: Sequence[str], digits: int = 4
) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for label, values in zip(labels, rows, strict=True):
        table.add_row(label, *(f"{value:.{digits}f}" for value in values))
    return table
