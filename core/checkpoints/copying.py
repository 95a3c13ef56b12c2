"""Copies complete checkpoints of a local run directory to durable storage, in the background.

    RUN/checkpoints/100  ->  gs://BUCKET/first/checkpoints/100

This is for runs of one process.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable

from core import units
from core.checkpoints import inspection, steps
from core.errors import UserError
from core.files import paths
from core.files.bookkeeping import Bookkeeping

_CONFIGURATION = "config.gin"  # from which other commands read how the model was trained
_IDENTITY = "run_id"  # a file in both places, so that two runs do not share one
_CHUNK_BYTES = 2**24
_POLL_SECONDS = 2.0
_RETRY_SECONDS = 30.0
_LAST_ATTEMPTS = 3


class CopyError(RuntimeError):
    """A copied file differs from its source."""


def copy_step(source: paths.Path, target: paths.Path) -> int:
    """Copies a complete step, replacing an existing copy; returns its size in bytes.

    Raises CopyError if a copied file differs.
    """
    if target.exists():
        steps.remove(target)
    files = paths.sizes(source)
    marks = [name for name in steps.MARKS if name in files]
    for name in [*sorted(files.keys() - set(marks)), *marks]:
        paths.copy_between(source / name, target / name)
        if not _same(source / name, target / name, files[name]):
            raise CopyError(f"{target / name} differs from {source / name} after it was copied")
    if paths.is_remote(target) and steps.COMMITTED_MARK not in files:
        (target / steps.COMMITTED_MARK).write_text("copied")
    return sum(files.values())


def _same(source: paths.Path, target: paths.Path, size: int) -> bool:
    if size == 0:
        return target.stat().length == 0
    try:
        return all(
            paths.read_range(source, start, min(start + _CHUNK_BYTES, size))
            == paths.read_range(target, start, min(start + _CHUNK_BYTES, size))
            for start in range(0, size, _CHUNK_BYTES)
        )
    except UserError:  # a file ended early
        return False


def check_place(run_dir: str, place: str, *, hosts: int) -> None:
    """Raises UserError if `place` cannot hold a run's copies; writes and removes a small file there."""
    if hosts > 1:
        raise UserError(
            f"checkpoint_mirror = {place!r} with {hosts} hosts: no disk has all parts of a checkpoint. Give "
            "--run-dir gs://BUCKET/…, where all hosts write in parallel, in the background"
        )
    run, there = paths.resolve(run_dir), paths.resolve(place)
    if paths.is_remote(run) or run == there:
        raise UserError(
            f"checkpoint_mirror = {place!r} with the run directory {run_dir}: checkpoints are copied from a local "
            "run directory to another place. Leave one of them out"
        )
    paths.check_writable(there)
    own, other = _identity(run), _identity(there)
    if other and own != other and (own or steps.complete(run / steps.FOLDER)):
        raise UserError(
            f"checkpoint_mirror = {place!r} has checkpoints of another run than {run_dir}: give another place, or "
            "another --run-dir to resume the run that is there"
        )


def require_place(run_dir: str, place: str, *, hosts: int) -> None:
    """Checks a place as `check_place` does, and writes one run id into both folders."""
    check_place(run_dir, place, hosts=hosts)
    run, there = paths.resolve(run_dir), paths.resolve(place)
    paths.require_writable(there)
    identity = _identity(there) or _identity(run) or uuid.uuid4().hex
    for folder in (run, there):
        paths.write_text_atomically(folder / _IDENTITY, identity)


def _identity(folder: paths.Path) -> str:
    file = folder / _IDENTITY
    return file.read_text() if file.exists() else ""


def fetch_newest(run_dir: str, place: str, *, say: Callable[[str], None]) -> int | None:
    """Copies the newest intact step of `place` to a run directory with only older ones; returns its number.

    It returns None if nothing was copied. `say` receives a warning for every damaged copy.
    """
    own, there = (paths.resolve(folder) / steps.FOLDER for folder in (run_dir, place))
    newest = max(steps.complete(own), default=0)
    for step in sorted((step for step in steps.complete(there) if step > newest), reverse=True):
        copy_step(there / str(step), own / str(step))
        found = inspection.verify(own / str(step))
        if not found.damaged:
            return step
        steps.remove(own / str(step))
        say(f"warning: in {place}, {found.describe()}. The run does not use this copy")
    return None


def _saved_at(step_folder: paths.Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # no restore needs this file
        return steps.saved_at(step_folder)
    return None


class Copying:
    """A context in which a thread copies the newest complete step."""

    def __init__(self, run_dir: str, place: str, *, keep: int, say: Callable[[str], None]):
        """`keep` is the number of copies to keep."""
        self._source, self._target = (paths.resolve(folder) / steps.FOLDER for folder in (run_dir, place))
        self._keep, self._say = keep, say
        self._copied: tuple[int, float | None] | None = None  # the last step, and when it was saved
        self._bookkeeping = Bookkeeping(os.fspath(self._target))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="copy of checkpoints", daemon=True)

    def __enter__(self) -> Copying:
        self._bookkeeping.attempt(self._clear)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Copies the newest step; prints a warning if that fails."""
        self._ended.set()
        self._thread.join()
        if not any(self._bookkeeping.attempt(self.copy_newest) for _ in range(_LAST_ATTEMPTS)):
            self._say(f"warning: the newest checkpoint of {self._source} was not copied to {self._target}")

    def _clear(self) -> None:
        for left in list(steps.leftovers(self._target)):
            if left.what == "unfinished":
                steps.remove(left.folder)

    def _work(self) -> None:
        pause_seconds = _POLL_SECONDS
        while not self._ended.wait(pause_seconds):
            pause_seconds = _POLL_SECONDS if self._bookkeeping.attempt(self.copy_newest) else _RETRY_SECONDS

    def copy_newest(self) -> None:
        """Copies the newest step unless it was copied; removes old copies.

        A copy of an earlier save of this step is replaced.
        """
        newest = max(steps.complete(self._source), default=None)
        if newest is None:
            return
        source, target = self._source / str(newest), self._target / str(newest)
        saved = (newest, _saved_at(source))
        if self._copied == saved:
            return
        there = steps.complete(self._target)
        if newest in there and _saved_at(target) == saved[1]:
            self._copied = saved
            return
        began = time.monotonic()
        try:
            size = copy_step(source, target)
        except FileNotFoundError:
            if newest in steps.complete(self._source):
                raise
            return  # the run has removed the step, because there are newer ones
        self._copied = saved
        if (file := self._source.parent / _CONFIGURATION).exists():
            paths.copy_between(file, self._target.parent / file.name)
        took = units.seconds(time.monotonic() - began, digits=2)
        self._say(f"checkpoint {newest}: {units.size(size)} copied to {self._target} and compared, in {took}")
        later = [step for step in there if step > newest]  # which the run went back from, or could not use
        for old in [*later, *sorted({*there, newest}.difference(later))[: -self._keep]]:
            with contextlib.suppress(FileNotFoundError):
                steps.remove(self._target / str(old))
