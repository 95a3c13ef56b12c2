"""`launch/run evaluate RUN --relevance`: measures whether a model looks where questions point.

A selector chooses the patches of an image that the model reads. The data say which cells of an image each question is
about. The table shows, by kind of question, the share of right answers and the share of chosen patches in these cells.
For questions about different cells of one image, the mean share of common patches is printed, too.
"""

import argparse
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from rich.table import Table

from core import units
from core.errors import UserError
from launch import terminal
from launch.experiments import asked
from launch.experiments.asked import Answered

EVALUATION = {"relevance": ()}
EXAMPLE = "launch/run evaluate runs/arrcoc/mosaics-v5e-1 --relevance"
_WIDTH = 100  # columns without a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the argument of this evaluation."""
    help_ = "show the share of chosen patches in the cells that questions are about, and how choices overlap"
    parser.add_argument("--relevance", action="store_true", help=help_)


def run(args: argparse.Namespace) -> int:
    """Prints the table, and how choices for the same image overlap.

    Raises UserError if options, model or questions do not fit.
    """
    if args.num_examples:
        raise UserError("--relevance takes all questions: leave --num-examples out")
    found = asked.opened(args, "--relevance")
    prompts = found.task.prompts
    if prompts is not None and prompts.input.processor.crop is not None:
        raise UserError(
            f"--relevance: the image processor of {prompts.input.folder} cuts off the edges of images, to which `grid` "
            "and `cells` refer; expected a model that reads whole images"
        )
    questions = found.task.questions("validation")
    if missing := next((question for question in questions if not question.cells), None):
        raise UserError(f"{missing.where}: --relevance needs `grid` and `cells`, the cells that the question is about")
    answers = list(found.answers(questions))
    print(f"{found.loaded.where}: {units.counted(len(answers), 'question')}")
    terminal.console(_WIDTH).print(table(answers))
    shared = overlaps(answers)
    if len(shared):
        pairs = units.counted(len(shared), "pair")
        print(f"{pairs} of questions about other cells of the same image share {np.mean(shared):.1%} of their patches")
    return 0


def table(answers: Sequence[Answered]) -> Table:
    """Returns a table: a row for each kind of question and, if there are several, one for all."""
    found = Table("kind", "questions", "right", "chosen patches in the asked cells", "of all patches")
    kinds = sorted({answer.question.kind for answer in answers})
    for kind in [*kinds, *([""] if len(kinds) > 1 else [])]:
        own = [answer for answer in answers if answer.question.kind == kind or not kind]
        inside = [_inside(answer, answer.chosen) for answer in own]
        area = [_inside(answer, np.ones_like(answer.chosen)) for answer in own]
        shares = [np.mean([a.is_right for a in own]), np.mean(inside), np.mean(area)]
        found.add_row(kind or "all", f"{len(own):,}", *(f"{share:.1%}" for share in shares))
    return found


def _inside(answer: Answered, patches: np.ndarray) -> float:
    return share_inside(patches, answer.question.grid, answer.question.cells, covered=answer.covered)


def share_inside(chosen: np.ndarray, grid: int, cells: Iterable[int], *, covered: float = 1.0) -> float:
    """Returns the share of the chosen patches that lie in the given cells; 0 if none is chosen.

    Args:
      chosen: [N] bool, whether each patch of a square image was chosen.
      grid: cells along a side, which need not divide the patches along a side.
      cells: numbers of cells, row by row. A patch lies in the cell of its center.
      covered: share of the image's side that the patches cover, from the top left.
    """
    side = round(len(chosen) ** 0.5)
    cell = ((np.arange(side) + 0.5) * grid * covered / side).astype(int)
    inside = np.isin(cell[:, None] * grid + cell, list(cells)).reshape(-1)
    return float(np.sum(chosen & inside) / max(np.sum(chosen), 1))


def overlaps(answers: Sequence[Answered]) -> list[float]:
    """Returns the share of common patches for pairs of questions about one image without a common cell.

    The share is the number of patches chosen for both, divided by the larger number of chosen patches.
    """
    by_image: dict[str, list[Answered]] = {}
    for answer in answers:
        by_image.setdefault(answer.question.image, []).append(answer)
    pairs = (pair for group in by_image.values() for pair in itertools.combinations(group, 2))
    return [
        float(np.sum(a.chosen & b.chosen) / max(np.sum(a.chosen), np.sum(b.chosen), 1))
        for a, b in pairs
        if not set(a.question.cells) & set(b.question.cells)
    ]
