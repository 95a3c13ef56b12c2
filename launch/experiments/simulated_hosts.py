"""Runs `launch/run evaluate` on every simulated host of a slice."""

import argparse
import os
from pathlib import Path

from core import slices
from core.checkpoints import published_files
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
    run_dir = args.run_dir if is_published else os.fspath(paths.resolve(args.run_dir))
    command = [*environment.COMMAND, "evaluate", run_dir, "--slice", slice_.name]
    command += flags.passed_on(args, *_PASSED_ON)
    folder = Path(run_dir)
    logs = (Path("runs", folder.name) if is_published or paths.is_remote(run_dir) else folder) / "logs"
    simulate.announce(slice_, logs)
    return simulate.run(slice_, command=command, log_directory=logs)
