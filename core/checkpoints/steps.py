"""Lists the steps of a folder of checkpoints, and reads and writes what a step contains besides its arrays.

    100/meta/metadata   JSON: the run's metadata, fingerprints of arrays, digests of positions, and a checksum
        meta/scores     JSON: the results of an evaluation that was made after the save
        data/a.bin      the position of one stream in the data, after its SHA-256

Frozen parameters that the run read from a published folder may be left out; the metadata then names their source.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from core import units
from core.checkpoints import best
from core.errors import UserError
from core.files import foreign_json, paths
from core.hosts import distributed

BEST = "best"  # in place of a step: RUN@best
FOLDER = "checkpoints"  # of a run directory
PARAMS_FOLDER = "params"  # beside it: steps that contain the parameters alone
AVERAGED = "averaged"  # in the metadata of such a step: whether they are the optimizer's average
_COMPLETE_MARK = "_CHECKPOINT_METADATA"
COMMITTED_MARK = "commit_success.txt"  # the last object that orbax writes into a bucket
MARKS = (_COMPLETE_MARK, COMMITTED_MARK)  # the files that make a step complete, written last and in this order
STATE_PART, STREAMS_PART, PART = "state", "data", "meta"  # subfolders of a step's folder
_FILE, _SUFFIX = "metadata", ".bin"
SCORES = f"{PART}/scores"  # a file of a step that was saved before its evaluation: what the metadata lack
_STEP, _CONTENT, _STREAMS, _CHECKSUM = "step", "content", "streams", "checksum"  # keys added to the caller's
_LEFT_OUT = "left_out"
_KINDS: Mapping[str, foreign_json.Kind] = {_CHECKSUM: str, _CONTENT: dict, _STREAMS: (dict, list)}
_DIGEST_BYTES = 32
_TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a local folder until all hosts have written


class Leftover(NamedTuple):
    """A folder among the checkpoints that is not a complete step.

    Attributes:
      what: `damaged` or `incomplete` (set aside by a run), `unfinished` (a save that has not ended), or `empty`.
    """

    folder: paths.Path
    what: str


def complete(directory: paths.Path) -> list[int]:
    """Returns the complete steps of a folder, ascending."""
    if not directory.exists():
        return []
    return sorted(int(folder.name) for folder in directory.iterdir() if _is_step(folder.name) and is_complete(folder))


def _is_step(name: str) -> bool:
    return name.isdecimal() and name == str(int(name))


def is_complete(folder: paths.Path) -> bool:
    """Returns whether the folder of a step was committed, with arrays and metadata."""
    marks = MARKS if paths.is_remote(folder) else (_COMPLETE_MARK,)  # a local folder gets its name last
    return all((folder / name).exists() for name in (*marks, STATE_PART, PART))


def folder_of(run: str) -> paths.Path:
    """Returns the folder of a run's checkpoints. Raises UserError if there is none.

    RUN/checkpoints and RUN/params are returned as they are.
    """
    folder = paths.resolve(run)
    folder = folder if _is_folder_of_steps(folder) else folder / FOLDER
    if not folder.exists():
        what = "has no checkpoints" if folder.parent.exists() else "does not exist"
        raise UserError(f"the run {run!r} {what} (expected {folder}); give a run directory, local or gs://")
    return folder


def split(text: str) -> tuple[str, str | None]:
    """Returns RUN and STEP of RUN@STEP, or RUN and None; an `@` in the path of a folder is no mark."""
    run, mark, step = text.rpartition("@")
    if not mark or not run or "/" in step or paths.resolve(text).exists():
        return text, None
    return run, step


def has_folder(text: str) -> bool:
    """Returns whether RUN or RUN@STEP names a run with a folder of checkpoints."""
    folder = paths.resolve(split(text)[0])
    return folder.exists() if _is_folder_of_steps(folder) else (folder / FOLDER).exists()


def _is_folder_of_steps(folder: paths.Path) -> bool:
    if folder.name == FOLDER:
        return not (folder / FOLDER).exists()  # else it is a run of this name
    return folder.name == PARAMS_FOLDER and (folder.parent / FOLDER).exists()


def folders_of(run: str) -> list[paths.Path]:
    """Returns the folder of a run's checkpoints and, if it exists, that of parameters alone."""
    folder = folder_of(run)
    beside = folder.parent / PARAMS_FOLDER
    return [folder, beside] if beside != folder and beside.exists() else [folder]


