"""Mazes with their shortest path.

A maze is carved as a tree of corridors through rooms on every other cell; then a few walls between corridors fall, so
that there are ways around and the shortest path is a choice. The one idea: among equally short paths the label is the
one that a breadth-first search from S finds when it looks down, left, right, up in that order: a rule that a model can
learn. (An orientation of a labelled maze keeps the path, not the rule.)

Tokens: 0 padding (never used), 1 wall "#", 2 open " ", 3 start "S", 4 goal "G", 5 path "o". N rows and columns.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np

from core.errors import UserError

CHARACTERS = "# SGo"  # tokens 1 to 5
WALL, OPEN, START, GOAL, PATH = range(1, 6)
_STEPS = ((1, 0), (0, -1), (0, 1), (-1, 0))  # down, left, right, up
_MOST_FALLEN = 0.12  # share of the walls between two corridors that fall, at most

Cell = tuple[int, int]


class Maze(NamedTuple):
    """Tokens [N, N] without and with the path, and its length in steps."""

    grid: np.ndarray
    solved: np.ndarray
    steps: int


def search(is_open: np.ndarray, start: Cell) -> tuple[np.ndarray, dict[Cell, Cell]]:
    """Breadth first over an array [N, M] of open cells, looking down, left, right, up.

    Returns:
      [N, M] steps from `start`, -1 where there is no way; and by cell the one that it was found from.
    """
    steps = np.full(is_open.shape, -1)
    steps[start] = 0
    found_from: dict[Cell, Cell] = {}
    free = is_open.tolist()
    waiting = collections.deque([(*start, 0)])
    while waiting:
        y, x, far = waiting.popleft()
        for down, right in _STEPS:
            cell = (y + down, x + right)
            if 0 <= cell[0] < len(free) and 0 <= cell[1] < len(free[0]) and free[cell[0]][cell[1]]:
                free[cell[0]][cell[1]] = False
                if cell != start:
                    steps[cell] = far + 1
                    found_from[cell] = (y, x)
                    waiting.append((*cell, far + 1))
    return steps, found_from


def solve(grid: np.ndarray) -> tuple[np.ndarray, int]:
    """The maze with its path, and the path's steps.

    Raises:
      ValueError: S and G are not there once each, or nothing leads from one to the other.
    """
    places = [np.argwhere(grid == token) for token in (START, GOAL)]
    if any(len(found) != 1 for found in places):
        raise UserError(f"a maze has {len(places[0])} S and {len(places[1])} G, expected one of each")
    start, goal = (tuple(map(int, found[0])) for found in places)
    steps, found_from = search(grid != WALL, start)
    if goal not in found_from:
        raise UserError(f"no way leads from S at {start} to G at {goal}")
    solved, cell = grid.copy(), found_from[goal]
    while cell != start:
        solved[cell] = PATH
        cell = found_from[cell]
    return solved, int(steps[goal])


def generate(rng: np.random.Generator, *, size: int, min_path: int) -> Maze | None:
    """A random maze whose shortest path has more than `min_path` steps; None where the one drawn has no such path."""
    is_open = _carved(rng, size)
    standing = np.argwhere(_divides(is_open))
    fallen = rng.random(len(standing)) < rng.uniform(0, _MOST_FALLEN)
    is_open[tuple(standing[fallen].T)] = True
    cells = np.argwhere(is_open)
    start = tuple(map(int, cells[rng.integers(len(cells))]))
    far = np.argwhere(search(is_open, start)[0] > min_path)
    if not len(far):
        return None
    grid = np.where(is_open, OPEN, WALL).astype(np.uint8)
    grid[start] = START
    grid[tuple(far[rng.integers(len(far))])] = GOAL
    return Maze(grid, *solve(grid))


def _carved(rng: np.random.Generator, size: int) -> np.ndarray:
    """[N, N] open cells: a random tree of corridors, grown depth first, shifted at random where N is even."""
    rooms = (size + 1) // 2
    is_open = np.zeros((2 * rooms - 1, 2 * rooms - 1), bool)
    way: list[Cell] = [tuple(map(int, rng.integers(rooms, size=2)))]
    is_open[way[0][0] * 2, way[0][1] * 2] = True
    while way:
        y, x = way[-1]
        for down, right in rng.permutation(_STEPS).tolist():
            to = (y + down, x + right)
            if 0 <= to[0] < rooms and 0 <= to[1] < rooms and not is_open[to[0] * 2, to[1] * 2]:
                is_open[y + to[0], x + to[1]] = is_open[to[0] * 2, to[1] * 2] = True
                way.append(to)
                break
        else:
            way.pop()
    spare = size - len(is_open)
    above, left = (int(n) for n in rng.integers(spare + 1, size=2))
    return np.pad(is_open, ((above, spare - above), (left, spare - left)))


def _divides(is_open: np.ndarray) -> np.ndarray:
    """[N, N]: walls with corridors on two opposite sides."""
    around = np.pad(is_open, 1)
    across = around[1:-1, :-2] & around[1:-1, 2:]
    upright = around[:-2, 1:-1] & around[2:, 1:-1]
    return ~is_open & (across | upright)
