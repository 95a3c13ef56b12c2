"""Packs segments into rows with numpy, and streams the rows. T: tokens per row. N: rows."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tasks import permutation
from tasks.streams import BATCH_DTYPES, Stream, read_position
from tasks.text.documents import StreamSpec


class Segment(NamedTuple):
    """One segment of a row; attention and targets do not cross its boundaries.

    Attributes:
      inputs: [n] input ids, n at most T.
      targets: [n], the id that follows each input.
      weights: [n] float32: 1 where the loss counts, 0 elsewhere.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def text_segment(ids: np.ndarray, *, bos_id: int, prompt: int = 0) -> Segment:
    """Returns the segment of a chunk of text, int32 [n]; the first `prompt` ids have weight 0."""
    inputs = np.empty_like(ids)
    inputs[0], inputs[1:] = bos_id, ids[:-1]
    weights = np.ones(len(ids), np.float32)
    weights[: max(prompt, 0)] = 0
    return Segment(inputs, ids, weights)


Row = list[Segment]


def first_fit(segments: Sequence[Segment], *, length: int) -> list[Row]:
    """Packs segments into rows of T ids, from the longest, each into the first row with room."""
    sizes = np.array([len(segment.targets) for segment in segments], np.int64)
    free = np.full(len(segments), length)
    row_of = np.zeros(len(segments), np.int64)
    for size in np.unique(sizes)[::-1].tolist():  # segments of equal size fill the rows one after another
        numbers = np.flatnonzero(sizes == size)
        fits = np.minimum(np.cumsum(free // size), len(numbers))
        fits = np.diff(fits, prepend=0)
        row_of[numbers] = np.repeat(np.arange(len(free)), fits)
        free -= fits * size
    order = np.argsort(row_of, kind="stable")
    borders = np.flatnonzero(np.diff(row_of[order])) + 1
    rows = sorted(row.tolist() for row in np.split(order, borders))
    return [[segments[number] for number in row] for row in rows if row]


def in_order(segments: Sequence[Segment], *, length: int) -> list[Row]:
    """Packs segments into rows of T ids in order; one that does not fit starts a row."""
    rows: list[Row] = []
    used = length
    for segment in segments:
        if used + len(segment.targets) > length:
            rows.append([])
            used = 0
        rows[-1].append(segment)
        used += len(segment.targets)
    return rows


def batch(rows: Sequence[Row], *, length: int) -> Mapping[str, np.ndarray]:
    """Returns the fields of a batch, [N, T]; padding is 0 in all of them."""
    packed = {key: np.zeros((len(rows), length), dtype) for key, dtype in BATCH_DTYPES.items()}
    for index, row in enumerate(rows):
        sizes = np.array([len(segment.targets) for segment in row])
        used = int(sizes.sum())
        for key, values in zip(Segment._fields, zip(*row, strict=True), strict=True):
            packed[key][index, :used] = np.concatenate(values)
        packed["segment_ids"][index, :used] = np.repeat(np.arange(1, len(row) + 1), sizes)
        packed["positions"][index, :used] = np.arange(used) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return packed


class PackedStream(Stream):
    """A `streams.Stream` that reads segments in windows and packs one window at a time.

    Subclasses define the methods that raise NotImplementedError here.
    """

    KINDS: Mapping[str, type]  # keys of a window's position, with their types

    def __init__(self, spec: StreamSpec, arrange: Callable[..., list[Row]] = first_fit) -> None:
        self._spec, self._arrange = spec, arrange
        self._rows: list[Row] = []
        self._start: dict[str, Any] = {}  # position of the window of _rows
        self._row = 0  # index of the next row in _rows
        self._rows_before = 0  # rows of earlier windows

    def __next__(self) -> Mapping[str, np.ndarray]:
        rows: list[Row] = []
        while len(rows) < self._spec.rows and (row := self.next_row()):
            rows.append(row)
        if not rows:
            raise StopIteration
        return batch(rows, length=self._spec.length)

    def state(self) -> bytes:
        return json.dumps(self.position()).encode()

    def restore(self, state: bytes) -> None:
        self.move(read_position(state, **self.KINDS, row=int))

    def next_row(self) -> Row | None:
        """Returns the segments of the next row; None at the end of a stream that ends."""
        while self._row == len(self._rows):
            self._read_window()
            if not self._rows and self._spec.once:
                return None
        self._row += 1
        return self._rows[self._row - 1]

    def position(self) -> dict[str, Any]:
        """Returns the position of the next row, as JSON values."""
        return {
            **(self._start if self._row < len(self._rows) else self._position()),
            "row": self._row % max(len(self._rows), 1),
        }

    def move(self, position: Mapping[str, Any]) -> None:
        self._move(position)
        self._rows, self._row = [], 0
        if position["row"]:
            self._read_window()
            self._row = position["row"]

    def share(self) -> float | None:
        """Returns approximately the share of the source that was returned as rows; None if it is not known."""
        returned, read = self._rows_before + self._row, self._rows_before + len(self._rows)
        share = self._source_share()
        return None if share is None else share * returned / max(read, 1)

    def _read_window(self) -> None:
        self._rows_before += len(self._rows)
        self._start = self._position()
        rows = self._arrange(self._next_window(), length=self._spec.length)
        self._rows = [rows[place] for place in permutation.permuted(range(len(rows)), len(rows), key=())]
        self._row = 0

    def _position(self) -> dict[str, Any]:
        """Returns the position of the next window, as JSON values."""
        raise NotImplementedError

    def _move(self, position: Mapping[str, Any]) -> None:
        """Moves to a position that `_position` returned."""
        raise NotImplementedError

    def _source_share(self) -> float | None:
        """Returns the share of the source that was read, 0 to 1; None if it is not known."""
        raise NotImplementedError

    def _next_window(self) -> list[Segment]:
        """Returns the segments of the next window; [] at the end of a stream that ends."""
        raise NotImplementedError
