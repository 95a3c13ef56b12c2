"""`launch/run evaluate`: scores a run's checkpoints on held-out rows.

On a TPU slice, run it on every host. With --simulate it starts simulated hosts.
"""

import argparse
import dataclasses
import importlib
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich import box
from rich.console import Group
from rich.table import Table

from core import slices, versions
from core.batches import row_length
from core.checkpoints import published_files
from core.checkpoints import steps as saved_steps
from core.checkpoints.store import Checkpoints
from core.errors import UserError
from core.files import paths
from core.hosts import distributed
from core.training import evaluation, scoring
from core.training.evaluation import Scored
from core.training.scoring import HeldOut, Scores
from core.types import AnswerJudge, Judges, SplitsRows, Task, can
from launch import environment, flags, terminal
from launch.experiment import Experiment
from launch.experiments import saved_run, simulated_hosts
from launch.experiments.saved_run import SavedRun
from launch.hosts import cluster, tpu_host
from launch.hosts.cluster import Host
from launch.runs import prepared_run
from launch.runs.prepared_run import Run
from parallel import mesh
from parallel.compiled import host_memory, report

COMMAND = ("runs", "evaluate")
HELP = "score a run's checkpoints on held-out data: mean metrics, and ARC by voting"
EXAMPLE = """launch/run evaluate runs/trm/sudoku4-v4-8
  launch/run evaluate gs://BUCKET/runs/trm/maze-v4-32 --num-examples all   (on every host of the slice)
  launch/run evaluate runs/trm/arc1-v4-64 --all-steps --submission submission.json --simulate --slice v4-8
  launch/run evaluate runs/quickstart-v4-16 --num-examples all --gin "STRATEGY = @strategies.data_parallel()\""""
# Other evaluations are modules of this folder with `EVALUATION` (on one line: the flags that ask for it, each with the
# flags that it alone uses), `EXAMPLE`, `add_arguments(parser)` and `run(args)`.
_OTHERS = {importlib.import_module(module): flags_ for module, flags_ in environment.declared("EVALUATION").items()}
EXAMPLE = "\n  ".join([EXAMPLE, *(other.EXAMPLE for other in _OTHERS)])

FIRST = ("loss", "exact_accuracy", "accuracy", "q_halt_accuracy")
_CONSTANT = ("steps", "halted")  # the same in every evaluation
_WIDTH = 140  # columns without a terminal


def _show_tables(results: Scores) -> None:
    console = terminal.console(_WIDTH)
    first, labels = results.checkpoints[0], [f"step {step:,}" for step in results.steps]
    share, scored = first["share"], f"{first['scored']:,} scored"
    scored = scored if share is None else f"scored {Scored(first['scored'], share).describe('token')}"
    print(f"\n{results.about['evaluated_on']}; {scored}")
    means = [found["means"] for found in results.checkpoints]
    every = {name for found in means for name in found}  # a metric without weight has no mean
    names = [n for n in FIRST if n in every] + sorted(every - {*FIRST, *_CONSTANT})
    console.print(_table(names, [[m.get(name) for name in names] for m in means], labels))
    for name, curve in first["by_step"].items():
        rows = [found["by_step"].get(name, [None] * len(curve)) for found in results.checkpoints]
        table = _table([str(step) for step in range(1, len(curve) + 1)], rows, labels, digits=3)
        console.print(Group(f"{name} after each recursion step", table))
    if "by_position" in first:
        headings = [f"{own['first']:,}–{own['last']:,}" for own in first["by_position"]]
        rows = [[own["loss"] for own in found["by_position"]] for found in results.checkpoints]
        scored = ", ".join(f"{own['scored']:,}" for own in first["by_position"])
        what = f"loss by position in the document; tokens: {scored}"
        console.print(Group(what, _table(headings, rows, labels)))
    if results.judge:
        found = [checkpoint[results.judge.name] for checkpoint in results.checkpoints]
        if len(results.ensembles) > 1:
            found, labels = [*found, results.ensembles[-1]], [*labels, f"{results.of} (cumulative)"]
        console.print(_pass_at_k(found, labels))


