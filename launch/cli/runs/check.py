"""`launch/run check`: checks an experiment without a device, in seconds."""

from __future__ import annotations

import argparse

import jax

from core import slices
from launch import environment, findings
from launch.check import preflight
from launch.cli import flags

HELP = "find every mistake that shows without a device: configuration, layout, data, run directory"
EXAMPLE = "launch/run check v4-32 gin/valkyrie_7b.gin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, "SLICE", "EXPERIMENT.gin", "--gin", "--run-dir", "--smoke")
    hosts = parser.add_mutually_exclusive_group()
    flags.add(hosts, "--simulate")
    hosts.add_argument("--ship", action="store_true", help="the run will be started from this workstation")


def run(args: argparse.Namespace) -> int:
    """Prints the findings. Returns 2 if a check failed."""
    jax.config.update("jax_platforms", "cpu")
    checked = preflight.check(
        args.experiment,
        bindings=args.gin,
        slice_name=slices.get(args.slice).name,
        run_dir=args.run_dir or environment.run_directory(args.experiment, smoke=args.smoke),
        smoked=args.smoke,
        hosts="simulated" if args.simulate else "shipped to" if args.ship else "here",
    )
    print(findings.table(checked.findings))
    return 0 if checked.ok else 2
