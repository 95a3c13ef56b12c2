"""`launch/run checkpoints ls|verify|diff|prune`: what a run has saved, from any machine that sees its directory.

The one idea: one process, no accelerator and no model. It can stand beside the job that writes the next checkpoint.
"""

from __future__ import annotations

import argparse
import os

from core import units
from core.watch import exit_codes

HELP = "list, verify, compare or prune the checkpoints of a run"
EXAMPLE = """launch/run checkpoints ls     runs/gin/quickstart
  launch/run checkpoints verify gs://BUCKET/runs/first --step 1000
  launch/run checkpoints diff   runs/first@1000 runs/second
  launch/run checkpoints prune  runs/first --keep 2 --dry-run"""

_ABOUT = {
    "ls": "Steps with time, size, revision and configuration, and what was put aside. Reads descriptions only.",
    "verify": "Reads every array and stream and compares it with what was saved. Exit code 1 on damage.",
    "diff": "Configuration, versions, tree and shapes, and how far apart arrays are. Exit code 1 where any differ.",
    "prune": "Removes all steps but the latest, never the newest sound one. Not of a run that is training: it has its "
    "own KEEP_CHECKPOINTS.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what can be done, each with its own."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|verify|diff|prune")
    own = {name: actions.add_parser(name, description=about, allow_abbrev=False) for name, about in _ABOUT.items()}
    for name in ("ls", "verify", "prune"):
        own[name].add_argument("run_dir", metavar="RUN", help="the directory of a run, local or gs://")
    own["verify"].add_argument("--step", metavar="N", type=int, help="this one alone (default: all, newest first)")
    own["diff"].add_argument("first", metavar="RUN_A[@STEP]", help="without @STEP: the latest")
    own["diff"].add_argument("second", metavar="RUN_B[@STEP]")
    own["diff"].add_argument(
        "--no-values", action="store_true", help="do not read arrays to say how far apart they are"
    )
    own["prune"].add_argument("--keep", metavar="N", type=int, required=True, help="of the latest")
    own["prune"].add_argument(
        "--set-aside", action="store_true", help="also what a run put aside: damaged-*, incomplete-*"
    )
    own["prune"].add_argument("--dry-run", action="store_true", help="remove nothing, say what would go")


def run(args: argparse.Namespace) -> int:
    """Does one of the four."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: the chips belong to whoever trains
    return {"ls": _ls, "verify": _verify, "diff": _diff, "prune": _prune}[args.action](args)


def _ls(args: argparse.Namespace) -> int:
    from launch.saved import listing, places

    folder = places.directory(args.run_dir)
    rows = listing.rows(folder)
    print(f"{folder}: {units.counted(len(rows), 'folder')}")
    if rows:
        print(listing.aligned([listing.HEADER, *(row.cells() for row in rows)]))
    return exit_codes.DONE


def _verify(args: argparse.Namespace) -> int:
    from core.checkpoints import steps
    from launch.saved import places, verifying

    folder = places.directory(args.run_dir)
    if args.step is not None:
        places.require_step(folder, args.step)
    asked = [args.step] if args.step is not None else sorted(steps.complete(folder), reverse=True)
    if not asked:
        raise ValueError(f"there is no complete checkpoint in {folder}")
    wrong = 0
    for step in asked:
        verdict = verifying.verify(folder / str(step))
        wrong += bool(verdict.damaged)
        print(verdict.describe(), flush=True)
    return exit_codes.FAILED if wrong else exit_codes.DONE


def _diff(args: argparse.Namespace) -> int:
    from core.checkpoints.description import DamagedError
    from launch.saved import comparing, places

    first, second = places.run_at_step(args.first), places.run_at_step(args.second)
    print(f"- {first}\n+ {second}")
    try:
        lines = list(comparing.compare(first, second, values=not args.no_values))
    except DamagedError as error:
        raise ValueError(f"{error}; launch/run checkpoints verify says more") from error
    print("\n".join(lines) or "no difference: configuration, versions and every array are equal")
    return exit_codes.FAILED if lines else exit_codes.DONE


def _prune(args: argparse.Namespace) -> int:
    from core.checkpoints import steps
    from launch.saved import places, pruning

    folder = places.directory(args.run_dir)
    plan = pruning.plan(folder, keep=args.keep, set_aside=args.set_aside, say=lambda line: print(line, flush=True))
    print(f"keeps {', '.join(map(str, plan.keep)) or 'nothing'}")
    for path in plan.remove:
        print(f"{'would remove' if args.dry_run else 'removes'} {path}", flush=True)
        if not args.dry_run:
            steps.remove(path)
    return exit_codes.DONE
