"""`launch/run train`: this host's process of a run. `launch/pod.sh` starts one on every host."""

import argparse
import contextlib
import sys

from core import distributed, metrics, published_files, slices, versions
from core.health import exit_codes
from core.training.hooks import PreemptedError
from core.training.run_lock import LockLostError, RunLock
from launch import environment, flags
from launch.config import loader
from launch.hosts import cluster, tpu_host
from launch.runs import prepared_run, training
from launch.runs.progress import Waiting

HELP = "train on the devices of this host and its peers (launch/pod.sh starts it on every host)"
EXAMPLE = "launch/run train gin/quickstart.gin --slice v4-8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    flags.add(parser, "EXPERIMENT.gin", "--slice", "--gin", "--run-dir", "--steps", "--smoke")


def run(args: argparse.Namespace) -> int:
    """Joins the other hosts and trains; if the run fails, notes the cause for the process that started it."""
    noting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if environment.read("RENGA_NOTES"):
        from launch.hosts import alerts

        noting = alerts.noting(tpu_host.own_index(slices.get(args.slice) if args.slice else None))
    with noting:
        try:
            with contextlib.ExitStack() as stack:
                return _train(args, stack)
        except LockLostError as lost:
            print(f"error: {lost}", file=sys.stderr, flush=True)
            return exit_codes.RUN_DIRECTORY_LOST


def _train(args: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    """Loads the configuration, joins the hosts, prepares the run and trains, in this order."""
    run_dir = args.run_dir or environment.run_directory(args.experiment, smoke=args.smoke)
    published_files.use_copies(run_dir)
    config = loader.load(args.experiment, bindings=args.gin, slice_name=args.slice)
    experiment = config.build()
    if args.smoke:
        from launch.runs import smoke

        experiment = smoke.shrink(experiment)
    metrics.require_wandb(experiment.wandb_project)
    revision = versions.git_revision()
    last_step = min(args.steps or experiment.total_steps, experiment.total_steps)
    held: list[RunLock] = []

    def lock(joined: distributed.Cluster) -> None:
        if joined.process_index == 0 and not args.smoke:  # a smoke run has a folder of its own
            taken = RunLock.acquire(run_dir, say=lambda text: print(f"note: {text}", flush=True))
            stack.callback(taken.release)
            stack.enter_context(taken.explaining())
            held.append(taken)

    host = cluster.join(
        slices.get(experiment.slice),
        description=prepared_run.run_signature(config.text, revision, run_dir=run_dir, last_step=last_step),
        limits=experiment.limits,
        before_devices=lock,
    )
    cluster.warn_at_start(host)
    if host.is_zero:
        for note in config.notes:
            print(f"note: {note}")
        stack.enter_context(Waiting())
    run = prepared_run.prepare_run(
        experiment,
        config_text=config.text,
        revision=revision,
        run_dir=smoke.attempt(run_dir) if args.smoke else run_dir,
        last_step=last_step,
        host=host,
    )
    try:
        smoke.rehearse(run) if args.smoke else training.train(run, lock=next(iter(held), None))
    except PreemptedError as stop:
        print(f"{host.name}: {stop}", flush=True)
        return exit_codes.PREEMPTED
    return exit_codes.DONE
