"""Assembles the rows of one host's batches from data streams.

Row r of the global batch comes from stream r // (batch_size // num_streams), at a fixed place in it. A host opens the
streams of its rows and keeps only those rows, so any number of hosts read the same global batches.

B: rows of the global batch. R: rows of one stream in it.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from core import units
from core.batches import BatchSpec, Field, KnowsShare, is_same_data, row_length
from core.errors import UserError
from core.files import foreign_json
from core.types import Batches, DataLayout, can

BATCH_DTYPES = {
    "inputs": np.int32,
    "targets": np.int32,
    "weights": np.float32,
    "segment_ids": np.int32,
    "positions": np.int32,
}
_NO_POSITION = (
    "is not a data position: the checkpoint is damaged or was written by another version; a new run with another "
    "--run-dir can start from its parameters (INIT_FROM)"
)


def batch_spec(batch_size: int, *, length: int) -> dict[str, Field]:
    """Returns the fields of a global batch of text."""
    return {key: Field((batch_size, length), dtype, ("batch", "length")) for key, dtype in BATCH_DTYPES.items()}


class Stream(Protocol):
    """One stream of rows, the same on every host that opens it."""

    def __next__(self) -> Mapping[str, np.ndarray]:
        """Returns the next R rows of every field. A finite stream raises StopIteration at its end."""

    def state(self) -> bytes:
        """Returns the position after the last rows returned."""

    def restore(self, state: bytes) -> None:
        """Moves to a saved position. Raises UserError for bytes that are not a position."""


OpenStream = Callable[[int, int], Stream]  # (stream index, R) -> a stream at its start


def rows_per_stream(batch_size: int, *, num_streams: int) -> int:
    """Returns the number of rows that each stream contributes to a global batch.

    Raises UserError if the streams do not divide the batch.
    """
    if batch_size % num_streams == 0 and batch_size > 0:
        return batch_size // num_streams
    below, above = batch_size // num_streams * num_streams, -(-batch_size // num_streams) * num_streams
    batches = " or ".join(str(b) for b in sorted({below, max(above, num_streams)}) if b > 0)
    raise UserError(
        f"batch_size {batch_size} is not divisible by num_streams {num_streams}: set BATCH_SIZE = {batches}"
    )


def stream_name(index: int) -> str:
    """Returns the name under which the position of a stream is saved."""
    return f"stream_{index:05d}"


class StreamBatches(Batches):
    """Implements `core.types.Batches` over streams.

    Args:
      layout: the rows of this host.
      spec: fields of the global batch.
      num_streams: number of streams of the whole input.
      open_stream: opens one stream at its start.
      identity: JSON values on which the data depends; a position saved with others is not restored.
      former: values of `identity` that earlier versions saved for the same data.

    Raises:
      UserError: the streams do not divide the batch, or the layout is invalid.
    """

    def __init__(
        self,
        layout: DataLayout,
        *,
        spec: BatchSpec,
        num_streams: int,
        open_stream: OpenStream,
        identity: Mapping[str, Any],
        former: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> None:
        rows = rows_per_stream(layout.batch_size, num_streams=num_streams)
        _check_layout(layout)
        self._layout, self._spec = layout, spec
        self._identity = {**identity, "length": row_length(spec), "num_streams": num_streams, "rows_per_stream": rows}
        self._former = former
        self._takes = _takes(layout.rows, rows)
        self._streams = {index: open_stream(index, rows) for index in self._takes}
        owned = set(layout.owned_rows)
        self._owned = [index for index in self._takes if index * rows in owned]

    @property
    def spec(self) -> BatchSpec:
        return self._spec

    def __iter__(self) -> StreamBatches:
        return self

    def __next__(self) -> Mapping[str, np.ndarray]:
        height = len(self._layout.rows)
        batch = {key: np.empty((height, *whole.shape[1:]), whole.dtype) for key, whole in self._spec.items()}
        for index, (places, rows) in self._takes.items():
            part = next(self._streams[index])
            for key, values in batch.items():
                values[places] = part[key][rows]
        return batch

    def state(self) -> Mapping[str, bytes]:
        return {stream_name(index): _seal(self._streams[index].state(), self._identity) for index in self._owned}

    def restore(self, state: Mapping[str, bytes]) -> None:
        """Continues every stream at its position.

        Raises UserError if a position is missing, or was saved with another `identity`.
        """
        missing = [stream_name(index) for index in self._streams if stream_name(index) not in state]
        if missing:
            now, named = self._identity["num_streams"], ", ".join(units.shortened(missing, most=3))
            raise UserError(
                f"the checkpoint has positions of {len(state)} streams of data, and this run has NUM_STREAMS = {now} "
                f"(no position for {named}): resume with NUM_STREAMS = {len(state)}, or start a new run with another "
                "--run-dir"
            )
        for index, stream in self._streams.items():
            stream.restore(_unseal(state[stream_name(index)], self._identity, self._former))


class PassBatches(Batches):
    """Implements `core.types.Batches`: reads a split once, as one stream, and ends.

    Each host reads all rows and keeps its own: row r of the split is row r % B of batch r // B. Rows of zeros fill the
    last batch.
    """

    def __init__(self, layout: DataLayout, *, spec: BatchSpec, stream: Stream) -> None:
        """Prepares a pass over `stream`, which is finite and has one row per element."""
        _check_layout(layout)
        self._layout, self._spec, self._stream = layout, spec, stream

    @property
    def spec(self) -> BatchSpec:
        return self._spec

    def __iter__(self) -> PassBatches:
        return self

    def __next__(self) -> Mapping[str, np.ndarray]:
        places = {row: place for place, row in enumerate(self._layout.rows)}
        batch = {key: np.zeros((len(places), *whole.shape[1:]), whole.dtype) for key, whole in self._spec.items()}
        for row in range(self._layout.batch_size):
            try:
                found = next(self._stream)
            except StopIteration:
                if row == 0:
                    raise
                break
            if row in places:
                for key, values in batch.items():
                    values[places[row]] = found[key][0]
        return batch

    def share(self) -> float | None:
        return self._stream.share() if can(self._stream, KnowsShare) else None

    def state(self) -> Mapping[str, bytes]:
        return {}

    def restore(self, state: Mapping[str, bytes]) -> None:
        assert not state, "a pass over a split begins at its start"


def read_position(state: bytes, **kinds: type) -> dict[str, Any]:
    """Parses a position that a stream wrote as a JSON object.

    `kinds` are the types of required keys. Raises UserError for other bytes.
    """
    try:
        return foreign_json.load_object(state, kinds)
    except foreign_json.MalformedError as error:
        if state.startswith(b"PK"):  # a zip file: the iterators of tf.data
            fix = "the run read a seqio task with tf.data: set text.seqio.live = True to continue it"
            raise UserError(f"the position in the data {_NO_POSITION}: {fix}") from error
        raise UserError(f"{state[:40]!r}... {_NO_POSITION}: {error}") from error


def _takes(rows: tuple[int, ...], per_stream: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Maps each stream to the places that it fills in the host's batch, and to its rows that go there."""
    rows_array = np.asarray(rows)
    streams = rows_array // per_stream
    return {
        int(index): (np.flatnonzero(streams == index), rows_array[streams == index] % per_stream)
        for index in np.unique(streams)
    }


