"""Scores a model on HumanEval: how many problems it solves by writing a function that passes unit tests.

Chen et al. 2021, "Evaluating Large Language Models Trained on Code". The model continues the beginning of a function.
The continuation is cut before the first of `STOPS`, and the problem's tests run in `sandbox`.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from core import units
from core.errors import UserError
from core.files import paths
from tasks.code import sandbox

STOPS = ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif")
MAX_TOKENS = 512
KS = (1, 10, 100)


class Problem(NamedTuple):
    """A problem in the format of HumanEval.

    Attributes:
      prompt: the beginning of a function.
      test: code that defines `check(function)`.
      entry_point: name of the function.
    """

    name: str
    prompt: str
    test: str
    entry_point: str

    def program(self, completion: str) -> str:
        """Returns a program that runs the tests on a completion."""
        return f"{self.prompt}{completion}\n{self.test}\ncheck({self.entry_point})\n"


def read(file: str, *, most: int | None = None) -> list[Problem]:
    """Reads problems from JSON lines with task_id, prompt, test and entry_point: the first `most`, or all if None.

    Raises UserError if the file is missing, malformed or without problems.
    """
    path = paths.resolve(file)
    if not path.is_file():
        raise UserError(f"--humaneval {file}: no such file; expected JSON lines in the format of HumanEval")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--humaneval {file}: not text in UTF-8 ({error}); if it is compressed, unpack it first"
        ) from None
    found: list[Problem] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and (most is None or len(found) < most):
            found.append(_problem(line, f"{file}, line {number}"))
    if not found:
        raise UserError(f"--humaneval {file} has no problems")
    return found


def _problem(line: str, where: str) -> Problem:
    fields = ("task_id", "prompt", "test", "entry_point")
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: {error}") from error
    wrong = [name for name in fields if not isinstance(entry, dict) or not isinstance(entry.get(name), str)]
    if wrong:
        raise UserError(f"{where}: {', '.join(wrong)} is missing or no text; expected {', '.join(fields)}")
    return Problem(*(entry[name] for name in fields))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns an unbiased estimate of the probability that k samples contain a correct one.

    1 - C(n - c, k) / C(n, k)     with c correct ones of n samples; equation 1 of the paper
    """
    assert 0 <= correct <= samples >= k > 0
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def score(problems: Sequence[Problem], completions: Sequence[str]) -> dict[str, Any]:
    """Runs the problems' tests on completions; returns a description, pass@k, and the outcomes.

    Args:
      problems: P problems, at least one.
      completions: P * n texts, first the n completions of the first problem.
    """
    samples = len(completions) // len(problems)
    owners = [problem for problem in problems for _ in range(samples)]
    programs = [problem.program(text) for problem, text in zip(owners, completions, strict=True)]
    outcomes = sandbox.run_all(programs)
    correct = [sum(o.passed for o in outcomes[i * samples : (i + 1) * samples]) for i in range(len(problems))]
    ks = [k for k in KS if k <= samples]
    return {
        "evaluated_on": f"{units.counted(len(problems), 'problem')}, {units.counted(samples, 'sample')} each",
        "pass_at": {k: sum(pass_at_k(samples, c, k) for c in correct) / len(problems) for k in ks},
        "samples": [
            {"task_id": owner.name, "completion": text, "passed": outcome.passed, "why": outcome.why}
            for owner, text, outcome in zip(owners, completions, outcomes, strict=True)
        ],
    }
