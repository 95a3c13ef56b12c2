"""Trains a prepared run on this host: restores or initializes the state, compiles, runs the loop, and ends the run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from core import distributed, metrics, paths
from core.checkpoints.store import Checkpoints
from core.errors import UserError
from core.health import phase
from core.train_state import TrainState
from core.training import compilation, non_finite, prefetch
from core.training.run_lock import RunLock
from core.training.trainer import Hook, TrainStep
from launch import array_table, config
from launch.prediction import PredictionCheck
from launch.runs import run_summary, training_hooks, warm_start
from launch.runs.prepared_run import Run
from launch.runs.progress import Progress

_A_DAY_SECONDS = 24 * 3600.0  # where a limit only reports


def train(run: Run, *, lock: RunLock | None = None, also: Sequence[Hook] = ()) -> dict[str, float]:
    """Trains to `run.last_step`, from the newest checkpoint if there is one.

    Args:
      run: from `prepare_run`.
      lock: of the run directory, on the host that holds it.
      also: hooks to run after the usual ones.

    Returns:
      The last validation means, such as `validation/loss`; empty if nothing is evaluated.
    """
    with phase.enter(phase.RESTORING):
        limits = {"keep": run.experiment.keep_checkpoints, "timeout_seconds": run.experiment.save_limit_seconds}
        checkpoints = Checkpoints(run.checkpoint_dir, **limits)
        state, position, resumed = restore_or_init(run, checkpoints)
    first_step = int(state.step)
    progress = Progress(run.last_step, host=run.host, unit=run.experiment.unit)
    progress.start(first_step)
    predictions = _prediction_check(run, progress)
    with contextlib.ExitStack() as stack:
        writers = metrics.open_writers(
            run.run_dir,
            is_host_zero=run.host.is_zero,
            first_step=first_step,
            wandb_project=run.experiment.wandb_project,
        )
        stack.callback(writers.close)
        if run.host.is_zero:
            run_summary.show(
                run.experiment,
                run.program,
                run_dir=run.run_dir,
                resumed_from=resumed,
                last_step=run.last_step,
                host=run.host,
                measured=predictions.rows(),
            )
            _write_config(run, writers)
        now = training_hooks.UnderWay(run, first_step, progress, predictions, writers, stack, lock)
        evaluation = training_hooks.evaluation_hook(now)
        batches = stack.enter_context(open_batches(run, position))
        state = non_finite.train(
            compile_together(run, first_step),
            batches,
            state,
            restore=lambda: restore_or_init(run, checkpoints)[0],
            total_steps=run.last_step,
            hooks=[*training_hooks.hooks_of(now, evaluation, checkpoints, batches), *also],
        )
        if evaluation and first_step >= run.last_step:  # nothing was left to train: evaluate once
            evaluation.at_boundary(first_step, state)
    with phase.enter(phase.SAVING):
        checkpoints.close()
    phase.at(phase.ENDING)
    validation = evaluation.latest if evaluation else {}
    run_summary.show_end(run.experiment, run.program, state, validation, run_dir=run.run_dir)
    distributed.barrier("run/end")
    return validation


def restore_or_init(
    run: Run, checkpoints: Checkpoints, *, step: int | None = None
) -> tuple[TrainState, Mapping[str, bytes] | None, int | None]:
    """Restores the newest intact checkpoint (or that of `step`), or initializes a new state.

    Returns:
      State, position (None at the start), and the step it comes from (None for a fresh start).
    """
    if step is None:
        found = checkpoints.restore_newest(run.program.abstract_state)
    else:
        found = step, *checkpoints.restore(step, run.program.abstract_state)
    if found is None:
        return warm_start.first_state(run.experiment, run.program, is_host_zero=run.host.is_zero), None, None
    step, state, position, meta = found
    if meta["data"] != run.meta["data"]:
        raise UserError(
            f"the checkpoint of step {step} was trained on other data, so its position in the data does not apply.\n"
            f"  then: {meta.get('data_source', 'not recorded')}\n  now:  {run.meta['data_source']}\n"
            "Files are compared by name and size. Use another --run-dir, or the same data."
        )
    return state, position, step


def open_batches(run: Run, position: Mapping[str, bytes] | None) -> prefetch.Prefetch:
    """Returns training batches on the devices, starting at a position."""
    layout = run.program.partitioner.data_layout(run.experiment.batch_size)
    batches = run.experiment.task.train(layout, seed=run.experiment.seed)
    if position is not None:
        prefetch.restore(batches, position)
    return prefetch.Prefetch(batches, to_device=run.program.put, snapshot_interval=run.experiment.checkpoint_interval)


def compile_together(run: Run, first_step: int) -> TrainStep:
    """Returns the training step; with several hosts, waits until all of them have compiled it.

    Simulated hosts wait at most 30 s for one another in the first collective of a program, and on a busy machine
    compile times differ by more.

    Raises:
      TimeoutError: a host did not compile within the run's limit for compiling; names it.
    """
    if run.host.count == 1 or first_step >= run.last_step:
        return compilation.OnceCompiled(run.program.train_step)
    with phase.enter(phase.COMPILING):
        compiled = run.program.lower_train_step().compile()
        seconds = _A_DAY_SECONDS if run.experiment.limits.reports_only else run.experiment.compile_limit_seconds
        distributed.barrier("run/compiled", timeout_seconds=seconds)
    # Calling the jitted function would compile it once more.
    return compilation.OnceCompiled(compiled, named_by=run.program.train_step)


def _prediction_check(run: Run, progress: Progress) -> PredictionCheck:
    on_tpu = run.program.partitioner.mesh.devices.flat[0].platform == "tpu"
    return PredictionCheck(
        run.experiment, settings=config.parse(run.meta["config"]), on_tpu=on_tpu, warn=progress.warning
    )


def _write_config(run: Run, writers: metrics.Writers) -> None:
    paths.write_text_atomically(paths.resolve(run.run_dir) / "config.gin", run.meta["config"])
    writers.text("config", run.meta["config"])
    writers.text("sharding", array_table.text(run.program))
    if evaluated := run_summary.evaluated_on(run.experiment):
        writers.text(metrics.EVALUATED_ON, evaluated)
    writers.text("versions", "\n".join(f"- {k} {v}" for k, v in run.meta["versions"].items()))
