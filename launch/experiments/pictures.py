"""`launch/run evaluate RUN --pictures`: draws which patches of images a model chose for questions.

Each row of the sheet is one image, with a panel for each question; patches that were not chosen are pale.
"""

import argparse
import io
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from core.errors import UserError
from core.files import paths
from launch.experiments import asked
from launch.experiments.asked import Answered, Asked
from tasks.vision.question_lines import Question

EVALUATION = {"pictures": ()}
EXAMPLE = "launch/run evaluate runs/arrcoc/easy_vqa-v4-8 --pictures"
IMAGES, QUESTIONS = 6, 4  # rows of the sheet, and panels of a row
SIDE, CAPTION, GAP = 192, 64, 12  # pixels of a panel
PALE = 0.75  # share of white in a patch that was not chosen
_LETTERS, _LINES = 31, 4  # characters of a line, lines of a caption


class Panel(NamedTuple):
    """One question about an image.

    Attributes:
      image: [H, W, 3] uint8.
      chosen: [N] bool, whether each of the image's N patches was chosen.
      lines: lines of text below the image.
    """

    image: np.ndarray
    chosen: np.ndarray
    lines: Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the argument of this evaluation."""
    help_ = "write a PNG of the patches that a selector chose for questions about the same images"
    parser.add_argument("--pictures", action="store_true", help=help_)


def run(args: argparse.Namespace) -> int:
    """Writes the sheet to RUN/evaluation/pictures.png. Raises UserError if --num-examples is given."""
    if args.num_examples:
        raise UserError("--pictures chooses its own examples: leave --num-examples out")
    found = asked.opened(args, "--pictures")
    panels = answered(found, list(same_image(found.task.questions("validation"))))
    file = paths.resolve(found.run_dir) / "evaluation" / "pictures.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(sheet(panels))
    print(f"{found.loaded.where}: {file}")
    return 0


def same_image(questions: Sequence[Question]) -> Iterator[list[Question]]:
    """Yields at most QUESTIONS questions about each of the first IMAGES images.

    It prefers questions about different cells of the image, and of different kinds.
    """
    by_image: dict[str, list[Question]] = {}
    for question in questions:
        by_image.setdefault(question.image, []).append(question)
    for group in list(by_image.values())[:IMAGES]:
        left, taken = list(group), list[Question]()
        while left and len(taken) < QUESTIONS:
            taken.append(min(left, key=lambda one: _likeness(one, taken)))
            left.remove(taken[-1])
        yield taken


def _likeness(question: Question, others: Sequence[Question]) -> tuple[int, int]:
    same_cell = sum(question.cells[:1] == other.cells[:1] for other in others)
    return same_cell, sum(question.kind == other.kind for other in others)


def answered(found: Asked, groups: Sequence[Sequence[Question]]) -> list[list[Panel]]:
    """Answers groups of questions; returns a panel for each question that was answered, in the same groups."""

    def panel(of: Answered) -> Panel:
        size = round(of.covered * len(of.row["images"]))
        ids = of.ids[of.row["weights"] > 0]
        said = words.decode(ids[ids < words.size]).strip()  # the embedding may have more rows than the vocabulary
        answer = textwrap.shorten(f"{said} ({of.question.answer})", _LETTERS, placeholder="…")
        lines = textwrap.wrap(of.question.question, _LETTERS, max_lines=_LINES - 1, placeholder="…")
        return Panel(of.row["images"][:size, :size], of.chosen, [*lines, answer])

    words = found.task.vocabulary
    answers = found.answers([question for group in groups for question in group])
    panels = {answer.question: panel(answer) for answer in answers}
    rows = [[panels[question] for question in group if question in panels] for group in groups]
    return [row for row in rows if row]


def sheet(rows: Sequence[Sequence[Panel]]) -> bytes:
    """Draws rows of panels; returns the bytes of a PNG."""
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
    """Returns the image, [H, W, 3] uint8, with the patches that were not chosen made pale.

    Image and patches are square, and the patches cover the image.
    """
    side = round(len(panel.chosen) ** 0.5)
    patch = len(panel.image) // side
    seen = np.kron(panel.chosen.reshape(side, side), np.ones((patch, patch), bool))[..., None]
    pale = panel.image * (1 - PALE) + 255 * PALE
    return np.where(seen, panel.image, pale).astype(np.uint8)