def find(text: str) -> paths.Path:
    """Returns the folder of the step RUN@STEP or RUN@best, or of RUN's latest complete step.

    A step with the parameters alone is returned if there is no other of this number. Raises UserError if the text is
    malformed or there is no such step.
    """
    run, step = split(text)
    if run and step == BEST:
        step = str(best_of(run))
    if step is not None and not (run and step.isdecimal()):
        raise UserError(f"{text!r}: expected RUN, RUN@STEP with a step number, such as runs/first@1000, or RUN@{BEST}")
    folder, *beside = folders_of(run)
    existing = complete(folder)
    chosen = max(existing, default=None) if step is None else int(step)
    if chosen in existing:
        return folder / str(chosen)
    listed = ", ".join(map(str, existing)) or "none"
    for other in beside:
        if chosen in (alone := complete(other)):
            return other / str(chosen)
        listed += f"; with parameters alone: {', '.join(map(str, alone)) or 'none'}"
    raise UserError(f"no complete checkpoint {f'of step {step} ' if step else ''}in {folder}; existing steps: {listed}")


class Best(NamedTuple):
    """The best step of a folder; `value` is text: `validation/loss 1.2345`."""

    step: int
    value: str


def find_best(directory: paths.Path) -> Best | None:
    """Returns the best complete step by the metric that the metadata requests, or None."""
    described = described_steps(directory)
    if (metric := best.asked(described)) is None:
        return None
    found = best.values(described, metric)
    step = metric.best(found)
    return None if step is None else Best(step, f"{metric.name} {found[step]:.4f}")


def described_steps(directory: paths.Path) -> dict[int, dict[str, Any]]:
    """Returns the metadata of the complete steps that can be read, with later scores, by step."""
    found = {}
    for step in complete(directory):
        with contextlib.suppress(Exception):  # of many types; a restore reports it
            found[step] = read(directory / str(step)).meta
            if scores := read_scores(directory / str(step)):
                found[step] |= foreign_json.load_object(scores)
    return found


def read_scores(step_folder: paths.Path) -> bytes:
    """Returns the file with what `write_scores` added to a step, b"" if there is none."""
    file = step_folder / SCORES
    return file.read_bytes() if file.exists() else b""


def write_scores(step_folder: paths.Path, described: Mapping[str, Any]) -> None:
    """Adds the results of an evaluation, as `best.described` returns them, to a step that was saved before it."""
    paths.write_text_atomically(step_folder / SCORES, json.dumps(described))


def best_of(run: str) -> int:
    """Returns the step that RUN@best names. Raises UserError if there is none."""
    folder = folder_of(run)
    if (found := find_best(folder)) is not None:
        return found.step
    listed = ", ".join(units.shortened(list(map(str, complete(folder))), most=8)) or "none"
    raise UserError(
        f"{run}@{BEST}: no checkpoint in {folder} has a validation metric to compare (KEEP_BEST); existing steps: "
        f"{listed}"
    )


def select(run_dir: str, *, step: int | None, every: bool) -> list[int]:
    """Returns the steps to evaluate: all if `every`, else `step` (None: the latest).

    Raises UserError if no step is complete, or `step` is not.
    """
    steps = complete(paths.resolve(run_dir) / FOLDER)
    if not steps:
        raise UserError(
            f"the run in {run_dir!r} has no complete checkpoint: one is saved every CHECKPOINT_INTERVAL steps, when "
            "the run is preempted (SIGTERM) or interrupted (Ctrl-C), and at its end"
        )
    if step is not None and step not in steps:
        existing = ", ".join(map(str, steps))
        raise UserError(f"--step {step}: {run_dir!r} has no complete checkpoint of that step; existing: {existing}")
    if every:
        return steps
    return [steps[-1] if step is None else step]


def select_together(run_dir: str, *, step: int | None, every: bool) -> list[int]:
    """Calls `select` on host 0, and returns its result on every host; all hosts must call it."""
    return distributed.decided_by_host_zero(lambda: select(run_dir, step=step, every=every))


