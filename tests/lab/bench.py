"""`tests/run.sh lab bench`: times the trainer against the bare jitted step, or the recursive model against the peak."""

import argparse
import contextlib
import os
import pathlib
import statistics
import tempfile
from collections.abc import Sequence

from rich.table import Table

from core.errors import UserError
from launch import terminal

HELP = "time the trainer's step against the bare jitted step, alternating in one process; or the recursive model"
EXAMPLE = """tests/run.sh lab bench v4-8
  tests/run.sh lab bench v4-8 --statistics
  tests/run.sh lab bench --recursion"""
GOAL = 1.03
STATISTICS_GOAL, STATISTICS_INTERVAL = 0.01, 100
RECURSION_GOAL = 0.6
# Options that only the measurement of the trainer has, and their defaults.
_OF_THE_TRAINER = {"length": 128, "batch_size": 16, "turns": 20, "turn_steps": 10, "run_dir": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the slice and the sizes."""
    parser.add_argument(
        "slice", metavar="SLICE", nargs="?", help="measured on its hosts; elsewhere simulated in one process"
    )
    parser.add_argument(
        "--recursion",
        action="store_true",
        help="measure instead how much of this machine's float32 peak a step of the recursive model reaches, and where "
        "its time is spent",
    )
    parser.add_argument(
        "--statistics",
        action="store_true",
        help="measure instead what statistics of the update cost, without the trainer",
    )
    parser.add_argument("--width", type=int, help="of the model (default: 128; with --recursion: 512)")
    parser.add_argument("--length", type=int, help="tokens of a row (default: 128)")
    parser.add_argument("--batch-size", type=int, help="rows of the global batch (default: 16)")
    parser.add_argument("--turns", type=int, help="measured turns, at least 2 (default: 20)")
    parser.add_argument("--turn-steps", type=int, help="steps of a turn, at least 5 (default: 10)")
    parser.add_argument("--run-dir", metavar="DIR", help="for files of the run; several hosts need a shared one")


def run(args: argparse.Namespace) -> int:
    """Measures and prints. The exit code is always 0, because timings on a shared machine are unreliable."""
    if args.recursion == bool(args.slice):
        raise UserError("expected either a SLICE, such as v4-8, or --recursion without a SLICE")
    if not args.recursion:
        return _overhead(args)
    idle = [f"--{name.replace('_', '-')}" for name in _OF_THE_TRAINER if getattr(args, name) is not None]
    if idle:
        raise UserError(
            f"--recursion does not take {', '.join(idle)}, which apply to the trainer's measurement; leave them out"
        )
    return _recursion(512 if args.width is None else args.width)


def _recursion(width: int) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from tests.lab import recursion

    if width < 16 or width % 16:
        raise UserError(f"--width {width}: expected a multiple of 16, for 8 heads of an even width")
    found = [recursion.measure(mixer, width=width) for mixer in ("mlp", "attention")]
    table = Table("mixer", "step", "GFLOP/s", "peak", "of peak", "of peak, CPU seconds", *found[0].profile, box=None)
    for speed in found:
        cells = [f"{speed.step.clock:.3f} s", f"{speed.flops / speed.step.clock / 1e9:.0f}"]
        shares = [f"{share:.1%}" for share in (*speed.share, *speed.profile.values())]
        table.add_row(speed.mixer, *cells, f"{speed.peak.clock / 1e9:.0f}", *shares)
    terminal.console(140).print(table)
    print(
        f"goal: {RECURSION_GOAL:.0%} of the float32 peak of a matrix product; last columns: shares of a profiled step"
    )
    return 0


def _overhead(args: argparse.Namespace) -> int:
    for name, default in (_OF_THE_TRAINER | {"width": 128}).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    from core import slices
    from launch.hosts import cluster, tpu_host
    from tests.lab import overhead

    if args.turns < 2 or args.turn_steps < overhead.SETTLING_STEPS + 2:
        raise UserError(f"--turns {args.turns} --turn-steps {args.turn_steps}: expected at least 2 and 5")
    slice_ = slices.get(args.slice)
    if not tpu_host.look().on_tpu_host:
        os.environ |= {"JAX_PLATFORMS": "cpu", "RENGA_SIMULATE": slice_.name}
    timed = overhead.experiment(
        slice_.name,
        width=args.width,
        length=args.length,
        batch_size=args.batch_size,
        total_steps=(1 + args.turns) * args.turn_steps,
    )
    host = cluster.join(slice_, limits=cluster.limits(timed.health))
    if args.statistics:
        cost = overhead.measure_statistics(timed, turn_steps=args.turn_steps)
        if host.is_zero:
            _print_statistics(cost)
        return 0
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
    table = Table("", "steps", "10th percentile", "median", "90th percentile", box=None)
    table.add_row("in the trainer", *_row(result.trainer))
    table.add_row("bare jitted step", *_row(result.bare))
    terminal.console(100).print(table)
    least, *_, most = by_turn = result.ratios_by_turn
    print(f"trainer / bare = {result.ratio:.3f} (goal: at most {GOAL})")
    print(f"ratio of each turn: median {statistics.median(by_turn):.3f}, from {least:.3f} to {most:.3f}")


def _print_statistics(cost) -> None:
    table = Table("", "steps", "10th percentile", "median", "90th percentile", box=None)
    table.add_row("usual", *_row(cost.usual))
    table.add_row("with statistics, and the next one", *_row([cost.due]))
    terminal.console(100).print(table)
    low, median, high = (100 * share for share in statistics.quantiles(cost.shares(STATISTICS_INTERVAL), n=4))
    print(
        f"every {STATISTICS_INTERVAL} steps they cost {median:.2f} % of a step (goal: {100 * STATISTICS_GOAL:g} %); "
        f"half of the turns from {low:.2f} to {high:.2f} %"
    )


def _row(turns: Sequence[Sequence[float]]) -> list[str]:
    seconds = [s for turn in turns for s in turn]
    deciles = statistics.quantiles(seconds, n=10)
    return [str(len(seconds)), *(f"{1000 * s:.1f} ms" for s in (deciles[0], statistics.median(seconds), deciles[-1]))]
