"""`launch/run suite`: runs many experiments one after another and collects their results in one table."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich import box
from rich.table import Table

from core import metrics, paths, slices, units
from core.errors import UserError
from launch import environment, terminal
from launch.cli import flags
from launch.experiments import results, suites
from launch.experiments.suites import Entry, Suite
from launch.hosts import supervise, tpu_host

HELP = "run a group of experiments one after another, and collect their results in one table"
EXAMPLE = """launch/run suite exp01 --run-root gs://BUCKET/runs --gin "DATA = 'gs://BUCKET/sudoku-extreme'"
      (on every host of the slice)
  launch/run suite all --smoke --simulate --slice v4-8
  launch/run suite exp02 --seeds 3 --run-root gs://BUCKET/runs --gin "DATA = 'gs://BUCKET/sudoku-extreme'"
  launch/run suite exp02 --analyze --run-root gs://BUCKET/runs --gin "DATA = 'gs://BUCKET/sudoku-extreme'\""""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "group", metavar="GROUP", help="a group of gin/trm (exp01, exp02, …, all), or a folder of gin files"
    )
    flags.add(parser, "--simulate", "--smoke", "--slice", "--gin")
    parser.add_argument("--analyze", action="store_true", help="run nothing: collect existing results")
    parser.add_argument("--list", action="store_true", help="run nothing: list the experiments and duplicates")
    parser.add_argument(
        "--seeds",
        metavar="N",
        type=flags.at_least(1),
        default=1,
        help="runs of each experiment, with different seeds (default: 1)",
    )
    flags.add(parser, "--steps", help="stop each experiment after step N")
    parser.add_argument(
        "--run-root", metavar="DIR", help="run directories are DIR/{group}/{experiment} (default: RENGA_RUN_ROOT)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder for the table and the logs (default: runs/suites/GROUP)")


def run(args: argparse.Namespace) -> int:
    """Loads the experiments, runs them and writes the results. Returns 1 if an experiment failed."""
    jax.config.update("jax_platforms", "cpu")  # in this process; the runs that it starts use the chips
    runs = not (args.analyze or args.list)
    if args.out and paths.is_remote(args.out):
        raise UserError(f"--out {args.out}: expected a local folder (run directories may be in a bucket: --run-root)")
    if args.analyze and args.smoke:
        raise UserError("--analyze reads the scores of runs, and smoke runs have none: remove --smoke")
    if runs and not args.simulate and not tpu_host.look().on_tpu_host:
        raise UserError(
            f"this is not a host of a TPU: run `launch/run suite {args.group} …` on every host, or add --simulate"
        )
    root = args.run_root or environment.read("RENGA_RUN_ROOT") or str(environment.WORKSPACE / "runs")
    root = os.fspath(paths.resolve(root))
    entries = suites.load(
        suites.files(args.group),
        bindings=args.gin,
        slice_name=args.slice,
        seeds=args.seeds,
        root=root,
        smoke=args.smoke,
        check_data=runs,
    )
    if runs and not args.simulate:
        _check_places(entries, root)
    name = Path(args.group).name
    out = Path(args.out) if args.out else environment.WORKSPACE / "runs" / "suites" / name
    mode = suites.Mode(simulate=args.simulate, smoke=args.smoke, steps=args.steps)
    suite = Suite(entries, mode=mode, root=root, logs=out / "logs")
    suite.gather() if args.analyze else suite.find_done()
    code = 0
    if runs:
        with supervise.stop_requests() as requested:
            code = suite.run(requested)
    terminal.console(140).print(_table(suite))
    if runs:
        _print_failures(suite)
    if not (args.list or args.smoke):
        _write(suite, name=name, out=out)
    return code


def _check_places(entries: Sequence[Entry], root: str) -> None:
    """Raises UserError for mistakes because of which every run on real hosts would fail, one after another."""
    names: dict[str, str] = {}
    for entry in entries:
        names.setdefault(entry.experiment.slice, entry.id)
    if len(names) > 1:
        which = " and ".join(f"{name} ({first})" for name, first in names.items())
        raise UserError(f"the experiments are for several slices, {which}, but these hosts belong to one: give --slice")
    (slice_,) = map(slices.get, names)
    if slice_.hosts > 1 and not paths.is_remote(root):
        raise UserError(
            f"runs would go to {root}, on a disk of this host, but all {slice_.hosts} hosts of {slice_.name} must see "
            "one run directory: give --run-root gs://BUCKET/runs (or set RENGA_RUN_ROOT)"
        )


def _table(suite: Suite) -> Table:
    done = sum(not suite.failed(entry) for entry in suite.entries)
    distinct = sum(not entry.same_as for entry in suite.entries)
    title = f"{units.counted(len(suite.entries), 'experiment')}, {distinct} of them distinct; {done} done"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for heading in ("experiment", "step", "of", "exact"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "experiment" else "right")
    table.add_column("status", overflow="fold")
    for entry in suite.entries:
        cells = ("", "", "")
        if not (entry.same_as or suite.mode.smoke):
            found = metrics.read(suite.run_dirs[entry.id])
            step, score = found.step, found.last(results.SCORE)
            cells = (f"{step:,}", f"{suite.mode.last_step(entry):,}", "" if score is None else f"{score:.2%}")
        table.add_row(entry.name, *cells, suite.status[entry.id])
    return table


def _print_failures(suite: Suite) -> None:
    for entry in suite.entries:
        if suite.status[entry.id].startswith(("failed", "refused")):
            print(f"{entry.id} {suite.status[entry.id]}", file=sys.stderr)
        if suite.status[entry.id].startswith("failed"):
            print("".join(f"  | {line}\n" for line in suite.last_lines(entry)), end="", file=sys.stderr)
            print(f"  full output: {suite.logs[entry.id]}", file=sys.stderr)


def _write(suite: Suite, *, name: str, out: Path) -> None:
    """Writes the results as CSV and as an HTML page."""
    from launch.experiments import results_page  # matplotlib takes a second to import

    table = results.rows(suite.entries, status=suite.status, run_dirs=suite.run_dirs)
    distinct = sum(not row["same_as"] for row in table)
    note = f"{units.counted(len(table), 'experiment')}, {distinct} distinct. Scores are from the last step."
    paths.write_text_atomically(out / "results.csv", results.as_csv(table))
    paths.write_text_atomically(out / "results.html", results_page.page(table, title=f"Suite {name}", note=note))
    print(f"{out / 'results.csv'}\n{out / 'results.html'}")
