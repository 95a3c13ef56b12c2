"""Prepares a run on this host, and checks that all hosts agree."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from core import versions
from core.checkpoints import published_files, steps
from core.checkpoints.steps import LeftOut
from core.checkpoints.warm_start import GivenParameters, Origin, ParameterSource
from core.errors import UserError
from core.files import paths
from core.hosts import activity, distributed
from core.training import compilation, prefetch
from core.training.trainer import StatisticsStep
from launch import environment
from launch.config import Settings
from launch.experiment import Experiment, Span
from launch.hosts.cluster import Host
from launch.runs import continuation
from parallel.compiled import host_memory
from parallel.partitioner import Program

if TYPE_CHECKING:
    from launch.runs.warm_start import Initial  # imported below, if needed

_A_DAY_SECONDS = 24 * 3600.0  # the limit if the watchdog only reports
INIT_FROM = "init_from"  # key in checkpoint metadata: what the run was initialized from
DATA_SECONDS = 3600.0  # limit for one host's work on data; `make-dataset` and `tokenize` may take longer


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is ready to start."""

    experiment: Experiment  # the experiment
    program: Program  # its training and evaluation steps on this slice
    host: Host  # the host of this process
    run_dir: str  # the run directory, shared by all hosts
    config: Settings | str  # its configuration, or a description if it was not built from one (`renga.Trainer`)
    meta: Mapping[str, Any]  # metadata saved with every checkpoint; equal on all hosts
    last_step: int  # the step at which to stop
    span: Span  # the phase that it trains
    is_last: bool  # whether no other phase follows
    started: float | None = None  # when this start began (`time.monotonic`); None: with the process
    initial: "Initial | None" = None  # the parameters of INIT_FROM; None: it starts from its seed, or is resumed

    @property
    def origin(self) -> Origin:
        """The reader of frozen parameters that checkpoints leave out."""

        def open_source(left_out: LeftOut) -> ParameterSource:
            from launch.runs import warm_start

            return warm_start.source_again(self.experiment, left_out)

        return Origin(open_source, self.program.param_specs)

    @property
    def checkpoint_dir(self) -> str:
        """The folder of the checkpoints."""
        return f"{self.run_dir}/checkpoints"

    @property
    def meeting_seconds(self) -> float:
        """How many seconds hosts wait for one another."""
        health = self.experiment.health
        return _A_DAY_SECONDS if health.watchdog == "report" else health.compile_limit_seconds

    @property
    def statistics_step(self) -> StatisticsStep | None:
        """The step that also computes statistics of the update; None if the run logs none."""
        interval = self.experiment.logging.statistics_interval
        return StatisticsStep(self.program.statistics_step, interval) if interval else None

    def open_batches(self, position: Mapping[str, bytes] | None) -> prefetch.Prefetch:
        """Returns an iterator of training batches on the devices; `position` None: from the beginning."""
        layout = self.program.partitioner.data_layout(self.experiment.batch_size)
        batches = self.experiment.task.train(layout, seed=self.span.seed)
        if position is not None:
            prefetch.restore(batches, position)
        interval = self.experiment.checkpointing.checkpoint_interval
        return prefetch.Prefetch(batches, to_device=self.program.put, snapshot_interval=interval)


def cache_folder(run_dir: str) -> str:
    """Returns the folder of a run's compiled programs."""
    return environment.read("JAX_COMPILATION_CACHE_DIR") or f"{run_dir}/compiled"


def run_signature(config_text: str, revision: str, *, run_dir: str, last_step: int) -> str:
    """Returns a text that describes a run; it must be equal on all hosts.

    Args:
      last_step: the step at which to stop.
    """
    installed = versions.of_training()
    about = {"git revision": revision, **installed, "run directory": run_dir, "last step": last_step}
    about |= {name: environment.read(name) or "" for name in environment.COMPILED_BY}
    return "\n".join([f"{name}: {value}" for name, value in about.items()] + [config_text])


def prepare_run(
    experiment: Experiment | Span,
    *,
    config: Settings | str,
    revision: str,
    run_dir: str,
    last_step: int,
    host: Host,
    started: float | None = None,
    given: GivenParameters | None = None,
) -> Run:
    """Prepares a run on the devices of the joined hosts. All hosts must call it.

    Args:
      experiment: the phase to prepare, or an experiment, for its first phase.
      last_step: the step at which to stop.
      started: when this start began (`time.monotonic`); None: with the process.
      given: parameters to start from instead of INIT_FROM; None: none.

    Raises:
      UserError: the hosts differ; or layout, memory, data or parameters do not fit.
      TimeoutError: another host did not prepare its data within DATA_SECONDS.
    """
    activity.at(activity.OPENING)
    span = experiment if isinstance(experiment, Span) else experiment.spans()[0]
    is_last = span.number == span.count or last_step <= span.last_step
    experiment, last_step = span.experiment, min(last_step, span.last_step)
    compilation.use_cache(cache_folder(run_dir))
    program = experiment.bind(jax.devices())
    host_memory.require(program, experiment.task, eval_batches=experiment.evaluation.eval_batches)
    initial = None
    saved = distributed.decided_by_host_zero(lambda: steps.complete(paths.resolve(run_dir) / steps.FOLDER))
    is_resumed = bool(saved)
    if (given or experiment.initialization.init_from) and not is_resumed:
        from launch.runs import warm_start

        initial = warm_start.find(experiment, program, given=given)
        if initial is not None and initial.notes and host.is_zero:
            print(f"note: {initial.notes}", flush=True)
    distributed.require_shared(run_dir, is_host_zero=host.is_zero)
    with activity.enter(activity.PREPARING):
        _prepare_data(span, run_dir, host)
    if host.is_zero and not is_resumed:
        published_files.keep_copies(run_dir)
    if problems := [*experiment.data_problems(prepared=True), *span.repeats(last_step)]:
        raise UserError("\n".join(problems))
    meta = metadata(span, config=config, revision=revision)
    if initial is not None:
        meta[INIT_FROM] = initial.source.describe()
        if (note := warm_start.vocabulary_note(initial.source, meta[continuation.ORDER])) and host.is_zero:
            print(f"note: INIT_FROM: {note}", flush=True)
    distributed.require_same("the configuration", "\n".join(f"{k}: {v}" for k, v in meta.items()))
    return Run(experiment, program, host, run_dir, config, meta, last_step, span, is_last, started, initial)


def metadata(span: Span, *, config: Settings | str, revision: str) -> dict[str, Any]:
    """Returns the metadata for a phase's checkpoints, as JSON values; its task must be prepared."""
    experiment = span.experiment
    return {
        "config": config if isinstance(config, str) else config.text,
        "git_revision": revision,
        "versions": versions.of_training(),
        "seed": experiment.seed,
        "data": experiment.task.fingerprint(),
        "data_source": experiment.task.describe(),
        continuation.ORDER: continuation.order(span),
    }


def _prepare_data(span: Span, run_dir: str, host: Host) -> None:
    if host.is_zero:
        span.experiment.task.prepare(run_dir, is_host_zero=True)
    else:
        limit = f"{DATA_SECONDS / 60:g} minutes"
        print(f"{host.name}: waits for host 0 to build or read the data, {limit} at most", flush=True)
    distributed.barrier(f"data/{span}/prepared by host 0", timeout_seconds=DATA_SECONDS)
    if not host.is_zero:
        span.experiment.task.prepare(run_dir, is_host_zero=False)
    distributed.barrier(f"data/{span}/prepared by all", timeout_seconds=DATA_SECONDS)
