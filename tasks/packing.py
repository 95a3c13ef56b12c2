"""Packing documents into rows with numpy, for sources that tf.data cannot read.

The one idea: rows are filled greedily in order, exactly as seqio's DecoderFeatureConverter fills them, so that a source
gives the same rows whichever of the two packs it.

T length of a row, N rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tasks.streams import BATCH_DTYPES


def chunks(ids: Sequence[int], *, length: int) -> list[np.ndarray]:
    """A document cut into pieces of at most `length` ids; nothing is dropped."""
    array = np.asarray(ids, np.int32)
    return [array[start : start + length] for start in range(0, len(array), length)]


def pack(pieces: Iterable[np.ndarray], *, length: int, bos_id: int) -> Mapping[str, np.ndarray]:
    """Rows made of pieces in order; a piece that does not fit begins the next row.

    Args:
      pieces: ids of each segment, at most T of them.
      length: T.
      bos_id: the input at the first place of every segment.

    Returns:
      Every key of a batch, [N, T]; padding is 0 everywhere.
    """
    rows: list[list[np.ndarray]] = []
    used = length
    for piece in pieces:
        if used + len(piece) > length:
            rows.append([])
            used = 0
        rows[-1].append(piece)
        used += len(piece)
    packed = {key: np.zeros((len(rows), length), dtype) for key, dtype in BATCH_DTYPES.items()}
    for row, segments in enumerate(rows):
        start = 0
        for number, piece in enumerate(segments, start=1):
            _write_segment({key: values[row] for key, values in packed.items()}, piece, (start, number, bos_id))
            start += len(piece)
    return packed


def _write_segment(row: Mapping[str, np.ndarray], piece: np.ndarray, place: tuple[int, int, int]) -> None:
    start, number, bos_id = place
    where = slice(start, start + len(piece))
    row["targets"][where] = piece
    row["inputs"][where] = np.concatenate([[bos_id], piece[:-1]])
    row["weights"][where] = 1.0
    row["segment_ids"][where] = number
    row["positions"][where] = np.arange(len(piece))
