"""The training loop with the policy for a loss or gradient that is not finite: stop, skip the update, or roll back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core import metrics
from core.health import phase
from core.train_state import TrainState
from core.training import non_finite, trainer
from core.training.trainer import DeviceBatches, Hook, Program


def train(
    program: Program,
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
      program, batches, state, total_steps, hooks: as in `trainer.train`.
      restore: returns the state of the newest checkpoint, or a fresh one if there is none.

    Raises:
      NonFiniteLossError: without a `RollBack` hook, or when rolling back repeatedly made no progress.
    """
    roll_back = next((hook for hook in hooks if isinstance(hook, non_finite.RollBack)), None)
    while True:
        try:
            return trainer.train(program, batches, state, total_steps=total_steps, hooks=hooks)
        except non_finite.NonFiniteLossError as error:
            if roll_back is None:
                raise
            roll_back.again(error)
            with phase.enter(phase.RESTORING):
                state = restore()


def policy_hook(name: str, *, warn: Callable[[str], None], writers: metrics.Writers) -> Hook:
    """Returns the hook of a policy of `non_finite.POLICIES`; it records skipped updates and rollbacks."""

    def say(step: int, metric: str, sentence: str) -> None:
        warn(sentence)
        writers.scalars(step, {metric: 1.0})
        writers.flush()

    match name:
        case "skip":
            return non_finite.Skip(say)
        case "roll_back":
            return non_finite.RollBack(say)
    return non_finite.Stop()
