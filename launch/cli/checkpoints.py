"""`launch/run checkpoints`: lists, verifies, compares or prunes the checkpoints of a run.

All but `prune` may be used while the run is training.
"""

import argparse
from collections.abc import Callable

import jax

from core import units
from core.checkpoints import comparing, inspection, steps
from core.errors import UserError
from core.hosts import exit_codes
from launch import flags

COMMAND = ("runs", "checkpoints")
HELP = "list, verify, compare or prune the checkpoints of a run"
EXAMPLE = """launch/run checkpoints ls     runs/quickstart-v4-16
  launch/run checkpoints verify gs://BUCKET/runs/first --step 1000
  launch/run checkpoints diff   runs/first@1000 runs/second
  launch/run checkpoints prune  runs/first --keep 2 --dry-run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ls|verify|diff|prune")

    def add(run: Callable[[argparse.Namespace], int], description: str) -> argparse.ArgumentParser:
        own = actions.add_parser(run.__name__.strip("_"), description=description, allow_abbrev=False)
        own.set_defaults(action=run)
        return own

    own = add(_ls, "List steps with time, size, revision and configuration, and folders set aside; reads metadata only")
    flags.add(own, "RUN")
    own = add(_verify, "Read every array and stream and compare them with what was saved. Exit code 1: damaged.")
    flags.add(own, "RUN")
    own.add_argument("--step", metavar="N", type=flags.at_least(0), help="verify only this step (default: all)")
    own = add(_diff, "Compare configuration, versions, tree, shapes and array values. Exit code 1: different.")
    own.add_argument("first", metavar="RUN_A[@STEP]", help="without @STEP: the latest step")
    own.add_argument("second", metavar="RUN_B[@STEP]")
    own.add_argument("--no-values", action="store_true", help="do not read arrays to measure how they differ")
    own = add(_prune, "Remove all but the latest steps and the newest intact one. Not for a run that is training.")
    flags.add(own, "RUN")
    own.add_argument("--keep", metavar="N", type=flags.at_least(1), required=True, help="number of steps to keep")
    own.add_argument("--set-aside", action="store_true", help="also remove folders set aside: damaged-*, incomplete-*")
    own.add_argument("--dry-run", action="store_true", help="only print what would be removed")


def run(args: argparse.Namespace) -> int:
    """Runs a subcommand; returns 1 if `verify` finds damage or `diff` a difference."""
    jax.config.update("jax_platforms", "cpu")  # the chips belong to the run
    return args.action(args)


def _ls(args: argparse.Namespace) -> int:
    for folder in steps.folders_of(args.run_dir):
        rows, chosen = inspection.table(folder), steps.find_best(folder)
        if chosen:
            rows = [
                (*row[:-1], f"{row[-1]}, best: {chosen.value}") if row[0] == str(chosen.step) else row for row in rows
            ]
        print(f"{folder}: {units.counted(len(rows), 'folder')}")
        if rows:
            table = [inspection.HEADER, *rows]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            print("\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table))
    return exit_codes.DONE


def _verify(args: argparse.Namespace) -> int:
    if args.step is not None:
        places = [folder / str(args.step) for folder in steps.folders_of(args.run_dir)]
        folders = [place for place in places if steps.is_complete(place)]
        folders = folders or [steps.find(f"{args.run_dir}@{args.step}")]  # raises UserError
    else:
        by_folder = {folder: steps.complete(folder) for folder in steps.folders_of(args.run_dir)}
        folders = [folder / str(step) for folder, found in by_folder.items() for step in reversed(found)]
    if not folders:
        raise UserError(
            f"there is no complete checkpoint in {steps.folder_of(args.run_dir)}: expected the folder of a run that "
            "has saved one"
        )
    damaged = False
    for folder in folders:
        result = inspection.verify(folder)
        if result.damaged and not steps.is_complete(folder):
            print(f"step {folder.name}: removed meanwhile", flush=True)
            continue
        damaged |= bool(result.damaged)
        print(result.describe(), flush=True)
    return exit_codes.FAILED if damaged else exit_codes.DONE


def _diff(args: argparse.Namespace) -> int:
    first, second = steps.find(args.first), steps.find(args.second)
    print(f"- {first}\n+ {second}")
    lines = list(comparing.compare(first, second, values=not args.no_values))
    print("\n".join(lines) or "no difference: configuration, versions and every array are equal")
    return exit_codes.FAILED if lines else exit_codes.DONE


def _prune(args: argparse.Namespace) -> int:
    folder = steps.folder_of(args.run_dir)
    kept, removed = inspection.plan_pruning(
        folder, keep=args.keep, set_aside=args.set_aside, say=lambda line: print(line, flush=True)
    )
    print(f"keeps {', '.join(map(str, kept)) or 'nothing'}")
    for path in removed:
        print(f"{'would remove' if args.dry_run else 'removes'} {path}", flush=True)
        if not args.dry_run:
            steps.remove(path)
    return exit_codes.DONE
