"""Packs segments into rows with numpy, and streams the rows.

Rows are filled greedily in order, exactly as seqio's DecoderFeatureConverter fills them: the two give the same rows.

T: tokens per row. N: rows.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tasks.documents import StreamSpec
from tasks.streams import BATCH_DTYPES, read_position


class Segment(NamedTuple):
    """One segment of a row: attention and targets do not cross its borders.

    Attributes:
      inputs: [n] ids, n at most T.
      targets: [n], the id that follows each input.
      weights: [n] float32: 1 where the loss counts, 0 elsewhere.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def text_segment(ids: np.ndarray, *, bos_id: int) -> Segment:
    """Returns the segment of a chunk of text, int32[n]: each id is learned from those before it and `bos_id`."""
    return Segment(np.r_[np.int32(bos_id), ids[:-1]], ids, np.ones(len(ids), np.float32))


def pack(segments: Iterable[Segment], *, length: int) -> Mapping[str, np.ndarray]:
    """Packs segments into rows in order; a segment that does not fit starts the next row.

    Args:
      segments: at most T ids each.
      length: T.

    Returns:
      Every key of a batch, [N, T]; padding is 0 everywhere, and has segment 0 and weight 0.
    """
    rows: list[list[Segment]] = []
    used = length
    for segment in segments:
        size = len(segment.targets)
        if used + size > length:
            rows.append([])
            used = 0
        rows[-1].append(segment)
        used += size
    packed = {key: np.zeros((len(rows), length), dtype) for key, dtype in BATCH_DTYPES.items()}
    for index, row in enumerate(rows):
        start = 0
        for number, segment in enumerate(row, start=1):
            where = np.s_[index, start : start + len(segment.targets)]
            for key, values in segment._asdict().items():
                packed[key][where] = values
            packed["segment_ids"][where] = number
            packed["positions"][where] = np.arange(len(segment.targets))
            start += len(segment.targets)
    return packed


class PackedStream:
    """`streams.Stream` that reads segments in windows and packs one window at a time.

    A position is that of the window and a row number, so resuming reads one window again. Subclasses define the
    methods that raise NotImplementedError here.
    """

    KINDS: Mapping[str, type]  # keys of a window's position, with their types

    def __init__(self, spec: StreamSpec) -> None:
        self._spec = spec
        self._rows: list[tuple[dict[str, Any], Mapping[str, np.ndarray]]] = []  # (position of the row, row)

    def __next__(self) -> Mapping[str, np.ndarray]:
        """See `streams.Stream`."""
        while len(self._rows) < self._spec.rows:
            self._rows += self._next_rows()
        taken, self._rows = self._rows[: self._spec.rows], self._rows[self._spec.rows :]
        return {key: np.stack([row[key] for _, row in taken]) for key in BATCH_DTYPES}

    def state(self) -> bytes:
        """See `streams.Stream`."""
        return json.dumps(self._rows[0][0] if self._rows else {**self._position(), "row": 0}).encode()

    def restore(self, state: bytes) -> None:
        """See `streams.Stream`."""
        position = read_position(state, **self.KINDS, row=int)
        self._move(position)
        self._rows = self._next_rows()[position["row"] :] if position["row"] else []

    def _next_rows(self) -> list[tuple[dict[str, Any], Mapping[str, np.ndarray]]]:
        position = self._position()
        packed = pack(self._next_window(), length=self._spec.length)
        rows = range(len(packed["targets"]))
        return [({**position, "row": row}, {key: packed[key][row] for key in packed}) for row in rows]

    def _position(self) -> dict[str, Any]:
        """Returns the position of the next window, as JSON."""
        raise NotImplementedError

    def _move(self, position: Mapping[str, Any]) -> None:
        """Moves to the position of a window."""
        raise NotImplementedError

    def _next_window(self) -> list[Segment]:
        """Reads the segments of the next window."""
        raise NotImplementedError
