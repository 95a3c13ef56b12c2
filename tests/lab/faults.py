"""Faults, and how a process injects one into itself.

The product has no option to fail. `tests.lab.faulty_host` starts an ordinary run and injects the fault from outside: a
thread that waits for its moment, or an additional hook.
"""

import dataclasses
import functools
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from core.hosts import activity
from core.training.hooks import Hook
from launch.runs.prepared_run import Run
from launch.session import Session
from tests.lab import gcs_emulator, growth

_POLL_SECONDS = 0.002
_SMALL_FILE_BYTES = 2**16  # files up to this size can still be written to a "full" disk


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Attributes:
      kind: `kill`, `config`, `missing`, or one of `KINDS`.
      hosts: indices of the affected hosts.
      step: the step before which it happens; for `kill`, the earliest step; for `soak`, steps between samples.
      activity: for `kill`, the activity in which the host must be.
      delay_seconds: for `kill`, time after it reaches step and activity; for `slow`, delay of every step; for `outage`,
        its duration.
      bindings: for `config`, additional gin bindings of these hosts.
      note: file that gets the time at which it happened, in seconds since the epoch.
    """

    kind: str
    hosts: tuple[int, ...] = (2,)
    step: int = 6
    activity: str = activity.TRAINING
    delay_seconds: float = 0.0
    bindings: tuple[str, ...] = ()
    note: str = ""

    def as_json(self) -> str:
        """Returns the fault as text for a command line."""
        return json.dumps(dataclasses.asdict(self))


def from_json(text: str) -> Fault:
    """Inverse of `Fault.as_json`."""
    plain = json.loads(text)
    return Fault(**{**plain, "hosts": tuple(plain["hosts"]), "bindings": tuple(plain["bindings"])})


def plant(fault: Fault, *, process_index: int) -> list[str]:
    """Injects a fault into this process if its host is affected.

    Returns:
      Words to append to the process's command line.
    """
    if process_index not in fault.hosts:
        return []
    if fault.kind == "config":
        _note(fault)
        return [word for binding in fault.bindings for word in ("--gin", binding)]
    if fault.kind == "missing":
        _note(fault)
        time.sleep(1e6)
    if fault.kind == "kill":
        threading.Thread(target=_kill_at_its_moment, args=(fault,), daemon=True).start()
        return []
    if fault.kind == "soak":
        note = Path(fault.note)
        file = note.with_name(f"{note.name}-host_{process_index}.jsonl")
        _add_hook(lambda run: (run, growth.Sampler(file, every=fault.step)))
    else:
        _add_hook(lambda run: (_with_bad_data(run, fault), _AtStep(fault, run)))
    return []


def _add_hook(prepare: Callable[[Run], tuple[Run, Hook]]) -> None:
    """Changes the run that this process will train, and adds a hook to it."""
    begin = Session.__init__

    @functools.wraps(begin)
    def planted(self: Session, run: Run, *, also: Sequence[Hook] = (), **more: Any) -> None:
        run, hook = prepare(run)
        begin(self, run, also=(*also, hook), **more)

    Session.__init__ = planted


def _with_bad_data(run: Run, fault: Fault) -> Run:
    if fault.kind != "nan":
        return run
    return dataclasses.replace(run, experiment=dataclasses.replace(run.experiment, task=_Task(run, fault)))


def _note(fault: Fault) -> None:
    Path(fault.note).write_text(repr(time.time()))


def _kill_at_its_moment(fault: Fault) -> None:
    while (at := activity.place()).activity != fault.activity or at.step < fault.step:
        time.sleep(_POLL_SECONDS)
    time.sleep(fault.delay_seconds)
    _note(fault)
    os.kill(os.getpid(), signal.SIGKILL)


class _AtStep(Hook):
    """Does something before a step, once, and notes when."""

    def __init__(self, fault: Fault, run: Run):
        self._fault, self._run = fault, run
        self._noted = False

    def before_step(self, step: int) -> None:
        if step < self._fault.step or (step > self._fault.step and self._fault.kind != "slow"):
            return
        if not self._noted:
            _note(self._fault)
            self._noted = True
        KINDS[self._fault.kind](self._fault, self._run)


def _hang(fault: Fault, run: Run) -> None:
    time.sleep(1e6)


def _freeze(fault: Fault, run: Run) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(fault: Fault, run: Run) -> None:
    raise RuntimeError("planted: a host raises")


def _leave(fault: Fault, run: Run) -> None:
    sys.exit(0)


def _terminate(fault: Fault, run: Run) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _be_slow(fault: Fault, run: Run) -> None:
    time.sleep(fault.delay_seconds)


def _fill_disk(fault: Fault, run: Run) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_SMALL_FILE_BYTES, resource.RLIM_INFINITY))


def _take_another_branch(fault: Fault, run: Run) -> None:
    """Runs a program over all chips on this host alone."""
    mesh = run.program.partitioner.mesh
    over_all = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
    rows = np.ones(mesh.size, np.float32)
    mine = jax.make_array_from_callback(rows.shape, over_all, lambda index: rows[index])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jax.block_until_ready(jax.jit(lambda x: x.sum(), out_shardings=whole)(mine))


def _refuse_all_requests(fault: Fault, run: Run) -> None:
    """Makes the bucket emulator refuse all requests for a while."""
    bucket = gcs_emulator.of_environment()
    bucket.errors(1.0)
    threading.Timer(fault.delay_seconds, bucket.errors, [0.0]).start()


def _do_nothing(fault: Fault, run: Run) -> None:
    del fault, run


KINDS: Mapping[str, Callable[[Fault, Run], None]] = {
    "hang": _hang,
    "freeze": _freeze,
    "raise": _raise,
    "leave": _leave,
    "terminate": _terminate,
    "slow": _be_slow,
    "full disk": _fill_disk,
    "branch": _take_another_branch,
    "outage": _refuse_all_requests,
    "nan": _do_nothing,  # `_Task` injects it into the data
}


class _Task:
    """A task with NaN weights in one batch."""

    def __init__(self, run: Run, fault: Fault):
        self._task, self._fault = run.experiment.task, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def train(self, layout, *, seed):
        return _Batches(self._task.train(layout, seed=seed), at=self._fault.step)


class _Batches:
    """The batches of a task; the `at`-th batch has NaN weights."""

    def __init__(self, batches: Any, *, at: int):
        self._batches, self._left = batches, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._batches)
        self._left -= 1
        return {**batch, "weights": batch["weights"] * np.nan} if self._left == 0 else batch


def random_kill(chance: random.Random, *, hosts: int, newest: int, within: int, note: str) -> Fault:
    """Returns a kill of a random host at a random moment: while restoring, in a step, or while saving.

    Args:
      chance: random number generator.
      hosts: number of hosts.
      newest: the newest saved step; 0 if there is nothing to restore.
      within: maximum number of steps after that one.
      note: as `Fault.note`.
    """
    longest = {
        activity.TRAINING: 1.0,
        activity.SAVING: 0.3,
        activity.RESTORING: 0.5,
    }  # seconds after the activity began
    doing = chance.choice([name for name in longest if newest or name != activity.RESTORING])
    step = 0 if doing == activity.RESTORING else newest + chance.randint(1, within)
    host, delay = chance.randrange(hosts), chance.uniform(0, longest[doing])
    return Fault("kill", hosts=(host,), step=step, activity=doing, delay_seconds=delay, note=note)
