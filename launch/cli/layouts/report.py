"""`launch/run report`: prints the memory of a layout per chip; with --compile, also cycles and traffic."""

from __future__ import annotations

import argparse
import json
from typing import Any

from core import slices
from core.errors import UserError
from launch import array_table, configuration
from launch.cli import flags
from launch.plan import compiled_report
from parallel import analysis, compiled

HELP = "print the layout of every array and its bytes per chip; --compile asks the real TPU compiler"
EXAMPLE = """launch/run report v4-32 gin/valkyrie_7b.gin --compile --json report.json
  launch/run report v4-32 gin/valkyrie_7b.gin --strategies
  launch/run report v4-32 gin/valkyrie_7b.gin --strategies gin/strategies/fsdp.gin mine.gin"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, "SLICE", "EXPERIMENT.gin", "--gin")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the step for the slice (7B: about a minute): memory, estimated cycles, traffic, lints",
    )
    parser.add_argument(
        "--strategies",
        nargs="*",
        metavar="CHOICE",
        help="instead, compile under several strategies in turn and print one table: gin files, or bindings of "
        "STRATEGY separated by ;, or nothing for all of gin/strategies",
    )
    flags.add(parser, "--json", help="write the compiler's figures to FILE; implies --compile")


def run(args: argparse.Namespace) -> int:
    """Prints the tables."""
    if args.compile and args.strategies is not None:
        raise UserError("--compile reports one program, --strategies compares several: give only one of them")
    written = _one_program(args) if args.strategies is None else _every_strategy(args)
    if args.json:
        args.json.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    return 0


def _one_program(args: argparse.Namespace) -> Any:
    config = configuration.load(args.experiment, bindings=args.gin, slice_name=args.slice)
    for note in config.notes:
        print(f"note: {note}")
    experiment = config.build()
    program = experiment.bind(compiled.devices_of(slices.get(experiment.slice)))
    array_table.show(program)
    if not (args.compile or args.json):
        return None
    found = analysis.analyze(program)
    compiled_report.show(found)
    return analysis.as_json(program, found)


def _every_strategy(args: argparse.Namespace) -> Any:
    choices = args.strategies or compiled_report.strategy_files()
    for choice in choices:
        compiled_report.bindings_of(choice)  # refuses a missing file before anything is compiled
    found = []
    where = {"bindings": args.gin, "slice_name": args.slice}
    for row in compiled_report.compile_strategies(args.experiment, choices, **where):
        found.append(row)
        print(f"{len(found)} of {len(choices)}: {' | '.join(row.cells())}", flush=True)
    compiled_report.show_strategies(found, slice_name=args.slice)
    return [row.as_json() for row in found]
