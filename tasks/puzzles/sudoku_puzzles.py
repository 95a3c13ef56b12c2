"""Sudoku puzzles from nothing: solved grids, clues removed, symmetries, and telling copies apart.

The one idea: two puzzles are the same if a symmetry (digits renamed; rows, columns, bands or stacks exchanged; the grid
transposed where boxes are square) turns one into the other. A model that is trained with those symmetries has seen
every copy, so a held-out puzzle must be no copy of a training puzzle. `signatures` gives equal numbers to all copies of
a puzzle: different signatures are a proof, equal ones merely a suspicion, on which a puzzle is left out.

N digits, C = N * N cells, n puzzles; a grid is [C] with 0 for blank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tasks.puzzles import sudoku_solver
from tasks.puzzles.sudoku_solver import BOXES, Search

CLUES = {4: (4, 8), 6: (8, 14), 9: (22, 32)}  # fewest and most of a generated puzzle, by size
_ROUNDS = 4  # of refinement in a signature


class Puzzle(NamedTuple):
    """A puzzle with its only solution.

    Attributes:
      grid: [C], 0 for blank.
      solution: [C].
      rating: backtracks of `sudoku_solver.solve`, or what a file said.
    """

    grid: np.ndarray
    solution: np.ndarray
    rating: int


@dataclasses.dataclass(frozen=True)
class Symmetry:
    """Puzzle to puzzle, solution to solution: `digits[grid[cells]]`."""

    cells: np.ndarray  # [C]
    digits: np.ndarray  # [N + 1], 0 stays 0

    def __call__(self, grid: np.ndarray) -> np.ndarray:
        """The image of a grid [C]."""
        return self.digits[grid[self.cells]]


def random_symmetry(rng: np.random.Generator, *, size: int) -> Symmetry:
    """One of all symmetries, evenly; boxes of 2 x 3 allow no transposition."""
    rows, columns = BOXES[size]
    digits = np.concatenate([[0], 1 + rng.permutation(size)]).astype(np.uint8)
    transposed = rows == columns and rng.random() < 0.5
    cells = _lines(rng, size, rows)[:, None] * size + _lines(rng, size, columns)[None, :]  # [N, N]
    return Symmetry((cells.T if transposed else cells).ravel(), digits)


def _lines(rng: np.random.Generator, size: int, together: int) -> np.ndarray:
    """[N]: rows (or columns) in a new order; bands of `together` change places, and lines within each."""
    bands = rng.permutation(size // together)
    return np.concatenate([band * together + rng.permutation(together) for band in bands])


def generate(rng: np.random.Generator, *, size: int, clues: tuple[int, int] | None = None) -> Puzzle:
    """A puzzle with exactly one solution.

    A solved grid loses clues in random order, each time only where the solution stays the only one, until a number of
    clues drawn evenly from `clues` is left, or nothing more can go (then it has more clues, up to any number).
    """
    solution = _solved(rng, size)
    low, high = clues or CLUES[size]
    target = int(rng.integers(low, high + 1))
    grid = list(solution)
    left = len(grid)
    for cell in rng.permutation(len(grid)).tolist():
        if left <= target:
            break
        if _may_go(grid, cell, size):
            grid[cell] = 0
            left -= 1
    return Puzzle(np.asarray(grid, np.uint8), np.asarray(solution, np.uint8), rate(grid, size=size))


def rate(grid: Sequence[int], *, size: int) -> int:
    """The difficulty of a puzzle: backtracks of a search that fills singles and then tries candidates, to its end."""
    return sudoku_solver.solve(grid, size=size)[1]


def _solved(rng: np.random.Generator, size: int) -> list[int]:
    of = sudoku_solver.shape(size)
    search = Search(of, at_most=1, shuffled=rng)
    search.run(sudoku_solver.places_of([0] * of.cells, of))
    grid = np.asarray(sudoku_solver.grid_of(search.solutions[0], of), np.uint8)
    return random_symmetry(rng, size=size)(grid).tolist()


def _may_go(grid: list[int], cell: int, size: int) -> bool:
    """Whether a puzzle with one solution keeps it when a clue goes: no solution has another digit there."""
    of = sudoku_solver.shape(size)
    without = [*grid]
    without[cell] = 0
    places = sudoku_solver.places_of(without, of)
    places[grid[cell] - 1] &= ~(1 << cell)
    return not Search(of, at_most=1).run(places)


def signatures(grids: np.ndarray, *, size: int) -> np.ndarray:
    """[n] numbers, equal for puzzles that a symmetry turns into one another, from grids [n, C].

    Cells are coloured again and again by the colours around them (in row, column, box, and under the same digit), which
    depends on no name and no order; the signature is the sum of the colours. Where boxes are square, row and column are
    treated alike.
    """
    rows, columns = BOXES[size]
    given = grids.reshape(-1, size, size).astype(np.int64)  # [n, N, N]
    colours = _mix(np.minimum(given, 1).astype(np.uint64))
    for _ in range(_ROUNDS):
        across = np.broadcast_to(colours.sum(2, keepdims=True), colours.shape)
        down = np.broadcast_to(colours.sum(1, keepdims=True), colours.shape)
        boxes = colours.reshape(-1, size // rows, rows, size // columns, columns)
        box = np.broadcast_to(boxes.sum((2, 4), keepdims=True), boxes.shape).reshape(colours.shape)
        same = _sum_by_digit(colours, given)
        lines = _mix(across) + _mix(down) if rows == columns else _mix(across) + _mix(down * np.uint64(3))
        colours = _mix(colours * np.uint64(5) + lines + _mix(box * np.uint64(7)) + _mix(same * np.uint64(11)))
    return colours.sum((1, 2))


def _sum_by_digit(colours: np.ndarray, given: np.ndarray) -> np.ndarray:
    """[n, N, N]: at each clue the sum of the colours of all clues with its digit; 0 at blanks."""
    total = np.zeros_like(colours)
    for digit in range(1, colours.shape[1] + 1):
        here = given == digit
        total += here * (colours * here).sum((1, 2), keepdims=True)
    return total


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers that leaves no pattern (Steele et al. 2014, splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
