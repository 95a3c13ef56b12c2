"""`launch/run evaluate --humaneval`: lets a model write programs, which unit tests score."""

import argparse
from collections.abc import Sequence
from typing import Any

from core.errors import UserError
from launch import flags
from launch.experiments import benchmarks
from launch.experiments.text_scores import TextScores
from parallel.generation.sampling import GREEDY, Sampling
from tasks.code import humaneval, sandbox
from tasks.code.humaneval import Problem

EVALUATION = {"humaneval": ("samples", "temperature", "allow_code", "json")}
EXAMPLE = "launch/run evaluate smollm2 --humaneval HumanEval.jsonl --samples 10 --allow-code"
USUAL_TEMPERATURE = 0.8  # sampling temperature for several completions, as in the HumanEval paper


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this evaluation."""
    own = parser.add_argument_group("programs that a language model writes")
    own.add_argument("--humaneval", metavar="FILE", help="problems in HumanEval's format: pass@k by unit tests")
    own.add_argument(
        "--samples", metavar="N", type=flags.at_least(1), help="completions of each problem (default: 1, greedy)"
    )
    own.add_argument(
        "--temperature", metavar="T", type=flags.positive, help="temperature of several samples (default: 0.8)"
    )
    own.add_argument(
        "--allow-code", action="store_true", help="run code that the model wrote, confined (required by --humaneval)"
    )


def run(args: argparse.Namespace) -> int:
    """Prints pass@k of the programs that the model writes; --json writes the completions.

    Raises UserError if options are missing or contradictory.
    """
    limit = benchmarks.require_benchmark(args)
    if args.temperature is not None and args.samples in (None, 1):
        raise UserError("--temperature is of several samples, and one sample is greedy: give --samples, too")
    problems = humaneval.read(args.humaneval, most=limit)
    if not args.allow_code:
        raise UserError(
            "--humaneval runs programs that the model writes, each in a process that cannot read or write files, start "
            "processes or use the network: give --allow-code to run them"
        )
    scores = benchmarks.load(args)
    temperature = args.temperature or USUAL_TEMPERATURE
    found = solve(problems, scores, samples=args.samples or 1, temperature=temperature)
    print(found["evaluated_on"], *(f"pass@{k} {value:.4f}" for k, value in found["pass_at"].items()), sep="; ")
    benchmarks.write(args, scores, found)
    return 0


def solve(problems: Sequence[Problem], scores: TextScores, *, samples: int, temperature: float) -> dict[str, Any]:
    """Lets the model complete each problem, and runs the programs' unit tests.

    Args:
      problems: the problems.
      scores: the model.
      samples: completions per problem; 1: one greedy completion.
      temperature: sampling temperature of several completions.

    Returns:
      JSON values: `evaluated_on`, a description; `pass_at`, pass@k by k; `samples`, the completions with their
        outcomes.
    """
    sandbox.require_confinement()
    prompts = [problem.prompt for problem in problems for _ in range(samples)]
    sampling = GREEDY if samples == 1 else Sampling(temperature, 0, 0.95)
    most = scores.model.generator.max_positions
    tokens = humaneval.MAX_TOKENS if most is None else min(humaneval.MAX_TOKENS, most // 2)
    completions = scores.continued(prompts, until=humaneval.STOPS, max_tokens=tokens, sampling=sampling)
    return humaneval.score(problems, completions)
