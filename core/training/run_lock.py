"""A lock on the run directory, so that only one launch trains in it at a time.

Host 0 creates `RUN/lock.json`, renews it during the run and removes it at the end. If the owner of an existing lock is
a process of this machine, the process table shows whether it is alive. Otherwise an owner that does not renew the lock
within SILENT_SECONDS counts as dead.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import socket
import threading
import time
import typing
import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

from core.errors import UserError
from core.files import bookkeeping, foreign_json, paths
from core.training import goodput
from core.training.trainer import Hook

FILE = "lock.json"
RENEW_SECONDS = 15.0
SILENT_SECONDS = 60.0  # four renewals
_LOOK_SECONDS = 1.0  # between two looks at a lock on a disk
_SETTLING_SECONDS = 0.5  # after a lock on a disk was taken over: see `paths.write_if_unchanged`


class Owner(NamedTuple):
    """The process that holds a lock.

    Attributes:
      started: when it started, in seconds since 1970.
      ticks: the same in clock ticks since boot.
      machine: identifies the boot and the process namespace of its machine.
    """

    host: str
    pid: int
    started: float
    ticks: int
    machine: str
    token: str

    def __str__(self) -> str:
        when = datetime.datetime.fromtimestamp(self.started, datetime.UTC)
        return f"process {self.pid} on {self.host}, started {when:%Y-%m-%d %H:%M:%S} UTC"

    @classmethod
    def this(cls) -> Owner:
        """Returns this process as the owner."""
        ticks = goodput.own_ticks()
        return cls(
            socket.gethostname(), os.getpid(), goodput.process_started(), ticks, _machine(), token=uuid.uuid4().hex
        )

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Parses the content of a lock; None if it names no owner."""
        try:
            found = foreign_json.load_object(text, _KINDS)
            datetime.datetime.fromtimestamp(found["started"], datetime.UTC)  # a time that can be shown
        except (foreign_json.MalformedError, OverflowError, ValueError, OSError):
            return None
        return cls(**{name: found[name] for name in _KINDS})

    def is_alive(self) -> bool | None:
        """Returns whether the owner's process runs; None if this machine cannot tell."""
        if not self.machine or self.machine != _machine():
            return None
        return goodput.start_ticks(self.pid) == self.ticks


_KINDS = typing.get_type_hints(Owner)


def _machine() -> str:
    """Returns a text that is equal for processes that share a boot and a pid namespace; "" if unknown."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""


class Words(NamedTuple):
    """The words of messages about a locked folder.

    Attributes:
      folder: what the folder is called.
      cannot: what is not possible, as a clause.
      flag: the flag that chooses another folder.
    """

    folder: str = "run directory"
    cannot: str = "two launches cannot train in one directory"
    flag: str = "--run-dir"


RUN = Words()


class LockLostError(RuntimeError):
    """The lock of this run was removed or taken over by another process."""

    ends_without_save = True


def holder(run_dir: str) -> Owner | None:
    """Returns the live process of this machine that holds a run's lock, or None."""
    found = paths.read_versioned(paths.resolve(run_dir) / FILE)
    owner = found and Owner.parse(found.text)
    return owner if owner and owner.is_alive() else None


def in_use(run_dir: str, owner: Owner | None, *, renewed: bool = False, words: Words = RUN) -> str:
    """Returns the error message for a launch in a run directory that is in use.

    Args:
      owner: owner of the lock; None if the lock names none.
      renewed: whether the owner was seen renewing it.
      words: what the folder is called.
    """
    file = paths.resolve(run_dir) / FILE
    seen = ", which renewed its lock while this one watched" if renewed else ""
    remove = "gcloud storage rm" if paths.is_remote(file) else "rm"
    return (
        f"the {words.folder} {run_dir} is in use by another launch: {owner or 'its lock names no process'}{seen}. Wait "
        f"for it, stop it, or give another {words.flag}. To take the directory from it, which ends it: {remove} {file}"
    )