def _check_layout(layout: DataLayout) -> None:
    outside = [row for row in layout.rows if not 0 <= row < layout.batch_size]
    if outside or not layout.rows:
        raise UserError(f"rows {outside or 'of this host: none'}; expected rows of 0 to {layout.batch_size - 1}")
    foreign = sorted(set(layout.owned_rows) - set(layout.rows))
    if foreign:
        raise UserError(f"owned_rows {foreign} are not among this host's rows {layout.rows}")


def _seal(position: bytes, identity: Mapping[str, Any]) -> bytes:
    return json.dumps(identity, sort_keys=True).encode() + b"\n" + position


def difference(name: str, *, now: Any, was: Any) -> str:
    """Describes a changed setting on which saved data positions depend."""
    if name == "vocabulary":
        now, was = (str(value or "none")[:8] for value in (now, was))
        return f"the vocabulary is another one (hash {now}, was {was})"
    return f"{name} = {now!r}, was {was!r}"


def _differs(key: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    match key:
        case "source":
            return "its files have other names, sizes or content"
        case "packing":
            return "its rows were packed in another way, by an earlier version"
        case "rows_per_stream":
            was, rows = (identity.get(key, 0) * identity.get("num_streams", 0) for identity in (saved, now))
            return difference("BATCH_SIZE", now=rows, was=was)
    name = key.upper() if key in ("num_streams", "length", "seed") else key
    return difference(name, now=now[key], was=saved.get(key))


def _unseal(sealed: bytes, identity: Mapping[str, Any], former: Mapping[str, Any]) -> bytes:
    header, newline, position = sealed.partition(b"\n")
    try:
        saved = foreign_json.load_object(header if newline else b"")
    except foreign_json.MalformedError as error:
        raise UserError(f"{sealed[:40]!r}... {_NO_POSITION}: {error}") from error
    wrong = [
        _differs(key, saved, identity)
        for key, value in identity.items()
        if not (
            is_same_data(str(saved.get(key)), value)
            if key == "source"
            else saved.get(key) in (value, former.get(key, value))
        )
    ]
    if wrong:
        raise UserError(
            f"the saved data position belongs to other data ({'; '.join(wrong)}): "
            "resume with the settings of the checkpoint, or use a new run directory"
        )
    return position
