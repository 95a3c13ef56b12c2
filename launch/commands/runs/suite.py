"""`launch/run suite`: many experiments one after another, and one table of what came of them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.live import Live
from rich.table import Table

from core import paths, slices, units
from core.errors import UserError
from launch import environment, terminal

if TYPE_CHECKING:
    from launch.suites.plan import Entry
    from launch.suites.running import Suite

HELP = "run a group of experiments one after another, and gather what came of them in one table"
EXAMPLE = """launch/run suite exp01 --run-root gs://BUCKET/runs --gin "DATA = 'gs://BUCKET/sudoku-extreme'"
      (on every host of the slice)
  launch/run suite all --smoke --simulate --slice v4-8
  launch/run suite exp02 --seeds 3 --run-root gs://BUCKET/runs --gin "DATA = 'gs://BUCKET/sudoku-extreme'"
  launch/run suite exp02 --analyze --run-root gs://BUCKET/runs --gin "DATA = 'gs://BUCKET/sudoku-extreme'\""""
_SECONDS_BETWEEN_LOOKS = 3.0
_WIDTH = 140  # where there is no terminal to say
_AROUND = 6  # lines of a table that are no rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what a suite takes."""
    parser.add_argument("group", metavar="GROUP", help="of gin/trm (exp01, exp02, …, all), or a folder of gin files")
    parser.add_argument("--simulate", action="store_true", help="hosts as processes here, chips as CPU devices")
    parser.add_argument("--smoke", action="store_true", help="rehearse each: smallest sizes, 20 steps, PASS")
    parser.add_argument("--analyze", action="store_true", help="run nothing: gather what is there")
    parser.add_argument("--list", action="store_true", help="run nothing: what there is, and what is the same")
    parser.add_argument("--slice", metavar="SLICE", help="wins over the files' SLICE")
    parser.add_argument("--gin", metavar="BINDING", action="append", default=[], help="for all of them; repeatable")
    parser.add_argument("--seeds", metavar="N", type=int, default=1, help="of each experiment (default 1)")
    parser.add_argument("--steps", metavar="N", type=int, help="stop each after step N")
    parser.add_argument("--run-root", metavar="DIR", help="runs go to DIR/{group}/{experiment}; as RENGA_RUN_ROOT")
    parser.add_argument("--out", metavar="DIR", help="for the table and the logs (default: runs/suites/GROUP)")


def run(args: argparse.Namespace) -> int:
    """Plans, runs, gathers. 1 where an experiment failed."""
    import jax

    from launch.suites import plan, running

    jax.config.update("jax_platforms", "cpu")  # of this process alone: the chips are for the runs that it starts
    _check(args)
    root = args.run_root or environment.read("RENGA_RUN_ROOT") or str(environment.WORKSPACE / "runs")
    root = os.fspath(paths.resolve(root))
    entries = plan.plan(
        plan.files(args.group),
        bindings=args.gin,
        slice_name=args.slice,
        seeds=args.seeds,
        root=root,
        smoke=args.smoke,
        check_data=not (args.analyze or args.list),
    )
    if not (args.simulate or args.analyze or args.list):
        _check_places(entries, root)
    name = Path(args.group).name
    out = Path(args.out) if args.out else environment.WORKSPACE / "runs" / "suites" / name
    mode = running.Mode(simulate=args.simulate, smoke=args.smoke, steps=args.steps)
    suite = running.Suite(entries, mode=mode, root=root, logs=out / "logs")
    suite.gather() if args.analyze else suite.look()
    if args.list:
        terminal.console(_WIDTH).print(_list(suite))
        return 0
    code = 0 if args.analyze else _run(suite)
    terminal.console(_WIDTH).print(_list(suite))
    if not args.analyze:
        _print_failures(suite)
    if not args.smoke:
        _write(suite, name=name, out=out)
    return code


def _check(args: argparse.Namespace) -> None:
    from launch.hosts import tpu_host

    if args.seeds < 1 or (args.steps is not None and args.steps < 1):
        raise UserError(f"--seeds {args.seeds} --steps {args.steps}: expected at least 1")
    if args.out and paths.is_remote(args.out):
        raise UserError(f"--out {args.out}: expected a local folder (runs themselves may be in a bucket: --run-root)")
    if args.analyze and args.smoke:
        raise UserError("--analyze reads the scores of runs, and rehearsals have none: leave --smoke out")
    if args.simulate or args.analyze or args.list:
        return
    if not tpu_host.on_tpu_host():
        raise UserError(
            f"this is no host of a TPU: run `launch/run suite {args.group} …` on every host of one, or add --simulate"
        )


