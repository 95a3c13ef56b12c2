"""From answers to many variants of an ARC puzzle to two attempts, and what they score.

Each variant's answer is turned back and counts as a vote for what it then is. The one idea: votes are values. Those of
one checkpoint are counted by `count_votes`; the ensemble over checkpoints is `merged` of several, and whoever reports a
score says which of the two it is.

Attempts are ranked by number of votes, then by the mean of the model's own confidence, sigmoid(q_halt).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from core import paths
from core.errors import UserError
from tasks.puzzles import arc_grids, arc_sets, files

KS = (1, 2, 5, 10, 100, 1000)
_NO_ANSWER = ((0,),)

Grid = tuple[tuple[int, ...], ...]


class Answer(NamedTuple):
    """What a model said of one row of an evaluation.

    Attributes:
      name: identifier of the puzzle or variant.
      inputs: [900] tokens shown.
      predicted: [900] tokens said.
      q_halt: logit of being right.
    """

    name: str
    inputs: np.ndarray
    predicted: np.ndarray
    q_halt: float


class Support(NamedTuple):
    """What stands behind a candidate."""

    votes: int
    confidence: float  # sum over votes

    def __add__(self, other: Support) -> Support:
        return Support(self.votes + other.votes, self.confidence + other.confidence)


Votes = Mapping[tuple[str, Grid], Mapping[Grid, Support]]  # (puzzle, test input) -> candidate output -> support


@dataclasses.dataclass(frozen=True)
class Judge:
    """Scores a model's answers to the held-out rows of an ARC dataset.

    Attributes:
      needed_answers: names of the answers that it reads, by row.
      puzzles: test_puzzles.json.
      names: identifiers of puzzles and variants by id.
      blank: the id of rows that only complete a batch; they do not vote.
    """

    needed_answers: ClassVar[Sequence[str]] = ("inputs", "predicted", "puzzle_ids", "q_halt")

    puzzles: Mapping[str, Any]
    names: Sequence[str]
    blank: int

    def votes(self, batches: Iterable[Mapping[str, np.ndarray]]) -> Votes:
        """The votes of one evaluation.

        Args:
          batches: answers by row: `inputs` and `predicted` [B, 900], `puzzle_ids` and `q_halt` [B].
        """
        return count_votes(answer for batch in batches for answer in self._answers(batch))

    def scores(self, votes: Votes) -> dict[str, Any]:
        """pass@k, and of how many puzzles, tests and votes, as JSON."""
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
        """The votes of several evaluations together."""
        return merged(*several)

    def submission(self, votes: Votes) -> dict[str, list[dict[str, list[list[int]]]]]:
        """Two attempts for every test."""
        return submission(votes, self.puzzles)

    def _answers(self, batch: Mapping[str, np.ndarray]) -> Iterator[Answer]:
        for shown, said, identifier, q_halt in zip(*(batch[name] for name in self.needed_answers), strict=True):
            if identifier != self.blank:
                yield Answer(self.names[identifier], shown, said, float(q_halt))


def read_judge(directory: str) -> Judge | None:
    """The judge of the dataset in a folder; None where it is not ARC's, which has test_puzzles.json.

    Raises:
      ValueError: the file is damaged or empty.
    """
    file = paths.resolve(directory) / arc_sets.TEST_PUZZLES
    if not file.exists():
        return None
    try:
        puzzles = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is no JSON ({error}); build the dataset anew") from error
    if not puzzles:
        raise UserError(f"{file} names no puzzles, so there is nothing to score; build the dataset anew")
    blank = files.read_metadata(directory, "test").blank_identifier_id
    return Judge(puzzles, files.read_identifiers(directory), blank)


def count_votes(answers: Iterable[Answer]) -> Votes:
    """The votes of one evaluation; answers that are no grid vote for nothing."""
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
    """The votes of several evaluations together."""
    found: dict[tuple[str, Grid], dict[Grid, Support]] = {}
    for votes in several:
        for test, candidates in votes.items():
            kept = found.setdefault(test, {})
            for grid, support in candidates.items():
                kept[grid] = kept.get(grid, Support(0, 0.0)) + support
    return found


def ranked(candidates: Mapping[Grid, Support]) -> list[Grid]:
    """Candidates, best first; the grid itself decides between equals, so that the order of rows never does."""
    return sorted(candidates, key=lambda g: (-candidates[g].votes, -candidates[g].confidence / candidates[g].votes, g))


def pass_at(votes: Votes, puzzles: Mapping[str, Any], *, ks: Sequence[int] = KS) -> dict[int, float]:
    """By k, the share of a puzzle's tests whose output is among the k best candidates, averaged over puzzles.

    Args:
      votes: of these puzzles; what was not voted on is not solved.
      puzzles: test_puzzles.json.
      ks: numbers of attempts.

    Raises:
      ValueError: no puzzles.
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
    """Where the right answer stands among the candidates, from 0; infinity where it does not."""
    return ranked(candidates).index(right) if right in candidates else math.inf


def submission(votes: Votes, puzzles: Mapping[str, Any]) -> dict[str, list[dict[str, list[list[int]]]]]:
    """Two attempts for every test, as the competition wants them; a grid of one black cell where there is none."""
    attempts = {}
    for name, puzzle in puzzles.items():
        tests = [ranked(votes.get((name, as_grid(test["input"])), {}))[:2] for test in puzzle["test"]]
        padded = [(*best, *[_NO_ANSWER] * (2 - len(best))) for best in tests]
        attempts[name] = [{f"attempt_{n}": [list(row) for row in g] for n, g in enumerate(b, 1)} for b in padded]
    return attempts


def as_grid(values: Any) -> Grid:
    """Rows of colours as a value."""
    return tuple(map(tuple, np.asarray(values).tolist()))


def _sigmoid(x: float) -> float:
    return 0.5 * (1 + math.tanh(0.5 * float(x)))
