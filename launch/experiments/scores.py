"""Evaluates checkpoints on held-out rows, writes their scores as JSON to the run directory and prints them as tables.

Puzzle data is finite: all held-out puzzles can be evaluated, or a subset drawn with a seed. Text data is endless, so
its first rows are evaluated. Every score is shown with a description of its rows.

The scores of one checkpoint are in step_N.json. Votes of several checkpoints together are an ensemble: their scores are
in cumulative.json and labelled as such. Only the sum of the votes over checkpoints is kept, because the votes of one
checkpoint can be hundreds of thousands of grids.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table

from core import paths
from core.checkpoints.store import Checkpoints
from core.errors import UserError
from core.health import phase
from core.training import trainer
from core.training.evaluation import EvaluationPass
from core.types import AnswerJudge, DataLayout, DescribesEvaluation, Evaluates, SizesEvaluation, can, lacking
from launch import terminal
from launch.experiment import Experiment
from launch.runs.prepared_run import Run
from launch.runs.progress import curves_apart
from parallel.partitioner import Program

FOLDER, CUMULATIVE = "evaluation", "cumulative.json"
FIRST = ("loss", "exact_accuracy", "accuracy", "q_halt_accuracy")
SECONDS_BETWEEN_LINES = 15.0
_CONSTANT = ("steps", "halted")  # the same in every evaluation
_WIDTH = 140  # without a terminal


class HeldOut(NamedTuple):
    """The rows of an evaluation: a number of batches of the experiment's task, or None for all of finite data."""

    experiment: Experiment
    batches: int | None

    def open(self, layout: DataLayout) -> Iterator[Mapping[str, np.ndarray]]:
        """Returns this host's rows, batch by batch, from the start."""
        return itertools.islice(self.experiment.task.evaluation(layout), self.batches)

    def describe(self) -> str:
        """Describes the rows; the task must be prepared."""
        most = None if self.batches is None else self.batches * self.experiment.batch_size
        if can(self.experiment.task, DescribesEvaluation):
            return self.experiment.task.evaluated_on(most)
        return "all held-out rows" if most is None else f"the first {most:,} rows of the validation data"


def select(experiment: Experiment, *, rows: int | Literal["all"] | None) -> HeldOut:
    """Selects the rows to evaluate.

    Args:
      experiment: experiment of the run.
      rows: a number of rows (for text rounded up to whole batches), or all; None: the rows of the run's own
        evaluations, at most EVAL_BATCHES x BATCH_SIZE.

    Raises:
      UserError: `rows` is `all` for endless data, or is missing for a run without evaluations.
    """
    task, ends = experiment.task, can(experiment.task, SizesEvaluation)
    if rows is None:
        if experiment.eval_batches:
            return HeldOut(experiment, experiment.eval_batches)
        either = "--rows N or --rows all" if ends else "--rows N"
        raise UserError(f"the run has no evaluations of its own (EVAL_BATCHES = 0): give {either}")
    if ends:
        return HeldOut(dataclasses.replace(experiment, task=task.evaluating(None if rows == "all" else rows)), None)
    if rows == "all":
        raise UserError(
            "--rows all: this task's validation data has no end (text repeats from its start): give a number of rows"
        )
    return HeldOut(experiment, math.ceil(rows / experiment.batch_size))


def require_answers(program: Program, judge: AnswerJudge) -> None:
    """Checks, without using a device, that the model returns the answers that a judge needs.

    Raises:
      UserError: it does not.
    """
    answered = program.abstract_answers()
    if absent := [name for name in judge.needed_answers if name not in answered]:
        lacks = f"the extras of {type(program.model).__name__}.evaluate lack {', '.join(absent)}"
        raise UserError(
            "the task is scored by votes of the model's answers, but "
            f"{lacks if can(program.model, Evaluates) else lacking(program.model, Evaluates)}. "
            f"Expected {', '.join(judge.needed_answers)} by row in the extras of `evaluate`, as in models/trm"
        )


def _with_progress(batches: Iterator[Any], what: str, *, rows: int) -> Iterator[Any]:
    """The same batches; prints a line now and then."""
    began = last = time.monotonic()
    for number, batch in enumerate(batches, 1):
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            print(f"{what}: {number * rows:,} rows, {number * rows / (now - began):.3g} rows/s", flush=True)
        yield batch