def _check_places(entries: Sequence[Entry], root: str) -> None:
    """Raises ValueError for what every run of real hosts would be refused for, one after another."""
    names: dict[str, str] = {}
    for entry in entries:
        names.setdefault(entry.experiment.slice, entry.id)
    if len(names) > 1:
        which = " and ".join(f"{name} ({first})" for name, first in names.items())
        raise UserError(f"the experiments are for several slices, {which}, and these hosts are of one: give --slice")
    (slice_,) = map(slices.get, names)
    if slice_.hosts > 1 and not paths.is_remote(root):
        raise UserError(
            f"runs would go to {root}, on a disk of this host, but all {slice_.hosts} hosts of {slice_.name} must see "
            "one run directory: give --run-root gs://BUCKET/runs (or set RENGA_RUN_ROOT)"
        )


def _run(suite: Suite) -> int:
    """Runs with a table that follows it on a terminal, a line for each change elsewhere."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, lambda n, frame: suite.requested.append(128 + n)) for n in numbers}
    console = terminal.console(_WIDTH)
    try:
        if not console.is_terminal:
            return suite.run(_Lines(suite))
        with Live(console=console, auto_refresh=False, transient=True) as live:
            return suite.run(_Throttled(lambda: live.update(_list(suite, most=console.height - _AROUND), refresh=True)))
    finally:
        for number, action in before.items():
            signal.signal(number, action)


class _Throttled:
    """Calls at most every few seconds: looking means reading files."""

    def __init__(self, look):
        self._look, self._last = look, 0.0

    def __call__(self) -> None:
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LOOKS:
            self._last = time.monotonic()
            self._look()


class _Lines:
    """Prints a line whenever an experiment's status changes."""

    def __init__(self, suite: Suite):
        self._suite, self._said = suite, {}

    def __call__(self) -> None:
        for number, entry in enumerate(self._suite.entries, 1):
            status = self._suite.status[entry.id]
            if self._said.get(entry.id) != status and status != "waits":
                print(f"{number:>3}/{len(self._suite.entries)}  {entry.id:<36} {status}", flush=True)
            self._said[entry.id] = status


def _list(suite: Suite, *, most: int | None = None) -> Table:
    """The status of every experiment, or of so many around the one that runs."""
    done = sum(not suite.failed(entry) for entry in suite.entries)
    distinct = sum(not entry.same_as for entry in suite.entries)
    title = f"{units.counted(len(suite.entries), 'experiment')}, {distinct} of them distinct; {done} done"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for heading in ("experiment", "step", "of", "exact"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "experiment" else "right")
    table.add_column("status", overflow="fold")
    for entry in suite.entries[_window(suite, most)]:
        has_steps = not (entry.same_as or suite.mode.smoke)
        step, score = suite.progress(entry) if has_steps else (0, None)
        shown = (f"{step:,}", f"{suite.mode.last_step(entry):,}") if has_steps else ("", "")
        table.add_row(entry.name, *shown, "" if score is None else f"{score:.2%}", suite.status[entry.id])
    return table


def _window(suite: Suite, most: int | None) -> slice:
    if most is None or len(suite.entries) <= most:
        return slice(None)
    statuses = [suite.status[entry.id] for entry in suite.entries]
    at = statuses.index("runs") if "runs" in statuses else 0
    first = max(0, min(at - most // 2, len(statuses) - most))
    return slice(first, first + max(most, 1))


def _print_failures(suite: Suite) -> None:
    for entry in suite.entries:
        if suite.status[entry.id].startswith(("failed", "refused")):
            print(f"{entry.id} {suite.status[entry.id]}", file=sys.stderr)
        if suite.status[entry.id].startswith("failed"):
            print("".join(f"  | {line}\n" for line in suite.last_lines(entry)), end="", file=sys.stderr)
            print(f"  all of it: {suite.logs[entry.id]}", file=sys.stderr)


def _write(suite: Suite, *, name: str, out: Path) -> None:
    """One table, for a program and for a reader."""
    from launch.suites import page, results

    table = results.rows(suite.entries, status=suite.status, run_dirs=suite.run_dirs)
    distinct = sum(not row["same_as"] for row in table)
    note = f"{units.counted(len(table), 'experiment')}, {distinct} distinct. Scores are of the last step."
    paths.write_text_atomically(out / "results.csv", results.as_csv(table))
    paths.write_text_atomically(out / "results.html", page.page(table, title=f"Suite {name}", note=note))
    print(f"{out / 'results.csv'}\n{out / 'results.html'}")
