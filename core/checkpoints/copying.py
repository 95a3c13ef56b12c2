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
from collections.abc import Callable, Collection, Mapping, Sequence

from core import units
from core.checkpoints import best, inspection, published_files, steps
from core.errors import UserError
from core.files import paths
from core.files.bookkeeping import Bookkeeping

_CONFIGURATION = "config.gin"  # from which other commands read how the model was trained
_FOLDERS = (published_files.FOLDER, "vocabulary")  # of files that a run writes before its first step
_FILES = ("wandb_id",)  # of the run's identity in Weights & Biases (`core.training.metrics`)
_FETCHED = "fetched"  # a folder in the run directory, of a copy before it is verified
_IDENTITY = "run_id"  # a file in both places, so that two runs do not share one
_CHUNK_BYTES = 2**24
_POLL_SECONDS = 2.0
_RETRY_SECONDS = 30.0
_LAST_ATTEMPTS = 3


class CopyError(RuntimeError):
    """A copied file differs from its source."""


def copy_step(source: paths.Path, target: paths.Path) -> int:
    """Copies a complete step, replacing an existing copy; returns its size in bytes.

    Raises:
      CopyError: a copied file differs.
      FileNotFoundError: the step is gone.
    """
    files = paths.sizes(source)
    if not files:
        raise FileNotFoundError(f"{source} was removed before it was copied")
    if target.exists():
        steps.remove(target)
    marks = [name for name in steps.MARKS if name in files]
    names = [*sorted(files.keys() - set(marks)), *marks]
    if not paths.is_remote(target):
        unfinished = steps.unfinished(target)
        try:
            _copy_files(source, unfinished, names, files)
            unfinished.rename(target)
        except BaseException:
            if unfinished.exists():  # it may be what fills the disk
                unfinished.rmtree()
            raise
        return sum(files.values())
    _copy_files(source, target, names, files)
    if steps.COMMITTED_MARK not in files:
        (target / steps.COMMITTED_MARK).write_text("copied")
    return sum(files.values())


def _copy_files(source: paths.Path, target: paths.Path, names: Sequence[str], sizes: Mapping[str, int]) -> None:
    for name in names:
        paths.copy_between(source / name, target / name)
        if not _same(source / name, target / name, sizes[name]):
            raise CopyError(f"{target / name} differs from {source / name} after it was copied")


