"""From answers to many variants of an ARC puzzle to two attempts, and what they score.

Each variant's answer is turned back and counts as a vote for what it then is. The one idea: votes are values. Those of
one checkpoint are counted by `count_votes`; the ensemble over checkpoints is `merged` of several, and whoever reports a
score says which of the two it is.

Attempts are ranked by number of votes, then by the mean of the model's own confidence, sigmoid(q_halt).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tasks.puzzles import arc_grids

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
        raise ValueError("no puzzles to score; expected the content of test_puzzles.json")
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
    return tuple(tuple(int(x) for x in row) for row in np.asarray(values))


def _sigmoid(x: float) -> float:
    return 0.5 * (1 + math.tanh(0.5 * float(x)))