def clear(directory: paths.Path) -> None:
    """Removes unfinished saves, and renames other steps that lack parts to `incomplete-…`."""
    for left in list(leftovers(directory)):
        if left.what == "unfinished":
            left.folder.rmtree()
        elif left.what == "empty":
            left.folder.rename(directory / f"incomplete-{left.folder.name}-{time.time_ns()}")


def set_damaged_aside(directory: paths.Path, step: int) -> paths.Path:
    """Renames the folder of a damaged step; returns its new path."""
    aside = directory / f"damaged-{step}-{time.time_ns()}"
    (directory / str(step)).rename(
        aside
    )  # in a bucket object by object: half a step is damaged too, and goes next time
    return aside


def leftovers(directory: paths.Path) -> Iterator[Leftover]:
    """Yields the leftovers among the checkpoints."""
    there = set(complete(directory))
    for folder in sorted(directory.iterdir()) if directory.exists() else ():
        put_aside = folder.name.split("-")[0]
        if put_aside in ("damaged", "incomplete"):
            yield Leftover(folder, put_aside)
        elif _TEMPORARY in folder.name or (_is_step(folder.name) and int(folder.name) not in there):
            is_begun = paths.is_remote(folder) and not (folder / COMMITTED_MARK).exists()
            yield Leftover(folder, "unfinished" if _TEMPORARY in folder.name or is_begun else "empty")


def saved_at(step_folder: paths.Path) -> float:
    """Returns when a complete step was committed, in seconds since 1970."""
    mark = foreign_json.load_object((step_folder / _COMPLETE_MARK).read_text(), {"commit_timestamp_nsecs": int})
    return mark["commit_timestamp_nsecs"] / 1e9


def unfinished(folder: paths.Path) -> paths.Path:
    """Returns a name beside a step's local folder, for one that is not complete yet or no longer."""
    return folder.parent / f"{folder.name}{_TEMPORARY}-{time.time_ns()}"


def remove(folder: paths.Path) -> None:
    """Removes a step or a leftover, first what makes it complete; `clear` removes what an interruption leaves."""
    if paths.is_remote(folder):
        for mark in reversed(MARKS):
            if (folder / mark).exists():
                (folder / mark).unlink()
    else:
        aside = unfinished(folder)
        folder.rename(aside)
        folder = aside
    folder.rmtree()


class DamagedError(RuntimeError):
    """The content of a checkpoint differs from what was saved."""


class LeftOut(NamedTuple):
    """Arrays that are not saved, because they are frozen and came from a published folder.

    Attributes:
      init_from: the folder, as the configuration names it.
      source: what it stood for: a path, or hf://OWNER/NAME@COMMIT.
      renames: as in `core.parameters.renamed`.
    """

    init_from: str
    source: str
    renames: dict[str, str]
    arrays: list[str]


