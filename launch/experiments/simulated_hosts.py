"""Runs `launch/run evaluate` on every simulated host of a slice."""

import argparse
import os
from pathlib import Path

from core import slices
from core.checkpoints import published_files, steps
from core.errors import UserError
from core.files import paths
from launch import environment, flags
from launch.hosts import simulate

_PASSED_ON = (
    "--gin",
    "--step",
    "--all-steps",
    "--num-examples",
    "--by-position",
    "--submission",
    "--overwrite",
    "--task",
    "--module",
    "--json",
)


def evaluate(args: argparse.Namespace, slice_: slices.Slice) -> int:
    """Runs `launch/run evaluate` on the simulated hosts; returns the exit code."""
    is_published = published_files.is_published(args.run_dir)
    if not is_published and not steps.has_folder(args.run_dir):
        raise UserError(published_files.unknown(args.run_dir))
    run_dir = args.run_dir if is_published else os.fspath(paths.resolve(args.run_dir))
    command = [*environment.COMMAND, "evaluate", run_dir, "--slice", slice_.name]
    command += flags.passed_on(args, *_PASSED_ON)
    folder = Path(run_dir if is_published else steps.split(run_dir)[0])
    logs = (Path("runs", folder.name) if is_published or paths.is_remote(run_dir) else folder) / "logs"
    simulate.announce(slice_, logs)
    return simulate.run(slice_, command=command, log_directory=logs)