class Scores:
    """The scores of all checkpoints that one command evaluates; they are collected on host 0.

    Attributes:
      checkpoints: the content of each step_N.json, in the order evaluated.
    """

    def __init__(self, run_dir: str, about: Mapping[str, Any], judge: AnswerJudge | None, *, cumulative: bool):
        """Starts without scores.

        Args:
          run_dir: directory of the run; files are written into its folder `evaluation`.
          about: entries of every file: `evaluated_on`, `slice`, `strategy`, `git_revision`.
          judge: scores the answers; None to report means only.
          cumulative: whether to score also the votes of the first checkpoint, of the first two together, and so on.
        """
        self.checkpoints: list[Mapping[str, Any]] = []
        self._folder = paths.resolve(run_dir) / FOLDER
        self._about, self._judge, self._cumulative = about, judge, cumulative
        self._ensembles: list[Mapping[str, Any]] = []  # of cumulative.json
        self._votes: Any = None  # of all checkpoints together

    def evaluate(self, run: Run, checkpoints: Checkpoints, step: int, *, held_out: HeldOut) -> bool:
        """Evaluates the checkpoint of one step, with averaged weights if the optimizer keeps an average.

        Host 0 writes the score at once: the next checkpoint may take hours.

        Returns:
          False, on every host, if a run that is training removed the checkpoint meanwhile.

        Raises:
          UserError: the checkpoint does not fit the model, or there are no held-out rows.
        """
        with phase.enter(phase.RESTORING):
            restored = checkpoints.restore_if_there(step, run.program.abstract_state)
        if restored is None:
            return False
        state, _, meta = restored
        rows, judge = run.experiment.batch_size, self._judge
        data = held_out.open(run.program.partitioner.data_layout(rows))
        evaluation = EvaluationPass(run.program, state, data, answering=judge is not None)
        answers = evaluation.answers()
        votes = None
        if run.host.is_zero:
            answers = _with_progress(answers, f"step {step}", rows=rows)
            votes = judge.votes(answers) if judge else None
        for _ in answers:  # runs the pass where nobody counts votes
            pass
        if not evaluation.sums:
            raise UserError("there are no held-out rows to evaluate")
        means, by_step = curves_apart(trainer.means(evaluation.sums))
        score = {
            "step": step,
            **self._about,
            "scored": round(float(evaluation.sums["loss"].weight)),  # puzzles, or tokens
            "same_data_as_in_training": meta.get("data") == run.meta["data"],
            "means": means,
            "by_step": by_step,
        }
        if run.host.is_zero:
            self._add(score, votes)
        return True

    def _add(self, score: dict[str, Any], votes: Any) -> None:
        self.checkpoints.append(score)
        if self._judge:
            score["arc"] = self._judge.scores(votes)
            self._votes = votes if self._votes is None else self._judge.merged(self._votes, votes)
        self._write(f"step_{score['step']}.json", score)
        if self._judge and self._cumulative:
            self._ensembles.append({"steps": self._steps, **self._judge.scores(self._votes)})
            self._write(CUMULATIVE, {**self._about, "cumulative": self._ensembles})

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        paths.write_text_atomically(self._folder / name, json.dumps(value, indent=1) + "\n")

    def submission(self) -> str:
        """Returns two attempts for every test as JSON, from the votes of all checkpoints together."""
        return json.dumps(self._judge.submission(self._votes)) + "\n"

    @property
    def _steps(self) -> list[int]:
        return [found["step"] for found in self.checkpoints]

    @property
    def of(self) -> str:
        """Names the evaluated checkpoints, for headings."""
        steps = ", ".join(f"{step:,}" for step in self._steps)
        return f"step {steps}" if len(self.checkpoints) == 1 else f"steps {steps} together"

    @property
    def files(self) -> list[str]:
        """The files that were written."""
        names = [f"step_{step}.json" for step in self._steps] + [CUMULATIVE] * bool(self._ensembles)
        return [str(self._folder / name) for name in names]

    def show(self) -> None:
        """Prints the tables."""
        console = terminal.console(_WIDTH)
        first, labels = self.checkpoints[0], [f"step {step:,}" for step in self._steps]
        print(f"\n{self._about['evaluated_on']}; {first['scored']:,} scored")
        means = [found["means"] for found in self.checkpoints]
        names = [n for n in FIRST if n in means[0]] + sorted(set(means[0]) - {*FIRST, *_CONSTANT})
        console.print(_table(names, [[m[name] for name in names] for m in means], labels))
        for name, curve in first["by_step"].items():
            rows = [found["by_step"][name] for found in self.checkpoints]
            table = _table([str(step) for step in range(1, len(curve) + 1)], rows, labels, digits=3)
            console.print(Group(f"{name} after each recursion step", table))
        if self._judge:
            found = [checkpoint["arc"] for checkpoint in self.checkpoints]
            if len(self._ensembles) > 1:
                found, labels = [*found, self._ensembles[-1]], [*labels, f"{self.of} (cumulative)"]
            console.print(_pass_at_k(found, labels))


def _pass_at_k(found: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> Group:
    first = found[0]
    return Group(
        f"pass@k of {first['puzzles']:,} puzzles; {first['tests_with_votes']:,} of their {first['tests']:,} tests "
        f"have votes, {first['votes']:,} votes from the first checkpoint",
        _table([f"pass@{k}" for k in first["pass_at"]], [list(f["pass_at"].values()) for f in found], labels),
    )


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[float]], labels: Sequence[str], *, digits: int = 4
) -> Table:
    table = Table("", box=box.SIMPLE)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for label, values in zip(labels, rows, strict=True):
        table.add_row(label, *(f"{value:.{digits}f}" for value in values))
    return table
