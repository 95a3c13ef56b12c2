"""Packs documents into rows with numpy, for sources that tf.data cannot read.

Rows are filled greedily in order, exactly as seqio's DecoderFeatureConverter fills them: the two give the same rows.

T: tokens per row. N: rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tasks.streams import BATCH_DTYPES


def chunks(ids: Sequence[int], *, length: int) -> list[np.ndarray]:
    """Splits a document into chunks of at most `length` ids; nothing is dropped."""
    array = np.asarray(ids, np.int32)
    return [array[start : start + length] for start in range(0, len(array), length)]


def pack(chunks: Iterable[np.ndarray], *, length: int, bos_id: int) -> Mapping[str, np.ndarray]:
    """Packs chunks into rows in order; a chunk that does not fit starts the next row.

    Args:
      chunks: ids of each segment, at most T each.
      length: T.
      bos_id: the first input of every segment.

    Returns:
      Every key of a batch, [N, T]; padding is 0 everywhere, and has segment 0 and weight 0.
    """
    rows: list[list[np.ndarray]] = []
    used = length
    for chunk in chunks:
        if used + len(chunk) > length:
            rows.append([])
            used = 0
        rows[-1].append(chunk)
        used += len(chunk)
    packed = {key: np.zeros((len(rows), length), dtype) for key, dtype in BATCH_DTYPES.items()}
    for row, segments in enumerate(rows):
        start = 0
        for number, chunk in enumerate(segments, start=1):
            _write_segment({key: values[row] for key, values in packed.items()}, chunk, (start, number, bos_id))
            start += len(chunk)
    return packed


def _write_segment(row: Mapping[str, np.ndarray], chunk: np.ndarray, place: tuple[int, int, int]) -> None:
    start, number, bos_id = place
    where = slice(start, start + len(chunk))
    row["targets"][where] = chunk
    row["inputs"][where] = np.concatenate([[bos_id], chunk[:-1]])
    row["weights"][where] = 1.0
    row["segment_ids"][where] = number
    row["positions"][where] = np.arange(len(chunk))
