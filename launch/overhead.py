"""What the trainer costs beside the step that it runs.

The same program takes turns in one process: some steps in the trainer, wired as every run is (prefetched batches, logs,
TensorBoard, the guards), then as many bare calls of the jitted step on one batch that stays where it is. Taking turns,
and comparing medians, keeps what else the machine does out of the ratio.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from core import hooks
from core.optimizers import adamw, constant
from core.train_state import TrainState
from core.trainer import StepReport
from core.types import Batch
from launch import training
from launch.experiment import Experiment
from launch.joining import Host
from models.transformer import Transformer
from parallel import strategies
from parallel.partitioner import Program
from tasks import synthetic

_SETTLING_STEPS = 3  # of every turn, left out: the pipeline of batches and steps is filling


class Overhead(NamedTuple):
    """Seconds of every steady step.

    Attributes:
      trainer: in the trainer.
      bare: of the jitted step alone.
    """

    trainer: Sequence[float]
    bare: Sequence[float]

    @property
    def ratio(self) -> float:
        """Median step in the trainer over median bare step."""
        return statistics.median(self.trainer) / statistics.median(self.bare)


def experiment(slice_name: str, *, width: int, length: int, batch_size: int, total_steps: int) -> Experiment:
    """A decoder on random tokens, for timing: its step is long enough to be one, and short enough to repeat."""
    return Experiment(
        slice=slice_name,
        strategy=strategies.fsdp(),
        model=Transformer(
            vocab_size=512, num_layers=4, embed_dim=width, mlp_dim=3 * width, num_heads=4, num_kv_heads=4
        ),
        task=synthetic.random_tokens(vocab_size=512, length=length, num_streams=batch_size),
        optimizer=adamw(learning_rate=constant(1e-4)),
        batch_size=batch_size,
        total_steps=total_steps,
        eval_batches=0,
        checkpoint_interval=total_steps,
    )


def measure(timed: Experiment, *, turn_steps: int, run_dir: str, host: Host) -> Overhead:
    """Trains to the end, and steps aside for the bare step behind every `turn_steps` steps.

    Args:
      timed: what to train.
      turn_steps: steps of a turn, more than the few that settle it.
      run_dir: for what a run writes.
      host: this process among its peers.
    """
    run = training.ready(timed, config_text="", revision="", run_dir=run_dir, last_step=timed.total_steps, host=host)
    layout = run.program.partitioner.data_layout(timed.batch_size)
    batch = run.program.put(next(timed.task.train(layout, seed=timed.seed)))
    turns = _Turns(run.program, batch, turn_steps=turn_steps)
    training.train(run, also=[turns])
    return Overhead(turns.trainer_seconds, turns.bare_seconds)


class _Turns(hooks.Hook):
    """Times the trainer's steps, and runs bare ones behind every turn. The first turn compiles and does not count."""

    def __init__(self, program: Program, batch: Batch, *, turn_steps: int):
        self.trainer_seconds: list[float] = []
        self.bare_seconds: list[float] = []
        self._program = program
        self._batch = batch
        self._turn_steps = turn_steps
        self._state: TrainState | None = None

    def after_step(self, report: StepReport) -> None:
        turn, place = divmod(report.step - 1, self._turn_steps)
        if turn > 0 and place >= _SETTLING_STEPS:
            self.trainer_seconds.append(report.seconds)

    def needs_state(self, step: int) -> bool:
        return step % self._turn_steps == 0

    def at_boundary(self, step: int, state: TrainState) -> None:
        mine = self._program.init() if self._state is None else self._state
        self._state, seconds = bare_steps(self._program, mine, self._batch, steps=self._turn_steps)
        if step > self._turn_steps:
            self.bare_seconds += seconds[_SETTLING_STEPS:]


def bare_steps(program: Program, state: TrainState, batch: Batch, *, steps: int) -> tuple[TrainState, list[float]]:
    """The jitted step over and over, one dispatched ahead: the least that this program can take.

    Returns:
      The state behind the last step, and the seconds from each finished step to the next.
    """
    finished, before = [time.perf_counter()], None
    with program.partitioner.tracing():
        for _ in range(steps):
            state, metrics = program.jitted_train_step(state, batch)
            if before is not None:
                jax.block_until_ready(before)
                finished.append(time.perf_counter())
            before = metrics
    jax.block_until_ready(before)
    finished.append(time.perf_counter())
    return state, [later - earlier for earlier, later in itertools.pairwise(finished)]
