"""`launch/run evaluate --lm-eval` and `--task`: scores a run or a published model on benchmarks."""

import argparse
import functools
import json
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from core import slices
from core.errors import UserError
from core.files import paths
from core.hosts import distributed
from core.training import metrics
from launch import environment, flags, loaded_model, terminal
from launch.experiments import lm_eval_tasks, simulated_hosts
from launch.experiments.text_scores import TextScores
from launch.hosts import cluster, tpu_host
from launch.loaded_model import LoadedModel
from parallel.compiled import host_memory, report

EVALUATION = {"lm_eval": ("lm_eval_path", "json"), "task": ("json", "module")}
EXAMPLE = "launch/run evaluate smollm2 --lm-eval arc_easy,hellaswag --num-examples 200"
_ERROR = "_stderr"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of these evaluations."""
    own = parser.add_argument_group("benchmarks of language models (RUN may be the folder of a published model)")
    own.add_argument("--lm-eval", metavar="TASK[,TASK]", help="score on tasks of the library lm_eval")
    own.add_argument("--lm-eval-path", metavar="DIR", help="a folder of further tasks, as YAML files")
    help_ = "metrics of a registered seqio task or mixture on its validation split"
    own.add_argument("--task", metavar="NAME", help=help_)
    own.add_argument("--module", metavar="MODULE", help='the module that registers it, as --gin "import MODULE"')
    flags.add(own, "--json")


def run(args: argparse.Namespace) -> int:
    """Computes the scores and prints them; --json also writes them."""
    limit = require_benchmark(args)
    tasks = lm_eval_tasks.find(args.lm_eval, folder=args.lm_eval_path) if args.lm_eval is not None else None
    if args.task is not None and args.slice and slices.get(args.slice).hosts > 1:
        if args.simulate:
            return simulated_hosts.evaluate(args, slices.get(args.slice))
        if environment.read("RENGA_SIMULATE") or tpu_host.look().on_tpu_host:
            cluster.join(slices.get(args.slice))
    scores = load(args, check=functools.partial(_require_metrics, args.task))
    if tasks is not None:
        found = lm_eval_tasks.evaluate(tasks, scores, limit=limit)
    else:
        found = seqio_metrics(args.task, scores.model, limit=limit)
    if distributed.is_host_zero():
        _show(found)
        write(args, scores, {"tasks": found})
    distributed.barrier("evaluate/end")
    return 0


def require_benchmark(args: argparse.Namespace) -> int | None:
    """Returns the number of examples to score; None: all. Raises UserError if options of held-out data are given."""
    if args.all_steps or args.submission:
        raise UserError(
            "--all-steps and --submission are for the run's own held-out data, not for benchmarks: leave them out"
        )
    return args.num_examples if isinstance(args.num_examples, int) else None


def load(args: argparse.Namespace, **options: Any) -> TextScores:
    """Loads the model that the arguments name, and prints where it was found.

    `options`: further arguments of `loaded_model.load`.
    """
    loaded_model.choose_devices(args.slice, is_simulated=args.simulate)
    name = args.run_dir if args.step is None else f"{args.run_dir}@{args.step}"
    bindings = [*(args.gin or ()), *([f"import {args.module}"] if args.module else [])]
    options |= {"slice_name": args.slice, "bindings": bindings, "check_model": _require_memory}
    scores = TextScores(loaded_model.load(name, **options))
    if distributed.is_host_zero():
        print(scores.model.where)
    return scores


def write(args: argparse.Namespace, scores: TextScores, found: Mapping[str, Any]) -> None:
    """Writes the result to the file of --json, if it is given."""
    if args.json:
        text = json.dumps(metrics.finite({"model": scores.model.where, **found}), indent=1, allow_nan=False)
        paths.write_text_atomically(paths.resolve(args.json), text + "\n")


def seqio_metrics(name: str, model: LoadedModel, *, limit: int | None) -> dict[str, dict[str, float]]:
    """Returns the metrics of a registered seqio task or mixture, by task and metric.

    All hosts must call it; host 0 reads the data. `limit`: most examples of each task; None: all. Raises UserError if
    the model lacks the task's vocabulary.
    """
    from launch.runs.task_metrics import WAIT_SECONDS, Answers
    from tasks.text import seqio_metrics, seqio_tasks

    vocabulary, measured = model.vocabulary, seqio_metrics.Measured(name, most=limit)
    if vocabulary is None:
        raise UserError(
            f"{model.where} has no vocabulary, so it cannot be evaluated on texts: expected a model of text"
        )

    def questions() -> dict[str, Any]:
        if not seqio_tasks.has_ids_of(name, vocabulary):
            raise UserError(
                f"--task {name}: its vocabulary is not that of {model.where}; expected a model that was trained with "
                "the same one"
            )
        return measured.questions()

    answers = Answers(model.program, model.params, stop_ids=model.stop_ids, num_ids=vocabulary.size)
    asked = distributed.decided_by_host_zero(questions, timeout_seconds=WAIT_SECONDS)
    outputs = seqio_metrics.answered(asked, score=answers.score, predict=answers.predict)
    return distributed.decided_by_host_zero(lambda: measured.computed(outputs), timeout_seconds=WAIT_SECONDS)


def _require_metrics(name: str | None) -> None:
    if name is not None:
        from tasks.text import seqio_metrics

        distributed.decided_by_host_zero(lambda: seqio_metrics.require_metrics(name) and None)


def _require_memory(model: LoadedModel) -> None:
    at = model.program.partitioner
    if at.mesh.devices.flat[0].platform == "cpu":
        needed = report.totals(model.program).params * at.slice.devices
        name = at.slice.name
        distributed.decided_by_host_zero(lambda: host_memory.require_simulated(needed, slice_name=name))


def _show(found: Mapping[str, Mapping[str, float]]) -> None:
    table = Table("task", "metric", box=box.SIMPLE)
    table.add_column("score", justify="right")
    table.add_column("standard error", justify="right")
    for task, figures in found.items():
        for name, value in figures.items():
            if not name.split(",")[0].endswith(_ERROR):
                error = figures.get(_error_name(name))
                table.add_row(task, name, f"{value:.4f}", "" if error is None else f"{error:.4f}")
    terminal.console(120).print(table)


def _error_name(metric: str) -> str:
    name, comma, answers = metric.partition(",")
    return f"{name}{_ERROR}{comma}{answers}"
