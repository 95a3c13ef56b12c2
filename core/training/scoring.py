"""Scores checkpoints on held-out rows, and writes the scores to the run directory as JSON.

If the task judges answers by votes (`AnswerJudge`), the votes of several checkpoints can be scored together.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from core.batches import is_same_data
from core.checkpoints.store import Checkpoints
from core.errors import UserError
from core.files import paths
from core.hosts import activity, distributed
from core.step import TrainState
from core.training import frozen, metrics, trainer
from core.training.evaluation import EvaluationPass, FirstBatches, by_position, curves_apart
from core.types import (
    AnswerJudge,
    DataLayout,
    DescribesEvaluation,
    EndsEvaluation,
    Evaluates,
    SizesEvaluation,
    Task,
    can,
    lacking,
)

FOLDER, CUMULATIVE = "evaluation", "cumulative.json"
SECONDS_BETWEEN_LINES = 15.0


class HeldOut(NamedTuple):
    """The held-out rows of an evaluation; `batches` is how many to read, or None for all."""

    task: Task
    batch_size: int
    batches: int | None

    def open(self, layout: DataLayout) -> FirstBatches:
        """Returns this host's rows, batch by batch, from the start."""
        batches: Any = self.task.evaluation(layout)
        return FirstBatches(batches, self.batches)

    def describe(self) -> str:
        """Describes the rows; the task must be prepared."""
        most = None if self.batches is None else self.batches * self.batch_size
        if can(self.task, DescribesEvaluation):
            return self.task.evaluated_on(most)
        if can(self.task, EndsEvaluation):
            return "the validation data" if most is None else f"the validation data, at most {most:,} rows"
        return "all held-out rows" if most is None else f"the first {most:,} rows of the validation data"


def select(
    task: Task,
    *,
    batch_size: int,
    eval_batches: int,
    rows: int | Literal["all"] | None,
    asked: tuple[str, str] = ("--num-examples N", "--num-examples all"),
) -> HeldOut:
    """Selects the rows to evaluate.

    Args:
      batch_size, eval_batches: those of the run's own evaluations.
      rows: a number of rows, or "all"; None: the rows of the run's own evaluations.
      asked: how the user asks for a number and for all, in errors.

    Raises:
      UserError: `rows` is None and `eval_batches` 0, or "all" of endless data.
    """
    is_pass = can(task, EndsEvaluation)
    ends = is_pass or can(task, SizesEvaluation)
    if rows is None:
        if eval_batches:
            return HeldOut(task, batch_size, eval_batches)
        either = " or ".join(asked) if ends else asked[0]
        raise UserError(f"the run has no evaluations of its own (EVAL_BATCHES = 0): give {either}")
    if can(task, SizesEvaluation):
        return HeldOut(task.evaluating(None if rows == "all" else rows), batch_size, None)
    if rows != "all":
        return HeldOut(task, batch_size, math.ceil(rows / batch_size))
    if not is_pass:
        raise UserError(f"{asked[1]}: this task's validation data has no end: give {asked[0]}")
    return HeldOut(task, batch_size, None)


def require_answers(program: Any, judge: AnswerJudge) -> None:
    """Raises UserError if the model does not return the answers that a judge needs."""
    answered = program.abstract_answers()
    if absent := [name for name in judge.needed_answers if name not in answered]:
        lacks = f"the extras of {type(program.model).__name__}.evaluate lack {', '.join(absent)}"
        raise UserError(
            "the task is scored by votes of the model's answers, but "
            f"{lacks if can(program.model, Evaluates) else lacking(program.model, Evaluates)}. "
            f"Expected {', '.join(judge.needed_answers)} by row in the extras of `evaluate`, as in models/trm"
        )


