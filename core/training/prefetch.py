"""Prefetches batches to the devices, and tracks the position of the data.

The thread that reads is ahead of the step. So a position is a snapshot of the data source plus the number of batches
consumed since.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from core.errors import UserError
from core.types import Batches

_OFFSET = struct.Struct(">Q")  # precedes the snapshot of each stream: number of batches consumed since
DEPTH = 2  # prefetched batches on the devices
HELD = DEPTH + 2  # batches on the devices, with the one that waits for the queue and the one that the step uses
_JOIN_SECONDS = 10.0
_POLL_SECONDS = 0.1


class _Position(NamedTuple):
    snapshot: Mapping[str, bytes]
    offset: int


class _Ready(NamedTuple):
    batch: Any
    position: _Position  # after this batch


class _Failed(NamedTuple):
    error: BaseException


class Prefetch:
    """An iterator over device batches; holds at most `depth` + 1 besides the one that the step uses.

    Attributes:
      input_wait_seconds: how long the last `next` waited for data.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        to_device: Callable[[Mapping[str, np.ndarray]], Any],
        depth: int = DEPTH,
        snapshot_interval: int = 100,
    ):
        """Starts the thread; from now on `batches` belongs to it.

        Args:
          batches: the host side, already at the position to continue from.
          to_device: makes the device batch from this host's rows; called in the thread.
          depth: number of batches to keep ready, at least 1.
          snapshot_interval: batches between snapshots, at least 1; best a divisor of the checkpoint interval.
        """
        for name, value in (("depth", depth), ("snapshot_interval", snapshot_interval)):
            if value < 1:
                raise UserError(f"prefetch: {name} is {value}; expected at least 1")
        self.input_wait_seconds = 0.0
        self._batches = batches
        self._to_device = to_device
        self._interval = snapshot_interval
        self._position = _Position(batches.state(), 0)
        self._waiting: queue.Queue[_Ready | _Failed] = queue.Queue(maxsize=depth)
        self._closing = threading.Event()
        self._failed: _Failed | None = None
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Any:
        """Returns the next device batch, or raises the thread's error after the batches before it."""
        if self._failed is None:
            began = time.monotonic()
            item = self._take()
            self.input_wait_seconds = time.monotonic() - began
            if isinstance(item, _Ready):
                self._position = item.position
                return item.batch
            self._failed = item
        raise self._failed.error

    def position(self) -> dict[str, bytes]:
        """Returns the position of this host's streams after the batches returned so far."""
        offset = _OFFSET.pack(self._position.offset)
        return {name: offset + snapshot for name, snapshot in self._position.snapshot.items()}

    def close(self) -> None:
        """Stops the thread; waits for it at most 10 s."""
        self._closing.set()
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            warnings.warn(f"the input did not stop within {_JOIN_SECONDS:g} s; its thread is left behind", stacklevel=2)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> _Ready | _Failed:
        while True:
            try:
                return self._waiting.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._closing.is_set():
                    raise RuntimeError("this prefetch is closed; it has no further batches") from None

    def _work(self) -> None:
        snapshot, offset = self._position
        try:
            while not self._closing.is_set():
                batch = self._to_device(next(self._batches))
                offset += 1
                if offset == self._interval:
                    snapshot, offset = self._batches.state(), 0
                self._put(_Ready(batch, _Position(snapshot, offset)))
        except BaseException as error:  # raised in the thread that takes the next batch
            self._put(_Failed(error))

    def _put(self, item: _Ready | _Failed) -> None:
        while not self._closing.is_set():
            try:
                self._waiting.put(item, timeout=_POLL_SECONDS)
                return
            except queue.Full:
                continue


def restore(batches: Batches, position: Mapping[str, bytes]) -> None:
    """Moves `batches` to a saved position: restores the snapshot, then drops the batches consumed since.

    `position` is the union of what `Prefetch.position` returned on all hosts. Raises UserError if it is empty, or
    streams are at different positions.
    """
    offsets = {name: _OFFSET.unpack_from(value)[0] for name, value in position.items()}
    if not offsets:
        raise UserError("the checkpoint holds no data position; start with another run_dir")
    if len(set(offsets.values())) > 1:
        raise UserError(f"the streams of the checkpoint are at different positions: batches since snapshot {offsets}")
    batches.restore({name: value[_OFFSET.size :] for name, value in position.items()})
    for _ in range(next(iter(offsets.values()))):
        next(batches)
