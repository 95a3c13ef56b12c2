"""`launch/run suite`: runs many experiments one after another and collects their results in one table."""

import argparse
import csv
import io
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from rich import box
from rich.table import Table

from core import extras, identity, logical, parameters, slices, units
from core.batches import batch_shapes
from core.errors import UserError
from core.files import paths
from core.training import metrics, supervise
from core.types import Model, can
from launch import environment, flags, terminal
from launch.config import differences
from launch.experiment import Experiment
from launch.experiments import suites
from launch.experiments.suites import Entry, State, Status, Suite
from launch.hosts import tpu_host

COMMAND = ("runs", "suite")
HELP = "run a group of experiments one after another, and collect their results in one table"
EXAMPLE = """launch/run suite exp01 --run-root gs://BUCKET/runs --gin "DATA = 'gs://BUCKET/sudoku-extreme'"
      (on every host of the slice)
  launch/run suite all --check smoke --simulate --slice v4-8
  launch/run suite exp02 --seeds 3 --run-root gs://BUCKET/runs --gin "DATA = 'gs://BUCKET/sudoku-extreme'"
  launch/run suite exp02 --analyze --run-root gs://BUCKET/runs --gin "DATA = 'gs://BUCKET/sudoku-extreme'\""""

SCORE = "validation/exact_accuracy"
LOSS = "validation/loss"
GOAL = 0.8  # the first step with this accuracy is reported
_EXA = 1e18
_SCORES = {"loss": ("loss", ".4f"), "validation loss": (LOSS, ".4f"), "exact": (SCORE, ".2%")}  # columns of scores
_MOST_SETTINGS = 3  # settings per experiment in the printed table


class _HasLayers(Protocol):
    num_layers: int


class _Recurs(Protocol):
    effective_depth: int  # layers applied in sequence in one training step


class _CutsPuzzles(Protocol):
    """A task that may use a part of its puzzles; None means all."""

    asked: tuple[int | None, int | None]
    eval_puzzles: int | None
    eval_seed: int


