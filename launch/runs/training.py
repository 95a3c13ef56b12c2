"""Trains a prepared run on this host: restores or initializes the state, compiles, runs the loop, and ends the run."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from core import distributed, metrics, paths, slices
from core.checkpoints import best, steps
from core.checkpoints.store import Checkpoints
from core.checkpoints.writing import SaveCosts
from core.health import heartbeat, phase
from core.step import TrainState
from core.training import compilation, evaluation, frozen, goodput, hooks, prefetch, profiling, run_lock
from core.training.trainer import Hook, StatisticsStep, TrainStep
from core.types import EndsEvaluation, Params, can
from launch import config, environment, program_identity
from launch.config.differences import Difference
from launch.runs import continuation, progress
from launch.runs.prepared_run import INIT_FROM, Run
from parallel import report
from parallel.prediction import PredictionCheck

_A_DAY_SECONDS = 24 * 3600.0  # where a limit only reports


class EarlierPhaseError(RuntimeError):
    """The newest intact checkpoint belongs to an earlier phase."""


class _UnderWay(NamedTuple):
    """The state of a run in progress that its hooks share; `lock` is the lock of the run directory, on its host."""

    run: Run
    first_step: int
    lines: progress.Progress
    predictions: PredictionCheck
    writers: metrics.Writers
    stack: contextlib.ExitStack
    lock: run_lock.RunLock | None


def train(run: Run, *, lock: run_lock.RunLock | None = None, also: Sequence[Hook] = ()) -> dict[str, float]:
    """Trains to `run.last_step`, from the newest checkpoint if there is one.

    The host that holds the lock of the run directory passes it; the hooks `also` run after the standard ones.

    Of an experiment with phases, it trains one of them.

    Returns:
      The last validation means, such as `validation/loss`; empty if nothing is evaluated.

    Raises:
      EarlierPhaseError: the checkpoints of this phase, and the one before it, are damaged; they are renamed.
    """
    with phase.enter(phase.RESTORING):
        _require_newest_fits(run)
        distributed.decided_by_host_zero(lambda: continuation.require_space(run.run_dir, run.experiment, run.program))
        checkpoints = _open_checkpoints(run)
        try:
            start = restore_or_init(run, checkpoints)
        except EarlierPhaseError:
            checkpoints.close()
            raise
        run = dataclasses.replace(run, meta={**run.meta, **start.meta})
        checksum = frozen.checksum(run.program, start.state.params)
        frozen.require_base(run.experiment.task, checksum)
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(open_batches(run, start.position))  # refuses a position, before files are written
        now = _begin(run, int(start.state.step), stack, lock)
        if run.host.is_zero:
            measured = now.predictions.rows()
            progress.show_summary(run, resumed_from=start.step, measured=measured, left_out=checkpoints.left_out)
            _write_config(run, now.writers)
            _tell_changes(now, start)
        if place := run.experiment.persistent_directory:
            from core.checkpoints import copying

            keep = run.experiment.keep_checkpoints
            stack.enter_context(copying.Copying(run.run_dir, place, keep=keep, say=now.lines.note))
        evaluate = _evaluation(now)
        train_step, statistics = compile_together(run, now.first_step)
        state = hooks.train_rolling_back(
            train_step,
            batches,
            start.state,
            restore=lambda: restore_or_init(run, checkpoints).state,
            total_steps=run.last_step,
            statistics=statistics,
            hooks=[*_hooks(now, evaluate, checkpoints, batches), *also],
        )
        if evaluate and now.first_step >= run.last_step:  # nothing was left to train: evaluate once
            evaluate.at_boundary(now.first_step, state)
    with phase.enter(phase.SAVING):
        checkpoints.close()
    phase.at(phase.ENDING)
    validation = evaluate.latest if evaluate else {}
    if run.is_last:
        progress.show_end(run, state, validation, checksum=checksum)
    distributed.barrier(f"run/end of step {run.last_step}")
    return validation


def _require_newest_fits(run: Run) -> None:
    """Checks the newest checkpoint by its metadata, which takes no time, before its arrays are read."""

    def check() -> None:
        if found := continuation.newest(run.run_dir):
            like = {"span": run.span, "abstract_state": run.program.abstract_state}
            continuation.refuse(found.step, continuation.problems(found, run.meta, **like))

    distributed.decided_by_host_zero(check)


def _tell_changes(now: _UnderWay, start: "Start") -> None:
    """Lists the settings that differ from those of the checkpoint, on the screen and in the logs."""
    if start.step is not None and start.changes:
        said = continuation.described_changes(start.step, start.changes)
        now.lines.note(said)
        now.writers.text("changed settings", said, step=start.step)


def _open_checkpoints(run: Run) -> Checkpoints:
    settings = run.experiment
    return Checkpoints(
        run.checkpoint_dir,
        keep=settings.keep_checkpoints,
        keep_params=settings.keep_params_checkpoints if settings.params_checkpoint_interval else None,
        timeout_seconds=settings.save_limit_seconds,
        origin=run.origin,
        keep_best=settings.keep_best,
    )


def _begin(run: Run, first_step: int, stack: contextlib.ExitStack, lock: run_lock.RunLock | None) -> _UnderWay:
    """Prints the first step, looks up the run's prediction, and opens the metrics files."""
    lines = progress.Progress(run.last_step, host=run.host, unit=run.experiment.unit)
    lines.start(first_step)
    settings = config.parse(run.meta["config"])
    predictions = PredictionCheck(
        program_identity.find(run.experiment, settings),
        slice_=slices.get(run.experiment.slice),
        flops=run.experiment.flops_per_step,
        is_measured=not run.host.simulated,
        warn=lines.warning,
    )
    project, is_host_zero = run.experiment.wandb_project, run.host.is_zero
    writers = metrics.open_writers(run.run_dir, is_host_zero=is_host_zero, first_step=first_step, wandb_project=project)
    stack.callback(writers.close)
    return _UnderWay(run, first_step, lines, predictions, writers, stack, lock)


