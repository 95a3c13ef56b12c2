"""Where this process is: the step, what it does there, and since when.

One record for the process, written by whoever does the work and read by the thread that tells the other hosts. The one
idea: writing it costs a microsecond, so it can be kept at every turn of the loop, and is right when something stops.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

JOINING = "joining"
OPENING = "opening"  # what a run needs: its program, its files, its data once they are there
PREPARING = "preparing the data"
RESTORING = "restoring"
READING = "reading data"
COMPILING = "compiling"  # until the first step is done: the hosts compile at different speeds
TRAINING = "training"
BETWEEN = "between steps"
EVALUATING = "evaluating"
SAVING = "saving"
ENDING = "ending"

ALONE = frozenset({OPENING, BETWEEN, READING})  # what a host does by itself: it waits for no other
STEPPING = frozenset({READING, COMPILING, TRAINING, BETWEEN})  # in the loop: the last step is not done


class Place(NamedTuple):
    """Where a process is.

    Attributes:
      step: the number of the step that it is at, 0 before the first.
      phase: what it does, one of the words above.
      seconds: how long it has done that.
      limit_seconds: how long that may take by the work's own limit; 0 where it has none.
    """

    step: int
    phase: str
    seconds: float
    limit_seconds: float = 0.0

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"


class _Record(NamedTuple):
    step: int
    phase: str
    since: float
    limit_seconds: float = 0.0


_now = _Record(0, JOINING, time.monotonic())


def place() -> Place:
    """Where this process is now. Any thread may ask."""
    record = _now
    return Place(record.step, record.phase, time.monotonic() - record.since, record.limit_seconds)


def at(phase: str, *, step: int | None = None, limit_seconds: float = 0.0) -> None:
    """From now on: this phase, of this step where one is given, under a limit of its own where it has one."""
    global _now
    _now = _Record(_now.step if step is None else step, phase, time.monotonic(), limit_seconds)


@contextlib.contextmanager
def enter(phase: str, *, limit_seconds: float = 0.0) -> Iterator[None]:
    """This phase, and then the one before it again; an error leaves the record as it was when it happened."""
    before = _now
    at(phase, limit_seconds=limit_seconds)
    yield
    at(before.phase, limit_seconds=before.limit_seconds)
