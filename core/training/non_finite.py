"""Handles a non-finite loss or gradient: hooks by policy, and the training loop that can roll back.

    Stop      ends the run before such a state can be saved
    Skip      counts skipped updates (`core.step` skips them), and ends the run after too many in a row
    RollBack  ends the loop; `train` restores the newest checkpoint and continues with the following data

The metrics of a step are the same on all hosts, so all hosts decide alike without communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from core import metrics
from core.health import exit_codes, phase
from core.train_state import TrainState
from core.training import trainer
from core.training.trainer import DeviceBatches, Hook, StepReport, TrainStep

POLICIES = ("stop", "skip", "roll_back")
SKIPPED = "skipped_updates"  # a metric of every step of a run that skips: 1 where the update was left out
ROLLED_BACK = "rolled_back"  # a metric of the steps that a run went back from
MOST_SKIPPED = 20  # in a row
MOST_ROLLED_BACK = 3  # without getting further

_CAUSES = "Usual causes: a learning rate that is too high, no warm-up, or a bad batch"


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient is NaN or infinite."""

    exit_code = exit_codes.NON_FINITE


Say = Callable[[int, str, str], None]  # (step, name of the metric that becomes 1, sentence)


def found(report: StepReport) -> str:
    """Describes non-finite values, for example `loss = nan`; empty if loss and gradient norm are finite."""
    looked_at = {name: report.metrics[name] for name in ("loss", "gradient_norm") if name in report.metrics}
    return ", ".join(f"{name} = {value}" for name, value in looked_at.items() if not math.isfinite(value))


class Stop(Hook):
    """Ends the run at the first step whose loss or gradient norm is not finite, before it can be saved."""

    def after_step(self, report: StepReport) -> None:
        """Raises NonFiniteLossError if the loss or the gradient norm is not finite."""
        if bad := found(report):
            raise NonFiniteLossError(
                f"step {report.step}: {bad}. The last checkpoint precedes this step. {_CAUSES}; start again from the "
                "checkpoint with a lower rate, or set experiment.Experiment.non_finite = 'skip' or 'roll_back'."
            )


class Skip(Hook):
    """Reports every skipped update, and ends the run after too many in a row."""

    def __init__(self, say: Say):
        """Takes a function that is called for every skipped update."""
        self._say = say
        self._in_a_row = 0

    def after_step(self, report: StepReport) -> None:
        """Raises NonFiniteLossError if too many updates in a row were skipped."""
        if not report.metrics[SKIPPED]:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self._say(report.step, SKIPPED, f"step {report.step}: {found(report)}; its update is left out")
        if self._in_a_row >= MOST_SKIPPED:
            raise NonFiniteLossError(
                f"step {report.step}: {found(report)}, as in the {MOST_SKIPPED - 1} steps before, whose updates were "
                f"left out too: no batch is to blame. {_CAUSES}."
            )


class RollBack(Hook):
    """Ends the loop like `Stop`, and limits the number of rollbacks to the newest checkpoint."""

    def __init__(self, say: Say):
        """Takes a function that is called for every rollback."""
        self._say = say
        self._failed_at = 0
        self._in_vain = 0

    def after_step(self, report: StepReport) -> None:
        """Raises NonFiniteLossError if the loss or the gradient norm is not finite."""
        if bad := found(report):
            self._failed_at = max(self._failed_at, report.step)
            raise NonFiniteLossError(f"step {report.step}: {bad}. {_CAUSES}.")
        if report.step > self._failed_at:
            self._in_vain = 0

    def again(self, error: NonFiniteLossError) -> None:
        """Counts a rollback. Raises NonFiniteLossError if several in a row have made no progress."""
        self._in_vain += 1
        if self._in_vain > MOST_ROLLED_BACK:
            raise NonFiniteLossError(
                f"{error} Rolled back {MOST_ROLLED_BACK} times and got no further than step {self._failed_at}."
            ) from error
        self._say(self._failed_at, ROLLED_BACK, f"{error} Back to the newest checkpoint, with the data after this.")


def train(
    train_step: TrainStep,
    batches: DeviceBatches,
    state: TrainState,
    *,
    restore: Callable[[], TrainState],
    total_steps: int,
    hooks: Sequence[Hook],
) -> TrainState:
    """Runs `trainer.train`; a `RollBack` hook that ends the loop makes it continue from the newest checkpoint.

    The data is never rewound: the batch with the non-finite loss and the one after it, already dispatched by then, are
    dropped, and later checkpoints store the position that the data has reached.

    Args:
      train_step, batches, state, total_steps, hooks: as in `trainer.train`.
      restore: returns the state of the newest checkpoint, or a fresh one if there is none.

    Raises:
      NonFiniteLossError: without a `RollBack` hook, or when rolling back repeatedly made no progress.
    """
    roll_back = next((hook for hook in hooks if isinstance(hook, RollBack)), None)
    while True:
        try:
            return trainer.train(train_step, batches, state, total_steps=total_steps, hooks=hooks)
        except NonFiniteLossError as error:
            if roll_back is None:
                raise
            roll_back.again(error)
            with phase.enter(phase.RESTORING):
                state = restore()


def policy_hook(name: str, *, warn: Callable[[str], None], writers: metrics.Writers) -> Hook:
    """Returns the hook of one of POLICIES; it records skipped updates and rollbacks."""

    def say(step: int, metric: str, sentence: str) -> None:
        warn(sentence)
        writers.scalars(step, {metric: 1.0})
        writers.flush()

    match name:
        case "skip":
            return Skip(say)
        case "roll_back":
            return RollBack(say)
    return Stop()