class Start(NamedTuple):
    """The state and the position in the data from which training starts.

    Attributes:
      state: the state.
      position: in the data; None at the beginning.
      step: of the checkpoint; None for a fresh start.
      meta: metadata of the checkpoint that the following ones keep: what the run was initialized from.
      changes: the settings in which the configuration differs from that of the checkpoint.
    """

    state: TrainState
    position: Mapping[str, bytes] | None = None
    step: int | None = None
    meta: Mapping[str, Any] = {}
    changes: Sequence[Difference] = ()


def restore_or_init(run: Run, checkpoints: Checkpoints, *, step: int | None = None) -> Start:
    """Restores the newest intact checkpoint (or that of `step`), or initializes a new state."""
    if step is None:
        found = checkpoints.restore_newest(run.program.abstract_state)
    else:
        found = step, *checkpoints.restore(step, run.program.abstract_state)
    if found is None:
        checkpoints.left_out = run.initial.left_out if run.initial else None
        return Start(_first_state(run))
    step, state, position, meta = found
    if step < run.span.first_step:
        raise EarlierPhaseError(
            f"the newest checkpoint that can be restored is of step {step}, and {run.span} begins after step "
            f"{run.span.first_step}: start the run again, and it trains the phase before once more"
        )
    # This is checked once more, because the newest one may have been damaged.
    continuation.refuse(step, continuation.data_problems(step, meta, run.meta, span=run.span))
    is_new_phase = 0 < step == run.span.first_step  # the position is in the data of the phase before
    kept = {name: meta[name] for name in (INIT_FROM,) if name in meta}
    changes = continuation.changes(meta, run.meta["config"])
    return Start(state, None if is_new_phase else position, step, kept, changes)


def _first_state(run: Run) -> TrainState:
    if run.initial is None:
        return run.program.init()
    from launch.runs import warm_start

    return warm_start.first_state(run.experiment, run.program, run.initial, is_host_zero=run.host.is_zero)


def open_batches(run: Run, position: Mapping[str, bytes] | None) -> prefetch.Prefetch:
    """Returns training batches on the devices, starting at a position."""
    layout = run.program.partitioner.data_layout(run.experiment.batch_size)
    batches = run.experiment.task.train(layout, seed=run.span.seed)
    if position is not None:
        prefetch.restore(batches, position)
    return prefetch.Prefetch(batches, to_device=run.program.put, snapshot_interval=run.experiment.checkpoint_interval)


