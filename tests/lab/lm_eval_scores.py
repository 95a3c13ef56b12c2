"""`tests/run.sh lab lm_eval_scores`: scores a published model with lm_eval, beside lm_eval's own model of transformers.

Neither lm_eval nor transformers is among the requirements, so no test can do this. The tasks are small and local: one
for each kind of request.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.checkpoints import published_files
from core.errors import UserError
from launch import environment, terminal
from launch.experiments import lm_eval_tasks

HELP = (
    "score a published model on small tasks of lm_eval, and compare the scores with those of lm_eval's own `hf` model"
)
EXAMPLE = "tests/run.sh lab lm_eval_scores --folder smollm2 --python torch-environment/bin/python"
TASKS = environment.WORKSPACE / "tests" / "launch" / "experiments" / "lm_eval"
TOLERANCE = 1e-4  # relative: sums of float32 in another order differ by 8e-6 for SmolLM2
_NAMES = ("renga_choices", "renga_prose", "renga_sums")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the published model and the environment of transformers."""
    parser.add_argument("--folder", required=True, help="of a published model")
    parser.add_argument("--python", required=True, help="of an environment with lm_eval, torch and transformers")


def run(args: argparse.Namespace) -> int:
    """Scores both models in float32 on the CPU, and prints the scores; returns 1 if any differ."""
    if not published_files.is_published(args.folder):
        raise UserError(f"--folder {args.folder}: expected the folder of a published model, with config.json")
    if not (python := shutil.which(args.python)):
        raise UserError(f"--python {args.python}: there is no such program")
    os.environ["JAX_PLATFORMS"] = "cpu"
    folder = Path(args.folder).absolute()
    with contextlib.chdir(TASKS):  # lm_eval finds the data from there
        here, there = _here(folder), _there(Path(python).absolute(), folder)
    rows = compare(here, there)
    headings = ("task", "score", "here", "`hf`", "equal")
    terminal.console(100).print(terminal.markdown(headings, rows, text=headings[:2]))
    return 0 if all(row[-1] == "yes" for row in rows) else 1


def compare(here: Mapping[str, Mapping[str, float]], there: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Returns a row for each score: task, name, both scores, and whether they are equal but for rounding.

    Raises:
      UserError: the scores have different names.
    """
    rows = []
    for task in _NAMES:
        names = [{name for name in scores.get(task, {}) if "_stderr" not in name} for scores in (here, there)]
        if names[0] != names[1] or not names[0]:
            raise UserError(f"{task} has the scores {sorted(names[0])} here, and {sorted(names[1])} of the hf model")
        for name in sorted(names[0]):
            ours, theirs = here[task][name], there[task][name]
            is_equal = math.isclose(ours, theirs, rel_tol=TOLERANCE)
            rows.append([task, name, f"{ours:.7g}", f"{theirs:.7g}", "yes" if is_equal else "no"])
    return rows


def _here(folder: Path) -> dict[str, dict[str, float]]:
    from launch import loaded_model
    from launch.experiments.text_scores import TextScores

    tasks = lm_eval_tasks.find(",".join(_NAMES), folder=".")
    return lm_eval_tasks.evaluate(tasks, TextScores(loaded_model.load(str(folder), dtype="float32")), limit=None)


def _there(python: Path, folder: Path) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as out:
        command = [str(python), "-m", "lm_eval", "--model", "hf", "--tasks", ",".join(_NAMES), "--include_path", "."]
        command += ["--model_args", f"pretrained={folder},dtype=float32", "--device", "cpu", "--output_path", out]
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        if code := subprocess.run(command, env=own).returncode:
            raise UserError(f"--python {python}: lm_eval ended with exit code {code}; see the messages above")
        [file] = Path(out).rglob("results_*.json")
        results: dict[str, dict[str, Any]] = json.loads(file.read_text())["results"]
    return {task: lm_eval_tasks.numbers(scores) for task, scores in results.items()}
