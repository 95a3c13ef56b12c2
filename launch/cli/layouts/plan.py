"""`launch/run plan`: finds the fastest layout of an experiment on a slice by compiling candidates for it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from core.errors import UserError
from launch.cli import flags

HELP = "find the fastest layout of an experiment that fits a slice, by compiling for it; --explain says what limits one"
EXAMPLE = """launch/run plan v4-32 gin/valkyrie_7b.gin --quick --price 3.22
  launch/run plan v4-32 gin/valkyrie_7b.gin --batch 32 64 --write mine.gin --html plan.html
  launch/run plan v5p-128 gin/valkyrie_7b.gin --arithmetic
  launch/run plan v4-32 gin/valkyrie_7b.gin --explain gin/strategies/hsdp.gin"""

_PLAN_ONLY = ("batch", "only", "price", "rejected", "wide", "write", "overwrite", "html", "json", "record", "fresh")
_ENDINGS = {"write": "gin", "html": "html", "json": "json", "record": "json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    flags.add(parser, "SLICE", "EXPERIMENT.gin", "--gin")
    parser.add_argument("--batch", metavar="ROWS", type=int, nargs="+", default=[], help="batch sizes to try")
    parser.add_argument("--only", metavar="STRATEGY", nargs="+", default=[], help="try only these strategies")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--compile", metavar="N", type=flags.at_least(1), help="compile until N fit (default 16)")
    how.add_argument("--quick", action="store_true", help="compile until 10 fit")
    how.add_argument("--arithmetic", action="store_true", help="compile nothing: rough estimates in seconds")
    how.add_argument("--cached", action="store_true", help="compile nothing: show only what was compiled before")
    how.add_argument("--explain", metavar="CHOICE", help="analyse one layout: a gin file or bindings of STRATEGY")
    parser.add_argument("--price", metavar="USD", help="price of a chip-hour in US dollars")
    parser.add_argument("--rejected", action="store_true", help="print every rejected candidate with its reason")
    parser.add_argument("--wide", action="store_true", help="print all columns of the table")
    parser.add_argument("--write", metavar="FILE", help="write the winner as a gin file to include")
    parser.add_argument("--overwrite", action="store_true", help="--write, --html and --json may replace a file")
    parser.add_argument("--html", metavar="FILE", help="write an HTML page with the table and charts")
    parser.add_argument("--json", metavar="FILE", help="write all figures of the table to FILE")
    parser.add_argument(
        "--record", metavar="FILE", help="write the records of what was compiled to FILE, to be committed"
    )
    parser.add_argument("--fresh", action="store_true", help="compile again what was compiled before")


def run(args: argparse.Namespace) -> int:
    """Plans, or explains one layout."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    _check(args)
    if args.explain is not None:
        from launch.plan import explain
        from parallel.hlo import messages

        os.environ.update(messages.AUDIBLE_WARNINGS)

        return explain.explain(args.experiment, args.explain, slice_name=args.slice, bindings=args.gin)
    from launch.plan import session

    return session.run(args)


def _check(args: argparse.Namespace) -> None:
    """Refuses wrong arguments that a plan would otherwise meet only at its end."""
    if args.explain is not None:
        idle = [f"--{name}" for name in _PLAN_ONLY if getattr(args, name) not in (None, False, [])]
        if idle:
            raise UserError(
                f"{', '.join(idle)}: only for a plan; --explain analyses one layout and takes no option but --gin"
            )
    if args.arithmetic and args.record:
        raise UserError("--record keeps what was compiled, and --arithmetic compiles nothing: give one of them")
    if args.cached and args.fresh:
        raise UserError("--fresh compiles everything again, and --cached compiles nothing: give one of them")
    if args.price is not None:
        args.price = _price(args.price)
    for flag in _ENDINGS:
        if (path := getattr(args, flag)) is not None:
            _check_file(flag, Path(path), may_exist=flag == "record" or args.overwrite)


def _check_file(flag: str, path: Path, *, may_exist: bool) -> None:
    from core import paths

    if not (parent := path.absolute().parent).is_dir():
        raise UserError(f"--{flag} {path}: there is no folder {parent}; create it first")
    if path.is_dir():
        raise UserError(f"--{flag} {path}: this is a folder; name a file, such as {path / f'plan.{_ENDINGS[flag]}'}")
    if path.exists() and not may_exist:
        raise UserError(f"--{flag} {path}: the file exists; name another, or add --overwrite")
    paths.check_writable(parent)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise UserError(f"--price {text}: expected US dollars per chip-hour, such as 3.22")
    return price