def statistics_step(run: Run) -> StatisticsStep | None:
    """Returns the step that computes the run's statistics of the update, not yet compiled; None if it has none."""
    interval = run.experiment.statistics_interval
    return StatisticsStep(run.program.statistics_step, interval) if interval else None


def compile_together(run: Run, first_step: int) -> tuple[TrainStep, StatisticsStep | None]:
    """Returns the training step and that of statistics; with several hosts, waits until all of them have compiled both.

    The step of statistics is always compiled here, because later its compilation would look like a step that hangs.

    Simulated hosts wait at most 30 s for one another in the first collective of a program, and on a busy machine
    compile times differ by more.

    Raises:
      TimeoutError: a host did not compile within the run's limit for compiling; names it.
    """
    train_step, statistics = run.program.train_step, statistics_step(run)
    if first_step >= run.last_step:
        return train_step, statistics
    compiled: TrainStep = train_step
    with phase.enter(phase.COMPILING):
        if statistics:
            program = run.program.lower_train_step(with_statistics=True).compile()
            statistics = statistics._replace(run=compilation.OnceCompiled(program, named_by=train_step))
        if run.host.count > 1:  # calling the jitted function would compile it once more
            compiled = run.program.lower_train_step().compile()
            distributed.barrier(f"run/compiled after step {first_step}", timeout_seconds=meeting_seconds(run))
    return compilation.OnceCompiled(compiled, named_by=train_step), statistics


def meeting_seconds(run: Run) -> float:
    """Returns how long hosts wait for one another while none of them is stuck."""
    return _A_DAY_SECONDS if run.experiment.limits.reports_only else run.experiment.compile_limit_seconds


def _write_config(run: Run, writers: metrics.Writers) -> None:
    paths.write_text_atomically(paths.resolve(run.run_dir) / "config.gin", run.meta["config"])
    writers.text("config", run.meta["config"])
    writers.text("sharding", report.table(run.program))
    if evaluated := progress.evaluated_on(run.experiment):
        writers.text(metrics.EVALUATED_ON, evaluated)
    writers.text("versions", "\n".join(f"- {k} {v}" for k, v in run.meta["versions"].items()))


def _hooks(
    now: _UnderWay, evaluate: evaluation.Evaluate | None, checkpoints: Checkpoints, batches: prefetch.Prefetch
) -> list[Hook]:
    """Returns the hooks of a run. Those that may reject a step come before those that log and save it."""
    run = now.run
    preemption = hooks.StopWhenPreempted(distributed.preempted)
    saved = paths.resolve(run.checkpoint_dir)
    about = {
        "warn": now.lines.warning,
        "writers": now.writers,
        "newest": lambda: max(steps.complete(saved), default=None),
    }
    used = [hooks.policy_hook(run.experiment.non_finite, **about), *_logging(now)]
    if run.is_last:
        used.insert(1, hooks.NoteEnding(run.last_step))
    if run.host.is_zero:
        told = {"first_step": now.first_step, "last_step": run.last_step, "every": run.experiment.log_interval}
        used.append(
            goodput.Goodput(run.run_dir, **told, started=run.started, write=now.writers.scalars, say=now.lines.note)
        )
    if (every := run.experiment.compare_interval) and run.program.partitioner.mesh.size > 1:
        from core.training import replicas

        used.append(replicas.Compare(heartbeat.compare, every=every))
    if evaluate:
        used.append(evaluate)
    saving = _saving(now, checkpoints, batches, preemption, evaluate)
    if run.host.count > 1:
        together = {"checkpoint": saving[0]} | ({"evaluation": evaluate} if evaluate else {})
        used.insert(0, hooks.Meet(together, timeout_seconds=meeting_seconds(run)))
    used += [*saving, preemption, *_profiles(now)]
    if file := environment.read("RENGA_STEP_FILE"):
        used.append(hooks.NoteStep(file, name=f"host {run.host.index}", step=now.first_step))
    if now.lock:
        used.append(run_lock.HoldsLock(now.lock))
    return used


