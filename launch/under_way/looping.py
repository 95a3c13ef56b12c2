"""The training loop of a run, which may have to go back to a checkpoint, and the hooks that look out for trouble."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core import metrics
from core.train_state import TrainState
from core.training import non_finite, trainer
from core.training.trainer import DeviceBatches, Hook, Program
from core.watch import peers, phase, replicas
from launch.progress import Progress


def train(
    program: Program,
    batches: DeviceBatches,
    state: TrainState,
    *,
    restored: Callable[[], TrainState],
    total_steps: int,
    hooks: Sequence[Hook],
) -> TrainState:
    """As `trainer.train`; with a `RollBack` among the hooks, again from the newest checkpoint where it says so.

    The data is never set back: the batch that was to blame, and the one after it, which had been dispatched by then,
    are left out, and checkpoints keep the position that the data has.

    Args:
      program, batches, state, total_steps, hooks: as there.
      restored: reads the newest checkpoint, or makes a fresh state.
    """
    policy = next((hook for hook in hooks if isinstance(hook, non_finite.RollBack)), None)
    while True:
        try:
            return trainer.train(program, batches, state, total_steps=total_steps, hooks=hooks)
        except non_finite.NonFiniteLossError as error:
            if policy is None:
                raise
            policy.again(error)
            with phase.enter(phase.RESTORING):
                state = restored()


def policy(name: str, progress: Progress, writers: metrics.Writers) -> Hook:
    """The hook of one of `non_finite.POLICIES`; what it does is printed and recorded."""

    def say(step: int, metric: str, sentence: str) -> None:
        progress.warning(sentence)
        writers.scalars(step, {metric: 1.0})
        writers.flush()

    match name:
        case "skip":
            return non_finite.Skip(say)
        case "roll_back":
            return non_finite.RollBack(say)
    return non_finite.Stop()


def comparing(every: int) -> list[Hook]:
    """The hook that has hosts compare what they hold in common; none where `every` is 0."""
    return [replicas.Compare(peers.compare, every=every)] if every else []
