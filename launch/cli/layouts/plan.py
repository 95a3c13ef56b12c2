"""`launch/run plan`: finds the fastest layout of an experiment on a slice by compiling candidates for it."""

from __future__ import annotations

import argparse

from core.errors import UserError
from launch.cli import flags
from launch.plan import explain, session

HELP = "find the fastest layout of an experiment that fits a slice, by compiling for it; --explain says what limits one"
EXAMPLE = """launch/run plan v4-32 gin/valkyrie_7b.gin --quick --price 3.22
  launch/run plan v4-32 gin/valkyrie_7b.gin --batch 32 64 --write mine.gin --html plan.html
  launch/run plan v5p-128 gin/valkyrie_7b.gin --arithmetic
  launch/run plan v4-32 gin/valkyrie_7b.gin --explain gin/strategies/hsdp.gin"""

_PLAN_ONLY = ("batch", "only", "price", "rejected", "wide", "write", "overwrite", "html", "json", "record", "fresh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, "SLICE", "EXPERIMENT.gin", "--gin")
    parser.add_argument("--batch", metavar="ROWS", type=int, nargs="+", default=[], help="batch sizes to try")
    parser.add_argument("--only", metavar="STRATEGY", nargs="+", default=[], help="try only these strategies")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--compile", metavar="N", type=flags.at_least(1), help="compile until N fit (default 16)")
    how.add_argument("--quick", action="store_true", help="compile until 10 fit")
    how.add_argument("--arithmetic", action="store_true", help="compile nothing: rough estimates in seconds")
    how.add_argument("--cached", action="store_true", help="compile nothing: show only what was compiled before")
    how.add_argument("--explain", metavar="CHOICE", help="analyse one layout: a gin file or bindings of STRATEGY")
    parser.add_argument("--price", metavar="USD", type=flags.positive, help="price of a chip-hour in US dollars")
    parser.add_argument("--rejected", action="store_true", help="print every rejected candidate with its reason")
    parser.add_argument("--wide", action="store_true", help="print all columns of the table")
    parser.add_argument("--overwrite", action="store_true", help="--write, --html and --json may replace a file")
    for name, what in {
        "--write": "write the winner as a gin file to include",
        "--html": "write an HTML page with the table and charts",
        "--json": "write all figures of the table to FILE",
        "--record": "write the records of what was compiled to FILE, to be committed",
    }.items():
        parser.add_argument(name, metavar="FILE", type=flags.output_file, help=what)
    parser.add_argument("--fresh", action="store_true", help="compile again what was compiled before")


def run(args: argparse.Namespace) -> int:
    """Plans, or explains one layout."""
    if args.explain is not None:
        if idle := [f"--{name}" for name in _PLAN_ONLY if getattr(args, name) not in (None, False, [])]:
            raise UserError(f"{', '.join(idle)}: only for a plan; --explain takes no option but --gin")
        return explain.explain(args.experiment, args.explain, slice_name=args.slice, bindings=args.gin)
    if args.arithmetic and args.record:
        raise UserError("--record keeps what was compiled, and --arithmetic compiles nothing: give one of them")
    if args.cached and args.fresh:
        raise UserError("--fresh compiles everything again, and --cached compiles nothing: give one of them")
    for path in (args.write, args.html, args.json):
        if path and path.exists() and not args.overwrite:
            raise UserError(f"{path}: the file exists; name another, or add --overwrite")
    return session.run(args)
