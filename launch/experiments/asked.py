"""Lets a run's model answer questions about images, to evaluate the patches that it chose."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from core.errors import UserError
from launch import loaded_model
from launch.experiments import saved_run
from launch.loaded_model import LoadedModel
from models.vision.model import VisionLanguageModel
from tasks.vision.image_questions import ImageQuestions
from tasks.vision.question_lines import Question


class Answered(NamedTuple):
    """The answer of the model to one question, and the image patches that it chose.

    Attributes:
      question: the question.
      row: arrays of the question's row in a batch, by name.
      chosen: [N] bool, whether each of the image's N patches was chosen.
      ids: [T], the most likely next id at each position, given the row's own ids up to there.
      is_right: whether the answer is right.
    """

    question: Question
    row: Mapping[str, np.ndarray]
    chosen: np.ndarray
    ids: np.ndarray
    is_right: bool


class Asked(NamedTuple):
    """A run with its loaded model."""

    run_dir: str
    loaded: LoadedModel
    task: ImageQuestions
    batch_size: int

    def answers(self, questions: Sequence[Question]) -> Iterator[Answered]:
        """Yields the answers to questions, in their order."""
        model: Any = self.loaded.model
        program, size = self.loaded.program, self.batch_size
        layout = program.partitioner.data_layout(size)
        with program.partitioner.tracing():
            evaluate = jax.jit(model.evaluate)
            for first in range(0, len(questions), size):
                asked = questions[first : first + size]
                rows = [self.task.row(question) for question in asked]
                padded = [rows[min(i, len(rows) - 1)] for i in layout.rows]
                batch = program.put({name: np.stack([row[name] for row in padded]) for name in rows[0]})
                extras = jax.device_get(evaluate(self.loaded.params, jax.random.key(0), batch).extras)
                found = (extras["chosen"] > 0, extras["answers"], extras["right"] > 0)
                for question, row, chosen, ids, right in zip(asked, rows, *found, strict=False):
                    yield Answered(question, row, chosen, ids, bool(right))


def opened(args: argparse.Namespace, flag: str) -> Asked:
    """Loads the run that the arguments of an evaluation name.

    `flag`: what asked for the evaluation, such as "--relevance"; errors name it.
    """
    if args.all_steps or args.submission or args.simulate:
        raise UserError(
            f"--all-steps, --submission and --simulate do not go with {flag}, which runs in one process: leave them out"
        )
    found = saved_run.read_step(args.run_dir, step=args.step, bindings=args.gin, slice_name=args.slice)
    experiment = found.config.build().spans()[-1].experiment
    loaded_model.choose_devices(experiment.slice, is_simulated=False)
    if not isinstance(experiment.model, VisionLanguageModel) or not isinstance(experiment.task, ImageQuestions):
        raise UserError(
            f"{flag}: {args.run_dir} is a run of {type(experiment.model).__name__} on "
            f"{type(experiment.task).__name__}; expected a VisionLanguageModel and vision.questions"
        )
    if problems := experiment.data_problems(prepared=False):
        raise UserError("\n".join(problems))
    name = args.run_dir if args.step is None else f"{args.run_dir}@{args.step}"
    loaded = loaded_model.load(name, slice_name=args.slice, bindings=args.gin)
    experiment.task.prepare(found.run_dir, is_host_zero=False)
    return Asked(found.run_dir, loaded, experiment.task, experiment.batch_size)
