"""Thousands of steps of which nothing may grow: memory of every process, arrays on the devices, open files, threads.

step   500  host 0  1.31 GiB  212 arrays of 3.1 MiB  41 files  38 threads
…
"""

from __future__ import annotations

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
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}  # freed memory scattered over an arena for every few threads looks like growth
LEAST_SETTLED = 0.5  # of the steps, behind which a process has all that it needs
ALLOWED_GROWTH = 0.01  # of memory, from the first third of what is left to the last; it swings by half of that
LEAKED_BYTES = 28 * 2**10  # by TensorStore 0.1.86 at each save of the 41 arrays here; 16 KiB are its own metrics
WRITTEN_WITHIN_SECONDS = 300


class Sample(NamedTuple):
    """What a process holds behind a step.

    Attributes:
      step: its number.
      memory_bytes: resident and its own (RssAnon): pages of files come and go as the system likes. Without what the C
        library keeps of freed memory to give out again: that swings by more than is looked for.
      arrays: alive, of this process's devices.
      array_bytes: of those, all shards here.
      files: open.
      threads: of Python.
    """

    step: int
    memory_bytes: int
    arrays: int
    array_bytes: int
    files: int
    threads: int


def save_interval(total_steps: int) -> int:
    """Steps from one checkpoint of a soak to the next."""
    return total_steps // SAVES


class Sampler(Hook):
    """Writes a sample every so many steps, while no checkpoint is being written."""

    def __init__(self, file: Path, *, every: int):
        self._file, self._every = file, every

    def before_step(self, step: int) -> None:
        """Samples what is held before the next step."""
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
    """What this process holds now."""
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
    """Of its shards on this process's devices; to look at a shard makes an array of it, which would be counted."""
    at = array.sharding
    return math.prod(at.shard_shape(array.shape)) * array.dtype.itemsize * len(at.addressable_devices)


def _own_memory_bytes() -> int:
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # glibc
        library.malloc_trim(0)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def read(file: Path) -> list[Sample]:
    """The samples of one host."""
    return [Sample(**json.loads(line)) for line in file.read_text().splitlines()]


def grown(samples: Sequence[Sample], *, save_interval: float = math.inf) -> Mapping[str, float]:
    """By how much something grew, by name, for what did: from the first third behind settling to the last.

    Something grew where its least and its most both did: what swings between two values does neither. What TensorStore
    is known to leak does not count. In 5,000 steps of a process of 230 MiB some 1.5 KB a step beyond it are seen.

    Args:
      samples: of one host.
      save_interval: steps from one checkpoint to the next.

    Raises:
      UserError: too few samples to say so.
    """
    settled = [s for s in samples if s.step >= LEAST_SETTLED * samples[-1].step] if samples else []
    if len(settled) < 12:
        raise UserError(f"a soak of {len(samples)} samples says nothing: run more steps")
    third = len(settled) // 3
    saves = (settled[-third].step - settled[0].step) / save_interval
    found = {}
    for name in Sample._fields[1:]:
        before, after = ([getattr(s, name) for s in part] for part in (settled[:third], settled[-third:]))
        growth = min(min(after) - min(before), max(after) - max(before))
        allowed = max(before) * ALLOWED_GROWTH + saves * LEAKED_BYTES if name == "memory_bytes" else 0
        if growth > allowed:
            found[name] = growth
    return found