def _copy_prepared(run: paths.Path, there: paths.Path) -> None:
    """Copies what a run prepared before its first step: a vocabulary, and small files of published models."""
    for folder in _FOLDERS:
        sizes = paths.sizes(run / folder)
        _copy_files(run / folder, there / folder, sorted(sizes), sizes)
    for name in _FILES:
        if (run / name).exists():
            paths.copy_between(run / name, there / name)


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
    is_begun, has_copies = (bool(steps.complete(folder / steps.FOLDER)) for folder in (run, there))
    if not other and is_begun and has_copies:
        raise UserError(
            f"checkpoint_mirror = {place!r} has checkpoints, but no file {_IDENTITY}, so they may be of another run "
            f"than {run_dir}: give a place without checkpoints, or, to continue the run that is there, a --run-dir "
            "without checkpoints"
        )
    if other and own != other and has_copies and is_begun:
        raise UserError(
            f"checkpoint_mirror = {place!r} has checkpoints of another run than {run_dir}: give another place, or "
            "another --run-dir to resume the run that is there"
        )
    if other and own != other and not has_copies and (own or is_begun):
        raise UserError(
            f"checkpoint_mirror = {place!r} was taken by another run than {run_dir}, which has copied no checkpoint "
            f"yet: give another place, or, if that run is over, remove {there / _IDENTITY}"
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


class Fetching:
    """Copies intact steps of a place back to a run directory."""

    def __init__(self, run_dir: str, place: str, *, say: Callable[[str], None]):
        """`say` receives a warning for every damaged copy."""
        self._own, self._there = (paths.resolve(folder) / steps.FOLDER for folder in (run_dir, place))
        self._say = say
        self._damaged: set[int] = set()  # among the copies

    def newest(self) -> int | None:
        """Copies the newest step to a run directory with only older ones.

        Returns its number, or None if nothing was copied.
        """
        newest = max(steps.complete(self._own), default=0)
        later = sorted((step for step in steps.complete(self._there) if step > newest), reverse=True)
        return next((step for step in later if self._fetch(step)), None)

    def in_place_of(self, step: int) -> int | None:
        """Copies the newest step up to a damaged one of the run directory, which is then renamed.

        Returns its number, or None if nothing was copied: the step is intact, or no copy is.
        """
        found = inspection.verify(self._own / str(step))
        earlier = max((one for one in steps.complete(self._own) if one < step), default=0)
        copies = [one for one in steps.complete(self._there) if earlier < one <= step] if found.damaged else []
        for one in reversed(copies):
            if self._fetch(one, damaged=step):
                self._say(f"warning: {found.describe()}; the copy of step {one} in {self._there.parent} is used")
                return one
        return None

    def best(self, keep_best: str) -> int | None:
        """Copies the best step to a run directory that has no better one.

        `keep_best` is the metric, as `best.parse` reads it. Returns its number, or None if nothing was copied.
        """
        metric, here = best.parse(keep_best), steps.described_steps(self._own)
        values = best.values({**steps.described_steps(self._there), **here}, metric)
        while (step := metric.best(values)) is not None and step not in here:
            if self._fetch(step):
                return step
            del values[step]
        return None

    def _fetch(self, step: int, *, damaged: int | None = None) -> bool:
        """Copies a step if it is intact; only then, a damaged or incomplete one of the run directory is renamed."""
        if step in self._damaged:
            return False
        _copy_prepared(self._there.parent, self._own.parent)  # first: a start with the step does not fetch again
        fetched = self._own.parent / _FETCHED / str(step)
        copy_step(self._there / str(step), fetched)
        found = inspection.verify(fetched)
        if found.damaged:
            self._damaged.add(step)
            fetched.parent.rmtree()
            self._say(f"warning: in {self._there.parent}, {found.describe()}. The run does not use this copy")
            return False
        for left in {step, step if damaged is None else damaged}:
            if (self._own / str(left)).exists():
                steps.set_damaged_aside(self._own, left)
        self._own.mkdir(parents=True, exist_ok=True)
        fetched.rename(self._own / str(step))
        fetched.parent.rmtree()
        return True


def _saved_at(step_folder: paths.Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # no restore needs this file
        return steps.saved_at(step_folder)
    return None


class Copying:
    """A context in which a thread copies the newest complete step and, with a metric, the best one."""

    def __init__(self, run_dir: str, place: str, *, keep: int, keep_best: str = "", say: Callable[[str], None]):
        """Prepares to copy.

        Args:
          run_dir: the run directory.
          place: where to copy.
          keep: the number of latest copies to keep.
          keep_best: also keep the best step by this metric (`best.parse`); "": only the latest.
          say: receives a line for each copy.
        """
        self._source, self._target = (paths.resolve(folder) / steps.FOLDER for folder in (run_dir, place))
        self._keep, self._metric, self._say = keep, best.parse(keep_best) if keep_best else None, say
        self._copied: tuple[int, float | None, list[bytes]] | None = (
            None  # the last step, when it was saved, and the scores of all
        )
        self._has_prepared = False  # whether the vocabulary and files of published models were copied
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
        """Copies the newest step, and the best one, unless they were copied; removes old copies.

        A copy of an earlier save of such a step is replaced.
        """
        here = steps.complete(self._source)
        if not here:
            return
        newest, scores = max(here), [steps.read_scores(self._source / str(step)) for step in here]
        saved = (newest, _saved_at(self._source / str(newest)), scores)
        if self._copied == saved:
            return
        there = steps.complete(self._target)
        values = {**self._values(self._target), **self._values(self._source)}
        best_one = self._metric.best(values) if self._metric else None
        kept = [step for step in steps.complete(self._source) if step in (newest, best_one)]
        missing = [step for step in sorted(kept, reverse=True) if not self._is_copy(step, there)]
        if not all([self._copy(step) for step in missing]):
            return  # the run has removed a step, because there are newer or better ones
        for step in set(kept).difference(missing):
            self._copy_scores(step)
        self._remove_old({*there, *missing}, newest)
        self._copied = saved

    def _values(self, folder: paths.Path) -> dict[int, float]:
        return best.values(steps.described_steps(folder), self._metric) if self._metric else {}

    def _is_copy(self, step: int, there: Collection[int]) -> bool:
        return step in there and _saved_at(self._target / str(step)) == _saved_at(self._source / str(step))

    def _copy(self, step: int) -> bool:
        """Copies a step; returns False if the run has removed it."""
        began = time.monotonic()
        if not self._has_prepared:  # first: other commands need it to use a step
            _copy_prepared(self._source.parent, self._target.parent)
            self._has_prepared = True
        try:
            size = copy_step(self._source / str(step), self._target / str(step))
        except FileNotFoundError:
            if step in steps.complete(self._source):
                raise
            return False
        if (file := self._source.parent / _CONFIGURATION).exists():
            paths.copy_between(file, self._target.parent / file.name)
        took = units.seconds(time.monotonic() - began, digits=2)
        self._say(f"checkpoint {step}: {units.size(size)} copied to {self._target} and compared, in {took}")
        return True

    def _copy_scores(self, step: int) -> None:
        """Copies what was added to a step after it was copied."""
        scores = steps.read_scores(self._source / str(step))
        if scores and scores != steps.read_scores(self._target / str(step)):
            paths.write_bytes_atomically(self._target / str(step) / steps.SCORES, scores)

    def _remove_old(self, there: Collection[int], newest: int) -> None:
        later = [step for step in there if step > newest]  # which the run went back from, or could not use
        kept = best.Kept(self._keep, self._metric, self._values(self._target))
        for old in [*later, *kept.others(sorted(set(there).difference(later)))]:
            with contextlib.suppress(FileNotFoundError):
                steps.remove(self._target / str(old))
