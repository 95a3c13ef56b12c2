"""One start of a run, or of one of its phases, on this host.

`Session.run` restores or initializes the state, compiles, trains, and waits for the last checkpoint.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from core import slices
from core.checkpoints import best, steps
from core.checkpoints.store import Checkpoints
from core.checkpoints.writing import SaveCosts
from core.files import bookkeeping, paths
from core.hosts import activity, distributed, heartbeat
from core.step import TrainState
from core.training import compilation, evaluation, frozen, goodput, hooks, metrics, profiling, run_lock, trainer
from core.training.trainer import Hook, StatisticsStep, TrainStep
from core.types import DefinesMetrics, EndsEvaluation, Params, can
from launch import environment
from launch.config import Settings
from launch.config.differences import Difference
from launch.runs import continuation, progress
from launch.runs.prepared_run import INIT_FROM, Run
from launch.settings import PROFILED_STEPS
from parallel.compiled import report
from parallel.prediction import PredictionCheck
from tasks.text.ids import stop_ids

if TYPE_CHECKING:
    from launch.runs.task_metrics import TaskMetrics


class EarlierPhaseError(RuntimeError):
    """The newest intact checkpoint belongs to an earlier phase."""


class Start(NamedTuple):
    """The state, and the position in the data, from which training starts.

    Attributes:
      state: the state.
      position: the position in the data; None: the beginning.
      step: the checkpoint's step; None for a fresh start.
      meta: the part of the checkpoint's metadata that later checkpoints repeat.
      changes: settings that differ from those of the checkpoint.
    """

    state: TrainState
    position: Mapping[str, bytes] | None = None
    step: int | None = None
    meta: Mapping[str, Any] = {}
    changes: Sequence[Difference] = ()


def restore_or_init(run: Run, checkpoints: Checkpoints, *, step: int | None = None, **fetch: Any) -> Start:
    """Restores a checkpoint, or initializes a state if the run has none.

    Args:
      run: the run.
      checkpoints: its checkpoints.
      step: the checkpoint's step, which must exist; None: the newest intact checkpoint.
      **fetch: as in `Checkpoints.restore_newest`.

    Raises:
      EarlierPhaseError: the checkpoint belongs to an earlier phase.
      UserError: the checkpoint does not fit the run.
    """
    if step is None:
        found = checkpoints.restore_newest(run.program.abstract_state, **fetch)
    else:
        found = step, *checkpoints.restore(step, run.program.abstract_state)
    if found is None:
        checkpoints.left_out = run.initial.left_out if run.initial else None
        if run.initial is None:
            return Start(run.program.init())
        from launch.runs import warm_start

        first = warm_start.first_state(run.experiment, run.program, run.initial, is_host_zero=run.host.is_zero)
        return Start(first)
    step, state, position, meta = found
    if step < run.span.first_step:
        raise EarlierPhaseError(
            f"the newest checkpoint that can be restored is of step {step}, and {run.span} begins after step "
            f"{run.span.first_step}: start the run again, and it trains the phase before once more"
        )
    # Checked again, because an older checkpoint is restored if the newest is damaged.
    continuation.refuse(step, continuation.data_problems(step, meta, run.meta, span=run.span))
    is_new_phase = 0 < step == run.span.first_step  # the position is in the previous phase's data
    kept = {name: meta[name] for name in (INIT_FROM,) if name in meta}
    changes = continuation.changes(meta, run.config)
    return Start(state, None if is_new_phase else position, step, kept, changes)


def compile_together(run: Run, first_step: int) -> tuple[TrainStep, StatisticsStep | None]:
    """Returns the training step, and the statistics step or None.

    With several hosts, all of them must call it: they compile here and wait for one another. Simulated hosts wait at
    most 30 s in a program's first collective.

    Raises:
      TimeoutError: a host did not compile in time.
    """
    train_step, statistics = run.program.train_step, run.statistics_step
    if first_step >= run.last_step:
        return train_step, statistics
    compiled: TrainStep = train_step
    with activity.enter(activity.COMPILING):
        if statistics:  # compiled later, it would look like a step that hangs
            program = run.program.lower_train_step(with_statistics=True).compile()
            statistics = statistics._replace(run=compilation.OnceCompiled(program, named_by=train_step))
        if run.host.count > 1:  # calling the jitted function would compile it again
            compiled = run.program.lower_train_step().compile()
            distributed.barrier(f"run/compiled after step {first_step}", timeout_seconds=run.meeting_seconds)
    return compilation.OnceCompiled(compiled, named_by=train_step), statistics


class Session:
    """One start of a run on this host, or of one of its phases."""

    def __init__(
        self, run: Run, *, lock: run_lock.RunLock | None = None, also: Sequence[Hook] = (), continues: bool = False
    ):
        """Creates the session of a prepared run.

        Args:
          run: the run.
          lock: the lock of the run directory; None on hosts that do not hold it.
          also: hooks that run after the standard ones.
          continues: whether this start has trained the phase before.
        """
        self._run, self._lock, self._also, self._continues = run, lock, also, continues
        self._fetch: dict[str, Any] = {}  # how a restore replaces a damaged step

    def run(self) -> dict[str, float]:
        """Trains from the newest checkpoint, if there is one, to the last step.

        Returns:
          The last validation means, such as `validation/loss`; empty without evaluations.

        Raises:
          EarlierPhaseError: an earlier phase must be trained again.
          PreemptedError: the run was preempted or interrupted.
          NonFiniteLossError: the loss or the gradient is not finite, and `non_finite` ends the run.
        """
        run = self._run
        with activity.enter(activity.RESTORING):
            start = self._restored()
            checksum = frozen.checksum(run.program, start.state.params)
            frozen.require_base(run.experiment.task, checksum)
        self._run = run = dataclasses.replace(run, meta={**run.meta, **start.meta})
        self._first_step = int(start.state.step)
        with contextlib.ExitStack() as self._stack:
            self._batches = self._stack.enter_context(run.open_batches(start.position))
            self._begin(start)
            if self._evaluate:
                self._evaluate.read()
            train_step, statistics = compile_together(run, self._first_step)
            if self._metrics:
                self._metrics.ready()
            if self._evaluate and self._is_evaluation_missing(self._evaluate):
                if run.host.count > 1:
                    distributed.barrier("evaluation at the start", timeout_seconds=run.meeting_seconds)
                self._evaluate.at_boundary(self._first_step, start.state)
            if self._evaluate and run.host.is_zero:
                bookkeeping.Bookkeeping(f"scores of {run.checkpoint_dir}").attempt(self._score_earlier_steps)
            state = trainer.train(
                train_step,
                self._batches,
                start.state,
                total_steps=run.last_step,
                statistics=statistics,
                restore=self._rolled_back,
                hooks=[*self._hooks(), *self._also],
            )
        with activity.enter(activity.SAVING):
            self._checkpoints.close()
        activity.at(activity.ENDING)
        validation = self._evaluate.latest if self._evaluate else {}
        if run.is_last:
            progress.show_end(run, state, validation, checksum=checksum)
        distributed.barrier(f"run/end of step {run.last_step}", timeout_seconds=run.meeting_seconds)
        return validation

    def _is_evaluation_missing(self, evaluate: evaluation.Evaluate) -> bool:
        """Returns whether to evaluate at the start: nothing is left to train, or the run ended in this evaluation."""
        run, step = self._run, self._first_step
        if step >= run.last_step:
            return True
        if step <= run.span.first_step or not evaluate.needs_state(step):
            return False
        return distributed.decided_by_host_zero(lambda: not metrics.read(run.run_dir).has_evaluation(step))

    def _score_earlier_steps(self) -> None:
        """Adds recorded evaluations to checkpoints that lack them, such as one saved when its evaluation failed."""
        run, evaluate = self._run, self._evaluate
        if evaluate is None or not (unscored := self._checkpoints.unscored()):
            return
        keep_best, recorded = run.experiment.checkpointing.keep_best, dict(metrics.read(run.run_dir).by_step)
        if evaluate.step is not None:
            recorded[evaluate.step] = evaluate.latest  # not yet in a bucket
        for step in unscored:
            means = {k: v for k, v in recorded.get(step, {}).items() if k.startswith(metrics.VALIDATION)}
            described = best.described(keep_best, means)
            if best.parse(keep_best).value(described) is not None:
                self._checkpoints.score(step, described)

    def _restored(self) -> Start:
        run, settings = self._run, self._run.experiment.checkpointing
        left_out = run.initial.left_out if run.initial else None
        distributed.decided_by_host_zero(
            lambda: continuation.require_fit(run.run_dir, run.meta, run.span, run.program, left_out=left_out)
        )
        if place := settings.checkpoint_mirror:
            from core.checkpoints import copying

            say = functools.partial(print, flush=True)
            self._fetch["fetch"] = copying.Fetching(run.run_dir, place, say=say).in_place_of
        self._checkpoints = Checkpoints(
            run.checkpoint_dir,
            keep=settings.keep_checkpoints,
            keep_params=settings.keep_params_checkpoints if settings.params_checkpoint_interval else None,
            timeout_seconds=settings.save_limit_seconds,
            origin=run.origin,
            keep_best=settings.keep_best,
        )
        try:
            return restore_or_init(run, self._checkpoints, **self._fetch)
        except EarlierPhaseError:
            self._checkpoints.close()
            raise

    def _rolled_back(self) -> TrainState:
        self._checkpoints.wait()  # an incomplete save would not be found
        return restore_or_init(self._run, self._checkpoints, **self._fetch).state

    def _begin(self, start: Start) -> None:
        run, settings = self._run, self._run.experiment
        self._lines = progress.Progress(run.last_step, host=run.host, unit=settings.unit)
        self._lines.start(self._first_step, evaluates=bool(settings.evaluation.eval_batches))
        prediction, slice_ = None, slices.get(settings.slice)
        if slice_.is_tpu and isinstance(run.config, Settings):
            from launch import predictions

            prediction = predictions.find(settings, run.config)
        self._predictions = PredictionCheck(
            prediction,
            slice_=slice_,
            flops=settings.flops_per_step,
            is_measured=not run.host.simulated,
            warn=self._lines.warning,
        )
        self._writers = metrics.open_writers(
            run.run_dir,
            is_host_zero=run.host.is_zero,
            first_step=self._first_step,
            wandb_project=settings.logging.wandb_project,
        )
        self._stack.callback(self._writers.close)
        self._metrics = self._own_metrics()
        self._evaluate = self._evaluation()
        if run.host.is_zero:
            measured, left_out = self._predictions.rows(), self._checkpoints.left_out
            progress.show_summary(run, resumed_from=start.step, measured=measured, left_out=left_out)
            if self._first_step < run.last_step or not (paths.resolve(run.run_dir) / "config.gin").exists():
                self._write_config()  # an evaluation alone may have other settings
            if start.step is not None and start.changes:
                said = continuation.described_changes(start.step, start.changes)
                self._lines.note(said)
                self._writers.text("changed settings", said, step=start.step)
        if place := settings.checkpointing.checkpoint_mirror:
            from core.checkpoints import copying

            saves = settings.checkpointing
            kept: dict[str, Any] = {"keep": saves.keep_checkpoints, "keep_best": saves.keep_best}
            self._stack.enter_context(copying.Copying(run.run_dir, place, **kept, say=self._lines.note))

    def _write_config(self) -> None:
        run = self._run
        paths.write_text_atomically(paths.resolve(run.run_dir) / "config.gin", run.meta["config"])
        self._writers.text("config", run.meta["config"])
        self._writers.text("sharding", report.table(run.program))
        if evaluated := progress.evaluated_on(run.experiment):
            self._writers.text(metrics.EVALUATED_ON, evaluated)
        self._writers.text("versions", "\n".join(f"- {k} {v}" for k, v in run.meta["versions"].items()))

    def _hooks(self) -> list[Hook]:
        """Returns the run's hooks. The one for non-finite losses comes before those that log and save."""
        run, settings, lines = self._run, self._run.experiment, self._lines
        preemption = hooks.StopWhenPreempted(distributed.preempted, wait=self._checkpoints.wait)
        saved = paths.resolve(run.checkpoint_dir)
        about: dict[str, Any] = {
            "warn": lines.warning,
            "writers": self._writers,
            "newest": lambda: max(steps.complete(saved), default=None),
            "wait": self._checkpoints.wait,  # an incomplete save would not be found
        }
        used = [hooks.policy_hook(settings.non_finite, **about), *self._logging()]
        if run.is_last:
            used.insert(1, hooks.NoteEnding(run.last_step))
        if run.host.is_zero:
            used.append(self._goodput())
        if (every := settings.health.replica_check_interval) and run.program.partitioner.mesh.size > 1:
            from core.training import replicas

            used.append(replicas.Compare(heartbeat.compare, every=every))
        saving = self._saving(preemption)
        if run.host.count > 1:
            together = dict(zip(("checkpoint", "checkpoint of the parameters"), reversed(saving), strict=False))
            together |= {"evaluation": self._evaluate} if self._evaluate else {}
            used.insert(0, hooks.Meet(together, timeout_seconds=run.meeting_seconds))
        evaluating = [self._evaluate] if self._evaluate else []
        if settings.checkpointing.keep_best:  # a checkpoint contains its scores
            if self._evaluate:
                self._evaluate.unless = preemption.needs_state
            used += [*saving[:-1], *evaluating, saving[-1], preemption]  # a step of parameters alone has none
        else:  # a long evaluation must not delay a save
            used += [*saving, preemption, *evaluating]
        used += self._profiles()
        if file := environment.read("RENGA_STEP_FILE"):
            used.append(hooks.NoteStep(file, name=f"host {run.host.index}", step=self._first_step))
        if self._lock:
            used.append(run_lock.HoldsLock(self._lock))
        return used

    def _goodput(self) -> goodput.Goodput:
        run = self._run
        return goodput.Goodput(
            run.run_dir,
            first_step=self._first_step,
            last_step=run.last_step if run.is_last else None,
            every=run.experiment.logging.log_interval,
            write=self._writers.scalars,
            say=self._lines.note,
            started=run.started,
            continues=self._continues,
        )

    def _logging(self) -> list[Hook]:
        run, writers, lines, predictions = self._run, self._writers, self._lines, self._predictions
        measured = goodput.HostMetrics()
        self._own_lines = own_lines = metrics.open_own_lines(run.run_dir, process_index=run.host.index)
        self._stack.callback(own_lines.close)

        def write(step: int, values: Mapping[str, float]) -> None:
            values = {**values, **predictions.metrics(values, flops=run.experiment.flops_between(step - 1, step))}
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
            if step == self._first_step + 1:
                lines.compiled(totals)
            writers.scalars(step, {f"compile/{name}": float(value) for name, value in totals._asdict().items()})

        items, every = run.experiment.items_per_step, run.experiment.logging.log_interval
        return [hooks.Compiled(compiled), hooks.Log(write, every=every, items_per_step=items, last_step=run.last_step)]

    def _own_metrics(self) -> "TaskMetrics | None":
        task, most = self._run.experiment.task, self._run.experiment.evaluation.metric_examples
        own = task.own_metrics(most) if most and can(task, DefinesMetrics) else None
        if own is None:
            return None
        from launch.runs.task_metrics import TaskMetrics

        found = TaskMetrics(self._run.program, own, stop_ids=stop_ids(task.vocabulary), num_ids=task.vocabulary.size)
        self._stack.callback(found.close)
        return found

    def _evaluation(self) -> evaluation.Evaluate | None:
        run, task = self._run, self._run.experiment.task
        if not run.experiment.evaluation.eval_batches:
            return None

        def batches() -> evaluation.FirstBatches:
            layout = run.program.partitioner.data_layout(run.experiment.batch_size)
            found: Any = task.evaluation(layout)
            return evaluation.FirstBatches(found, run.experiment.evaluation.eval_batches)

        def write(step: int, values: Mapping[str, float]) -> None:
            assert hook.scored is not None
            self._lines.validation(
                step, values, scored=hook.scored.describe("token") if can(task, EndsEvaluation) else ""
            )
            self._writers.scalars(step, values)
            self._writers.flush()

        every, last = run.experiment.evaluation.eval_interval, run.last_step
        also = {"also": self._metrics.values} if self._metrics else {}
        hook = evaluation.Evaluate(run.program, batches, write, every=every, last_step=last, **also)
        return hook

    def _saving(self, preemption: hooks.StopWhenPreempted) -> list[Hook]:
        run, lock, evaluate = self._run, self._lock, self._evaluate
        keep_best = run.experiment.checkpointing.keep_best

        def validated(step: int) -> Mapping[str, Any]:
            if not keep_best or evaluate is None or evaluate.step != step:
                return {}
            if (name := best.parse(keep_best).name) not in evaluate.latest:
                has = ", ".join(sorted(evaluate.latest))
                self._lines.warning(f"KEEP_BEST = {keep_best!r}: no {name} in the evaluation, which has {has}")
            return best.described(keep_best, evaluate.latest)

        def due(step: int) -> bool:
            last = step == run.last_step or preemption.needs_state(step)
            return step % run.experiment.checkpointing.checkpoint_interval == 0 or last

        def check() -> None:
            if lock is not None:
                lock.check(now=True)

        def before() -> None:
            for writers in (self._writers, self._own_lines):
                writers.flush(now=True)

        costs = SaveCosts(say=self._lines.note, write=self._writers.scalars)
        how: dict[str, Any] = {"due": due, "costs": costs, "check": check, "before": before, "evaluated": validated}
        save = hooks.Save(self._checkpoints, self._batches.position, run.meta, say=self._lines.note, **how)
        if not (every := run.experiment.checkpointing.params_checkpoint_interval):
            return [save]
        optimizer, abstract = run.program.optimizer, run.program.abstract_state
        meta = {**run.meta, steps.AVERAGED: optimizer.is_averaging(abstract.opt_state)}

        def evaluated(state: TrainState) -> Params:
            return optimizer.evaluated(state.params, state.opt_state)

        def due_alone(step: int) -> bool:
            # The whole state must not wait in a preemption; but no later start would save the last step.
            return step == run.last_step or (step % every == 0 and not preemption.needs_state(step))

        # At the same step, the parameters come first: the whole state takes longer, beside the next steps.
        return [hooks.SaveParams(self._checkpoints, evaluated, meta, due=due_alone, check=check), save]

    def _profiles(self) -> list[Hook]:
        run = self._run
        requests = profiling.Requests(run.run_dir, last_step=run.last_step)
        self._stack.callback(requests.close)
        memory = profiling.MemoryProfile(run.run_dir, at=run.experiment.logging.memory_profile_steps)
        self._stack.enter_context(memory.when_exhausted())

        def start(step: int) -> profiling.Trace:
            return profiling.Trace(run.run_dir, step)

        planned = run.experiment.logging.profile_steps
        return [profiling.Profile(start, requests, at=planned, num_steps=PROFILED_STEPS), memory]
