"""Metrics that a registered seqio task defines, of the model of a run or of a loaded one, on one or several hosts.

Host 0 reads the examples and computes the metrics. All hosts predict and score the same examples, in the layout of the
model.
"""

from collections.abc import Sequence
from typing import Any

from core.hosts import activity, distributed
from core.step import TrainState
from core.types import OwnMetrics, Params
from parallel.generation.generating import Generator
from parallel.generation.likelihood import Pair, Scorer
from parallel.partitioner import Program
from tasks.text import seqio_metrics, seqio_pipeline

ROWS = 16  # prompts that are continued together
WAIT_SECONDS = 24 * 3600.0  # for metrics of the user, which may take long; a lost host is noticed by its heartbeat
_FIX = "lower METRIC_EXAMPLES"


class Answers:
    """Greedy continuations and log-likelihoods by a model; its programs are compiled once for each shape."""

    def __init__(self, program: Program, params: Params, *, stop_ids: Sequence[int], num_ids: int | None):
        """Takes the model, its parameters, the ids that end a continuation, and the size of the vocabulary."""
        self._generator, self._scorer = Generator(program, params), Scorer(program, params)
        self._ends: dict[str, Any] = {"stop_ids": stop_ids, "num_ids": num_ids}

    def update(self, params: Params | None) -> None:
        """Takes other parameters of the same layout; None frees the memory of the last ones."""
        self._generator.update(params)
        self._scorer.update(params)

    def predict(self, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        """Returns the greedy continuation of each prompt, of at most so many ids.

        Rows of the model's whole length have no room for the last id, because the begin-of-text id comes first.

        Raises:
          UserError: prompts and continuations are longer than the model's positions by more than that.
        """
        room, found = self._generator.max_positions, []
        if room is not None and max(map(len, prompts)) + most == room + 1 and most > 1:
            most -= 1
        self._generator.check(prompts, max_tokens=most)
        for first in range(0, len(prompts), ROWS):
            activity.at(activity.EVALUATING, part=f"prediction {first + 1} of {len(prompts)}")
            batch = list(prompts[first : first + ROWS])
            filled = [*batch, *batch[:1] * (min(ROWS, len(prompts)) - len(batch))]  # one program for all batches
            found += self._generator.generate(filled, max_tokens=most, **self._ends)[: len(batch)]
        return [one.ids for one in found]

    def score(self, pairs: Sequence[Pair]) -> list[float]:
        """Returns the log-likelihood of each continuation, given as pairs of ids (context, continuation)."""
        activity.at(activity.EVALUATING, part=f"{len(pairs)} scores")
        return [one.log_likelihood for one in self._scorer.score(pairs)]


class TaskMetrics:
    """The metrics of a run's task at each of its evaluations. A process of host 0 imports seqio."""

    def __init__(self, program: Program, own: OwnMetrics, *, stop_ids: Sequence[int], num_ids: int | None):
        """Begins to read the examples."""
        self._program, self._own = program, own
        self._ends: dict[str, Any] = {"stop_ids": stop_ids, "num_ids": num_ids}
        self._processes = seqio_pipeline.Processes()
        self._answers: Answers | None = None
        self._asked: Any = self._processes.submit(0, own.questions) if distributed.is_host_zero() else None

    def ready(self) -> None:
        """Waits for the examples. Raises UserError on every host if they, or the metrics, cannot be read."""
        activity.at(activity.EVALUATING, part="examples of the task's metrics")
        self._questions = distributed.decided_by_host_zero(
            lambda: seqio_pipeline.answer(self._asked, fix=_FIX), timeout_seconds=WAIT_SECONDS
        )

    def values(self, state: TrainState) -> dict[str, float]:
        """Returns the metrics as `TASK/METRIC`. Raises UserError if a metric fails, on every host."""
        params = self._program.optimizer.evaluated(state.params, state.opt_state)
        if self._answers is None:
            self._answers = Answers(self._program, params, **self._ends)
        else:
            self._answers.update(params)
        outputs = seqio_metrics.answered(self._questions, score=self._answers.score, predict=self._answers.predict)
        self._answers.update(None)

        def computed() -> Any:
            return seqio_pipeline.answer(self._processes.submit(0, self._own.computed, outputs), fix=_FIX)

        activity.at(activity.EVALUATING, part="the task's metrics")
        found = distributed.decided_by_host_zero(computed, timeout_seconds=WAIT_SECONDS)
        return {f"{task}/{name}": value for task, each in found.items() for name, value in each.items()}

    def close(self) -> None:
        """Ends the process, also while it reads."""
        self._processes.close()
