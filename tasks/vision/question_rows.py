"""Lays out a question about an image as a row."""

from collections.abc import Sequence

import numpy as np


def laid_out(slots: Sequence[int], asked: Sequence[int], said: Sequence[int], *, length: int) -> dict[str, np.ndarray]:
    """Returns the fields of a row with a question about an image, except the image.

    `until` [T] is the last position to which each position attends.

    Args:
      slots: the positions of the image, [S].
      asked: ids before the answer; those at the positions of the image have no meaning.
      said: ids of the answer, which alone has weight 1.
      length: T.
    """
    ids = np.asarray([*asked, *said], np.int32)
    used, prefix = len(ids) - 1, len(asked)
    place = np.arange(length)
    inputs, targets = (np.zeros(length, np.int32) for _ in range(2))
    inputs[:used], targets[:used] = ids[:-1], ids[1:]
    is_text = place < used
    return {
        "inputs": inputs,
        "targets": np.where(place >= prefix - 1, targets, 0).astype(np.int32),
        "weights": (is_text & (place >= prefix - 1)).astype(np.float32),
        "segment_ids": is_text.astype(np.int32),
        "positions": np.where(is_text, place, 0).astype(np.int32),
        "slots": np.asarray(slots, np.int32),
        "until": np.where(place < prefix, prefix - 1, place).astype(np.int32),
    }
