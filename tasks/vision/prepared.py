"""Prepares images on the host as the processor of a published model does, but without normalizing them.

A processor with frames, such as that of SmolVLM, can split an image into square frames. If these are several, the
whole image follows, reduced to one frame.

F frames, H rows and W columns of pixels.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from core.checkpoints.image_processor import ImageProcessor
from tasks.vision import images

_MOST = 4096  # pixels of an edge, in processors with frames


class Frames(NamedTuple):
    """A prepared image.

    Attributes:
      pixels: [F, H, W, 3], uint8.
      rows, columns: size of the grid of frames; 0 if the image was not split.
    """

    pixels: np.ndarray
    rows: int = 0
    columns: int = 0


def prepare(content: bytes, processor: ImageProcessor) -> Frames:
    """Returns an image, given the content of its file, as a model reads it; raises UnreadableImage."""
    image = images.opened(content)
    if processor.frame is not None:
        return _frames(image, processor, processor.frame)
    image = _resized(image, processor.size or _by_shortest(image, processor.shortest_edge), processor)
    if processor.crop is not None:
        rows, columns = processor.crop
        left, top = (image.width - columns) // 2, (image.height - rows) // 2
        image = image.crop((left, top, left + columns, top + rows))
    return Frames(_stacked([image]))


def _frames(image: Any, processor: ImageProcessor, side: int) -> Frames:
    image = _resized(image, _by_longest(image, processor.longest_edge), processor)
    rows, columns = _whole_frames(image, side) if processor.splits else (1, 1)
    image = _resized(image, (rows * side, columns * side), processor)
    if rows == columns == 1:
        return Frames(_stacked([image]))
    corners = [(column * side, row * side) for row in range(rows) for column in range(columns)]
    parts = [image.crop((left, top, left + side, top + side)) for left, top in corners]
    return Frames(_stacked([*parts, _resized(image, (side, side), processor)]), rows, columns)


def _whole_frames(image: Any, side: int) -> tuple[int, int]:
    ratio = image.width / image.height
    if image.width >= image.height:
        columns = math.ceil(image.width / side)
        return math.ceil(int(columns * side / ratio) / side), columns
    rows = math.ceil(image.height / side)
    return rows, math.ceil(int(rows * side * ratio) / side)


def _by_shortest(image: Any, edge: int | None) -> tuple[int, int]:
    assert edge is not None
    longest = int(edge * max(image.size) / min(image.size))
    return (longest, edge) if image.width <= image.height else (edge, longest)


def _by_longest(image: Any, edge: int | None) -> tuple[int, int]:
    assert edge is not None
    ratio = image.width / image.height
    shorter = int(edge / ratio) if ratio >= 1 else int(edge * ratio)
    shorter = max(shorter + shorter % 2, 1)
    rows, columns = (shorter, edge) if ratio >= 1 else (edge, shorter)
    if max(rows, columns) <= _MOST:
        return rows, columns
    ratio = columns / rows
    return (max(int(_MOST / ratio), 1), _MOST) if ratio >= 1 else (_MOST, max(int(_MOST * ratio), 1))


def _resized(image: Any, size: tuple[int, int], processor: ImageProcessor) -> Any:
    rows, columns = size
    if (image.width, image.height) == (columns, rows):
        return image
    return image.resize((columns, rows), processor.resample)


def _stacked(parts: list[Any]) -> np.ndarray:
    return np.stack([np.asarray(part, np.uint8) for part in parts])