class RunLock:
    """The lock of a run directory, held from `acquire` to `release`."""

    def __init__(
        self,
        run_dir: str,
        version: str,
        owner: Owner,
        *,
        made_directory: bool,
        clock: Callable[[], float],
        words: Words,
    ):
        """Starts to renew the lock; only `acquire` calls it."""
        self._run_dir, self._file = run_dir, paths.resolve(run_dir) / FILE
        self._owner, self._version, self._made_directory = owner, version, made_directory
        self._words = words
        self._lost = ""
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._reads = bookkeeping.Bookkeeping(str(self._file), done="read")
        self._writes = bookkeeping.Bookkeeping(str(self._file))
        self._clock, self._looked_at = clock, clock()
        self._thread = threading.Thread(target=self._keep_renewing, name="run lock", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(
        cls,
        run_dir: str,
        *,
        say: Callable[[str], None],
        silent_seconds: float = SILENT_SECONDS,
        look_seconds: float = _LOOK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        words: Words = RUN,
    ) -> RunLock:
        """Acquires the lock, taking over that of a dead owner; creates the run directory if necessary.

        Args:
          say: receives messages about the lock of another owner.
          silent_seconds: time without a renewal after which an owner that cannot be looked up counts as dead.
          look_seconds: time between two reads of its lock.
          clock: the clock of `check`, in seconds.
        """
        was_there = paths.resolve(run_dir).exists()
        file, own = paths.require_writable(run_dir) / FILE, Owner.this()
        text = json.dumps(own._asdict())
        while True:
            found = paths.read_versioned(file)
            if found is not None:
                before = Owner.parse(found.text)
                waits = {"silent_seconds": silent_seconds, "look_seconds": look_seconds}
                _require_dead(run_dir, before, found, say=say, **waits, words=words)
            paths.write_if_unchanged(file, text, version=found and found.version)
            if found is not None and not paths.is_remote(file):
                time.sleep(_SETTLING_SECONDS)
            now = paths.read_versioned(file)
            if now is not None and now.text == text:  # the write succeeded, although its answer was lost
                if found is not None:
                    say(f"took over the lock of {run_dir} from {before or 'an owner without a name'}, which is gone")
                return cls(run_dir, now.version, own, made_directory=not was_there, clock=clock, words=words)

    def check(self, *, now: bool = False) -> None:
        """Raises LockLostError if the lock was removed or taken over.

        Reads the file at most once per second, and not in a bucket; with `now`, in any case.
        """
        due = not paths.is_remote(self._file) and self._clock() - self._looked_at >= _LOOK_SECONDS
        if now or due:
            self._reads.attempt(self._look)
        if self._lost:
            raise LockLostError(self._lost)

    def release(self) -> None:
        """Removes the lock if it is still this one, and the directory if `acquire` made it and it is empty."""
        self._ended.set()
        self._thread.join()
        if self._lost:
            return
        removes = bookkeeping.Bookkeeping(str(self._file), done="removed")
        removes.attempt(lambda: paths.remove_if_unchanged(self._file, version=self._version))
        if self._made_directory and not paths.is_remote(self._file):
            with contextlib.suppress(OSError):  # something is in it
                pathlib.Path(self._file.parent).rmdir()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Context that raises LockLostError, in place of another Exception, if the lock was lost."""
        try:
            yield
        except Exception as error:
            self._reads.attempt(self._look)
            if self._lost:
                raise LockLostError(self._lost) from error
            raise
        self._reads.attempt(self._look)
        self.check()

    def _keep_renewing(self) -> None:
        while not self._lost and not self._ended.wait(RENEW_SECONDS):
            if self._reads.attempt(self._look) and not self._lost and self._writes.attempt(self._renew):
                self._reads.attempt(self._look)

    def _renew(self) -> None:
        if paths.is_remote(self._file):
            paths.write_if_unchanged(self._file, json.dumps(self._owner._asdict()), version=self._version)
        else:
            os.utime(self._file)  # works on a full disk

    def _look(self) -> None:
        with self._looking:
            self._looked_at = self._clock()
            found = paths.read_versioned(self._file)
            owner = found and Owner.parse(found.text)
            if found is not None and owner == self._owner:
                self._version = found.version
            elif found is None:
                self._lost = (
                    f"{self._file} is gone: the {self._words.folder} was deleted, or its lock was removed to end this "
                    "run. What it held may be gone too; the same command starts again from what is there"
                )
            else:
                self._lost = (
                    f"the {self._words.folder} {self._run_dir} was taken over by {owner or 'an owner without a name'}: "
                    f"{self._words.cannot}, so this one ends. Give one of them another {self._words.flag}"
                )


class HoldsLock(Hook):
    """A hook that ends the run if its lock is lost."""

    def __init__(self, lock: RunLock):
        self._lock = lock

    def before_step(self, step: int) -> None:
        del step
        self._lock.check()


def _require_dead(
    run_dir: str,
    owner: Owner | None,
    found: paths.Versioned,
    *,
    say: Callable[[str], None],
    silent_seconds: float,
    look_seconds: float,
    words: Words,
) -> None:
    is_alive = owner.is_alive() if owner else None
    if is_alive:
        raise UserError(in_use(run_dir, owner, words=words))
    if is_alive is not None:
        return
    say(
        f"the {words.folder} {run_dir} is locked by {owner or 'an owner without a name'}, which cannot be looked up "
        f"from here: watching for {silent_seconds:g} s whether it renews its lock"
    )
    end = time.monotonic() + silent_seconds
    while time.monotonic() < end:
        time.sleep(look_seconds)
        now = paths.read_versioned(paths.resolve(run_dir) / FILE)
        if now is None:
            return
        if now.version != found.version:
            raise UserError(in_use(run_dir, Owner.parse(now.text), renewed=True, words=words))
