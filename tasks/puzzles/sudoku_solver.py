"""Sudoku by bits: solving, proving that a solution is the only one, and counting what that took.

The one idea: a grid is one integer per digit, whose bit c says that the digit may still stand in cell c. Filling all
cells with one candidate, or all units with one place for a digit, is then a handful of operations on whole grids, so
that plain Python proves a 6x6 puzzle in a fraction of a millisecond.

N digits and rows, C = N * N cells, boxes of `box_rows` x `box_columns` cells with box_rows * box_columns = N.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from core.errors import UserError

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box, by size


@dataclasses.dataclass(frozen=True)
class Shape:
    """A size of Sudoku and what follows from it.

    Attributes:
      size: N.
      units: rows, columns and boxes, each as bits of its cells.
      peers: by cell, the bits of the others in its units.
    """

    size: int
    units: tuple[int, ...]
    peers: tuple[int, ...]

    @property
    def cells(self) -> int:
        """C."""
        return self.size**2

    @property
    def box(self) -> tuple[int, int]:
        """Rows and columns of a box."""
        return BOXES[self.size]


@functools.cache
def shape(size: int) -> Shape:
    """The shape of a size.

    Raises:
      ValueError: another size than 4, 6 or 9.
    """
    if size not in BOXES:
        raise UserError(f"sudoku: size is {size!r}, expected one of {', '.join(map(str, BOXES))}")
    row, column = np.divmod(np.arange(size**2), size)
    rows, columns = BOXES[size]
    box = row // rows * (size // columns) + column // columns
    groups = [np.flatnonzero(of == i).tolist() for of in (row, column, box) for i in range(size)]
    units = tuple(sum(1 << cell for cell in group) for group in groups)
    peers = [functools.reduce(int.__or__, (u for u in units if u >> c & 1)) & ~(1 << c) for c in range(size**2)]
    return Shape(size, units, tuple(peers))


class Search:
    """A depth-first search for the solutions of one grid.

    It fills cells that have one candidate and units that have one place for a digit; where nothing is left to fill, it
    tries the candidates of a cell that has the fewest (the first such cell, digits ascending).

    Attributes:
      solutions: found so far, each with one integer per digit.
      backtracks: candidates tried that led to no solution.
    """

    def __init__(self, of: Shape, *, at_most: int, shuffled: np.random.Generator | None = None):
        """Stops after `at_most` solutions; where `shuffled`, tries candidates in random order."""
        self.solutions: list[list[int]] = []
        self.backtracks = 0
        self._shape, self._at_most = of, at_most
        self._shuffled = shuffled
        self._all = (1 << of.cells) - 1

    def run(self, places: list[int], placed: int = 0) -> bool:
        """Searches below `places` (by digit: the cells it may stand in); whether there was a solution."""
        places = list(places)
        placed = self._fill(places, placed)
        if placed < 0:
            return False
        if placed == self._all:
            self.solutions.append(places)
            return True
        cell = self._narrowest(places, placed)
        found = False
        digits = range(len(places)) if self._shuffled is None else self._shuffled.permutation(len(places)).tolist()
        for digit in digits:
            if places[digit] & cell:
                trial = [p & ~cell for p in places]
                trial[digit] = places[digit]
                if self.run(trial, placed):
                    found = True
                    if len(self.solutions) >= self._at_most:
                        break
                else:
                    self.backtracks += 1
        return found

    def _fill(self, places: list[int], placed: int) -> int:
        """Fills in place what is forced; the cells that are filled then, or -1 where there is no solution."""
        while True:
            once = twice = 0
            for p in places:
                twice |= once & p
                once |= p
            if once != self._all:
                return -1
            new = once & ~twice & ~placed  # one candidate left
            if not new:
                new = self._only_places(places, placed)
                if new <= 0:
                    return placed if new == 0 else -1
            placed |= self._place(places, new)

    def _only_places(self, places: list[int], placed: int) -> int:
        """Cells that are the only place of a digit in a unit, that digit left alone in each; -1: a digit has none."""
        new = 0
        for digit, p in enumerate(places):
            for unit in self._shape.units:
                here = p & unit
                if not here:
                    return -1
                if not here & (here - 1) and not here & placed and not here & new:
                    for other in range(len(places)):
                        if other != digit:
                            places[other] &= ~here
                    new |= here
        return new

    def _place(self, places: list[int], new: int) -> int:
        """Takes the digits of the cells `new` from their peers."""
        for digit, p in enumerate(places):
            left = p & new
            while left:
                bit = left & -left
                left ^= bit
                places[digit] &= ~self._shape.peers[bit.bit_length() - 1]
        return new

    def _narrowest(self, places: list[int], placed: int) -> int:
        """The bit of the first of the open cells with the fewest candidates."""
        at_least = [self._all & ~placed] + [0] * len(places)  # [k]: open cells with k candidates or more
        for p in places:
            for k in range(len(places), 0, -1):
                at_least[k] |= at_least[k - 1] & p
        cells = next(c for k in range(2, len(places) + 1) if (c := at_least[k] & ~(at_least[k + 1 : k + 2] or [0])[0]))
        return cells & -cells


def places_of(grid: Sequence[int], of: Shape) -> list[int]:
    """By digit, the cells it may stand in, from a grid [C] of digits 1 to N and 0 for blank."""
    every = (1 << of.cells) - 1
    given = [0] * of.size
    for cell, digit in enumerate(grid):
        if digit:
            given[digit - 1] |= 1 << cell
    filled = functools.reduce(int.__or__, given)
    return [g | (every & ~filled) for g in given]


def grid_of(places: Sequence[int], of: Shape) -> list[int]:
    """The grid [C] of a solution."""
    return [next(d + 1 for d, p in enumerate(places) if p >> cell & 1) for cell in range(of.cells)]


def solve(grid: Sequence[int], *, size: int, at_most: int = 2) -> tuple[list[list[int]], int]:
    """Up to `at_most` solutions of a grid, and the backtracks that finding them took.

    With `at_most` of 2, one solution is a proof that there is no other, and the backtracks are the puzzle's rating: how
    many candidates were tried in vain until the search was through.
    """
    search = Search(shape(size), at_most=at_most)
    search.run(places_of(grid, search._shape))
    return [grid_of(s, search._shape) for s in search.solutions], search.backtracks