def _pass_at_k(found: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> Group:
    first = found[0]
    return Group(
        f"pass@k of {first['puzzles']:,} puzzles; {first['tests_with_votes']:,} of their {first['tests']:,} tests "
        f"have votes, {first['votes']:,} votes from the first checkpoint",
        _table([f"pass@{k}" for k in first["pass_at"]], [list(f["pass_at"].values()) for f in found], labels),
    )


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[float | None]], labels: Sequence[str], *, digits: int = 4
) -> Table:
    table = Table("", box=box.SIMPLE)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for label, values in zip(labels, rows, strict=True):
        table.add_row(label, *("-" if value is None else f"{value:.{digits}f}" for value in values))
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `evaluate`."""
    flags.add(parser, "RUN")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument(
        "--step", metavar="N|best", type=_step, help="this checkpoint (default: the latest); best: see KEEP_BEST"
    )
    steps.add_argument(
        "--all-steps", action="store_true", help="evaluate every checkpoint; ARC also by votes over all of them"
    )
    parser.add_argument(
        "--num-examples",
        metavar="all|N",
        type=_examples,
        help="held-out puzzles, questions or rows of text (default: those of the run's own evaluations)",
    )
    parser.add_argument(
        "--by-position",
        action="store_true",
        help="also show the loss of tokens by their position in the document; takes up to seven passes more",
    )
    for other in _OTHERS:
        other.add_arguments(parser)
    submission = "ARC: write two attempts per test, from the votes of all checkpoints"
    parser.add_argument("--submission", **{**flags.OUTPUT, "type": str}, help=submission)
    flags.add(parser, "--overwrite")
    flags.add(parser, "--simulate", "--slice", "--gin")


def _step(text: str) -> int | str:
    return text if text == saved_steps.BEST else flags.at_least(0)(text)


def _examples(text: str) -> int | str:
    return text if text == "all" else flags.at_least(1)(text)


def _split_step(args: argparse.Namespace) -> None:
    """Takes the step of RUN@STEP as that of --step."""
    if args.run_dir.startswith(published_files.HUB):
        return
    run_dir, step = saved_steps.split(args.run_dir)
    if step is None:
        return
    if args.step is not None or args.all_steps:
        other = "--all-steps" if args.all_steps else f"--step {args.step}"
        raise UserError(f"{args.run_dir} and {other} both name steps: give one of them")
    if step != saved_steps.BEST and not step.isdecimal():
        raise UserError(f"{args.run_dir}: expected RUN, RUN@STEP with a step number, or RUN@{saved_steps.BEST}")
    args.run_dir, args.step = run_dir, _step(step)


def run(args: argparse.Namespace) -> int:
    """Runs the evaluation that the arguments ask for. Raises UserError if the run's data or task does not fit."""
    _split_step(args)
    other = _other(args)
    args.step = saved_steps.best_of(args.run_dir) if args.step == saved_steps.BEST else args.step
    if other is not None:
        return other.run(args)
    played = environment.read("RENGA_SIMULATE")
    place = tpu_host.look()
    found = saved_run.read_step(args.run_dir, step=args.step, bindings=args.gin, slice_name=args.slice)
    built = found.experiment()  # PHASE = N evaluates on the data of another phase
    slice_ = slices.get(built.slice)
    is_elsewhere = args.simulate or played or place.on_tpu_host or environment.process_layout().count
    alone = slice_.is_tpu and not is_elsewhere
    if alone or args.simulate:
        jax.config.update("jax_platforms", "cpu")
    sizes: dict[str, Any] = {"batch_size": built.batch_size, "eval_batches": built.evaluation.eval_batches}
    asked = scoring.select(built.task, **sizes, rows=args.num_examples)
    experiment = dataclasses.replace(built, task=asked.task, max_epochs=None)  # of training data
    if problems := experiment.data_problems(prepared=False):
        raise UserError("\n".join(problems))
    if args.by_position:
        _require_positions(experiment)
    if args.submission:
        if _judge(experiment) is None:
            raise UserError(
                f"--submission {args.submission}: this run's task has no attempts to submit; expected an ARC dataset "
                "(a folder with test_puzzles.json, as made by launch/run make-dataset arc)"
            )
        args.submission = os.fspath(paths.resolve(args.submission))
        paths.check_writable(paths.resolve(args.submission).parent)
    if args.simulate:
        return _simulate(args, found, experiment, slice_)
    if place.on_tpu_host and slice_.is_tpu and not played:
        tpu_host.require_slice(slice_, accelerator_type=place.accelerator_type, where="this host's TPU")
    if alone:
        os.environ["RENGA_SIMULATE"] = slice_.name
    host = cluster.join(slice_, limits=cluster.limits(experiment.health))
    saved_steps.select_together(found.run_dir, step=args.step, every=args.all_steps)  # errors before data is read
    if host.is_zero:
        for note in found.config.notes:
            print(f"note: {note}")
        if alone:
            print(f"no TPU here: the CPU simulates the {slice_.counted} of {slice_.name}", flush=True)
    _evaluate(args, found, experiment, asked, host)
    return 0


def _other(args: argparse.Namespace) -> types.ModuleType | None:
    uses = {asking: own for flags_ in _OTHERS.values() for asking, own in flags_.items()}
    asked = [name for name in uses if _is_given(args, name)]
    if len(asked) > 1:
        raise UserError(f"give one of {', '.join(map(_flag, asked))} at a time")
    if asked and args.by_position:
        raise UserError(f"--by-position does not go with {_flag(asked[0])}: leave one out")
    used = [name for asking in asked for name in uses[asking]]
    given = {name for own in uses.values() for name in own if _is_given(args, name)}
    if wrong := sorted(given.difference(used)):
        belong = f"belong{'s' if len(wrong) == 1 else ''} to"
        homes = " or ".join(_flag(asking) for asking, own in uses.items() if set(wrong) & set(own))
        instead = f", not to {_flag(asked[0])}" if asked else ""
        raise UserError(f"{', '.join(map(_flag, wrong))} {belong} {homes}{instead}")
    return next((other for other, flags_ in _OTHERS.items() if flags_.keys() & set(asked)), None)


