"""Encodes ARC grids as tokens, and augments puzzles by rotating, mirroring and permuting colors.

A grid of up to 30 x 30 colors 0 to 9 is placed in a frame of 30 x 30 tokens. They are 0 outside the grid, color + 2
inside, and 1 (END) in the row below it and the column to its right if the frame has room.

A variant of a puzzle is an orientation and a permutation of colors. Its name says both:

    007bbfb7                        the puzzle itself
    007bbfb7|||t3|||0768314952      orientation 3; color 1 becomes 7, 2 becomes 6, …
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from core.errors import UserError
from tasks.puzzles import symmetries

FRAME = 30
PAD, END, FIRST_COLOR = 0, 1, 2
COLORS = 10
VOCAB_SIZE = FIRST_COLOR + COLORS
SEPARATOR = "|||"
IDENTITY = tuple(range(COLORS))


class Variant(NamedTuple):
    """An augmentation of a puzzle: a color permutation, then a rotation or reflection.

    Attributes:
      orientation: 0 to 7, as in `symmetries.orient`.
      colors: `colors[c]` replaces color c.
    """

    orientation: int = 0
    colors: tuple[int, ...] = IDENTITY

    def apply(self, grid: np.ndarray) -> np.ndarray:
        """Converts a grid [H, W] of the puzzle to the variant's grid."""
        return np.ascontiguousarray(symmetries.orient(np.asarray(self.colors, np.uint8)[grid], self.orientation))

    def undo(self, grid: np.ndarray) -> np.ndarray:
        """Converts a grid [H, W] of the variant back to the puzzle's grid."""
        return np.argsort(self.colors).astype(np.uint8)[symmetries.restore(grid, self.orientation)]

    def name(self, puzzle: str) -> str:
        """Returns the identifier of this variant of a puzzle; for the unchanged puzzle, its name."""
        if self == Variant():
            return puzzle
        return SEPARATOR.join((puzzle, f"t{self.orientation}", "".join(map(str, self.colors))))


def random_variant(rng: np.random.Generator) -> Variant:
    """Returns a variant with a random orientation and a random permutation of colors 1 to 9."""
    return Variant(int(rng.integers(8)), (0, *(1 + rng.permutation(COLORS - 1)).tolist()))


def parse(name: str) -> tuple[str, Variant]:
    """Splits an identifier into the name of the puzzle and the variant. Raises UserError if it is malformed."""
    puzzle, *rest = name.split(SEPARATOR)
    if not rest:
        return puzzle, Variant()
    fits = (
        len(rest) == 2 and rest[0][:1] == "t" and rest[0][1:].isdigit() and int(rest[0][1:]) in symmetries.ORIENTATIONS
    )
    if not fits or sorted(rest[1]) != list("0123456789"):
        raise UserError(
            f"{name!r} is not an ARC identifier; expected ID or ID|||tN|||0dddddddd with ten different digits"
        )
    return puzzle, Variant(int(rest[0][1:]), tuple(map(int, rest[1])))


def check(grid: Sequence[Sequence[int]], *, where: str) -> np.ndarray:
    """Validates a grid and returns it as an array [H, W]; `where` names it in messages.

    Raises UserError if it is no grid of 1 to 30 rows and columns.
    """
    try:
        found = np.asarray(grid)
    except ValueError:
        found = np.zeros(0)
    sizes_fit = found.ndim == 2 and all(1 <= n <= FRAME for n in found.shape)
    if not sizes_fit or not np.issubdtype(found.dtype, np.integer) or not 0 <= found.min() <= found.max() < COLORS:
        raise UserError(f"{where} is not a grid: expected 1 to {FRAME} rows of equal length with colors 0 to 9")
    return found.astype(np.uint8)


def frame(grid: np.ndarray, *, at: tuple[int, int] = (0, 0)) -> np.ndarray:
    """Encodes a grid as [900] tokens, its upper left corner at row and column `at`."""
    (top, left), (height, width) = at, grid.shape
    tokens = np.full((FRAME + 1, FRAME + 1), PAD, np.uint8)  # larger: END tokens outside are cropped
    tokens[top : top + height, left : left + width] = grid + FIRST_COLOR
    tokens[top + height, left : left + width] = END
    tokens[top : top + height, left + width] = END
    return tokens[:FRAME, :FRAME].ravel()


def crop(tokens: np.ndarray) -> np.ndarray:
    """Decodes [900] tokens to the largest rectangle [H, W] of colors at the upper left corner.

    [0, 0] if there is none.
    """
    colors = np.asarray(tokens).reshape(FRAME, FRAME) >= FIRST_COLOR
    widths = np.minimum.accumulate(np.cumprod(colors, axis=1).sum(1))  # widths[h - 1]: with h rows
    areas = widths * np.arange(1, FRAME + 1)
    height = int(np.argmax(areas)) + 1
    if not areas[height - 1]:
        return np.zeros((0, 0), np.uint8)
    return (np.asarray(tokens).reshape(FRAME, FRAME)[:height, : widths[height - 1]] - FIRST_COLOR).astype(np.uint8)


def offset(rng: np.random.Generator, *grids: np.ndarray) -> tuple[int, int]:
    """Draws a random position (row, column) in the frame at which each of these grids fits."""
    room = FRAME + 1 - np.max([grid.shape for grid in grids], axis=0)
    return int(rng.integers(room[0])), int(rng.integers(room[1]))
