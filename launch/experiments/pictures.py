"""`launch/run evaluate RUN --pictures`: shows which patches of images a selector chose for questions about them.

A row of the sheet has one image, with a panel for each of several questions about it: patches that were not chosen are
pale. Like the benchmarks, it runs in one process.
"""

import argparse
import io
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from core.errors import UserError
from core.files import paths
from launch import loaded_model
from launch.experiments import saved_run
from launch.loaded_model import LoadedModel
from models.vision.model import VisionLanguageModel
from tasks.vision.image_questions import ImageQuestions, Question

EVALUATION = {"pictures": ()}
EXAMPLE = "launch/run evaluate runs/arrcoc/easy_vqa-v4-8 --pictures"
IMAGES, QUESTIONS = 6, 4  # of a sheet
SIDE, CAPTION, GAP = 192, 64, 12  # pixels of a panel
PALE = 0.75  # share of white in a patch that was not chosen
_LETTERS, _LINES = 31, 4  # of a line of text, of a caption


class Panel(NamedTuple):
    """One question about an image.

    Attributes:
      image: [H, W, 3], uint8.
      chosen: [N], whether each patch was chosen.
      lines: what is written below.
    """

    image: np.ndarray
    chosen: np.ndarray
    lines: Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the argument of this evaluation."""
    help_ = "write a PNG of the patches that a selector chose for questions about the same images"
    parser.add_argument("--pictures", action="store_true", help=help_)


def run(args: argparse.Namespace) -> int:
    """Writes the sheet to the folder of the run."""
    if args.num_examples:
        raise UserError("--pictures does not use --num-examples")
    if args.all_steps or args.submission or args.simulate:
        raise UserError("--all-steps, --submission and --simulate do not go with --pictures, which runs in one process")
    found = saved_run.read_step(args.run_dir, step=args.step, bindings=args.gin, slice_name=args.slice)
    experiment = found.config.build().spans()[-1].experiment
    loaded_model.choose_devices(experiment.slice, is_simulated=False)
    if not isinstance(experiment.model, VisionLanguageModel) or not isinstance(experiment.task, ImageQuestions):
        raise UserError(
            f"--pictures: {args.run_dir} is a run of {type(experiment.model).__name__} on "
            f"{type(experiment.task).__name__}; expected a VisionLanguageModel and vision.questions"
        )
    if problems := experiment.data_problems(prepared=False):
        raise UserError("\n".join(problems))
    name = args.run_dir if args.step is None else f"{args.run_dir}@{args.step}"
    loaded = loaded_model.load(name, slice_name=args.slice, bindings=args.gin)
    experiment.task.prepare(found.run_dir, is_host_zero=False)
    groups = list(same_image(experiment.task.questions("validation")))
    panels = answered(loaded, experiment.task, experiment.batch_size, groups)
    file = paths.resolve(found.run_dir) / "evaluation" / "pictures.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(sheet(panels))
    print(f"{loaded.where}: {file}")
    return 0


def same_image(questions: Sequence[Question]) -> Iterator[list[Question]]:
    """Yields the first questions about each of the first images, of different kinds where there are."""
    by_image: dict[str, list[Question]] = {}
    for question in questions:
        by_image.setdefault(question.image, []).append(question)
    for group in list(by_image.values())[:IMAGES]:
        counts: dict[str, int] = {}
        order = []
        for question in group:
            order.append(counts.get(question.kind, 0))
            counts[question.kind] = order[-1] + 1
        yield [group[i] for i in np.argsort(order, kind="stable")[:QUESTIONS]]


def answered(
    loaded: LoadedModel, task: ImageQuestions, batch_size: int, groups: Sequence[Sequence[Question]]
) -> list[list[Panel]]:
    """Returns the panels of groups of questions, one for each question.

    Args:
      loaded: the model.
      task: makes the rows, and decodes the answers.
      batch_size: rows of a batch.
      groups: the questions.
    """
    model: Any = loaded.model
    every = [question for group in groups for question in group]
    layout, panels = loaded.program.partitioner.data_layout(batch_size), []
    with loaded.program.partitioner.tracing():
        evaluate = jax.jit(model.evaluate)
        for first in range(0, len(every), batch_size):
            rows = [task.row(question) for question in every[first : first + batch_size]]
            padded = [rows[min(i, len(rows) - 1)] for i in layout.rows]
            batch = loaded.program.put({name: np.stack([row[name] for row in padded]) for name in rows[0]})
            extras = jax.device_get(evaluate(loaded.params, jax.random.key(0), batch).extras)
            for i, row in enumerate(rows):
                said = task.vocabulary.decode(extras["answers"][i][row["weights"] > 0]).strip()
                question = every[first + i]
                answer = textwrap.shorten(f"{said} ({question.answer})", _LETTERS, placeholder="…")
                asked = textwrap.wrap(question.question, _LETTERS, max_lines=_LINES - 1, placeholder="…")
                lines = [*asked, answer]
                panels.append(Panel(row["images"], extras["chosen"][i] > 0, lines))
    found = iter(panels)
    return [[next(found) for _ in group] for group in groups]


def sheet(rows: Sequence[Sequence[Panel]]) -> bytes:
    """Returns the panels as a PNG, one row below another."""
    from PIL import Image, ImageDraw

    across, down = max(map(len, rows)), len(rows)
    width, height = GAP + across * (SIDE + GAP), GAP + down * (SIDE + CAPTION)
    page = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(page)
    for y, row in enumerate(rows):
        for x, panel in enumerate(row):
            left, top = GAP + x * (SIDE + GAP), GAP + y * (SIDE + CAPTION)
            page.paste(Image.fromarray(shaded(panel)).resize((SIDE, SIDE), Image.Resampling.NEAREST), (left, top))
            for number, line in enumerate(panel.lines):
                draw.text((left, top + SIDE + 4 + 13 * number), line, fill="black")
    stream = io.BytesIO()
    page.save(stream, "PNG")
    return stream.getvalue()


def shaded(panel: Panel) -> np.ndarray:
    """Returns the image with pale patches where none was chosen, [H, W, 3] uint8."""
    side = round(len(panel.chosen) ** 0.5)
    patch = len(panel.image) // side
    seen = np.kron(panel.chosen.reshape(side, side), np.ones((patch, patch), bool))[..., None]
    pale = panel.image * (1 - PALE) + 255 * PALE
    return np.where(seen, panel.image, pale).astype(np.uint8)
