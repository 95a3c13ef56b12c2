"""Computes the metrics that a registered seqio task defines: on host 0, from predictions of all hosts."""

from collections.abc import Sequence
from typing import Any

from core.hosts import activity, distributed
from core.step import TrainState
from core.types import OwnMetrics, Params
from parallel.generation.generating import Generator
from parallel.generation.likelihood import Pair, Scorer
from parallel.partitioner import Program
from tasks.text import seqio_metrics, seqio_pipeline

ROWS = 16  # prompts per batch
WAIT_SECONDS = 24 * 3600.0  # the user's metrics may take long; heartbeats notice a lost host
_FIX = "lower METRIC_EXAMPLES"


class Answers:
    """Computes a model's greedy continuations and log-likelihoods."""

    def __init__(self, program: Program, params: Params, *, stop_ids: Sequence[int], num_ids: int | None):
        """`stop_ids` end a continuation; `num_ids` is the size of the vocabulary, None if unknown."""
        self._generator, self._scorer = Generator(program, params), Scorer(program, params)
        self._ends: dict[str, Any] = {"stop_ids": stop_ids, "num_ids": num_ids}

    def update(self, params: Params | None) -> None:
        """Replaces the parameters by others of the same layout; None only frees their memory."""
        self._generator.update(params)
        self._scorer.update(params)

    def predict(self, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        """Returns the ids of the greedy continuation of each prompt, at most `most` of them.

        The limit is `most - 1` if only that fits the model's positions.

        Raises:
          UserError: a prompt is empty, does not fit, or has ids that the model lacks.
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
    """Computes the metrics of a run's task; seqio runs in a separate process on host 0."""

    def __init__(self, program: Program, own: OwnMetrics, *, stop_ids: Sequence[int], num_ids: int | None):
        """Starts to read the examples in the background."""
        self._program, self._own = program, own
        self._ends: dict[str, Any] = {"stop_ids": stop_ids, "num_ids": num_ids}
        self._processes = seqio_pipeline.Processes()
        self._answers: Answers | None = None
        self._asked: Any = self._processes.submit(0, own.questions) if distributed.is_host_zero() else None

    def ready(self) -> None:
        """Waits for the examples. Raises UserError on every host if they cannot be read."""
        activity.at(activity.EVALUATING, part="examples of the task's metrics")
        self._questions = distributed.decided_by_host_zero(
            lambda: seqio_pipeline.answer(self._asked, fix=_FIX), timeout_seconds=WAIT_SECONDS
        )

    def values(self, state: TrainState) -> dict[str, float]:
        """Returns the metrics by name, `TASK/METRIC`. All hosts must call it."""
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
        """Ends the process, even while it reads."""
        self._processes.close()
