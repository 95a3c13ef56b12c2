"""`launch/run bench`: what the trainer costs beside the bare jitted step of the same shapes."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import statistics
import tempfile
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

HELP = "time the trainer's steady step against the bare jitted step, taking turns in one process"
EXAMPLE = "launch/run bench v4-8"
GOAL = 1.03


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the slice and the sizes."""
    parser.add_argument("slice", metavar="SLICE", help="on its hosts; elsewhere the CPU devices of one process play it")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: 128)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row (default: 128)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of the global batch (default: 16)")
    parser.add_argument("--turns", type=int, default=20, help="turns that count, at least 2 (default: 20)")
    parser.add_argument("--turn-steps", type=int, default=10, help="steps of a turn, at least 5 (default: 10)")
    parser.add_argument("--run-dir", metavar="DIR", help="for what a run writes; several hosts need one they share")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; always 0, because a shared machine is no judge."""
    from core import slices
    from launch import overhead
    from launch.pods import hosts, joining

    if args.turns < 2 or args.turn_steps < overhead.SETTLING_STEPS + 2:
        raise ValueError(f"--turns {args.turns} --turn-steps {args.turn_steps}: expected at least 2 and 5")
    slice_ = slices.get(args.slice)
    if not hosts.on_tpu_host():
        os.environ |= {"JAX_PLATFORMS": "cpu", "RENGA_SIMULATE": slice_.name}
    timed = overhead.experiment(
        slice_.name,
        width=args.width,
        length=args.length,
        batch_size=args.batch_size,
        total_steps=(1 + args.turns) * args.turn_steps,
    )
    host = joining.join(slice_)
    with (
        tempfile.TemporaryDirectory(prefix="renga-bench-") as folder,
        pathlib.Path(folder, "out").open("w") as quiet,
        contextlib.redirect_stdout(quiet),
    ):
        run_dir = args.run_dir or f"{folder}/run"
        result = overhead.measure(timed, turn_steps=args.turn_steps, run_dir=run_dir, host=host)
    if host.is_zero:
        _print(result)
    return 0


def _print(result) -> None:
    table = Table("", "steps", "10 % below", "median", "10 % above", box=None)
    table.add_row("in the trainer", *_row(result.trainer))
    table.add_row("bare jitted step", *_row(result.bare))
    Console(width=100).print(table)
    least, *_, most = by_turn = result.ratios_by_turn
    print(f"trainer / bare = {result.ratio:.3f} (goal: at most {GOAL})")
    print(f"turn by turn: median {statistics.median(by_turn):.3f}, from {least:.3f} to {most:.3f}")


def _row(turns: Sequence[Sequence[float]]) -> list[str]:
    seconds = [s for turn in turns for s in turn]
    deciles = statistics.quantiles(seconds, n=10)
    return [str(len(seconds)), *(f"{1000 * s:.1f} ms" for s in (deciles[0], statistics.median(seconds), deciles[-1]))]
