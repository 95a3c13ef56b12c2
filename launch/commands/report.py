"""`launch/run report`: what a layout costs a chip, array by array, and, if asked, what the compiler says."""

from __future__ import annotations

import argparse
import os

from rich.console import Console
from rich.table import Table

HELP = "print where every array lives and what it costs a chip; --compile asks the real TPU compiler"
EXAMPLE = "launch/run report v4-32 gin/valkyrie_7b.gin --compile"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what a report takes."""
    parser.add_argument("slice", metavar="SLICE")
    parser.add_argument("experiment", metavar="EXPERIMENT.gin")
    parser.add_argument(
        "--gin", metavar="BINDING", action="append", default=[], help="overrides one binding; repeatable"
    )
    parser.add_argument("--compile", action="store_true", help="compile the step for the slice (7B: about a minute)")


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from core import slices
    from launch import gin_config
    from parallel import compiled

    experiment = gin_config.load(args.experiment, bindings=args.gin, slice_name=args.slice).build()
    slice_ = slices.get(experiment.slice)
    program = experiment.bind(compiled.devices_of(slice_))
    _print_arrays(program)
    if args.compile:
        _print_compiled(compiled.compile_for_slice(program))
    return 0


def _print_arrays(program) -> None:
    from parallel import report

    table = Table("array", "shape", "logical axes", "mesh axes", "MiB per chip", box=None)
    for row in report.rows(program):
        if row.path.startswith("params/"):
            shape = "x".join(map(str, row.shape))
            table.add_row(row.path, shape, str(row.axes), row.spec, f"{row.bytes_per_chip / 2**20:,.2f}")
    Console(width=140).print(table)
    sizes = report.totals(program)
    print(
        f"per chip: parameters {_mib(sizes.params)}, optimizer state {_mib(sizes.opt_state)}, "
        f"carry {_mib(sizes.carry)}; all of it unsplit: {_mib(sizes.whole)}"
    )
    whole = [row.path for row in report.rows(program) if row.replicated and row.bytes_per_chip >= 2**20]
    print(f"held whole by every chip, 1 MiB or more: {', '.join(whole) or 'nothing'}")


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _print_compiled(result) -> None:
    from parallel.compiled import gib

    print(
        f"compiled for {result.slice.name} (not run): peak {gib(result.peak_bytes)} of "
        f"{gib(result.slice.chip.usable_hbm_bytes)} per chip, of which state and batch {gib(result.argument_bytes)}; "
        f"{result.compile_seconds:.0f} s to compile"
    )
