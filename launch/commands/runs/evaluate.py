"""`launch/run evaluate`: how good a run's checkpoints are on held-out data, from its directory alone.

The one idea: the same command in three places. On a host of a TPU slice it is this host's process of the evaluation
(run it on every host); with --simulate it plays the hosts; elsewhere one process plays the slice on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from core import paths, slices, units
from core.errors import UserError
from launch import environment

if TYPE_CHECKING:
    from launch.evaluation.portion import Portion
    from launch.evaluation.results import Results
    from launch.evaluation.saved import Saved
    from launch.host import Host
    from launch.prepared_run import Run
    from tasks.puzzles.arc_voting import Judge

HELP = "score a run's checkpoints on held-out data: its means, and ARC by voting"
EXAMPLE = """launch/run evaluate runs/trm/sudoku4
  launch/run evaluate gs://BUCKET/runs/trm/sudoku --rows all          (on every host of the slice)
  launch/run evaluate runs/trm/arc1 --all-steps --submission submission.json --simulate --slice v4-8
  launch/run evaluate runs/gin/quickstart --step 100 --rows 512 --gin "STRATEGY = @strategies.data_parallel()\""""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what an evaluation takes."""
    parser.add_argument("run_dir", metavar="RUN", help="the directory of a run, local or gs://")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--step", metavar="N", type=int, help="of this checkpoint (default: the latest)")
    steps.add_argument("--all-steps", action="store_true", help="of every checkpoint; ARC also votes over all of them")
    parser.add_argument(
        "--rows", metavar="all|N", type=_rows, help="held-out rows (default: those of the run's own evaluations)"
    )
    parser.add_argument(
        "--submission", metavar="FILE", help="of ARC: write two attempts for every test, from all that is voted on"
    )
    parser.add_argument("--simulate", action="store_true", help="hosts as processes here, chips as CPU devices")
    parser.add_argument("--slice", metavar="SLICE", help="wins over the run's SLICE")
    parser.add_argument("--gin", metavar="BINDING", action="append", default=[], help="wins over the run's; repeatable")


def _rows(text: str) -> int | str:
    if text == "all" or (text.isdecimal() and int(text) > 0):
        return text if text == "all" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: expected all, or a number from 1 up")


def run(args: argparse.Namespace) -> int:
    """Finds the run, looks that all that was asked for can be had, and evaluates."""
    from launch.hosts import tpu_host

    played = environment.read("RENGA_SIMULATE")
    place = tpu_host.look()
    alone = not (args.simulate or played or place.on_tpu_host or environment.process_layout().count)
    if alone or args.simulate:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported
    from launch.evaluation import portion, saved
    from launch.hosts import cluster

    found = saved.read(args.run_dir, bindings=args.gin, slice_name=args.slice)
    asked = portion.portion(found.config.build(), rows=args.rows)
    if problems := asked.experiment.data_problems(prepared=False):
        raise UserError("\n".join(problems))
    if args.submission:
        _check_submission(args.submission, asked)
    slice_ = slices.get(asked.experiment.slice)
    if args.simulate:
        saved.chosen(found.run_dir, step=args.step, every=args.all_steps)  # refused once, here
        return _simulate(args, asked, run_dir=found.run_dir)
    if place.on_tpu_host and not played:
        tpu_host.require_slice(slice_, accelerator_type=place.accelerator_type, where="this host's TPU")
    if alone:
        os.environ["RENGA_SIMULATE"] = slice_.name
    host = cluster.join(slice_, limits=asked.experiment.limits)
    saved.agreed(found.run_dir, step=args.step, every=args.all_steps)  # refused before the data is read
    if host.is_zero:
        for note in found.config.notes:
            print(f"note: {note}")
        if alone:
            print(
                f"this machine has no TPU: its CPU plays the {units.counted(slice_.chips, 'chip')} of {slice_.name}",
                flush=True,
            )
    _evaluate(args, found, asked, host)
    return 0


def _check_submission(file: str, asked: Portion) -> None:
    """Raises ValueError where there is nothing to submit, or nowhere to write it."""
    if _judge(asked) is None:
        raise UserError(
            f"--submission {file}: this run's task has no attempts to submit; expected an ARC dataset "
            "(a folder with test_puzzles.json, as launch/run build arc makes one)"
        )
    paths.check_writable(paths.resolve(file).parent)


def _judge(asked: Portion) -> Judge | None:
    from core.types import Judges, can

    task = asked.experiment.task
    return task.judge() if can(task, Judges) else None


def _simulate(args: argparse.Namespace, asked: Portion, *, run_dir: str) -> int:
    from launch import host_memory
    from launch.hosts import simulate
    from parallel import mesh, report

    slice_ = slices.get(asked.experiment.slice)
    program = asked.experiment.bind(mesh.topology_devices(slice_))  # a layout that does not fit is refused once, here
    host_memory.require_simulated(report.totals(program).everything * slice_.chips, slice_name=slice_.name)
    command = [sys.executable, "-m", "launch", "evaluate", run_dir, "--slice", slice_.name]  # the hosts have another ~
    command += [word for binding in args.gin for word in ("--gin", binding)]
    command += ["--step", str(args.step)] * (args.step is not None) + ["--all-steps"] * args.all_steps
    command += ["--rows", str(args.rows)] * (args.rows is not None)
    command += ["--submission", os.fspath(paths.resolve(args.submission))] if args.submission else []
    logs = Path(run_dir) if not paths.is_remote(run_dir) else environment.WORKSPACE / "runs" / Path(run_dir).name
    print(
        f"Simulating {slice_.name}: {units.counted(slice_.hosts, 'host')} x "
        f"{units.counted(slice_.chips_per_host, 'chip')}; "
        f"logs in {logs}/logs"
    )
    sys.stdout.flush()
    return simulate.run(slice_, command=command, log_directory=logs / "logs")


def _evaluate(args: argparse.Namespace, found: Saved, asked: Portion, host: Host) -> None:
    """All hosts evaluate the same checkpoints; host 0 says what came of it."""
    from core import distributed
    from launch import training
    from launch.evaluation import measuring, saved
    from launch.evaluation.results import Results
    from launch.hosts import tpu_host

    revision = tpu_host.revision()
    run = training.ready(
        asked.experiment,
        config_text=found.config.text,
        revision=revision,
        run_dir=found.run_dir,
        last_step=asked.experiment.total_steps,
        host=host,
    )
    judge, about = _judge(asked), {"evaluated_on": asked.describe(), "slice": asked.experiment.slice}
    about |= {"strategy": asked.experiment.strategy.name, "git_revision": revision}
    if judge:
        measuring.require_answers(run.program)
    steps = saved.agreed(found.run_dir, step=args.step, every=args.all_steps)  # again: a run may have gone on
    if host.is_zero:
        print(f"{found.run_dir}: checkpoint {', '.join(map(str, steps))} on {about['evaluated_on']}", flush=True)
    results = _measured(run, steps, asked, Results(found.run_dir, about, judge, cumulative=args.all_steps))
    if host.is_zero:
        _report(args, results)
    distributed.barrier("evaluate/end")


def _measured(run: Run, steps: Sequence[int], asked: Portion, results: Results) -> Results:
    """With what came of each checkpoint, on host 0. Raises ValueError where all were removed before their turn."""
    from core.checkpoints.store import Checkpoints
    from launch.evaluation import measuring

    keep, read = run.experiment.keep_checkpoints, False
    checkpoints = Checkpoints(run.checkpoint_dir, keep=keep, read_only=True)
    for step in steps:
        measured = measuring.measure(run, checkpoints, step, portion=asked, judge=results.judge)
        read = read or measured is not None
        if measured and run.host.is_zero:
            results = results.with_step(measured)
        if measured is None and run.host.is_zero:
            print(f"note: the checkpoint of step {step} was removed before it was read; it is left out", flush=True)
    checkpoints.close()
    if not read:
        raise UserError(
            f"every checkpoint that was to be evaluated ({', '.join(map(str, steps))}) was removed meanwhile: the run "
            f"is still training and keeps its latest {keep} (KEEP_CHECKPOINTS). Evaluate again, without --step"
        )
    return results


def _report(args: argparse.Namespace, results: Results) -> None:
    results.show()
    if not all(found["same_data_as_in_training"] for found in results.checkpoints):
        print("note: the run was trained on other data than that of which this holds some out")
    written = results.files
    if args.submission:
        paths.write_text_atomically(args.submission, results.submission())
        written.append(f"{args.submission}: two attempts for every test, from the votes of {results.of}")
    print("\n".join(written), flush=True)