def _is_given(args: argparse.Namespace, name: str) -> bool:
    return not (getattr(args, name) is None or getattr(args, name) is False)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _require_positions(experiment: Experiment) -> None:
    needed = {"positions", "weights"}
    if lacks := sorted(needed - experiment.task.spec(experiment.batch_size).keys()):
        raise UserError(
            f"--by-position: rows of {type(experiment.task).__name__} have no {' and no '.join(lacks)}; expected a "
            "task of text, such as text.files"
        )


def _positions(task: Task) -> Sequence[range]:
    whole = task.whole if can(task, SplitsRows) else task  # positions count through all chunks of a row
    return evaluation.position_ranges(row_length(whole.spec(whole.num_streams)))


def _judge(experiment: Experiment) -> AnswerJudge | None:
    return experiment.task.judge() if can(experiment.task, Judges) else None


def _simulate(args: argparse.Namespace, found: SavedRun, experiment: Experiment, slice_: slices.Slice) -> int:
    # Checked here for one error, instead of one per host: a missing checkpoint, a wrong layout.
    saved_steps.select(found.run_dir, step=args.step, every=args.all_steps)
    program = experiment.bind(mesh.topology_devices(slice_))
    host_memory.require_simulated(report.totals(program).everything * slice_.devices, slice_name=slice_.name)
    return simulated_hosts.evaluate(args, slice_)


def _evaluate(args: argparse.Namespace, found: SavedRun, experiment: Experiment, asked: HeldOut, host: Host) -> None:
    run = prepared_run.prepare_run(
        experiment,
        config=found.config,
        revision=versions.git_revision(),
        run_dir=found.run_dir,
        last_step=experiment.total_steps,
        host=host,
    )
    positions = _positions(experiment.task) if args.by_position else ()
    results, removed = score(run, asked, step=args.step, all_steps=args.all_steps, positions=positions)
    if host.is_zero:
        _show(args, results, removed)
    distributed.barrier("evaluate/end")


def score(
    run: Run,
    asked: HeldOut,
    *,
    step: int | None = None,
    all_steps: bool = False,
    positions: Sequence[range] = (),
) -> tuple[Scores, Sequence[int]]:
    """Scores checkpoints of a prepared run on held-out rows.

    Args:
      run: the run.
      asked: which held-out rows to score.
      step: the step of the checkpoint; None: the newest.
      all_steps: whether to score all checkpoints.
      positions: ranges of positions in a document, by which the loss is computed, too.

    Returns:
      The scores, and the steps of checkpoints that were removed before they were read.

    Raises:
      UserError: all checkpoints to score were removed before they were read.
    """
    experiment = run.experiment
    judge, about = _judge(experiment), {"evaluated_on": asked.describe(), "slice": experiment.slice}
    about |= {"strategy": experiment.strategy.name, "git_revision": run.meta["git_revision"]}
    if judge:
        scoring.require_answers(run.program, judge)
    # A run that is training may have saved and removed checkpoints while the data was read.
    steps = saved_steps.select_together(run.run_dir, step=step, every=all_steps)
    if run.host.is_zero:
        print(f"{run.run_dir}: checkpoint {', '.join(map(str, steps))} on {about['evaluated_on']}", flush=True)
    results = Scores(run.run_dir, about, judge, cumulative=all_steps, positions=positions)
    keep = run.experiment.checkpointing.keep_checkpoints
    checkpoints = Checkpoints(run.checkpoint_dir, keep=keep, read_only=True, origin=run.origin)
    options = {"layout": run.program.partitioner.data_layout(asked.batch_size), "data": run.meta["data"]}
    removed = [each for each in steps if not results.evaluate(run.program, checkpoints, each, asked, **options)]
    checkpoints.close()
    if removed == steps:
        raise UserError(
            f"every checkpoint to evaluate ({', '.join(map(str, steps))}) was removed meanwhile: the run is still "
            f"training and keeps its latest {keep} (KEEP_CHECKPOINTS). Evaluate again, without --step"
        )
    return results, removed


def _show(args: argparse.Namespace, results: Scores, removed: Sequence[int]) -> None:
    for step in removed:
        print(f"note: the checkpoint of step {step} was removed before it was read and is skipped")
    _show_tables(results)
    if other := [f"{found['step']:,}" for found in results.checkpoints if not found["same_data_as_in_training"]]:
        were = f"checkpoint {other[0]} was" if len(other) == 1 else f"checkpoints {', '.join(other)} were"
        print(f"note: {were} trained on other data than the data whose held-out rows were evaluated")
    written = results.files
    if args.submission:
        paths.write_text_atomically(args.submission, results.submission())
        written.append(f"{args.submission}: two attempts per test, from the votes of {results.of}")
    print("\n".join(written), flush=True)
