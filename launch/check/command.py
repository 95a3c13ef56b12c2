"""`launch/run check`: checks whether a run can start, at one of four levels; prints findings and READY or NOT READY.

    config  what needs no device: configuration, layout, data, memory, run directory, checkpoint
    hosts   config; then on every host: versions, variables, chips, clocks, data, and collectives of the mesh
    smoke   a small run: the same slice, mesh and strategy, smallest sizes, 20 steps with a save and a restore
    slice   hosts; then the attention kernel, a smoke run of each strategy in gin/strategies, and the speed of 30 steps;
            on simulated hosts, only two strategies and 2 steps

`launch/pod.sh … --check LEVEL` does the same in the place where the run would start.
"""

import argparse
import os
from collections.abc import Callable

import jax

from core import slices
from core.errors import UserError
from core.files import paths
from core.hosts import exit_codes
from core.training import supervise
from launch import environment, findings, flags
from launch.check import hosts, preflight, short_runs
from launch.findings import Finding
from launch.hosts import tpu_host

COMMAND = ("runs", "check")
HELP = "check whether a run can start, without a device or on all hosts: READY, or NOT READY with the fixes"
EXAMPLE = """launch/run check v4-16 gin/quickstart.gin
  launch/run check v4-16 gin/quickstart.gin --level hosts --simulate
  launch/run check v4-16 gin/quickstart.gin --level slice         (on every host of the slice)"""

Result = tuple[list[Finding], bool]  # the findings, and whether this process prints them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `check`."""
    flags.add(parser, "SLICE", "EXPERIMENT.gin", "--level", "--gin", "--run-dir", "--json", "--overwrite")
    where = parser.add_mutually_exclusive_group()
    flags.add(where, "--simulate")
    where.add_argument("--ship", action="store_true", help="config: the run will be started from this workstation")
    # For processes that this command starts: the checks of one host, and the layout of a smoke run.
    parser.add_argument("--part", choices=_PARTS, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Makes the checks, prints their findings and returns the exit code.

    Raises UserError if --ship is given for another level than `config`.
    """
    slice_ = slices.get(args.slice)
    if args.ship and args.level != "config":
        raise UserError(
            f"--ship is for --level config. From a workstation: launch/pod.sh {args.slice} {args.experiment} "
            f"--tpu NAME --zone ZONE --check {args.level}"
        )
    if args.level != "smoke":  # the smoke run chooses its directory itself
        level = "smoke" if args.part == "small" else args.level
        directory = args.run_dir or environment.run_directory(args.experiment, slice_.name, level=level)
        args.run_dir = os.fspath(paths.resolve(directory))
    if args.level in ("hosts", "slice") and slice_.is_tpu and not args.simulate:
        tpu_host.require_here(slice_)
    found, is_shown = (_PARTS.get(args.part) or _LEVELS[args.level])(args, slice_)
    if is_shown:
        if args.part != "host":  # the process that started this one prints them together with others
            print(findings.table(found), flush=True)
        if args.json:
            paths.write_text_atomically(args.json, findings.to_json(found) + "\n")
    return exit_codes.DONE if findings.is_ready(found) or args.part == "host" else exit_codes.USER_ERROR


def _config(args: argparse.Namespace, slice_: slices.Slice) -> Result:
    jax.config.update("jax_platforms", "cpu")
    checked = preflight.check(
        args.experiment,
        bindings=args.gin,
        slice_name=slice_.name,
        run_dir=args.run_dir,
        smoked=args.part == "small",
        hosts="simulated" if args.simulate else "shipped to" if args.ship else "here",
    )
    return list(checked.findings), True


def _hosts(args: argparse.Namespace, slice_: slices.Slice) -> Result:
    if args.simulate:
        return hosts.on_simulated_hosts(args, slice_), True
    found = hosts.without_devices(args)
    if hosts.is_unreadable(found):
        return found, True
    more, is_shown = hosts.on_this_host(args, slice_)
    return [*found, *more], is_shown


def _smoke(args: argparse.Namespace, slice_: slices.Slice) -> Result:
    words = [*flags.passed_on(args, "--gin", "--run-dir", "--simulate"), "--check", "smoke"]
    with supervise.stop_requests() as requested:
        command = [*environment.COMMAND, "pod", slice_.name, args.experiment, *words]
        code = supervise.run_child(command, requested)
    return [Finding("smoke run", code == 0, f"exit code {code}: {exit_codes.ending(code).meaning}")], True


_LEVELS: dict[str, Callable[[argparse.Namespace, slices.Slice], Result]] = {
    "config": _config,
    "hosts": _hosts,
    "smoke": _smoke,
    "slice": short_runs.check,
}
_PARTS: dict[str, Callable[[argparse.Namespace, slices.Slice], Result]] = {
    "host": hosts.on_this_host,
    "small": _config,
    "attention": short_runs.attention,
}
