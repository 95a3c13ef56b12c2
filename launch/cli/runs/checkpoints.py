"""`launch/run checkpoints ls|verify|diff|prune`: inspects the checkpoints of a run from any machine that can read them.

Runs in one process, without an accelerator or the model, and may run while the job that writes them is training.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from core import units
from core.errors import UserError
from core.health import exit_codes
from launch.cli import flags

if TYPE_CHECKING:
    from core import paths

HELP = "list, verify, compare or prune the checkpoints of a run"
EXAMPLE = """launch/run checkpoints ls     runs/gin/quickstart
  launch/run checkpoints verify gs://BUCKET/runs/first --step 1000
  launch/run checkpoints diff   runs/first@1000 runs/second
  launch/run checkpoints prune  runs/first --keep 2 --dry-run"""

FOLDER = "checkpoints"
_DESCRIPTIONS = {
    "ls": "List steps with time, size, revision and configuration, and folders that were set aside. Reads only "
    "metadata.",
    "verify": "Read every array and stream, and compare them with what was saved. Exit code 1 if anything is damaged.",
    "diff": "Compare configuration, versions, tree, shapes and array values. Exit code 1 if anything differs.",
    "prune": "Remove all steps except the latest; the newest intact step is always kept. Not for a run that is "
    "training: KEEP_CHECKPOINTS does this there.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the four subcommands with their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|verify|diff|prune")
    own = {name: actions.add_parser(name, description=text, allow_abbrev=False) for name, text in _DESCRIPTIONS.items()}
    for name in ("ls", "verify", "prune"):
        flags.add(own[name], "RUN")
    own["verify"].add_argument("--step", metavar="N", type=int, help="verify only this step (default: all)")
    own["diff"].add_argument("first", metavar="RUN_A[@STEP]", help="without @STEP: the latest step")
    own["diff"].add_argument("second", metavar="RUN_B[@STEP]")
    own["diff"].add_argument("--no-values", action="store_true", help="do not read arrays to measure how they differ")
    own["prune"].add_argument(
        "--keep", metavar="N", type=flags.at_least(1), required=True, help="number of latest steps to keep"
    )
    own["prune"].add_argument(
        "--set-aside", action="store_true", help="also remove folders that a run set aside: damaged-*, incomplete-*"
    )
    own["prune"].add_argument("--dry-run", action="store_true", help="only print what would be removed")


def run(args: argparse.Namespace) -> int:
    """Runs one of the four subcommands."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: the chips belong to the run
    return {"ls": _ls, "verify": _verify, "diff": _diff, "prune": _prune}[args.action](args)


def _ls(args: argparse.Namespace) -> int:
    from core.checkpoints import inspection

    directory = _directory(args.run_dir)
    rows = inspection.table(directory)
    print(f"{directory}: {units.counted(len(rows), 'folder')}")
    if rows:
        table = [inspection.HEADER, *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        print("\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table))
    return exit_codes.DONE


def _verify(args: argparse.Namespace) -> int:
    from core.checkpoints import inspection, steps

    directory = _directory(args.run_dir)
    if args.step is not None:
        _require_step(directory, args.step)
    chosen = [args.step] if args.step is not None else sorted(steps.complete(directory), reverse=True)
    if not chosen:
        raise UserError(f"there is no complete checkpoint in {directory}")
    damaged = 0
    for step in chosen:
        result = inspection.verify(directory / str(step))
        damaged += bool(result.damaged)
        print(result.describe(), flush=True)
    return exit_codes.FAILED if damaged else exit_codes.DONE


def _diff(args: argparse.Namespace) -> int:
    from core.checkpoints import comparing
    from core.checkpoints.description import DamagedError

    first, second = _step_folder(args.first), _step_folder(args.second)
    print(f"- {first}\n+ {second}")
    try:
        lines = list(comparing.compare(first, second, values=not args.no_values))
    except DamagedError as error:
        raise UserError(f"{error}; run launch/run checkpoints verify for details") from error
    print("\n".join(lines) or "no difference: configuration, versions and every array are equal")
    return exit_codes.FAILED if lines else exit_codes.DONE


def _prune(args: argparse.Namespace) -> int:
    from core.checkpoints import inspection, steps

    directory = _directory(args.run_dir)
    kept, removed = inspection.plan_pruning(
        directory, keep=args.keep, set_aside=args.set_aside, say=lambda line: print(line, flush=True)
    )
    print(f"keeps {', '.join(map(str, kept)) or 'nothing'}")
    for path in removed:
        print(f"{'would remove' if args.dry_run else 'removes'} {path}", flush=True)
        if not args.dry_run:
            steps.remove(path)
    return exit_codes.DONE


def _directory(run: str) -> paths.Path:
    """The checkpoint folder of a run. Raises UserError if there is none."""
    from core import paths

    folder = paths.resolve(run)
    if folder.name != FOLDER:
        folder = folder / FOLDER
    if not folder.exists():
        what = "has no checkpoints" if folder.parent.exists() else "does not exist"
        raise UserError(
            f"the run {run!r} {what} (expected {folder}); give the --run-dir that it was trained with, local or gs://"
        )
    return folder


def _require_step(directory: paths.Path, step: int) -> paths.Path:
    """The folder of a complete step. Raises UserError, listing the steps that exist, if it is not there."""
    from core.checkpoints import steps

    present = steps.complete(directory)
    if step not in present:
        listed = ", ".join(map(str, present)) or "none"
        raise UserError(f"no complete checkpoint of step {step} in {directory}; existing steps: {listed}")
    return directory / str(step)


def _step_folder(text: str) -> paths.Path:
    """The folder of the step named by RUN@STEP, or of the latest step of RUN. Raises UserError if it is missing."""
    from core.checkpoints import steps

    run, mark, step = text.rpartition("@")
    if mark and not (run and step.isdecimal()):
        raise UserError(f"{text!r}: expected RUN or RUN@STEP with a step number, such as runs/first@1000")
    directory = _directory(run if mark else text)
    if mark:
        return _require_step(directory, int(step))
    present = steps.complete(directory)
    if not present:
        raise UserError(f"{text!r} has no complete checkpoint in {directory}")
    return directory / str(present[-1])
