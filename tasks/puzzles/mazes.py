"""Generates and solves mazes.

A maze starts as a random tree of corridors between rooms on every other cell. Then some walls between corridors are
removed. The label is the shortest path that a breadth-first search from S finds if it visits neighbors in the order
down, left, right, up.

Tokens: 0 padding (never used), 1 wall "#", 2 open " ", 3 start "S", 4 goal "G", 5 path "o". N rows and columns.
"""

import collections
from typing import NamedTuple

import numpy as np

from core.errors import UserError

CHARACTERS = "# SGo"  # the tokens 1 to 5 as text
WALL, OPEN, START, GOAL, PATH = range(1, 6)
_STEPS = ((1, 0), (0, -1), (0, 1), (-1, 0))  # down, left, right, up
_MOST_REMOVED = 0.12  # largest fraction of the walls between two corridors that is removed

Cell = tuple[int, int]


class Maze(NamedTuple):
    """The tokens [N, N] without (`grid`) and with (`solved`) a shortest path, and its length in steps."""

    grid: np.ndarray
    solved: np.ndarray
    steps: int


def search(is_open: np.ndarray, start: Cell) -> tuple[np.ndarray, dict[Cell, Cell]]:
    """Runs breadth-first search over open cells [N, M].

    Returns:
      The number of steps from `start`, [N, M], -1 for unreachable cells; and the predecessors of reached cells.
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


def _cell(place: np.ndarray) -> Cell:
    return int(place[0]), int(place[1])


def solve(grid: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the maze with a shortest path marked, and the path's number of steps.

    Raises UserError without exactly one start and one goal, or without a path.
    """
    places = [np.argwhere(grid == token) for token in (START, GOAL)]
    if any(len(found) != 1 for found in places):
        raise UserError(f"a maze has {len(places[0])} S and {len(places[1])} G, expected one of each")
    start, goal = (_cell(found[0]) for found in places)
    steps, found_from = search(grid != WALL, start)
    if goal not in found_from:
        raise UserError(f"no path connects S at {start} and G at {goal}")
    solved, cell = grid.copy(), found_from[goal]
    while cell != start:
        solved[cell] = PATH
        cell = found_from[cell]
    return solved, int(steps[goal])


def generate(rng: np.random.Generator, *, size: int, min_path: int) -> Maze | None:
    """Draws a random maze [N, N], N = size.

    None if no cell is more than `min_path` steps from the drawn start.
    """
    is_open = _carved(rng, size)
    walls = np.argwhere(_divides(is_open))
    removed = rng.random(len(walls)) < rng.uniform(0, _MOST_REMOVED)
    is_open[tuple(walls[removed].T)] = True
    cells = np.argwhere(is_open)
    start = _cell(cells[rng.integers(len(cells))])
    far = np.argwhere(search(is_open, start)[0] > min_path)
    if not len(far):
        return None
    grid = np.where(is_open, OPEN, WALL).astype(np.uint8)
    grid[start] = START
    grid[tuple(far[rng.integers(len(far))])] = GOAL
    return Maze(grid, *solve(grid))


def _carved(rng: np.random.Generator, size: int) -> np.ndarray:
    """Returns which cells are open, bool [N, N]: a random tree of corridors, grown depth first."""
    rooms = (size + 1) // 2
    is_open = np.zeros((2 * rooms - 1, 2 * rooms - 1), bool)
    way = [_cell(rng.integers(rooms, size=2))]
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
    """Returns whether each cell is a wall with corridors on two opposite sides, [N, N]."""
    around = np.pad(is_open, 1)
    across = around[1:-1, :-2] & around[1:-1, 2:]
    upright = around[:-2, 1:-1] & around[2:, 1:-1]
    return ~is_open & (across | upright)
