"""Estimates and measures the time and disk space that the checkpoints of a run take."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping

from core import paths, units
from core.checkpoints.writing import Cost

Say = Callable[[str], None]
Scalars = Callable[[int, Mapping[str, float]], None]


class SaveCosts:
    """Records the cost of every save of a run; reports the first when it is known, and the total at the end."""

    def __init__(self, *, say: Say, write: Scalars, clock: Callable[[], float] = time.monotonic):
        """Starts the clock. `say` receives lines for the terminal; `write(step, values)` records metrics."""
        self._say = say
        self._write = write
        self._clock = clock
        self._began = clock()
        self._costs: list[Cost] = []

    def add(self, cost: Cost) -> None:
        """Records a completed save."""
        self._costs.append(cost)
        values = {
            "checkpoint/blocked_seconds": cost.blocked_seconds,
            "checkpoint/write_seconds": cost.write_seconds,
            "checkpoint/bytes": float(cost.bytes),
        }
        self._write(cost.step, values)
        if len(self._costs) == 1:
            self._say(
                f"step {cost.step:>6}: checkpoint of {units.size(cost.bytes)} saved; training waited "
                f"{units.seconds(cost.blocked_seconds, digits=2)}, "
                f"writing took {units.seconds(cost.write_seconds, digits=2)}"
            )

    def end(self) -> None:
        """Reports the total: `checkpoints: 3 saved, 420 MiB each; training waited 600 ms per save, 4.9 % of 37 s`."""
        if not self._costs:
            return
        training_seconds = max(self._clock() - self._began, 1e-9)
        blocked = sum(cost.blocked_seconds for cost in self._costs)
        self._say(
            f"checkpoints: {len(self._costs)} saved, {units.size(self._costs[-1].bytes)} each; training waited "
            f"{units.seconds(blocked / len(self._costs), digits=2)} per save, "
            f"{100 * blocked / training_seconds:.2g} % of {units.seconds(training_seconds)}"
        )


def estimate(run_dir: str, *, interval: int, keep: int, size_bytes: int) -> str:
    """Describes the saves of a run: `every 1,000 steps, keeping the latest 3, 420 MiB each; 12 GiB of disk free`.

    Args:
      run_dir: local or gs://.
      interval: steps between saves.
      keep: how many of the latest checkpoints are kept.
      size_bytes: of all arrays of the state.
    """
    text = f"every {units.counted(interval, 'step')}, keeping the latest {keep}, {units.size(size_bytes)} each"
    directory = paths.resolve(run_dir)
    if paths.is_remote(directory):
        return text
    free_bytes = shutil.disk_usage(next(p for p in (directory, *directory.parents) if p.exists())).free
    needed_bytes = (keep + 1) * size_bytes  # the oldest is removed after the newest is complete
    short = f", but {units.size(needed_bytes)} are needed: free some space, or lower KEEP_CHECKPOINTS"
    return f"{text}; {units.size(free_bytes)} of disk free{short * (free_bytes < needed_bytes)}"
