"""Samples memory, device arrays, open files and threads of every process of a soak, and finds growth.

step   500  host 0  1.31 GiB  212 arrays of 3.1 MiB  41 files  38 threads
…
"""

import ctypes
import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from core.checkpoints import writing
from core.errors import UserError
from core.training.hooks import Hook

SAVES, SAMPLES = 200, 50  # of a run
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}  # with several arenas, freed memory is spread out, which looks like growth
LEAST_SETTLED = 0.5  # fraction of the steps after which a process has allocated all that it needs
# Of memory, from the first third of the remaining steps to the last: in samples of a process of 206 MiB, a buffer of 3
# MiB is there or not, and the heap once grew by 2 MiB.
ALLOWED_BYTES = 4 * 2**20
LEAKED_BYTES = 28 * 2**10  # by TensorStore 0.1.86 at each save of the 41 arrays here; 16 KiB are its own metrics
WRITTEN_WITHIN_SECONDS = 300


class Sample(NamedTuple):
    """What a process holds after a step.

    Attributes:
      step: number of the step.
      memory_bytes: private resident memory (RssAnon), because the system drops and reloads pages of files. Memory that
        was freed but kept by the C library is not counted: it varies by more than the growth that is looked for.
      arrays: live JAX arrays of this process.
      array_bytes: of all their shards on this process's devices.
      files: open files.
      threads: Python threads.
    """

    step: int
    memory_bytes: int
    arrays: int
    array_bytes: int
    files: int
    threads: int


def save_interval(total_steps: int) -> int:
    """Returns the number of steps between two checkpoints of a soak."""
    return total_steps // SAVES


class Sampler(Hook):
    """Writes a sample every `every` steps, while no checkpoint is being written."""

    def __init__(self, file: Path, *, every: int):
        self._file, self._every = file, every

    def before_step(self, step: int) -> None:
        """Takes a sample after every `every`-th step, before the next."""
        if (step - 1) % self._every == 0 and step > 1:
            _wait_for_saves()
            with self._file.open("a") as file:
                file.write(json.dumps(sample(step - 1)._asdict()) + "\n")


def _wait_for_saves() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith(writing.THREAD):
            thread.join(WRITTEN_WITHIN_SECONDS)
            if thread.is_alive():
                raise TimeoutError(f"{thread.name} was not written within {WRITTEN_WITHIN_SECONDS} s")


def sample(step: int) -> Sample:
    """Returns what this process holds now."""
    alive = jax.live_arrays()
    held = sum(map(_bytes_here, alive))
    return Sample(
        step,
        _own_memory_bytes(),
        len(alive),
        held,
        sum(1 for _ in Path("/proc/self/fd").iterdir()),
        threading.active_count(),
    )


def _bytes_here(array: jax.Array) -> int:
    """Bytes of the shards on this process's devices, without creating arrays (which would be counted)."""
    at = array.sharding
    return math.prod(at.shard_shape(array.shape)) * array.dtype.itemsize * len(at.addressable_devices)


def _own_memory_bytes() -> int:
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # glibc
        library.malloc_trim(0)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def read(file: Path) -> list[Sample]:
    """Reads the samples of one host."""
    return [Sample(**json.loads(line)) for line in file.read_text().splitlines()]


def grown(samples: Sequence[Sample], *, save_interval: float = math.inf) -> Mapping[str, float]:
    """Returns the names of what grew, and by how much, from the first third after settling to the last third.

    Something grew if both its minimum and its maximum did; a value that oscillates has not grown. TensorStore's known
    leak does not count. In 5,000 steps, growth above 3 KB per step is detected.

    Args:
      samples: of one host.
      save_interval: steps between checkpoints.

    Raises:
      UserError: there are too few samples.
    """
    settled = [s for s in samples if s.step >= LEAST_SETTLED * samples[-1].step] if samples else []
    if len(settled) < 12:
        raise UserError(f"a soak of {len(samples)} samples is too short: run more steps")
    third = len(settled) // 3
    saves = (settled[-third].step - settled[0].step) / save_interval
    found = {}
    for name in Sample._fields[1:]:
        before, after = ([getattr(s, name) for s in part] for part in (settled[:third], settled[-third:]))
        growth = min(min(after) - min(before), max(after) - max(before))
        allowed = ALLOWED_BYTES + saves * LEAKED_BYTES if name == "memory_bytes" else 0
        if growth > allowed:
            found[name] = growth
    return found
