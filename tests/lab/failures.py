"""`tests/run.sh lab failures`: makes a simulated run fail in every known way, and reports how each run ended."""

import argparse
import os
import tempfile
from pathlib import Path

from core.errors import UserError

HELP = "make simulated hosts fail in every known way, restart them, and compare with an undisturbed run"
EXAMPLE = """tests/run.sh lab failures
  tests/run.sh lab failures --only "kill -9 of host 2" --kills 0 --flips 0
  tests/run.sh lab failures --write                               write all rows into docs/results/failures.md
  tests/run.sh lab failures --only SIGTERM --kills 0 --flips 0 --write    only two rows"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the selection of failures."""
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only failures whose name contains one of these")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="random kills of one run; default 20")
    parser.add_argument("--flips", type=int, default=200, metavar="N", help="bits flipped in a checkpoint; default 200")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random kills and flips")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the runs there; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="write the rows into docs/results/failures.md")


def run(args: argparse.Namespace) -> int:
    """Prints the table; returns 1 if a run did not end as expected, otherwise 0."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from core import slices
    from tests.lab import harness, scenarios

    os.environ["RENGA_JOIN_SECONDS"] = str(scenarios.JOIN_SECONDS)
    jax.config.update(
        "jax_num_cpu_devices", slices.get(harness.SLICE).devices
    )  # to restore checkpoints in this process
    for name in ("kills", "flips"):
        if getattr(args, name) < 0:
            raise UserError(f"--{name} {getattr(args, name)}: expected 0 or more")
    wanted = [s for s in scenarios.SCENARIOS if not args.only or any(text in s.name for text in args.only)]
    if args.only and not wanted:
        names = "\n  ".join(s.name for s in scenarios.SCENARIOS)
        raise UserError(f"--only {' '.join(args.only)}: no failure has such a name; there are:\n  {names}")
    if args.out is not None:
        return _run(args, wanted, args.out.resolve())
    with tempfile.TemporaryDirectory(prefix="renga-failures-") as folder:
        return _run(args, wanted, Path(folder))


def _run(args: argparse.Namespace, wanted: list, folder: Path) -> int:
    from core.training import supervise

    with supervise.stop_requests() as requested:
        return _try_all(args, wanted, folder, requested)


def _try_all(args: argparse.Namespace, wanted: list, folder: Path, requested: list[int]) -> int:
    from tests.lab import flips, harness, table

    rig = harness.FaultHarness(folder, requested=requested)
    outcomes = []
    for scenario in wanted:
        outcomes.append(rig.try_out(scenario))
        _say(outcomes[-1])
    if args.kills:
        outcomes.append(
            harness.FaultHarness(folder, requested=requested, total_steps=harness.LONG_STEPS).kills(
                args.kills, seed=args.seed
            )
        )
        _say(outcomes[-1])
    flipped = None
    if args.flips:
        bindings = (*harness.SMALL, f"TOTAL_STEPS = {harness.TOTAL_STEPS}")
        where = {"experiment": harness.EXPERIMENT, "slice_name": harness.SLICE, "bindings": bindings}
        undisturbed = rig.undisturbed
        with harness.quiet(folder / "flips.log"):
            flipped = flips.flip(undisturbed, **where, count=args.flips, seed=args.seed)
    printed = table.markdown(outcomes, flipped)
    print(f"\n{printed}")
    if args.write:
        table.keep(printed, whole=not args.only)
    bad = [o for o in outcomes if o.problems]
    return 1 if bad or (flipped and flipped.wrong) else 0


def _say(outcome) -> None:
    print(
        f"{'ok  ' if not outcome.problems else 'BAD '} {outcome.name}: {'; '.join(outcome.problems) or outcome.said}",
        flush=True,
    )
