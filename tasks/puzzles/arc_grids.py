"""ARC grids as tokens, and the changes that keep a puzzle the same puzzle.

A grid of up to 30 x 30 colours 0 to 9 lies somewhere in a frame of 30 x 30 tokens: 0 outside, colour + 2 inside, and 1
in the row below and the column to the right of it, where the frame has room, so that a model can say how large its
answer is. The one idea: a variant of a puzzle is an orientation and a renaming of colours 1 to 9, written into its
name, so that what a model answers to the variant can be turned back into an answer to the puzzle.

    007bbfb7                        the puzzle itself
    007bbfb7|||t3|||0768314952      orientation 3, colour 1 becomes 7, 2 becomes 6, …
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from core.errors import UserError
from tasks.puzzles import symmetries

FRAME = 30
PAD, END, FIRST_COLOUR = 0, 1, 2
COLOURS = 10
VOCAB_SIZE = FIRST_COLOUR + COLOURS
SEPARATOR = "|||"
IDENTITY = tuple(range(COLOURS))


class Variant(NamedTuple):
    """How a puzzle is shown: colours renamed, then turned. `colours[c]` is what colour c becomes; 0 stays."""

    orientation: int = 0
    colours: tuple[int, ...] = IDENTITY

    def apply(self, grid: np.ndarray) -> np.ndarray:
        """A grid [H, W] of the puzzle as the variant shows it."""
        return np.ascontiguousarray(symmetries.orient(np.asarray(self.colours, np.uint8)[grid], self.orientation))

    def undo(self, grid: np.ndarray) -> np.ndarray:
        """A grid of the variant as the puzzle shows it."""
        return np.argsort(self.colours).astype(np.uint8)[symmetries.restore(grid, self.orientation)]

    def name(self, puzzle: str) -> str:
        """The identifier of the variant."""
        if self == Variant():
            return puzzle
        return SEPARATOR.join((puzzle, f"t{self.orientation}", "".join(map(str, self.colours))))


def random_variant(rng: np.random.Generator) -> Variant:
    """Any orientation, and any renaming of colours 1 to 9."""
    return Variant(int(rng.integers(8)), (0, *(1 + rng.permutation(COLOURS - 1)).tolist()))


def parse(name: str) -> tuple[str, Variant]:
    """The puzzle and the variant that an identifier names.

    Raises:
      ValueError: it names neither.
    """
    puzzle, *rest = name.split(SEPARATOR)
    if not rest:
        return puzzle, Variant()
    fits = (
        len(rest) == 2 and rest[0][:1] == "t" and rest[0][1:].isdigit() and int(rest[0][1:]) in symmetries.ORIENTATIONS
    )
    if not fits or sorted(rest[1]) != list("0123456789"):
        raise UserError(f"{name!r} is no ARC identifier; expected ID or ID|||tN|||0dddddddd with ten different digits")
    return puzzle, Variant(int(rest[0][1:]), tuple(map(int, rest[1])))


def check(grid: Sequence[Sequence[int]], *, where: str) -> np.ndarray:
    """A grid as an array [H, W].

    Raises:
      ValueError: it is no rectangle of 1 to 30 rows and columns of colours 0 to 9.
    """
    try:
        found = np.asarray(grid)
    except ValueError:
        found = np.zeros(0)
    sizes_fit = found.ndim == 2 and all(1 <= n <= FRAME for n in found.shape)
    if not sizes_fit or not np.issubdtype(found.dtype, np.integer) or not 0 <= found.min() <= found.max() < COLOURS:
        raise UserError(f"{where} is no grid: expected 1 to {FRAME} rows of equal length of colours 0 to 9")
    return found.astype(np.uint8)


def frame(grid: np.ndarray, *, at: tuple[int, int] = (0, 0)) -> np.ndarray:
    """[900] tokens of a grid whose upper left corner is put at a row and column of the frame."""
    (top, left), (height, width) = at, grid.shape
    tokens = np.full((FRAME + 1, FRAME + 1), PAD, np.uint8)  # One more, so that an end outside is written and cut off.
    tokens[top : top + height, left : left + width] = grid + FIRST_COLOUR
    tokens[top + height, left : left + width] = END
    tokens[top : top + height, left + width] = END
    return tokens[:FRAME, :FRAME].ravel()


def crop(tokens: np.ndarray) -> np.ndarray:
    """[H, W]: the largest rectangle of colours from the upper left corner of [900] tokens; [0, 0] where there is none.

    Of equally large ones, that with the fewest rows. What a model answers need not be a framed grid at all.
    """
    colours = np.asarray(tokens).reshape(FRAME, FRAME) >= FIRST_COLOUR
    widths = np.minimum.accumulate(np.cumprod(colours, axis=1).sum(1))  # of the rectangle of so many rows
    areas = widths * np.arange(1, FRAME + 1)
    height = int(np.argmax(areas)) + 1
    if not areas[height - 1]:
        return np.zeros((0, 0), np.uint8)
    return (np.asarray(tokens).reshape(FRAME, FRAME)[:height, : widths[height - 1]] - FIRST_COLOUR).astype(np.uint8)


def offset(rng: np.random.Generator, *grids: np.ndarray) -> tuple[int, int]:
    """A random place in the frame that all these grids fit at."""
    room = FRAME + 1 - np.max([grid.shape for grid in grids], axis=0)
    return int(rng.integers(room[0])), int(rng.integers(room[1]))
