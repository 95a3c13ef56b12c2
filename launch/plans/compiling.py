"""Compiling candidates in processes of their own, two at a time where memory allows.

The one idea: what is finished is kept at once, in the user's cache, so that Ctrl-C, a lost connection or a full disk
costs what was under way and nothing else; the same command goes on from there.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from core.slices import GIB
from launch import host_memory
from launch.environment import WORKSPACE
from launch.plans import records
from launch.plans.records import Record
from parallel.hlo import messages

BYTES_PER_COMPILE = 4 * GIB  # about 3 of a 7B step, and room
MOST_AT_ONCE = 2
WORKER = (sys.executable, "-m", "launch.plans.worker")
_POLL_SECONDS = 0.1


class Job(NamedTuple):
    """One candidate to compile.

    Attributes:
      name: for people.
      experiment, slice, bindings: what the worker loads.
      record: where its record goes.
    """

    name: str
    experiment: str
    slice: str
    bindings: tuple[str, ...]
    record: Path


class Done(NamedTuple):
    """What became of a job: its record, or why its process failed, which is not kept."""

    job: Job
    record: Record


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen
    folder: Path


def at_once() -> int:
    """How many compiles this machine has processors and memory for; at least one."""
    room = host_memory.available_bytes() // BYTES_PER_COMPILE
    return int(max(1, min(MOST_AT_ONCE, os.cpu_count() or 1, room)))


def compile_all(
    jobs: Iterator[Job],
    *,
    wanted: Callable[[], int],
    on_start: Callable[[Job], None] = lambda job: None,
    command: Sequence[str] = WORKER,
) -> Iterator[Done]:
    """Compiles jobs in their order, and yields each as it ends.

    Args:
      jobs: taken as there is room.
      wanted: how many more that compile are wanted; asked before each start.
      on_start: told of each job that starts.
      command: of a worker; its last argument will be the file that says what to do.

    Whatever ends the iteration early, Ctrl-C too, ends the workers.
    """
    running: collections.deque[_Running] = collections.deque()
    with tempfile.TemporaryDirectory(prefix="renga-plan-") as scratch, contextlib.ExitStack() as stack:
        stack.callback(_stop, running)
        number, left = 0, True
        while left or running:
            while left and len(running) < min(at_once() if running else 1, wanted()):
                job = next(jobs, None)
                if job is None:
                    left = False
                    break
                on_start(job)
                running.append(_start(job, Path(scratch) / str(number), command))
                number += 1
            ended = [r for r in running if r.process.poll() is not None]
            for one in ended:
                running.remove(one)
                yield Done(one.job, _record(one))
            if not running and wanted() <= 0:
                return
            if not ended:
                time.sleep(_POLL_SECONDS)


def _start(job: Job, folder: Path, command: Sequence[str]) -> _Running:
    folder.mkdir()
    said = {**job._asdict(), "record": str(job.record), "bindings": list(job.bindings), "parent": os.getpid()}
    (folder / "job.json").write_text(json.dumps(said))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env |= messages.AUDIBLE_WARNINGS
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(WORKSPACE), env.get("PYTHONPATH", "")]))
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, str(folder / "job.json")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            process_group=0,  # Ctrl-C is ours; we stop it
        )
    return _Running(job, process, folder)


def _record(ended: _Running) -> Record:
    if ended.process.returncode == 0 and ended.job.record.is_file():
        return records.from_json(json.loads(ended.job.record.read_text()))
    lines = (ended.folder / "output").read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it said nothing"
    return Record(records.FAILED, reason=f"the compiler's process ended with {ended.process.returncode}: {last}")


def _stop(running: collections.deque[_Running]) -> None:
    for one in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
    for one in running:
        one.process.wait()