class Scores:
    """The scores of all checkpoints that one command evaluates, on host 0.

    Attributes:
      about: entries to write into every file.
      judge: scores the answers; None: only loss and metrics are computed.
      checkpoints: the content of each step_N.json.
      ensembles: the entries of cumulative.json.
    """

    def __init__(
        self,
        run_dir: str,
        about: Mapping[str, Any],
        judge: AnswerJudge | None,
        *,
        cumulative: bool,
        positions: Sequence[range] = (),
    ):
        """Takes what to score.

        Args:
          run_dir: where to write.
          about: entries to write into every file.
          judge: scores the answers, or None.
          cumulative: for every N, also score the votes of the first N checkpoints.
          positions: ranges of positions in a document; the loss is also computed for the tokens of each.
        """
        self.about, self.judge, self._positions = about, judge, positions
        self.checkpoints: list[Mapping[str, Any]] = []
        self.ensembles: list[Mapping[str, Any]] = []
        self._folder = paths.resolve(run_dir) / FOLDER
        self._cumulative = cumulative
        self._votes: Any = None  # of all checkpoints together

    def evaluate(
        self, program: Any, checkpoints: Checkpoints, step: int, held_out: HeldOut, *, layout: DataLayout, data: str
    ) -> bool:
        """Evaluates the checkpoint of one step, with averaged weights if the optimizer keeps an average.

        All hosts must call it. It returns False, on every host, if the checkpoint is not there any more.

        Args:
          layout: the rows of each batch that this host supplies.
          data: fingerprint of the data.

        Raises:
          UserError: there are no held-out rows, or cached hidden states do not fit.
        """
        with activity.enter(activity.RESTORING):
            layout_of_state = program.abstract_state._replace(carry=())  # it belongs to the rows of a training batch
            restored = checkpoints.restore_if_there(step, layout_of_state, unread="carry")
        if restored is None:
            return False
        state, _, meta = restored
        state = state._replace(carry=program.first_carry())
        frozen.require_base(held_out.task, frozen.checksum(program, state.params))
        batches = held_out.open(layout)
        evaluation = EvaluationPass(program, state, batches, answering=self.judge is not None)
        answers: Iterator[Any] = evaluation.answers()
        votes = None
        if distributed.is_host_zero():
            answers = _with_progress(answers, f"step {step}", rows=held_out.batch_size, count=held_out.batches)
            votes = self.judge.votes(answers) if self.judge else None
        for _ in answers:  # runs the pass if no votes are counted
            pass
        if not evaluation.sums:
            raise UserError("there are no held-out rows to evaluate")
        means, by_step = curves_apart(trainer.means(evaluation.sums))
        score = {
            "step": step,
            **self.about,
            "scored": round(float(evaluation.sums["loss"].weight)),  # puzzles, or tokens
            "share": batches.share if can(held_out.task, EndsEvaluation) else None,
            "same_data_as_in_training": is_same_data(meta.get("data", ""), data),
            "means": means,
            "by_step": by_step,
        }
        if self._positions:
            score["by_position"] = self._by_position(program, state, held_out.open(layout))
        if distributed.is_host_zero():
            self._add(score, votes)
        return True

    def _by_position(self, program: Any, state: TrainState, batches: FirstBatches) -> list[dict[str, Any]]:
        sums = [found["loss"] for found in by_position(program, state, batches, self._positions)]
        return [
            {"first": own.start, "last": own[-1], "scored": round(float(s.weight)), "loss": float(s.total / s.weight)}
            for own, s in zip(self._positions, sums, strict=True)
            if s.weight > 0
        ]

    def _add(self, score: dict[str, Any], votes: Any) -> None:
        self.checkpoints.append(score)
        if self.judge:
            score[self.judge.name] = self.judge.scores(votes)
            self._votes = votes if self._votes is None else self.judge.merged(self._votes, votes)
        self._write(f"step_{score['step']}.json", score)
        if self.judge and self._cumulative:
            self.ensembles.append({"steps": self.steps, **self.judge.scores(self._votes)})
            self._write(CUMULATIVE, {**self.about, "cumulative": self.ensembles})

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        text = json.dumps(metrics.finite(value), indent=1, allow_nan=False)
        paths.write_text_atomically(self._folder / name, text + "\n")

    def submission(self) -> str:
        """Returns the judge's attempts as JSON text, from the votes of all checkpoints; on host 0 only."""
        assert self.judge is not None
        return json.dumps(self.judge.submission(self._votes)) + "\n"

    @property
    def steps(self) -> list[int]:
        """The steps of the evaluated checkpoints."""
        return [found["step"] for found in self.checkpoints]

    @property
    def of(self) -> str:
        """Names the evaluated checkpoints, such as `steps 100, 200 together`."""
        steps = ", ".join(f"{step:,}" for step in self.steps)
        return f"step {steps}" if len(self.checkpoints) == 1 else f"steps {steps} together"

    @property
    def files(self) -> list[str]:
        """The paths of the written files."""
        names = [f"step_{step}.json" for step in self.steps] + [CUMULATIVE] * bool(self.ensembles)
        return [str(self._folder / name) for name in names]


def _with_progress(batches: Iterator[Any], what: str, *, rows: int, count: int | None) -> Iterator[Any]:
    began, of = time.monotonic(), f" of at most {count}" if count else ""
    last = began
    for number, batch in enumerate(batches, 1):
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            speed = f"{number * rows / (now - began):.3g} rows/s"
            print(f"{what}: batch {number}{of}, {number * rows:,} rows, {speed}", flush=True)
        yield batch
