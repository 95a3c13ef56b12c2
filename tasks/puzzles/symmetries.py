"""Applies and inverts the eight rotations and reflections of a grid, numbered as in TRM's data."""

import numpy as np

ORIENTATIONS = range(8)
_UNDONE_BY = (0, 3, 2, 1, 4, 5, 6, 7)


def orient(grid: np.ndarray, orientation: int) -> np.ndarray:
    """Returns a grid [H, W] in another orientation.

    0: unchanged. 1, 2, 3: rotated counterclockwise by 90, 180, 270 degrees. 4: flipped left to right. 5: flipped
    upside down. 6: transposed. 7: rotated by 90 degrees, then flipped left to right.
    """
    if orientation == 6:
        return np.transpose(grid)
    if orientation == 5:
        return np.flipud(grid)
    turned = np.rot90(grid, {4: 0, 7: 1}.get(orientation, orientation))
    return np.fliplr(turned) if orientation in (4, 7) else turned


def restore(grid: np.ndarray, orientation: int) -> np.ndarray:
    """Returns the grid that `orient` turned into `grid` with this orientation."""
    return orient(grid, _UNDONE_BY[orientation])


def smallest(grid: np.ndarray) -> bytes:
    """Returns a canonical form of a grid, equal for all its orientations."""
    images = (np.ascontiguousarray(orient(grid, o)) for o in ORIENTATIONS)
    return min(bytes(image.shape) + image.tobytes() for image in images)
