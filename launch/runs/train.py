"""`launch/run train`: runs this host's process of a run. `launch/pod.sh` starts one on every host."""

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Sequence

import jax

from core import slices, versions
from core.checkpoints import published_files, steps
from core.errors import UnreachableError, UserError
from core.files import paths
from core.hosts import activity, distributed, exit_codes, interrupt
from core.training import metrics
from core.training.hooks import PreemptedError
from core.training.run_lock import LockLostError, RunLock
from launch import environment, flags
from launch.config import loader
from launch.experiment import Experiment, Span
from launch.hosts import cluster, tpu_host
from launch.runs import continuation, prepared_run
from launch.runs.progress import Waiting
from launch.session import EarlierPhaseError, Session

COMMAND = ("runs", "train")
HELP = "train on the devices of this host and its peers (launch/pod.sh starts it on every host)"
EXAMPLE = "launch/run train gin/quickstart.gin --slice v4-8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `train`."""
    flags.add(parser, "EXPERIMENT.gin", "--slice", "--gin", "--run-dir", "--steps", "--tune")
    parser.add_argument("--check", choices=("smoke",), help="a small run: this host's part of pod.sh --check smoke")


def run(args: argparse.Namespace) -> int:
    """Joins the other hosts and trains; returns the exit code.

    Raises UserError if --check and --steps are both given.
    """
    if args.check and args.steps:
        raise UserError("--check and --steps exclude each other: a smoke run has 20 steps")
    noting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if environment.read("RENGA_NOTES"):
        from launch.hosts import alerts

        noting = alerts.noting(tpu_host.own_index(slices.get(args.slice) if args.slice else None))
    save = None if args.check or args.tune else distributed.interrupt  # these runs cannot be resumed
    with noting, interrupt.Interrupts(save, end=distributed.exit_at_once, name=_host_name):
        try:
            with contextlib.ExitStack() as stack:
                return _train(args, stack)
        except LockLostError as lost:
            print(f"error: {lost}", file=sys.stderr, flush=True)
            return exit_codes.RUN_DIRECTORY_LOST


