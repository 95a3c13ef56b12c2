"""`tests/run.sh lab soak`: runs thousands of small steps on simulated hosts and checks that nothing grows."""

import argparse
import tempfile
from pathlib import Path

from core.errors import UserError

HELP = "run thousands of small steps on simulated hosts and watch memory, device buffers, files and threads"
EXAMPLE = """tests/run.sh lab soak
  tests/run.sh lab soak --slice v4-32 --steps 1000 --out /tmp/soak"""
LEAST_STEPS = 400
SLICE = "v4-16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the length, slice and folder."""
    parser.add_argument("--steps", type=int, default=5000, help=f"default 5000; at least {LEAST_STEPS}")
    parser.add_argument("--slice", default=SLICE, metavar="SLICE", help=f"default {SLICE}: two hosts of four chips")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the run there; default: a temporary folder")


def run(args: argparse.Namespace) -> int:
    """Prints what every host holds; returns 1 if something grew, otherwise 0."""
    if args.steps < LEAST_STEPS:
        raise UserError(f"--steps {args.steps}: expected at least {LEAST_STEPS}")
    if args.out is not None:
        return _run(args, args.out.resolve())
    with tempfile.TemporaryDirectory(prefix="renga-soak-") as folder:
        return _run(args, Path(folder))


def _run(args: argparse.Namespace, folder: Path) -> int:
    from core import slices
    from core.training import supervise
    from tests.lab import growth, harness

    with supervise.stop_requests() as requested:
        rig = harness.FaultHarness(
            folder, requested=requested, total_steps=args.steps, slice_name=slices.get(args.slice).name
        )
        files = rig.soak()
    failed = False
    for host, file in enumerate(files):
        samples = growth.read(file)
        for s in samples[:: max(1, len(samples) // 10)]:
            print(
                f"step {s.step:>6}  host {host}  {s.memory_bytes / 2**30:.3f} GiB  {s.arrays} arrays of "
                f"{s.array_bytes / 2**20:.2f} MiB  {s.files} files  {s.threads} threads"
            )
        for name, more in growth.grown(samples, save_interval=growth.save_interval(args.steps)).items():
            failed = True
            print(f"host {host}: {name} grew by {more:,}")
    print("something grows" if failed else f"nothing grows in {args.steps} steps on {len(files)} hosts (simulated)")
    return int(failed)
