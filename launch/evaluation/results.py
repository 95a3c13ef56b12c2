"""What came of an evaluation: JSON in the run directory, tables on the terminal, a submission.

Scores of one checkpoint are in step_N.json. Votes of several checkpoints together are another thing, an ensemble: they
have a file of their own, cumulative.json, and say so wherever they are shown. Of votes only the sum over checkpoints is
kept: those of one are hundreds of thousands of grids.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from core import paths
from launch import terminal
from launch.evaluation.measuring import Measured
from launch.progress import curves_apart
from tasks.puzzles import arc_voting
from tasks.puzzles.arc_voting import Judge, Votes

FOLDER, CUMULATIVE = "evaluation", "cumulative.json"
FIRST = ("loss", "exact_accuracy", "accuracy", "q_halt_accuracy")
_CONSTANT = ("steps", "halted")  # of every evaluation alike
_WIDTH = 140  # where there is no terminal to say


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything that one command evaluated.

    Attributes:
      run_dir: where it is written.
      about: what all of it has in common: `evaluated_on`, `slice`, `strategy`, `git_revision`.
      judge: of the answers; None where there is none.
      cumulative: whether votes are also scored together with those of the checkpoints before.
      checkpoints: the content of step_N.json, in the order evaluated.
      together: the scores of the votes of the first checkpoint, of the first two together, and so on.
      votes: of all checkpoints.
    """

    run_dir: str
    about: Mapping[str, Any]
    judge: Judge | None
    cumulative: bool
    checkpoints: Sequence[Mapping[str, Any]] = ()
    together: Sequence[Mapping[str, Any]] = ()
    votes: Votes = dataclasses.field(default_factory=dict)

    def with_step(self, measured: Measured) -> Results:
        """These and one more checkpoint's, which are written at once: the next may take hours."""
        found = self._as_json(measured)
        self._write(f"step_{measured.step}.json", found)
        more = dataclasses.replace(self, checkpoints=(*self.checkpoints, found))
        if not self.judge:
            return more
        votes = arc_voting.merged(self.votes, measured.votes)
        if not self.cumulative:
            return dataclasses.replace(more, votes=votes)
        together = (*self.together, {"steps": more.steps, **self.judge.scores(votes)})
        self._write(CUMULATIVE, {**self.about, "cumulative": together})
        return dataclasses.replace(more, votes=votes, together=together)

    def submission(self) -> str:
        """Two attempts for every test as JSON, from the votes of all checkpoints together."""
        return json.dumps(arc_voting.submission(self.votes, self.judge.puzzles)) + "\n"

    @property
    def steps(self) -> list[int]:
        """Of the checkpoints."""
        return [found["step"] for found in self.checkpoints]

    @property
    def of(self) -> str:
        """Which checkpoints, in words."""
        steps = ", ".join(f"{step:,}" for step in self.steps)
        return f"step {steps}" if len(self.steps) == 1 else f"steps {steps} together"

    @property
    def files(self) -> list[str]:
        """What was written."""
        names = [f"step_{step}.json" for step in self.steps] + [CUMULATIVE] * bool(self.together)
        return [str(paths.resolve(self.run_dir) / FOLDER / name) for name in names]

    def show(self) -> None:
        """Prints the tables."""
        console = terminal.console(_WIDTH)
        print(f"\n{self.about['evaluated_on']}; {self.checkpoints[0]['scored']:,} scored")
        console.print(self._means())
        for name in self.checkpoints[0]["by_step"]:
            console.print(self._curve(name))
        if self.judge:
            console.print(self._passes())

    def _as_json(self, measured: Measured) -> dict[str, Any]:
        plain, curves = curves_apart(measured.means)
        found = {
            "step": measured.step,
            **self.about,
            "scored": measured.scored,
            "same_data_as_in_training": measured.same_data,
            "means": plain,
            "by_step": curves,
        }
        return found | ({"arc": self.judge.scores(measured.votes)} if self.judge else {})

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        paths.write_text_atomically(paths.resolve(self.run_dir) / FOLDER / name, json.dumps(value, indent=1) + "\n")

    def _means(self) -> Table:
        means = [found["means"] for found in self.checkpoints]
        names = [n for n in FIRST if n in means[0]] + sorted(set(means[0]) - {*FIRST, *_CONSTANT})
        return _table(names, [[m[name] for name in names] for m in means], labels=self._labels())

    def _curve(self, name: str) -> Group:
        rows = [found["by_step"][name] for found in self.checkpoints]
        headings = [str(step) for step in range(1, len(rows[0]) + 1)]
        table = _table(headings, rows, labels=self._labels(), digits=3)
        return Group(f"{name} after so many steps on a puzzle", table)

    def _passes(self) -> Group:
        scores, labels = [found["arc"] for found in self.checkpoints], self._labels()
        if len(self.together) > 1:
            scores, labels = [*scores, self.together[-1]], [*labels, f"{self.of} (cumulative)"]
        one = scores[0]
        headings = [f"pass@{k}" for k in one["pass_at"]]
        return Group(
            f"pass@k of {one['puzzles']:,} puzzles; {one['tests_with_votes']:,} of their {one['tests']:,} tests have "
            f"votes, {one['votes']:,} of a checkpoint",
            _table(headings, [list(found["pass_at"].values()) for found in scores], labels=labels),
        )

    def _labels(self) -> list[str]:
        return [f"step {step:,}" for step in self.steps]


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
