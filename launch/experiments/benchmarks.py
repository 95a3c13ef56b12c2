"""`launch/run evaluate --lm-eval`, `--humaneval` and `--seqio`: scores a run or a published model on benchmarks.

Unlike the evaluation on a run's own held-out data, it runs in one process, like `launch/run generate`.
"""

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from core import paths
from core.errors import UserError
from launch import loaded_model, terminal
from launch.experiments import lm_eval_tasks, text_scores
from launch.experiments.text_scores import TextScores
from parallel.sampling import GREEDY, Sampling
from tasks.code import humaneval, sandbox
from tasks.code.humaneval import Problem

USUAL_TEMPERATURE = 0.8  # of several samples, as in the paper of HumanEval
_ERROR = "_stderr"


def run(args: argparse.Namespace) -> int:
    """Finds the tasks, loads the model, computes the scores, and prints them."""
    if args.all_steps or args.submission:
        raise UserError("--all-steps and --submission are for the run's own held-out data, not for benchmarks")
    _require_used(args)
    limit = args.num_examples if isinstance(args.num_examples, int) else None
    tasks = lm_eval_tasks.find(args.lm_eval, folder=args.lm_eval_path) if args.lm_eval is not None else None
    problems = _problems(args, limit) if args.humaneval is not None else []
    loaded_model.choose_devices(args.slice, is_simulated=args.simulate)
    name = args.run_dir if args.step is None else f"{args.run_dir}@{args.step}"
    check = functools.partial(_require_metrics, args.seqio)
    scores = TextScores(loaded_model.load(name, slice_name=args.slice, bindings=args.gin, check=check))
    print(scores.model.where)
    if tasks is not None:
        found: Mapping[str, Any] = {"tasks": lm_eval_tasks.evaluate(tasks, scores, limit=limit)}
        _show(found["tasks"])
    elif args.seqio is not None:
        found = {"tasks": seqio_metrics(args.seqio, scores, limit=limit)}
        _show(found["tasks"])
    else:
        sampling = {"samples": args.samples or 1, "temperature": args.temperature or USUAL_TEMPERATURE}
        found = solve(problems, scores, **sampling)
        print(found["evaluated_on"], *(f"pass@{k} {value:.4f}" for k, value in found["pass_at"].items()), sep="; ")
    if args.json:
        text = json.dumps({"model": scores.model.where, **found}, indent=1)
        paths.write_text_atomically(paths.resolve(args.json), text + "\n")
    return 0


def solve(problems: Sequence[Problem], scores: TextScores, *, samples: int, temperature: float) -> dict[str, Any]:
    """Lets the model complete each problem, once greedily or in several samples; returns `humaneval.score`."""
    sandbox.require_confinement()
    prompts = [problem.prompt for problem in problems for _ in range(samples)]
    sampling = GREEDY if samples == 1 else Sampling(temperature, 0, 0.95)
    most = scores.model.generator.max_positions
    tokens = humaneval.MAX_TOKENS if most is None else min(humaneval.MAX_TOKENS, most // 2)
    completions = scores.continued(prompts, until=humaneval.STOPS, max_tokens=tokens, sampling=sampling)
    return humaneval.score(problems, completions)


def seqio_metrics(name: str, scores: TextScores, *, limit: int | None) -> dict[str, dict[str, float]]:
    """Returns the metrics of a registered task or mixture of seqio; see `seqio_tasks.evaluate`."""
    from tasks import seqio_tasks

    vocabulary = scores.model.vocabulary
    if not seqio_tasks.has_ids_of(name, vocabulary):
        raise UserError(
            f"--seqio {name}: its vocabulary is not that of {scores.model.where}; expected a model that was trained "
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
        from tasks import seqio_tasks

        seqio_tasks.require_metrics(name)


def _require_used(args: argparse.Namespace) -> None:
    """Checks that every flag that was given is used."""
    if args.humaneval is not None:
        if args.lm_eval_path is not None:
            raise UserError("--lm-eval-path belongs to --lm-eval, not to --humaneval")
        if args.temperature is not None and args.samples in (None, 1):
            raise UserError("--temperature is of several samples, and one sample is greedy: give --samples, too")
        return
    if args.seqio is not None and args.lm_eval_path is not None:
        raise UserError("--lm-eval-path belongs to --lm-eval, not to --seqio")
    names = ("--samples", "--temperature", "--allow-code")
    if given := [name for name in names if getattr(args, name[2:].replace("-", "_"))]:
        raise UserError(
            f"{', '.join(given)}: of --humaneval, not of {'--lm-eval' if args.seqio is None else '--seqio'}, whose "
            "tasks say how texts are generated"
        )


def _problems(args: argparse.Namespace, limit: int | None) -> list[Problem]:
    problems = humaneval.read(args.humaneval, most=limit)
    if not args.allow_code:
        raise UserError(
            "--humaneval runs programs that the model writes, each in a process that cannot read or write files, start "
            "processes or use the network: give --allow-code to run them"
        )
    return problems


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
