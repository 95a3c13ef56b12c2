"""What saving costs a run: foreseen on its card, said once it is known, and summed up at its end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping

from core import paths, units
from core.checkpoints.writing import Cost

Say = Callable[[str], None]
Scalars = Callable[[int, Mapping[str, float]], None]


class Costs:
    """Of the saves of one run, from when this is made to `end`. Says what the first cost, and what all did."""

    def __init__(self, *, say: Say, write: Scalars, clock: Callable[[], float] = time.monotonic):
        """`say(line)` tells a person; `write(step, values)` records."""
        self._say = say
        self._write = write
        self._clock = clock
        self._began = clock()
        self._costs: list[Cost] = []

    def add(self, cost: Cost) -> None:
        """A save that is complete."""
        self._costs.append(cost)
        values = {
            "checkpoint/blocked_seconds": cost.blocked_seconds,
            "checkpoint/write_seconds": cost.write_seconds,
            "checkpoint/bytes": float(cost.bytes),
        }
        self._write(cost.step, values)
        if len(self._costs) == 1:
            self._say(
                f"step {cost.step:>6}: {units.size(cost.bytes)} saved; training waited "
                f"{units.seconds(cost.blocked_seconds, digits=2)} for it, "
                f"it was written in {units.seconds(cost.write_seconds, digits=2)}"
            )

    def end(self) -> None:
        """Training is over: `checkpoints: 3 of 420 MiB, 600 ms each out of 37 s of training (4.9 %)`."""
        if not self._costs:
            return
        training_seconds = max(self._clock() - self._began, 1e-9)
        blocked = sum(cost.blocked_seconds for cost in self._costs)
        self._say(
            f"checkpoints: {len(self._costs)} of {units.size(self._costs[-1].bytes)}, "
            f"{units.seconds(blocked / len(self._costs), digits=2)} "
            f"each out of {units.seconds(training_seconds)} of training ({100 * blocked / training_seconds:.2g} %)"
        )


def foreseen(run_dir: str, *, interval: int, keep: int, size_bytes: int) -> str:
    """What is known before the first save: `every 1,000 steps, the latest 3 kept, 420 MiB each; 12 GiB are free`.

    Args:
      run_dir: local or gs://.
      interval: steps between saves, at most so many are lost.
      keep: how many of the latest stay.
      size_bytes: of all arrays of the state.
    """
    text = (
        f"every {units.counted(interval, 'step')} (at most so many are lost), the latest {keep} kept, "
        f"{units.size(size_bytes)} each"
    )
    directory = paths.resolve(run_dir)
    if paths.is_remote(directory):
        return text
    free_bytes = shutil.disk_usage(next(p for p in (directory, *directory.parents) if p.exists())).free
    needed_bytes = (keep + 1) * size_bytes  # one more while the oldest still stands
    short = f", and {units.size(needed_bytes)} are needed: free some, or lower KEEP_CHECKPOINTS"
    return f"{text}; {units.size(free_bytes)} are free{short * (free_bytes < needed_bytes)}"
