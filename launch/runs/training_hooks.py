"""The hooks of every run: metrics, evaluation, checkpoints, profiles, and checks for failures."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import NamedTuple

from core import distributed, metrics
from core.checkpoints.store import Checkpoints
from core.checkpoints.writing import SaveCosts
from core.health import heartbeat
from core.training import compilation, evaluation, goodput, hooks, host_metrics, non_finite, profiling, run_lock
from core.training.prefetch import Prefetch
from core.training.trainer import Hook
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


def hooks_of(now: UnderWay, evaluate: Hook | None, checkpoints: Checkpoints, batches: Prefetch) -> list[Hook]:
    """Returns the hooks of a run. Those that may reject a step come before those that log and save it."""
    run = now.run
    preemption = hooks.StopWhenPreempted(distributed.preempted)
    used = [
        non_finite.policy_hook(run.experiment.non_finite, warn=now.progress.warning, writers=now.writers),
        *_logging(now),
    ]
    if run.host.is_zero:
        steps = {"first_step": now.first_step, "last_step": run.last_step, "every": run.experiment.log_interval}
        used.append(goodput.Goodput(run.run_dir, **steps, write=now.writers.scalars, say=now.progress.note))
    if every := run.experiment.compare_interval:
        from core.training import replicas

        used.append(replicas.Compare(heartbeat.compare, every=every))
    if evaluate:
        used.append(evaluate)
    used += [_saving(now, checkpoints, batches, preemption), preemption, *_profiles(now)]
    if file := environment.read("RENGA_STEP_FILE"):
        used.append(hooks.NoteStep(file, name=f"host {run.host.index}", step=now.first_step))
    if now.lock:
        used.append(run_lock.HoldsLock(now.lock))
    return used


def _logging(now: UnderWay) -> list[Hook]:
    run, writers, progress, predictions = now.run, now.writers, now.progress, now.predictions
    measured = host_metrics.HostMetrics()
    own_lines = metrics.open_own_lines(run.run_dir, process_index=run.host.index)
    now.stack.callback(own_lines.close)

    def write(step: int, values: Mapping[str, float]) -> None:
        values = {**values, **predictions.metrics(values)}
        own = measured.own(values)
        own_lines.scalars(step, own)
        own_lines.flush()
        compared, of_hosts = measured.exchange(step, own)
        progress.line(step, values, slowest=measured.slowest if of_hosts else None)
        if of_hosts:
            writers.scalars(compared, of_hosts)
        writers.scalars(step, values)
        writers.flush()

    def compiled(step: int, totals: compilation.Totals) -> None:
        progress.compiled(totals)
        writers.scalars(step, {f"compile/{name}": float(value) for name, value in totals._asdict().items()})

    items, every = run.experiment.tokens_per_step, run.experiment.log_interval
    return [hooks.Compiled(compiled), hooks.Log(write, every=every, items_per_step=items, last_step=run.last_step)]


def evaluation_hook(now: UnderWay) -> evaluation.Evaluate | None:
    """Returns the hook that evaluates every `eval_interval` steps; None if the experiment has no validation batches."""
    run = now.run
    if not run.experiment.eval_batches:
        return None

    def batches() -> evaluation.HostBatches:
        layout = run.program.partitioner.data_layout(run.experiment.batch_size)
        return itertools.islice(run.experiment.task.evaluation(layout), run.experiment.eval_batches)

    def write(step: int, values: Mapping[str, float]) -> None:
        now.progress.validation(step, values)
        now.writers.scalars(step, values)
        now.writers.flush()

    return evaluation.Evaluate(run.program, batches, write, every=run.experiment.eval_interval, last_step=run.last_step)


def _saving(
    now: UnderWay, checkpoints: Checkpoints, batches: Prefetch, preemption: hooks.StopWhenPreempted
) -> hooks.Save:
    run, lock = now.run, now.lock

    def due(step: int) -> bool:
        last = step == run.last_step or preemption.needs_state(step)
        return step % run.experiment.checkpoint_interval == 0 or last

    def check() -> None:
        if lock is not None:
            lock.check(now=True)

    costs = SaveCosts(say=now.progress.note, write=now.writers.scalars)
    return hooks.Save(checkpoints, batches.position, run.meta, due=due, costs=costs, check=check)


def _profiles(now: UnderWay) -> list[Hook]:
    """Profiles of steps and memory: configured, requested while running, and when memory is exhausted."""
    run = now.run
    requests = profiling.Requests(run.run_dir, last_step=run.last_step)
    now.stack.callback(requests.close)
    memory = profiling.MemoryProfile(run.run_dir, at=run.experiment.memory_profile_steps)
    now.stack.enter_context(memory.when_exhausted())

    def start(step: int) -> profiling.Trace:
        return profiling.Trace(run.run_dir, step)

    return [profiling.Profile(start, requests, at=run.experiment.profile_steps), memory]