def _logging(now: _UnderWay) -> list[Hook]:
    run, writers, lines, predictions = now.run, now.writers, now.lines, now.predictions
    measured = goodput.HostMetrics()
    own_lines = metrics.open_own_lines(run.run_dir, process_index=run.host.index)
    now.stack.callback(own_lines.close)

    def write(step: int, values: Mapping[str, float]) -> None:
        values = {**values, **predictions.metrics(values)}
        own = measured.own(values)
        own_lines.scalars(step, own)
        own_lines.flush()
        compared, of_hosts = measured.exchange(step, own)
        lines.line(step, values, slowest=measured.slowest if of_hosts else None)
        if of_hosts:
            writers.scalars(compared, of_hosts)
        writers.scalars(step, values)
        writers.flush()

    def compiled(step: int, totals: compilation.Totals) -> None:
        if step == now.first_step + 1:
            lines.compiled(totals)
        writers.scalars(step, {f"compile/{name}": float(value) for name, value in totals._asdict().items()})

    items, every = run.experiment.items_per_step, run.experiment.log_interval
    return [hooks.Compiled(compiled), hooks.Log(write, every=every, items_per_step=items, last_step=run.last_step)]


def _evaluation(now: _UnderWay) -> evaluation.Evaluate | None:
    """Returns the hook that evaluates every `eval_interval` steps; None if the experiment has no validation batches."""
    run = now.run
    if not run.experiment.eval_batches:
        return None

    task = run.experiment.task

    def batches() -> evaluation.FirstBatches:
        layout = run.program.partitioner.data_layout(run.experiment.batch_size)
        found: Any = task.evaluation(layout)
        return evaluation.FirstBatches(found, run.experiment.eval_batches)

    def write(step: int, values: Mapping[str, float]) -> None:
        assert hook.scored is not None
        now.lines.validation(step, values, scored=hook.scored.describe("token") if can(task, EndsEvaluation) else "")
        now.writers.scalars(step, values)
        now.writers.flush()

    every, last = run.experiment.eval_interval, run.last_step
    hook = evaluation.Evaluate(run.program, batches, write, every=every, last_step=last)
    return hook


def _saving(
    now: _UnderWay,
    checkpoints: Checkpoints,
    batches: prefetch.Prefetch,
    preemption: hooks.StopWhenPreempted,
    evaluate: evaluation.Evaluate | None,
) -> list[Hook]:
    run, lock, keep_best = now.run, now.lock, now.run.experiment.keep_best

    def validated(step: int) -> Mapping[str, Any]:
        if not keep_best or evaluate is None or evaluate.step != step:
            return {}
        if (name := best.parse(keep_best).name) not in evaluate.latest:
            has = ", ".join(sorted(evaluate.latest))
            now.lines.warning(f"KEEP_BEST = {keep_best!r}: no {name} in the evaluation, which has {has}")
        return best.described(keep_best, evaluate.latest)

    def due(step: int) -> bool:
        last = step == run.last_step or preemption.needs_state(step)
        return step % run.experiment.checkpoint_interval == 0 or last

    def check() -> None:
        if lock is not None:
            lock.check(now=True)

    costs = SaveCosts(say=now.lines.note, write=now.writers.scalars)
    how = {"due": due, "costs": costs, "check": check, "say": now.lines.note, "evaluated": validated}
    save = hooks.Save(checkpoints, batches.position, run.meta, **how)
    if not (every := run.experiment.params_checkpoint_interval):
        return [save]
    optimizer, abstract = run.program.optimizer, run.program.abstract_state
    meta = {**run.meta, steps.AVERAGED: optimizer.is_averaging(abstract.opt_state)}

    def evaluated(state: TrainState) -> Params:
        return optimizer.evaluated(state.params, state.opt_state)

    def due_alone(step: int) -> bool:
        return step % every == 0 and not due(step)

    return [save, hooks.SaveParams(checkpoints, evaluated, meta, due=due_alone, check=check)]


def _profiles(now: _UnderWay) -> list[Hook]:
    """Profiles of steps and memory: configured, requested while running, and when memory is exhausted."""
    run = now.run
    requests = profiling.Requests(run.run_dir, last_step=run.last_step)
    now.stack.callback(requests.close)
    memory = profiling.MemoryProfile(run.run_dir, at=run.experiment.memory_profile_steps)
    now.stack.enter_context(memory.when_exhausted())

    def start(step: int) -> profiling.Trace:
        return profiling.Trace(run.run_dir, step)

    return [profiling.Profile(start, requests, at=run.experiment.profile_steps), memory]
