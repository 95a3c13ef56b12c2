"""Measures the overhead of the trainer over the bare jitted step.

Both alternate in one process: a turn of steps in the trainer, set up as in every run (prefetched batches, logs,
TensorBoard, watchdog), then as many bare calls of the jitted step on one fixed batch. Alternating, and comparing
medians, reduces the influence of other work on the machine.
"""

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from core.hosts import activity
from core.optimizers import adamw, constant
from core.step import TrainState
from core.training import hooks
from core.training.trainer import StepReport
from core.types import Batch
from launch.experiment import Experiment
from launch.hosts.cluster import Host
from launch.runs import prepared_run
from launch.session import Session
from launch.settings import Checkpointing, Evaluation
from models.decoder.transformer import Transformer
from parallel import strategies
from parallel.partitioner import Program
from tasks import synthetic

SETTLING_STEPS = 3  # at the start of every turn, not counted: the pipeline of batches and steps is filling


class Overhead(NamedTuple):
    """Seconds of every counted step, by turn.

    Attributes:
      trainer: steps in the trainer.
      bare: bare jitted steps.
    """

    trainer: Sequence[Sequence[float]]
    bare: Sequence[Sequence[float]]

    @property
    def ratio(self) -> float:
        """Median step in the trainer over median bare step."""
        return _median(self.trainer) / _median(self.bare)

    @property
    def ratios_by_turn(self) -> list[float]:
        """The ratio of each pair of turns, smallest first; its spread shows the influence of other work."""
        pairs = zip(self.trainer, self.bare, strict=True)
        return sorted(statistics.median(trainer) / statistics.median(bare) for trainer, bare in pairs)


def _median(turns: Sequence[Sequence[float]]) -> float:
    return statistics.median(seconds for turn in turns for seconds in turn)


def experiment(slice_name: str, *, width: int, length: int, batch_size: int, total_steps: int) -> Experiment:
    """Returns a small decoder on random tokens, for timing."""
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
        evaluation=Evaluation(eval_batches=0),
        checkpointing=Checkpointing(checkpoint_interval=total_steps),
    )


def measure(timed: Experiment, *, turn_steps: int, run_dir: str, host: Host) -> Overhead:
    """Trains to the end, and runs bare steps after every `turn_steps` steps.

    Args:
      timed: what to train.
      turn_steps: steps of a turn, more than SETTLING_STEPS.
      run_dir: run directory.
      host: this process among its peers.
    """
    run = prepared_run.prepare_run(
        timed, config="", revision="", run_dir=run_dir, last_step=timed.total_steps, host=host
    )
    layout = run.program.partitioner.data_layout(timed.batch_size)
    batch = run.program.put(next(timed.task.train(layout, seed=timed.seed)))
    turns = _Turns(run.program, batch, turn_steps=turn_steps)
    Session(run, also=[turns]).run()
    return Overhead(turns.trainer_turns[1:], turns.bare_turns[1:])  # the first pair includes compilation


class StatisticsCost(NamedTuple):
    """Seconds of bare jitted steps, of which one in every turn computes statistics of the update.

    Attributes:
      usual: the steps before it, by turn.
      due: of each turn, the step that computes them and the step after it, together.
    """

    usual: list[list[float]]
    due: list[float]

    def shares(self, interval: int) -> list[float]:
        """Returns the additional time of a mean step, divided by a usual step: of each turn, smallest first."""
        turns = [(statistics.median(usual), due) for usual, due in zip(*self, strict=True)]
        return sorted((due - 2 * usual) / interval / usual for usual, due in turns)


def measure_statistics(timed: Experiment, *, turn_steps: int) -> StatisticsCost:
    """Runs steps in turns; the last but one of every turn computes statistics of the update.

    Args:
      timed: what to train; its `total_steps` are run.
      turn_steps: steps of a turn.
    """
    program = timed.bind(jax.devices())
    layout = program.partitioner.data_layout(timed.batch_size)
    batch, state = program.put(next(timed.task.train(layout, seed=timed.seed))), program.init()
    cost = StatisticsCost([], [])
    for turn in range(timed.total_steps // turn_steps):
        state, seconds = bare_steps(program, state, batch, steps=turn_steps, statistics_at=turn_steps - 2)
        if turn:  # the first includes compilation
            cost.usual.append(seconds[SETTLING_STEPS:-2]), cost.due.append(sum(seconds[-2:]))
    return cost


class _Turns(hooks.Hook):
    """Times the trainer's steps, and runs as many bare steps after every turn."""

    def __init__(self, program: Program, batch: Batch, *, turn_steps: int):
        self.trainer_turns: list[list[float]] = []
        self.bare_turns: list[list[float]] = []
        self._program = program
        self._batch = batch
        self._turn_steps = turn_steps
        self._state: TrainState | None = None

    def after_step(self, report: StepReport) -> None:
        turn, place = divmod(report.step - 1, self._turn_steps)
        if place == 0:
            self.trainer_turns.append([])
        if place >= SETTLING_STEPS:
            self.trainer_turns[turn].append(report.seconds)

    def needs_state(self, step: int) -> bool:
        return step % self._turn_steps == 0

    def at_boundary(self, step: int, state: TrainState) -> None:
        with activity.enter("bare steps"):
            mine = self._program.init() if self._state is None else self._state
            self._state, seconds = bare_steps(self._program, mine, self._batch, steps=self._turn_steps)
        self.bare_turns.append(seconds[SETTLING_STEPS:])


def bare_steps(
    program: Program, state: TrainState, batch: Batch, *, steps: int, statistics_at: int | None = None
) -> tuple[TrainState, list[float]]:
    """Repeats the jitted step, with one step dispatched ahead; step `statistics_at`, from 0, also computes statistics.

    Returns:
      The state after the last step, and the seconds between the ends of consecutive steps.
    """
    finished, before = [time.perf_counter()], None
    with program.partitioner.tracing():
        for index in range(steps):
            step = program.jitted_statistics_step if index == statistics_at else program.jitted_train_step
            state, metrics = step(state, batch)
            if before is not None:
                jax.block_until_ready(before)
                finished.append(time.perf_counter())
            before = metrics
    jax.block_until_ready(before)
    finished.append(time.perf_counter())
    return state, [later - earlier for earlier, later in itertools.pairwise(finished)]
