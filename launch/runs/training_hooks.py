"""The hooks of every run: metrics, evaluation, checkpoints, profiles, and checks for failures."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from core import distributed, metrics
from core.checkpoints.store import Checkpoints
from core.checkpoints.writing import SaveCosts
from core.health import heartbeat
from core.train_state import TrainState
from core.training import (
    compile_cache,
    goodput,
    hooks,
    host_metrics,
    prefetch,
    profile_requests,
    profiling,
    replicas,
    rollback_loop,
    run_lock,
    step_file,
)
from launch import environment
from launch.prediction import PredictionCheck
from launch.runs.prepared_run import Run
from launch.runs.progress import Progress


class UnderWay(NamedTuple):
    """A run in progress: what its hooks share; `lock` is that of the run directory, on the host that holds it."""

    run: Run
    first_step: int
    progress: Progress
    predictions: PredictionCheck
    writers: metrics.Writers
    stack: contextlib.ExitStack
    lock: run_lock.RunLock | None = None


def hooks_of(
    now: UnderWay, evaluation: hooks.Evaluate | None, checkpoints: Checkpoints, batches: prefetch.Prefetch
) -> list[hooks.Hook]:
    """Returns the hooks of a run. Those that may reject a step come before those that log and save it."""
    preemption = hooks.StopWhenPreempted(distributed.preempted)
    compare_every = now.run.experiment.compare_interval
    return [
        rollback_loop.policy_hook(now.run.experiment.non_finite, warn=now.progress.warning, writers=now.writers),
        *_logging(now),
        *_goodput(now),
        *([replicas.Compare(heartbeat.compare, every=compare_every)] if compare_every else []),
        *([evaluation] if evaluation else []),
        _saving(now, checkpoints, batches, preemption),
        preemption,
        *_profiles(now),
        *_noting(now),
        *([run_lock.HoldsLock(now.lock)] if now.lock else []),
    ]


def _logging(now: UnderWay) -> list[hooks.Hook]:
    run, writers, progress, predictions = now.run, now.writers, now.progress, now.predictions
    every = run.experiment.log_interval
    figures = host_metrics.HostMetrics()
    own_lines = metrics.open_own_lines(run.run_dir, process_index=run.host.index)
    now.stack.callback(own_lines.close)

    def write(step: int, values: Mapping[str, float]) -> None:
        values = {**values, **predictions.metrics(values)}
        own = figures.own(values)
        own_lines.scalars(step, own)
        own_lines.flush()
        compared, seen = figures.exchange(step, own)
        progress.line(step, values, slowest=figures.slowest if seen else None)
        if seen:
            writers.scalars(compared, seen)
        writers.scalars(step, values)
        writers.flush()

    def compiled(step: int, totals: compile_cache.Totals) -> None:
        progress.compiled(totals)
        writers.scalars(step, {f"compile/{name}": float(value) for name, value in totals._asdict().items()})

    tokens = run.experiment.tokens_per_step
    return [hooks.Compiled(compiled), hooks.Log(write, every=every, items_per_step=tokens, last_step=run.last_step)]


def _profiles(now: UnderWay) -> list[hooks.Hook]:
    """Profiles of steps and memory: configured, requested while running, and when memory is exhausted."""
    run, stack = now.run, now.stack
    requests = profile_requests.Requests(run.run_dir, last_step=run.last_step)
    stack.callback(requests.close)
    memory = profiling.MemoryProfiles(run.run_dir)
    stack.enter_context(memory.when_exhausted())
    start, at = profiling.Profile(run.run_dir).start, run.experiment.profile_steps
    return [
        hooks.Profile(start, at=at, asked=requests.asked, done=requests.done),
        hooks.MemoryProfile(memory.write, at=run.experiment.memory_profile_steps),
    ]


def _noting(now: UnderWay) -> list[hooks.Hook]:
    """Notes the step for this host's log, if RENGA_STEP_FILE is set."""
    file = environment.read("RENGA_STEP_FILE")
    return [step_file.NoteStep(file, name=f"host {now.run.host.index}", step=now.first_step)] if file else []


def _goodput(now: UnderWay) -> list[hooks.Hook]:
    """Accounts for time on host 0 (goodput), until the loop ends for any reason."""
    run = now.run
    if not run.host.is_zero:
        return []
    bounds = {"first_step": now.first_step, "last_step": run.last_step, "every": run.experiment.log_interval}
    return [goodput.Goodput(run.run_dir, **bounds, write=now.writers.scalars, say=now.progress.note)]


def evaluation(now: UnderWay) -> hooks.Evaluate | None:
    """Evaluates every `eval_interval` steps; None if the experiment has no validation batches."""
    run, writers, progress = now.run, now.writers, now.progress
    if not run.experiment.eval_batches:
        return None
    kept: list[Mapping[str, np.ndarray]] = []  # the same batches at every evaluation: opened once

    def evaluate(state: TrainState) -> Mapping[str, float]:
        if not kept:
            layout = run.program.partitioner.data_layout(run.experiment.batch_size)
            batches = run.experiment.task.evaluation(layout)
            kept.extend(itertools.islice(batches, run.experiment.eval_batches))  # all of a task that has fewer
        return hooks.evaluate(run.program.eval_step, state, map(run.program.put, kept), num_batches=len(kept))

    def write(step: int, values: Mapping[str, float]) -> None:
        progress.validation(step, values)
        writers.scalars(step, values)
        writers.flush()

    return hooks.Evaluate(evaluate, write, every=run.experiment.eval_interval, last_step=run.last_step)


def _saving(
    now: UnderWay, checkpoints: Checkpoints, batches: prefetch.Prefetch, preemption: hooks.StopWhenPreempted
) -> hooks.Save:
    run, lock, costs = now.run, now.lock, SaveCosts(say=now.progress.note, write=now.writers.scalars)

    def due(step: int) -> bool:
        last = step == run.last_step or preemption.needs_state(step)
        return step % run.experiment.checkpoint_interval == 0 or last

    def check() -> None:
        if lock is not None:
            lock.check(now=True)

    return hooks.Save(checkpoints, batches.position, run.meta, due=due, costs=costs, check=check)
