"""`launch/run evaluate --lm-eval` and `--task`: scores a run or a published model on benchmarks.

Unlike the evaluation on a run's own held-out data, it runs in one process, like `launch/run generate`.
"""

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from core.errors import UserError
from core.files import paths
from launch import flags, loaded_model, terminal
from launch.experiments import lm_eval_tasks, text_scores
from launch.experiments.text_scores import TextScores

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
    """Finds the tasks, loads the model, computes the scores, and prints them."""
    limit = require_benchmark(args)
    tasks = lm_eval_tasks.find(args.lm_eval, folder=args.lm_eval_path) if args.lm_eval is not None else None
    scores = load(args, check=functools.partial(_require_metrics, args.task))
    if tasks is not None:
        found = lm_eval_tasks.evaluate(tasks, scores, limit=limit)
    else:
        found = seqio_metrics(args.task, scores, limit=limit)
    _show(found)
    write(args, scores, {"tasks": found})
    return 0


def require_benchmark(args: argparse.Namespace) -> int | None:
    """Checks that no flag is of a run's own data; returns the number of examples to score, None for all."""
    if args.all_steps or args.submission:
        raise UserError("--all-steps and --submission are for the run's own held-out data, not for benchmarks")
    return args.num_examples if isinstance(args.num_examples, int) else None


def load(args: argparse.Namespace, **options: Any) -> TextScores:
    """Loads the model that the arguments name, and prints where it is from."""
    loaded_model.choose_devices(args.slice, is_simulated=args.simulate)
    name = args.run_dir if args.step is None else f"{args.run_dir}@{args.step}"
    bindings = [*(args.gin or ()), *([f"import {args.module}"] if args.module else [])]
    scores = TextScores(loaded_model.load(name, slice_name=args.slice, bindings=bindings, **options))
    print(scores.model.where)
    return scores


def write(args: argparse.Namespace, scores: TextScores, found: Mapping[str, Any]) -> None:
    """Writes the result to the file of --json, if it is given."""
    if args.json:
        text = json.dumps({"model": scores.model.where, **found}, indent=1)
        paths.write_text_atomically(paths.resolve(args.json), text + "\n")


def seqio_metrics(name: str, scores: TextScores, *, limit: int | None) -> dict[str, dict[str, float]]:
    """Returns the metrics of a registered task or mixture of seqio; see `seqio_tasks.evaluate`."""
    from tasks.text import seqio_tasks

    vocabulary = scores.model.vocabulary
    if not seqio_tasks.has_ids_of(name, vocabulary):
        raise UserError(
            f"--task {name}: its vocabulary is not that of {scores.model.where}; expected a model that was trained "
            "with the same one"
        )

    def score(pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        return [one.log_likelihood for one in scores.likelihoods(pairs)]

    def predict(prompts: Sequence[list[int]], most: int) -> list[list[int]]:
        batches = scores.model.batches(prompts, rows=text_scores.ROWS, max_tokens=most)
        return [one.ids for batch in batches for one in batch]

    return seqio_tasks.evaluate(name, most=limit, score=score, predict=predict)


def _require_metrics(name: str | None) -> None:
    """Checks that a registered task or mixture of seqio, if one is named, has metrics that can be computed."""
    if name is not None:
        from tasks.text import seqio_tasks

        seqio_tasks.require_metrics(name)


def _show(found: Mapping[str, Mapping[str, float]]) -> None:
    table = Table("task", "metric", box=box.SIMPLE)
    table.add_column("score", justify="right")
    table.add_column("standard error", justify="right")
    for task, metrics in found.items():
        for name, value in metrics.items():
            if not name.split(",")[0].endswith(_ERROR):
                error = metrics.get(_error_name(name))
                table.add_row(task, name, f"{value:.4f}", "" if error is None else f"{error:.4f}")
    terminal.console(120).print(table)


def _error_name(metric: str) -> str:
    """Returns the name of the standard error of `acc` or, with a filter of answers, `acc,strict`."""
    name, comma, answers = metric.partition(",")
    return f"{name}{_ERROR}{comma}{answers}"
