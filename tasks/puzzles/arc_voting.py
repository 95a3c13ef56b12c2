"""Scores a model on ARC by voting over its answers to many variants of each puzzle.

The answer to a variant is converted back to the puzzle, and counts as a vote for the resulting grid. Candidates are
ranked by number of votes, then by the model's mean confidence sigmoid(q_halt).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from core.errors import UserError
from core.files import paths
from tasks.puzzles import arc_grids, arc_sets, files

KS = (1, 2, 5, 10, 100, 1000)
_NO_ANSWER = ((0,),)

Grid = tuple[tuple[int, ...], ...]


class Answer(NamedTuple):
    """A model's answer to one row of an evaluation.

    Attributes:
      name: identifier of the puzzle or variant.
      inputs, predicted: [900] tokens.
      q_halt: the model's logit that the answer is right.
    """

    name: str
    inputs: np.ndarray
    predicted: np.ndarray
    q_halt: float


class Support(NamedTuple):
    """The votes for a candidate, and the sum of their confidence."""

    votes: int
    confidence: float

    def __add__(self, other: Support) -> Support:  # type: ignore[override]  # the sum of counts, not of tuples
        return Support(self.votes + other.votes, self.confidence + other.confidence)


Votes = Mapping[tuple[str, Grid], Mapping[Grid, Support]]  # (puzzle, test input) -> candidate output -> support


@dataclasses.dataclass(frozen=True)
class Judge:
    """Scores a model's answers to the held-out rows of an ARC dataset.

    Attributes:
      name: the name under which scores are stored.
      needed_answers: names of the arrays that it reads.
      puzzles: content of test_puzzles.json.
      names: identifiers, indexed by puzzle id.
      blank: the puzzle id of rows that only fill the last batch.
    """

    name: ClassVar[str] = "arc"
    needed_answers: ClassVar[Sequence[str]] = ("inputs", "predicted", "puzzle_ids", "q_halt")

    puzzles: Mapping[str, Any]
    names: Sequence[str]
    blank: int

    def votes(self, batches: Iterable[Mapping[str, np.ndarray]]) -> Votes:
        """Counts the votes of one evaluation.

        A batch has `inputs` and `predicted` [B, 900], `puzzle_ids` and `q_halt` [B].
        """
        return count_votes(answer for batch in batches for answer in self._answers(batch))

    def scores(self, votes: Votes) -> dict[str, Any]:
        """Returns pass@k by k, and counts, as JSON values."""
        tests = [(name, as_grid(test["input"])) for name, puzzle in self.puzzles.items() for test in puzzle["test"]]
        counted = [sum(support.votes for support in votes.get(test, {}).values()) for test in tests]
        return {
            "pass_at": {str(k): share for k, share in pass_at(votes, self.puzzles).items()},
            "puzzles": len(self.puzzles),
            "tests": len(tests),
            "tests_with_votes": sum(count > 0 for count in counted),
            "votes": sum(counted),
        }

    def merged(self, *several: Votes) -> Votes:
        """Adds the votes of several evaluations."""
        return merged(*several)

    def submission(self, votes: Votes) -> dict[str, list[dict[str, list[list[int]]]]]:
        """Returns two attempts for each test, in the competition's format."""
        return submission(votes, self.puzzles)

    def _answers(self, batch: Mapping[str, np.ndarray]) -> Iterator[Answer]:
        for shown, said, identifier, q_halt in zip(*(batch[name] for name in self.needed_answers), strict=True):
            if identifier != self.blank:
                yield Answer(self.names[identifier], shown, said, float(q_halt))


def read_judge(directory: str) -> Judge | None:
    """Returns the judge of an ARC dataset; None if the folder has no test_puzzles.json.

    Raises UserError if that file is damaged or empty.
    """
    file = paths.resolve(directory) / arc_sets.TEST_PUZZLES
    if not file.exists():
        return None
    try:
        puzzles = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); build the dataset again") from error
    if not puzzles:
        raise UserError(f"{file} names no puzzles, so there is nothing to score; build the dataset again")
    blank = files.read_metadata(directory, "test").blank_identifier_id
    return Judge(puzzles, files.read_identifiers(directory), blank)


def count_votes(answers: Iterable[Answer]) -> Votes:
    """Converts answers back to their puzzles, and counts them as votes.

    An answer without a grid is no vote.
    """
    found: dict[tuple[str, Grid], dict[Grid, Support]] = {}
    for answer in answers:
        puzzle, variant = arc_grids.parse(answer.name)
        shown, said = arc_grids.crop(answer.inputs), arc_grids.crop(answer.predicted)
        candidates = found.setdefault((puzzle, as_grid(variant.undo(shown))), {})
        if said.size:
            grid = as_grid(variant.undo(said))
            candidates[grid] = candidates.get(grid, Support(0, 0.0)) + Support(1, _sigmoid(answer.q_halt))
    return found


def merged(*several: Votes) -> Votes:
    """Adds the votes of several evaluations."""
    found: dict[tuple[str, Grid], dict[Grid, Support]] = {}
    for votes in several:
        for test, candidates in votes.items():
            kept = found.setdefault(test, {})
            for grid, support in candidates.items():
                kept[grid] = kept.get(grid, Support(0, 0.0)) + support
    return found


def ranked(candidates: Mapping[Grid, Support]) -> list[Grid]:
    """Sorts candidates by votes, then mean confidence, best first."""
    return sorted(candidates, key=lambda g: (-candidates[g].votes, -candidates[g].confidence / candidates[g].votes, g))


def pass_at(votes: Votes, puzzles: Mapping[str, Any], *, ks: Sequence[int] = KS) -> dict[int, float]:
    """Returns pass@k by k, averaged over puzzles.

    pass@k of a puzzle is the fraction of its tests solved by one of the k best candidates. Raises UserError if there
    are no puzzles.
    """
    if not puzzles:
        raise UserError("no puzzles to score; expected the content of test_puzzles.json")
    shares: dict[int, list[float]] = {k: [] for k in ks}
    for name, puzzle in puzzles.items():
        places = [_place(votes.get((name, as_grid(t["input"])), {}), as_grid(t["output"])) for t in puzzle["test"]]
        for k in ks:
            shares[k].append(sum(place < k for place in places) / len(places))
    return {k: math.fsum(found) / len(puzzles) for k, found in shares.items()}


def _place(candidates: Mapping[Grid, Support], right: Grid) -> float:
    return ranked(candidates).index(right) if right in candidates else math.inf


def submission(votes: Votes, puzzles: Mapping[str, Any]) -> dict[str, list[dict[str, list[list[int]]]]]:
    """Returns two attempts per test, in the competition's format.

    A missing attempt is a single cell of color 0.
    """
    attempts = {}
    for name, puzzle in puzzles.items():
        tests = [ranked(votes.get((name, as_grid(test["input"])), {}))[:2] for test in puzzle["test"]]
        padded = [(*best, *[_NO_ANSWER] * (2 - len(best))) for best in tests]
        attempts[name] = [{f"attempt_{n}": [list(row) for row in g] for n, g in enumerate(b, 1)} for b in padded]
    return attempts


def as_grid(values: Any) -> Grid:
    """Converts an array [H, W] or nested lists to nested tuples, which can be hashed."""
    return tuple(map(tuple, np.asarray(values).tolist()))


def _sigmoid(x: float) -> float:
    return 0.5 * (1 + math.tanh(0.5 * float(x)))