def content_hash(content: Mapping[str, list]) -> str:
    """Returns a hash of entries of `Description.content`."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class Description(NamedTuple):
    """The metadata of a step, after its checksum was verified.

    Attributes:
      meta: the caller's metadata.
      content: dtype, shape and fingerprint of every leaf, `{"params/w": ["float32[8, 6]", 2864434397]}`.
      streams: SHA-256 of each stream's data position; None: saved by an earlier revision.
      left_out: arrays of `content` that the step does not contain; None: it contains all.
    """

    meta: dict[str, Any]
    content: dict[str, list]
    streams: dict[str, str | None]
    left_out: LeftOut | None = None

    @property
    def kinds(self) -> dict[str, str]:
        """Dtype and shape of every leaf, by name."""
        return {name: kind for name, (kind, _) in self.content.items()}

    @property
    def saved(self) -> dict[str, list]:
        """The entries of `content` that the step contains."""
        absent = frozenset(self.left_out.arrays if self.left_out else ())
        return {name: entry for name, entry in self.content.items() if name not in absent}

    def without(self, entry: str) -> Description:
        """Returns the description without the arrays of an entry of the state."""
        kept = {name: about for name, about in self.content.items() if name.partition("/")[0] != entry}
        return self._replace(content=kept)

    @property
    def seals_positions(self) -> bool:
        """Whether the metadata has a digest of every data position."""
        return None not in self.streams.values()

    def positions(self, found: Mapping[str, bytes]) -> dict[str, bytes]:
        """Selects the data positions that were saved with this step.

        Raises:
          FileNotFoundError: a position is missing.
          DamagedError: a position is of another step or stream.
        """
        if gone := sorted(self.streams.keys() - found.keys()):
            raise FileNotFoundError(f"of {len(self.streams)} positions in the data {', '.join(gone)} are missing")
        own = {name: found[name] for name in self.streams}
        wrong = [name for name, sealed in self.streams.items() if sealed not in (None, digest(own[name]))]
        if wrong:
            listed = ", ".join(units.shortened(wrong, most=3))
            raise DamagedError(
                f"{len(wrong)} of {len(self.streams)} positions in the data are of another step or stream: {listed}"
            )
        return own


def sealed(
    meta: Mapping[str, Any],
    *,
    step: int,
    content: Mapping[str, list],
    streams: Mapping[str, str],
    left_out: LeftOut | None = None,
) -> dict[str, Any]:
    """Returns the metadata to write, with a checksum.

    Args:
      meta: the caller's metadata.
      content, streams, left_out: as in `Description`.
    """
    own = {_STEP: step, _CONTENT: dict(content), _STREAMS: dict(streams)}
    if left_out:
        own[_LEFT_OUT] = {**left_out._asdict(), "hash": content_hash({n: content[n] for n in left_out.arrays})}
    plain = json.loads(json.dumps({**meta, **own}))
    return {**plain, _CHECKSUM: _checksum(plain)}


def read(step_folder: paths.Path) -> Description:
    """Reads a step's metadata; DamagedError if it is not what was saved."""
    try:
        meta = foreign_json.load_object((step_folder / PART / _FILE).read_bytes(), _KINDS)
    except (foreign_json.MalformedError, IsADirectoryError) as error:
        raise DamagedError(f"the description is not what was saved: {error}") from None  # this is the first cause
    if meta[_CHECKSUM] != _checksum(meta):
        raise DamagedError("the description is not what was saved")
    if str(step := meta.get(_STEP, step_folder.name)) != step_folder.name and step_folder.name.isdecimal():
        raise DamagedError(f"the description belongs to step {step}")
    own = {k: v for k, v in meta.items() if k not in (_STEP, _CONTENT, _STREAMS, _CHECKSUM, _LEFT_OUT)}
    said = meta[_STREAMS] if isinstance(meta[_STREAMS], dict) else dict.fromkeys(meta[_STREAMS])
    try:
        left_out = LeftOut(*(meta[_LEFT_OUT][field] for field in LeftOut._fields)) if _LEFT_OUT in meta else None
    except (TypeError, KeyError) as error:
        raise DamagedError(f"the description of what was left out is not what was saved: {error!r}") from None
    return Description(own, meta[_CONTENT], said, left_out)


def _checksum(meta: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in meta.items() if key != _CHECKSUM}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def said(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    line = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}: {line if len(line) < 500 else f'{line[:200]} … {line[-250:]}'}"


def metadata_files(sealed: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the metadata as files, {name: content}."""
    return {_FILE: json.dumps(sealed).encode()}


def stream_files(positions: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the positions of streams as files, {name: content}."""
    return {
        urllib.parse.quote(name, safe="") + _SUFFIX: hashlib.sha256(position).digest() + position
        for name, position in positions.items()
    }


def read_streams(step_folder: paths.Path) -> dict[str, bytes]:
    """Reads the positions of a step's streams, by name; DamagedError if one is damaged."""
    folder = step_folder / STREAMS_PART
    files = sorted(folder.glob(f"*{_SUFFIX}")) if folder.exists() else []
    return {urllib.parse.unquote(file.name.removesuffix(_SUFFIX)): _read_stream(file) for file in files}


def digest(position: bytes) -> str:
    """Returns the SHA-256 of a position."""
    return hashlib.sha256(position).hexdigest()


def _read_stream(file: paths.Path) -> bytes:
    content = file.read_bytes()
    expected, position = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(position).digest() != expected:
        raise DamagedError(f"the position in {file.name} is damaged: its content is not what was written")
    return position
