"""The eight ways to turn and mirror a grid, numbered as TRM's data numbers them, and how to undo each."""

from __future__ import annotations

import numpy as np

ORIENTATIONS = range(8)
_UNDONE_BY = (0, 3, 2, 1, 4, 5, 6, 7)


def orient(grid: np.ndarray, orientation: int) -> np.ndarray:
    """A grid [H, W] in another orientation.

    0 as it is; 1, 2, 3 turned that often by 90 degrees against the clock; 4 mirrored left to right; 5 upside down;
    6 transposed; 7 turned once, then mirrored left to right.
    """
    turned = np.rot90(grid, orientation) if orientation < 4 else grid
    return {4: np.fliplr, 5: np.flipud, 6: np.transpose, 7: lambda g: np.fliplr(np.rot90(g))}.get(
        orientation, lambda _: turned
    )(grid)


def restore(grid: np.ndarray, orientation: int) -> np.ndarray:
    """What `orient` made this grid of."""
    return orient(grid, _UNDONE_BY[orientation])


def smallest(grid: np.ndarray) -> bytes:
    """The same for a grid in all its orientations, and different for all others."""
    images = (np.ascontiguousarray(orient(grid, o)) for o in ORIENTATIONS)
    return min(bytes(image.shape) + image.tobytes() for image in images)
