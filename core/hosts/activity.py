"""Records the current step and activity of this process, which the heartbeat sends to other hosts."""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

JOINING = "joining"
OPENING = "opening"  # building the program, opening files and data
PREPARING = "preparing the data"
RESTORING = "restoring"
READING = "reading data"
COMPILING = "compiling"  # until the first step is done: the hosts compile at different speeds
TRAINING = "training"
BETWEEN = "between steps"
MEETING = "waiting for all hosts"  # before they evaluate or save together
EVALUATING = "evaluating"
SAVING = "saving"
ENDING = "ending"

ALONE = frozenset({OPENING, BETWEEN, READING})  # activities in which a host does not wait for others
STEPPING = frozenset({READING, COMPILING, TRAINING, BETWEEN})  # in the training loop, before the last step is done


class Place(NamedTuple):
    """The step and activity of a process.

    Attributes:
      step: number of the current step; 0 before the first.
      seconds: time since the activity, or its part, began.
      limit_seconds: time limit that the work itself enforces; 0: none.
      part: part of the activity, such as `batch 3 of 8`; empty: none.
    """

    step: int
    activity: str
    seconds: float
    limit_seconds: float = 0.0
    part: str = ""

    def __str__(self) -> str:
        return f"step {self.step}, {self.activity}" + (f", {self.part}" if self.part else "")


class _Record(NamedTuple):
    step: int
    activity: str
    since: float
    limit_seconds: float = 0.0
    part: str = ""


_now = _Record(0, JOINING, time.monotonic())


def place() -> Place:
    """Returns the current place of this process."""
    record = _now
    return Place(record.step, record.activity, time.monotonic() - record.since, record.limit_seconds, record.part)


def at(activity: str, *, step: int | None = None, limit_seconds: float = 0.0, part: str = "") -> None:
    """Records that this process begins an activity, or a part of one.

    Args:
      step: number of the current step; None: as before.
      limit_seconds, part: as in `Place`.
    """
    global _now
    _now = _Record(_now.step if step is None else step, activity, time.monotonic(), limit_seconds, part)


@contextlib.contextmanager
def enter(activity: str, *, limit_seconds: float = 0.0) -> Iterator[None]:
    """Context with this activity; records the previous one at the end, unless an exception is raised."""
    before = _now
    at(activity, limit_seconds=limit_seconds)
    yield
    at(before.activity, limit_seconds=before.limit_seconds, part=before.part)