def rows(
    entries: Sequence[Entry], *, status: Mapping[str, Status], run_dirs: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Returns a row of results per entry, in order.

    `status` and `run_dirs` are by entry id, as in `Suite`.
    """
    told = settings(entries)
    # The state of the run, which may be that of another entry.
    states = {e.id: status.get(e.same_as or e.id, status[e.id]).state for e in entries}
    found = [
        _row(e, told[e.id], status[e.id].text, _read(states[e.id], run_dirs[e.id]), run_dirs[e.id]) for e in entries
    ]
    done = {name for name, state in states.items() if state == State.DONE}
    for entry, row in zip(entries, found, strict=True):
        seeds = {e.id: r for e, r in zip(entries, found, strict=True) if e.path == entry.path}
        is_accuracy = any(seed["exact_accuracy"] is not None for seed in seeds.values())
        row["score"] = score = "exact_accuracy" if is_accuracy else "validation_loss"
        # By run, because a given seed may be that of the file, so that two entries have the same run.
        by_run = {seed["run"]: seed[score] for id, seed in seeds.items() if id in done and seed[score] is not None}
        if entry.id in done and len(known := list(by_run.values())) > 1:
            row |= {"mean_of_seeds": statistics.fmean(known), "spread_of_seeds": max(known) - min(known)}
    return found


def settings(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Returns, by entry id, the settings that differ within a group, without the seed."""
    told = {}
    for group in dict.fromkeys(entry.group for entry in entries):
        members = [entry for entry in entries if entry.group == group]
        for entry, found in zip(members, differences.among([entry.text for entry in members]), strict=True):
            values = {name: differences.shortened(value) for name, value in found.items() if name != "SEED"}
            told[entry.id] = [f"{name} = {value}" for name, value in values.items()]
    return told


def _read(state: State, run_dir: str) -> metrics.RunMetrics:
    """Returns the metrics of an entry's run; none for a refused entry, whose directory is another experiment's."""
    return metrics.RunMetrics() if state == State.REFUSED else metrics.read(run_dir)


def _row(entry: Entry, told: Sequence[str], said: str, found: metrics.RunMetrics, run_dir: str) -> dict[str, Any]:
    run = entry.experiment
    puzzles, copies = run.task.asked if can(run.task, _CutsPuzzles) else (None, None)
    best_step, best = found.best(SCORE) or (None, None)
    exact, in_training = found.last(SCORE), found.last("exact_accuracy")
    return {
        "group": entry.group,
        "experiment": entry.name,
        "same_as": entry.same_as or "",
        "settings": "; ".join(told),
        "status": said,
        "seed": run.seed,
        "parameters": trained_parameters(run),
        "depth": depth(run.model),
        "puzzles": puzzles,
        "copies": copies,
        "batch": run.batch_size,
        "steps": found.step,
        "total_steps": run.total_steps,
        "rows": sum((last - first) * part.batch_size for part, first, last in _parts(run, found.step)),
        "eflop": _eflop(run, found.step),
        "total_eflop": _eflop(run, run.total_steps),
        "loss": found.last("loss"),
        "validation_loss": found.last(LOSS),
        "score": None,
        "exact_accuracy": exact,
        "mean_of_seeds": None,
        "spread_of_seeds": None,
        "best_exact_accuracy": best,
        "best_step": best_step,
        "goal_step": found.first_at(SCORE, least=GOAL),
        "cell_accuracy": found.last("validation/accuracy"),
        "q_halt_accuracy": found.last("validation/q_halt_accuracy"),
        "train_exact_accuracy": in_training,
        "gap": None if exact is None or in_training is None else in_training - exact,
        "train_steps_per_puzzle": found.last("steps"),
        "step_seconds": found.median("step_seconds"),
        "evaluated": found.texts.get(metrics.EVALUATED_ON, evaluated_on(run)),
        "curve": found.curve(LOSS if exact is None else SCORE),
        "run": run_dir,
    }


def trained_parameters(run: Experiment) -> int:
    """Counts trained parameters, without those of kind "table", of which a step uses few rows."""
    spec = run.task.spec(run.task.num_streams)
    key = identity.text([run.model, spec, list(run.frozen)])
    if key not in _COUNTED:
        shapes, specs = logical.abstract_init(run.model.init, jax.random.key(0), batch_shapes(spec))
        every = zip(*map(jax.tree.leaves, (shapes, specs, parameters.matches(specs, run.frozen))), strict=True)
        trained = [a for a, s, is_frozen in every if s.trainable and s.kind != "table" and not is_frozen]
        _COUNTED[key] = sum(math.prod(array.shape) for array in trained)
    return _COUNTED[key]


_COUNTED: dict[str, int] = {}  # of experiments with equal models, of which a suite has many


def depth(model: Model) -> int | None:
    """Returns how many layers a training step applies in sequence; None if not known."""
    if can(model, _Recurs):
        return model.effective_depth
    return model.num_layers if can(model, _HasLayers) else None


def _eflop(run: Experiment, steps: int) -> float | None:
    """Returns the training EFLOPs (1e18) up to a step, without rematerialization; None if unknown."""
    counted = [_flops(part, first, last) for part, first, last in _parts(run, steps)]
    known = [flops for flops in counted if flops is not None]
    return sum(known) / _EXA if len(known) == len(counted) else None


def _flops(part: Experiment, first: int, last: int) -> float | None:
    return part.flops_between(first, last)


def _parts(run: Experiment, steps: int) -> list[tuple[Experiment, int, int]]:
    """Returns the phases of the first `steps` steps, each with the steps after which it begins and ends."""
    parts = [(span.experiment, span.first_step, min(steps, span.last_step)) for span in run.spans()]
    return [(part, first, last) for part, first, last in parts if first < last]


def evaluated_on(run: Experiment) -> str:
    """Describes, from the configuration, the rows on which the run evaluates."""
    most = run.evaluation.eval_batches * run.batch_size
    if can(run.task, _CutsPuzzles) and (count := run.task.eval_puzzles) is not None:
        return f"at most {min(most, count):,} held-out puzzles, seed {run.task.eval_seed}"
    return f"at most {most:,} held-out rows"


def as_csv(table: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table as CSV, without learning curves."""
    out = io.StringIO()
    names = [name for name in table[0] if name != "curve"] if table else []
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)  # None is written as an empty cell
    return out.getvalue()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `results`."""
    parser.add_argument(
        "group", metavar="GROUP", help="a group of gin/trm (exp01, exp02, …, all), or a folder of gin files"
    )
    flags.add(parser, "--simulate", "--check", "--slice", "--gin")
    parser.add_argument("--analyze", action="store_true", help="run nothing: collect existing results")
    parser.add_argument("--list", action="store_true", help="run nothing: list the experiments and duplicates")
    parser.add_argument(
        "--seeds",
        metavar="N",
        type=flags.at_least(1),
        help="runs of each experiment, with different seeds (default: 1; with --analyze: all that exist)",
    )
    flags.add(parser, "--steps", help="stop each experiment after step N")
    parser.add_argument(
        "--run-root",
        metavar="DIR",
        help="run directories are DIR/{group}/{experiment} (default: RENGA_RUN_ROOT, or runs)",
    )
    parser.add_argument("--out", metavar="DIR", help="folder for the table and the logs (default: runs/suites/GROUP)")


def run(args: argparse.Namespace) -> int:
    """Runs, lists or analyzes the experiments of a suite.

    Returns 0 if all are done or nothing is run, 1 if one is not done, or the exit code of an interruption. Raises
    UserError if options are invalid or do not fit this machine.
    """
    jax.config.update("jax_platforms", "cpu")  # for this process; the runs that it starts use the chips
    runs = not (args.analyze or args.list)
    if args.out and paths.is_remote(args.out):
        raise UserError(f"--out {args.out}: expected a local folder (run directories may be in a bucket: --run-root)")
    if args.analyze and args.check:
        raise UserError("--analyze reads the scores of runs, and checks have none: remove --check")
    if args.check and args.steps:
        raise UserError("--check and --steps exclude each other: a check trains no experiment")
    files = suites.files(args.group)
    if runs and not args.simulate and args.check != "config" and not tpu_host.look().on_tpu_host:
        raise UserError(
            f"this is not a host of a TPU: run `launch/run suite {args.group} …` on every host, or add --simulate"
        )
    root = os.fspath(paths.resolve(args.run_root or environment.run_root()))
    entries = suites.load(
        files,
        bindings=args.gin,
        slice_name=args.slice,
        seeds=suites.seeds_run(files, root) if args.analyze and not args.seeds else range(args.seeds or 1),
        root=root,
        level=args.check,
        check_data=runs,
    )
    if runs and not args.simulate and args.check != "config":
        _check_places(entries, root)
    name = Path(args.group).name
    out = Path(args.out) if args.out else Path("runs", "suites", name)
    mode = suites.Mode(simulate=args.simulate, check=args.check, steps=args.steps)
    suite = Suite(entries, mode=mode, root=root, logs=out / "logs")
    suite.gather() if args.analyze else suite.find_done()
    code = 0
    if runs:
        with supervise.stop_requests() as requested:
            code = suite.run(requested)
    terminal.console(140, markup=False).print(_table(suite))
    if runs:
        _print_failures(suite)
    if not (args.list or args.check):
        _write(suite, name=name, out=out)
    return code


def _check_places(entries: Sequence[Entry], root: str) -> None:
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
    told = settings(suite.entries)
    shown = {entry.id: _shown(suite, entry) for entry in suite.entries}
    scores = [name for name in _SCORES if any(name in values for values in shown.values())]
    for heading in ("experiment", "step", "of", *scores):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "experiment" else "right")
    for heading in ("settings", "status"):
        table.add_column(heading, overflow="fold")
    for entry in suite.entries:
        numbers = [shown[entry.id].get(name, "") for name in ("step", "of", *scores)]
        few = "\n".join(units.shortened(told[entry.id], most=_MOST_SETTINGS))
        table.add_row(entry.name, *numbers, few, suite.status[entry.id].text)
    return table


def _shown(suite: Suite, entry: Entry) -> dict[str, str]:
    if entry.same_as or suite.mode.check:
        return {}
    found = _read(suite.status[entry.id].state, suite.run_dirs[entry.id])
    scores = {heading: (found.last(metric), form) for heading, (metric, form) in _SCORES.items()}
    told = {heading: format(value, form) for heading, (value, form) in scores.items() if value is not None}
    return {"step": f"{found.step:,}", "of": f"{suite.mode.last_step(entry):,}", **told}


def _print_failures(suite: Suite) -> None:
    for entry in suite.entries:
        state, text = suite.status[entry.id]
        if state in (State.FAILED, State.REFUSED):
            print(f"{entry.id} {text}", file=sys.stderr)
        if state == State.FAILED:
            print("".join(f"  | {line}\n" for line in suite.last_lines(entry)), end="", file=sys.stderr)
            print(f"  full output: {suite.logs[entry.id]}", file=sys.stderr)


def _write(suite: Suite, *, name: str, out: Path) -> None:
    table = rows(suite.entries, status=suite.status, run_dirs=suite.run_dirs)
    paths.write_text_atomically(out / "results.csv", as_csv(table))
    print(out / "results.csv")
    if problem := extras.missing("matplotlib", extra="plots", what="results.html"):
        print(f"{problem}; then run this command with --analyze")
        return
    from launch.experiments import results_page  # matplotlib takes a second to import

    distinct = sum(not row["same_as"] for row in table)
    note = f"{units.counted(len(table), 'experiment')}, {distinct} distinct. "
    note += "Scores are from the last evaluation so far; means over seeds are of finished runs."
    paths.write_text_atomically(out / "results.html", results_page.page(table, title=f"Suite {name}", note=note))
    print(out / "results.html")