def _train(args: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    config = loader.load(args.experiment, bindings=args.gin, slice_name=args.slice)
    run_dir = args.run_dir or environment.run_directory(args.experiment, config.slice, level=args.check)
    published_files.use_copies(run_dir)
    experiment = config.build()
    experiment.require_trainable()
    spans = experiment.spans()
    if args.tune:
        run_dir = _tuning_directory(args, run_dir, experiment)
    if args.check:
        from launch.runs import smoke

        spans = smoke.shrink_phases(experiment)
    environment.require_named(args.run_dir, slices.get(experiment.slice))
    metrics.require_wandb(experiment.logging.wandb_project, run_dir=run_dir)
    revision = versions.git_revision()
    last_step = min(args.steps or spans[-1].last_step, spans[-1].last_step)
    held: list[RunLock] = []

    def lock(joined: distributed.Cluster) -> None:
        if joined.process_index == 0 and not (args.check or args.tune):  # these runs write to folders of their own
            metrics.require_wandb_login(experiment.logging.wandb_project)
            taken = RunLock.acquire(run_dir, say=lambda text: print(f"note: {text}", flush=True))
            stack.callback(taken.release)
            stack.enter_context(taken.explaining())
            held.append(taken)

    host = cluster.join(
        slices.get(experiment.slice),
        description=prepared_run.run_signature(config.text, revision, run_dir=run_dir, last_step=last_step),
        limits=cluster.limits(experiment.health),
        before_devices=lock,
    )
    cluster.announce(host)
    cluster.warn_at_start(host, slices.get(experiment.slice))
    if host.is_zero:
        print("".join(f"note: {note}\n" for note in config.notes), end="", flush=True)
        stack.enter_context(Waiting())
    if not (args.check or args.tune):
        _fetch_copy(experiment, run_dir, host)
        if continuation.has_ended(run_dir, config, spans, steps=args.steps):
            return exit_codes.DONE
        distributed.decided_by_host_zero(lambda: continuation.require_not_moved(run_dir, args.experiment, config.slice))
    given = {"config": config, "revision": revision, "last_step": last_step, "host": host}
    prepare: Callable[..., prepared_run.Run] = functools.partial(prepared_run.prepare_run, **given)
    try:
        if args.tune:
            from launch.runs import tuning

            tuning.tune(prepare(spans[0], run_dir=run_dir), config)
        elif args.check:
            smoke.rehearse_phases(spans, prepare, run_dir)
        else:
            prepare = functools.partial(prepare, run_dir=run_dir)
            run_phases(spans, prepare, run_dir, last_step=last_step, lock=next(iter(held), None))
    except PreemptedError as stop:
        said = "ended before it was done; the same command begins anew" if args.check or args.tune else str(stop)
        print("\n".join([f"{host.name}: {said}", *getattr(stop, "__notes__", ())]), flush=True)
        return stop.exit_code
    return exit_codes.DONE


def _host_name() -> str:
    count = distributed.process_count()
    return f"host {distributed.process_index()} of {count}" if count > 1 else ""


def _tuning_directory(args: argparse.Namespace, run_dir: str, experiment: Experiment) -> str:
    from launch.runs import tuning

    others = [f"--{name}" for name in ("check", "steps") if getattr(args, name)]
    tuning.refuse(generation=slices.get(experiment.slice).generation, others=others)
    return f"{run_dir}/{tuning.FOLDER}"


def _fetch_copy(experiment: Experiment, run_dir: str, host: cluster.Host) -> None:
    saves = experiment.checkpointing
    if not (place := saves.checkpoint_mirror):
        return
    from core.checkpoints import copying

    copying.require_place(run_dir, place, hosts=host.count)
    fetching = copying.Fetching(run_dir, place, say=functools.partial(print, flush=True))
    fetched = [fetching.newest()]
    fetched += [fetching.best(saves.keep_best)] if saves.keep_best else []
    for step in filter(None, fetched):
        print(f"checkpoint {step} was copied back from {place}", flush=True)
    if any(fetched):
        published_files.look_again()  # files of published models came with the checkpoint


def run_phases(
    spans: Sequence[Span],
    prepare: Callable[[Span], prepared_run.Run],
    run_dir: str,
    *,
    last_step: int,
    lock: RunLock | None,
) -> dict[str, float]:
    """Trains the remaining phases up to a step; returns the last validation means, {} if there are none.

    Args:
      last_step: the step at which to stop.
      lock: the lock of the run directory; None on hosts without it.

    Raises:
      UserError: a phase divides rows that its model's loss couples.
      PreemptedError: the run was preempted or interrupted, and has saved a checkpoint.
    """

    def ready(span: Span) -> prepared_run.Run:
        found = prepare(span)
        _require_divisible_rows(found.experiment)
        return found

    _require_later_phases(spans, run_dir, last_step)
    validation: dict[str, float] = {}
    continues = False
    with contextlib.suppress(EarlierPhaseError):
        if ended := _unevaluated(spans, run_dir):
            validation = Session(ready(ended), lock=lock).run()
            continues = True
            if last_step <= ended.last_step:
                return validation
    while (span := _next(spans, run_dir, last_step)).first_step < last_step:
        with contextlib.suppress(EarlierPhaseError):  # trains the previous phase again
            validation = Session(ready(span), lock=lock, continues=continues).run()
            continues = True
            if last_step <= span.last_step:
                return validation
    print(f"note: step {span.first_step} is already done: train for more steps, or use another run directory")
    return validation


def _require_later_phases(spans: Sequence[Span], run_dir: str, last_step: int) -> None:
    """Raises UserError if a phase that this start will reach does not fit, or lacks data."""
    if environment.read("RENGA_SIMULATE") or len(spans) == 1:
        return  # the process that started the hosts has checked this
    activity.at(activity.OPENING)
    first = _next(spans, run_dir, last_step)
    for span in spans:
        if span.number <= first.number or span.first_step >= last_step:
            continue
        try:
            span.experiment.bind(jax.devices())
            look = functools.partial(_problems_of_data, span, last_step)
            problems = distributed.decided_by_host_zero(look, timeout_seconds=prepared_run.DATA_SECONDS)
        except UserError as error:
            kind = UnreachableError if isinstance(error, UnreachableError) else UserError
            raise kind(f"{span}: {error}") from error
        if problems:
            raise UserError(f"{span}: " + "\n".join(problems))


def _problems_of_data(span: Span, last_step: int) -> list[str]:
    return [*span.experiment.data_problems(prepared=False), *span.repeats(last_step)]


def _require_divisible_rows(experiment: Experiment) -> None:
    if environment.read("RENGA_SIMULATE"):
        return  # the process that started the hosts has checked this
    from launch.runs import smoke

    def tried() -> None:
        try:
            smoke.require_divisible_rows(experiment)
        except UserError:
            raise
        except Exception as error:  # of the user's model or task, which may need a TPU
            why = f"{type(error).__name__}: {error}"
            print(f"note: it could not be tried whether the loss allows a step to divide its rows ({why})", flush=True)

    distributed.decided_by_host_zero(tried)


def run_alone(
    experiment: Experiment,
    prepare: Callable[[Span], prepared_run.Run],
    run_dir: str,
    *,
    last_step: int,
    lock: RunLock,
) -> dict[str, float]:
    """Copies a later step of the mirror back, then trains as `run_phases` does, in a process that joined no others.

    Args:
      prepare: prepares a phase of the experiment.
      last_step: the step at which to stop.
      lock: the lock of the run directory.

    Raises:
      UserError: the mirror cannot hold the copies of this run.
      PreemptedError: the run was preempted or interrupted, and has saved a checkpoint.
    """
    _fetch_copy(experiment, run_dir, cluster.ALONE)
    return run_phases(experiment.spans(), prepare, run_dir, last_step=last_step, lock=lock)


def _unevaluated(spans: Sequence[Span], run_dir: str) -> Span | None:
    """Returns an earlier phase that ended before its last evaluation, or None. All hosts must call it."""

    def number() -> int:
        folder = paths.resolve(run_dir) / steps.FOLDER
        done = max(steps.complete(folder), default=0)
        ended = [span for span in spans[:-1] if span.last_step == done]
        return next((s.number for s in ended if not continuation.is_evaluated(run_dir, s.experiment, done)), 0)

    found = distributed.decided_by_host_zero(number) if len(spans) > 1 else 0
    return spans[found - 1] if found else None


def _next(spans: Sequence[Span], run_dir: str, last_step: int) -> Span:
    """Returns the phase that trains after the newest checkpoint, or that ended in it. All hosts must call it."""
    folder = paths.resolve(run_dir) / steps.FOLDER
    done = distributed.decided_by_host_zero(lambda: max(steps.complete(folder), default=0))
    return continuation.phase_of(spans, done) if done == last_step else continuation.phase_after(spans, done)
