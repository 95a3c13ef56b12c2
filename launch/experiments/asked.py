"""Lets a run's model answer questions about images, to evaluate the patches that it chose."""

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from core import units
from core.checkpoints import steps
from core.errors import UserError
from launch import loaded_model
from launch.experiments import saved_run
from launch.loaded_model import LoadedModel
from models.vision.model import VisionLanguageModel
from tasks.vision.image_questions import BrokenImage, ImageQuestions
from tasks.vision.question_lines import Question


class Answered(NamedTuple):
    """The answer of the model to one question, and the image patches that it chose.

    Attributes:
      question: the question.
      row: arrays of the question's row in a batch, by name.
      chosen: [N] bool, whether each of the image's N patches was chosen.
      ids: [T], the most likely next id at each position, given the row's own ids up to there.
      is_right: whether the answer is right.
      covered: share of the image's side that its patches cover; below 1 if the tower leaves out the edge.
    """

    question: Question
    row: Mapping[str, np.ndarray]
    chosen: np.ndarray
    ids: np.ndarray
    is_right: bool
    covered: float = 1.0


class Asked(NamedTuple):
    """A run with its loaded model."""

    run_dir: str
    loaded: LoadedModel
    task: ImageQuestions
    batch_size: int

    def answers(self, questions: Sequence[Question]) -> Iterator[Answered]:
        """Yields the answers to questions, in their order.

        Questions whose images cannot be read are left out, and counted, if the task skips them. Raises UserError if
        none is left.
        """
        model: Any = self.loaded.model
        vision, rows = model.vision, self._rows(questions)
        covered = vision.side * vision.patch_size / vision.image_size
        program, size = self.loaded.program, self.batch_size
        layout = program.partitioner.data_layout(size)
        with program.partitioner.tracing():
            evaluate = jax.jit(model.evaluate)
            while asked := list(itertools.islice(rows, size)):
                padded = [asked[min(i, len(asked) - 1)][1] for i in layout.rows]
                batch = program.put({name: np.stack([row[name] for row in padded]) for name in padded[0]})
                extras = jax.device_get(evaluate(self.loaded.params, jax.random.key(0), batch).extras)
                found = (extras["chosen"] > 0, extras["answers"], extras["right"] > 0)
                for (question, row), chosen, ids, right in zip(asked, *found, strict=False):
                    yield Answered(question, row, chosen, ids, bool(right), covered)

    def _rows(self, questions: Sequence[Question]) -> Iterator[tuple[Question, Mapping[str, np.ndarray]]]:
        left_out: list[BrokenImage] = []
        for question in questions:
            try:
                yield question, self.task.row(question)
            except BrokenImage as error:
                if self.task.broken == "refuse":
                    raise
                left_out.append(error)
        if left_out:
            print(f"left out: {units.counted(len(left_out), 'question')}; the last: {left_out[-1]}", file=sys.stderr)
        if len(left_out) == len(questions):
            raise UserError("no held-out question has an image that can be read")


def opened(args: argparse.Namespace, flag: str) -> Asked:
    """Loads the run that the arguments of an evaluation name.

    `flag`: what asked for the evaluation, such as "--relevance"; errors name it.
    """
    if args.all_steps or args.submission or args.simulate:
        raise UserError(
            f"--all-steps, --submission and --simulate do not go with {flag}, which runs in one process: leave them out"
        )
    found = saved_run.read_step(args.run_dir, step=args.step, bindings=args.gin, slice_name=args.slice)
    experiment = found.experiment()
    loaded_model.choose_devices(experiment.slice, is_simulated=False)
    if not isinstance(experiment.model, VisionLanguageModel) or not isinstance(experiment.task, ImageQuestions):
        raise UserError(
            f"{flag}: {args.run_dir} is a run of {type(experiment.model).__name__} on "
            f"{type(experiment.task).__name__}; expected a VisionLanguageModel and vision.questions"
        )
    if problems := experiment.data_problems(prepared=False):
        raise UserError("\n".join(problems))
    name = args.run_dir if args.step is None else f"{args.run_dir}@{args.step}"
    loaded = loaded_model.load_step(experiment, steps.find(name), slice_name=args.slice)
    experiment.task.prepare(found.run_dir, is_host_zero=False)
    return Asked(found.run_dir, loaded, experiment.task, experiment.batch_size)
