"""Solves Sudoku with bit masks, and counts the backtracks of the search.

The state of a grid is one integer per digit (`places`), whose bit c is set if the digit is still a candidate of cell c.

N: digits and rows. C = N * N: cells.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from core.errors import UserError

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # by size: rows and columns of a box


@dataclasses.dataclass(frozen=True)
class Shape:
    """The structure of a grid of one size.

    Attributes:
      size: N.
      units: rows, columns and boxes, each as a bit mask of its cells.
      peers: for each cell, the bit mask of the other cells in its units.
    """

    size: int
    units: tuple[int, ...]
    peers: tuple[int, ...]

    @property
    def cells(self) -> int:
        """Number of cells, C."""
        return self.size**2

    @property
    def box(self) -> tuple[int, int]:
        """The numbers of rows and of columns of a box."""
        return BOXES[self.size]


@functools.cache
def shape(size: int) -> Shape:
    """Returns the structure of grids of one size. Raises UserError for other sizes than those of BOXES."""
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

    It fills cells that have one candidate and units that have one place for a digit. If neither exists, it tries the
    candidates of the first cell with the fewest.

    Attributes:
      solutions: the solutions found, each with one bit mask per digit.
      backtracks: candidates tried that led to no solution.
    """

    def __init__(self, of: Shape, *, at_most: int, shuffled: np.random.Generator | None = None):
        """Prepares a search that stops after `at_most` solutions; with `shuffled`, tries digits in random order."""
        self.solutions: list[list[int]] = []
        self.backtracks = 0
        self._shape, self._at_most = of, at_most
        self._shuffled = shuffled
        self._all = (1 << of.cells) - 1

    def run(self, places: list[int], placed: int = 0) -> bool:
        """Searches for solutions, appends them to `solutions`, and returns whether one was found.

        `places` has the bit mask of candidate cells of each digit; `placed` is that of filled cells.
        """
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
        """Fills all forced cells in `places`; returns the mask of filled cells, or -1 if a contradiction is found."""
        while True:
            once = twice = 0
            for p in places:
                twice |= once & p
                once |= p
            if once != self._all:
                return -1
            new = once & ~twice & ~placed  # cells with one candidate left
            if not new:
                new = self._only_places(places, placed)
                if new <= 0:
                    return placed if new == 0 else -1
            placed |= self._place(places, new)

    def _only_places(self, places: list[int], placed: int) -> int:
        """Reduces cells that are a digit's only place in a unit; returns their mask, or -1 at a contradiction."""
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
        for digit, p in enumerate(places):
            left = p & new
            while left:
                bit = left & -left
                left ^= bit
                places[digit] &= ~self._shape.peers[bit.bit_length() - 1]
        return new

    def _narrowest(self, places: list[int], placed: int) -> int:
        """Returns the bit mask of the first unfilled cell with the fewest candidates."""
        at_least = [self._all & ~placed] + [0] * len(places)  # [k]: the unfilled cells with k candidates or more
        for p in places:
            for k in range(len(places), 0, -1):
                at_least[k] |= at_least[k - 1] & p
        cells = next(c for k in range(2, len(places) + 1) if (c := at_least[k] & ~(at_least[k + 1 : k + 2] or [0])[0]))
        return cells & -cells


def places_of(grid: Sequence[int], of: Shape) -> list[int]:
    """Returns, per digit, the bit mask of its candidate cells; 0 in a grid [C] is blank."""
    every = (1 << of.cells) - 1
    given = [0] * of.size
    for cell, digit in enumerate(grid):
        if digit:
            given[digit - 1] |= 1 << cell
    filled = functools.reduce(int.__or__, given)
    return [g | (every & ~filled) for g in given]


def grid_of(places: Sequence[int], of: Shape) -> list[int]:
    """Converts the bit masks of a solution to a grid [C]."""
    return [next(d + 1 for d, p in enumerate(places) if p >> cell & 1) for cell in range(of.cells)]


def solve(grid: Sequence[int], *, size: int, at_most: int = 2) -> tuple[list[list[int]], int]:
    """Returns up to `at_most` solutions of a grid [C], and the number of backtracks.

    With `at_most` = 2, a single returned solution is the only one.
    """
    search = Search(shape(size), at_most=at_most)
    search.run(places_of(grid, search._shape))
    return [grid_of(s, search._shape) for s in search.solutions], search.backtracks
