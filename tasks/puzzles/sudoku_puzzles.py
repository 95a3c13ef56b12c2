"""Generates Sudoku puzzles, applies symmetries, and detects symmetric copies.

N: digits. C = N * N: cells. n: puzzles. A grid is [C], 0 for blank.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tasks.puzzles import sudoku_solver
from tasks.puzzles.sudoku_solver import BOXES, Search

CLUES = {4: (4, 8), 6: (8, 14), 9: (22, 32)}  # by size: minimum and maximum of the number of clues that is aimed at
_ROUNDS = 4  # refinement rounds of a signature


class Puzzle(NamedTuple):
    """A puzzle with its only solution.

    Attributes:
      grid: [C], 0 for blank.
      solution: [C].
      rating: difficulty, from `rate` or a CSV file.
    """

    grid: np.ndarray
    solution: np.ndarray
    rating: int


@dataclasses.dataclass(frozen=True)
class Symmetry:
    """A symmetry of Sudoku: maps a grid to `digits[grid[cells]]`."""

    cells: np.ndarray  # [C]
    digits: np.ndarray  # [N + 1], 0 stays 0

    def __call__(self, grid: np.ndarray) -> np.ndarray:
        return self.digits[grid[self.cells]]


def random_symmetry(rng: np.random.Generator, *, size: int) -> Symmetry:
    """Draws a random symmetry."""
    rows, columns = BOXES[size]
    digits = np.concatenate([[0], 1 + rng.permutation(size)]).astype(np.uint8)
    transposed = rows == columns and rng.random() < 0.5
    cells = _lines(rng, size, rows)[:, None] * size + _lines(rng, size, columns)[None, :]  # [N, N]
    return Symmetry((cells.T if transposed else cells).ravel(), digits)


def _lines(rng: np.random.Generator, size: int, together: int) -> np.ndarray:
    """Returns a random order [N] of rows or columns that keeps bands of `together` lines together."""
    bands = rng.permutation(size // together)
    return np.concatenate([band * together + rng.permutation(together) for band in bands])


def generate(rng: np.random.Generator, *, size: int, clues: tuple[int, int] | None = None) -> Puzzle:
    """Generates a puzzle with exactly one solution.

    Clues are removed from a solved grid in random order, except those without which there would be a second solution.
    This stops at a number of clues drawn from `clues` (minimum, maximum; None: `CLUES[size]`), or at more if no other
    clue can be removed.
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
    """Returns the difficulty of a puzzle: the backtracks of `sudoku_solver.solve`."""
    return sudoku_solver.solve(grid, size=size)[1]


def _solved(rng: np.random.Generator, size: int) -> list[int]:
    of = sudoku_solver.shape(size)
    search = Search(of, at_most=1, shuffled=rng)
    search.run(sudoku_solver.places_of([0] * of.cells, of))
    grid = np.asarray(sudoku_solver.grid_of(search.solutions[0], of), np.uint8)
    return random_symmetry(rng, size=size)(grid).tolist()


def _may_go(grid: list[int], cell: int, size: int) -> bool:
    of = sudoku_solver.shape(size)
    without = [*grid]
    without[cell] = 0
    places = sudoku_solver.places_of(without, of)
    places[grid[cell] - 1] &= ~(1 << cell)
    return not Search(of, at_most=1).run(places)


def signatures(grids: np.ndarray, *, size: int) -> np.ndarray:
    """Returns a number for each grid [n, C], uint64 [n]; symmetric copies have equal numbers.

    This is color refinement: each round recomputes the color of a cell from its color and the sums of the colors in its
    row, column and box and of the clues with its digit.
    """
    rows, columns = BOXES[size]
    given = grids.reshape(-1, size, size).astype(np.int64)  # [n, N, N]
    colors = _mix(np.minimum(given, 1).astype(np.uint64))
    for _ in range(_ROUNDS):
        across = np.broadcast_to(colors.sum(2, keepdims=True), colors.shape)
        down = np.broadcast_to(colors.sum(1, keepdims=True), colors.shape)
        boxes = colors.reshape(-1, size // rows, rows, size // columns, columns)
        box = np.broadcast_to(boxes.sum((2, 4), keepdims=True), boxes.shape).reshape(colors.shape)
        same = _sum_by_digit(colors, given)
        lines = _mix(across) + _mix(down) if rows == columns else _mix(across) + _mix(down * np.uint64(3))
        colors = _mix(colors * np.uint64(5) + lines + _mix(box * np.uint64(7)) + _mix(same * np.uint64(11)))
    return colors.sum((1, 2))


def _sum_by_digit(colors: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Returns, at each clue, the sum of the colors of clues with its digit, [n, N, N]."""
    total = np.zeros_like(colors)
    for digit in range(1, colors.shape[1] + 1):
        here = given == digit
        total += here * (colors * here).sum((1, 2), keepdims=True)
    return total


def _mix(x: np.ndarray) -> np.ndarray:
    """Hashes 64-bit integers (splitmix64, Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
