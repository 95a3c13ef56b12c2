"""`launch/run make-dataset KIND`: writes the files of a dataset.

A module that makes kinds has `DATASETS` (their names, on one line), `EXAMPLE`, `add_arguments(kind, parser)` and
`run(kind, given, out)`. `given` maps the arguments on the command line, by destination, to their values.
"""

import argparse
import importlib
import types
from collections.abc import Mapping

from launch import environment

COMMAND = ("runs", "make-dataset")
HELP = "build a dataset: puzzles (sudoku, maze, arc), or questions about images of another dataset"
_KINDS: Mapping[str, types.ModuleType] = {
    kind: importlib.import_module(module)
    for module, kinds in environment.declared("DATASETS").items()
    for kind in kinds
}
EXAMPLE = "\n  ".join(dict.fromkeys(module.EXAMPLE for module in _KINDS.values()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="built", required=True, metavar="|".join(_KINDS))
    for name, module in _KINDS.items():
        own = kinds.add_parser(name, argument_default=argparse.SUPPRESS, allow_abbrev=False)
        module.add_arguments(name, own)
        own.add_argument("--out", metavar="DIR", required=True, help="local or gs://; appears when it is complete")


def run(args: argparse.Namespace) -> int:
    """Builds the dataset, and prints a summary."""
    given = {name: value for name, value in vars(args).items() if name not in ("built", "out")}
    return _KINDS[args.built].run(args.built, given, args.out)
