"""Lists the complete steps of a folder of checkpoints, and sets incomplete and damaged ones aside."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import NamedTuple

from core import paths  # isort: skip (paths decides how etils reaches buckets, before orbax imports it)
import orbax.checkpoint as ocp

from core import distributed
from core.errors import UserError

FOLDER = "checkpoints"  # of a run directory
_COMPLETE_MARK = "_CHECKPOINT_METADATA"
_COMMITTED_MARK = "commit_success.txt"  # the last object that orbax writes into a bucket


class Leftover(NamedTuple):
    """A folder among the checkpoints that is not a complete step.

    Attributes:
      folder: its path.
      what: `damaged` or `incomplete` (set aside by a run), `unfinished` (a save that has not ended), or `empty` (a step
        that lacks parts).
    """

    folder: paths.Path
    what: str


def complete(directory: paths.Path) -> list[int]:
    """Returns the steps that have all parts that a restore needs, ascending."""
    if not directory.exists():
        return []
    found = ocp.path.step.standard_name_format().find_all(directory)
    return sorted(step.step for step in found if _is_complete(step.path))


def _is_complete(folder: paths.Path) -> bool:
    return all((folder / name).exists() for name in (_COMPLETE_MARK, "state", "meta"))


def folder_of(run: str) -> paths.Path:
    """Returns the folder of a run's checkpoints; `run` may also be that folder.

    Raises:
      UserError: there is none.
    """
    folder = paths.resolve(run)
    folder = folder if folder.name == FOLDER else folder / FOLDER
    if not folder.exists():
        what = "has no checkpoints" if folder.parent.exists() else "does not exist"
        raise UserError(
            f"the run {run!r} {what} (expected {folder}); give the --run-dir that it was trained with, local or gs://"
        )
    return folder


def find(text: str) -> paths.Path:
    """Returns the folder of the step named by RUN@STEP, or of the latest complete step of RUN.

    Raises:
      UserError: there is no such run or step; lists the steps that exist.
    """
    run, mark, step = text.rpartition("@")
    if mark and not (run and step.isdecimal()):
        raise UserError(f"{text!r}: expected RUN or RUN@STEP with a step number, such as runs/first@1000")
    folder = folder_of(run if mark else text)
    existing = complete(folder)
    chosen = int(step) if mark else max(existing, default=None)
    if chosen not in existing:
        listed = ", ".join(map(str, existing)) or "none"
        raise UserError(
            f"no complete checkpoint {f'of step {step} ' if mark else ''}in {folder}; existing steps: {listed}"
        )
    return folder / str(chosen)


def select(run_dir: str, *, step: int | None, every: bool) -> list[int]:
    """Returns the steps of the checkpoints to evaluate: the latest, `step`, or all complete ones.

    Raises:
      UserError: there is no complete checkpoint, or none of `step`.
    """
    steps = complete(paths.resolve(run_dir) / FOLDER)
    if not steps:
        raise UserError(
            f"the run in {run_dir!r} has no complete checkpoint: one is saved every CHECKPOINT_INTERVAL steps, when "
            "the run is preempted (SIGTERM), and at its end"
        )
    if step is not None and step not in steps:
        existing = ", ".join(map(str, steps))
        raise UserError(f"--step {step}: {run_dir!r} has no complete checkpoint of that step; existing: {existing}")
    if every:
        return steps
    return [steps[-1] if step is None else step]


def select_together(run_dir: str, *, step: int | None, every: bool) -> list[int]:
    """Calls `select` on host 0 and returns its result on every host.

    A run that is still training adds and removes checkpoints, so hosts could see different ones.

    Collective.
    """
    own: list[int] | str = ""
    if distributed.is_host_zero():
        try:
            own = select(run_dir, step=step, every=every)
        except UserError as error:
            own = str(error)  # which the other hosts raise as well
    answer = json.loads(distributed.from_host_zero(json.dumps(own)))
    if isinstance(answer, str):
        raise UserError(answer)
    return answer


def set_incomplete_aside(directory: paths.Path) -> None:
    """Renames step folders that cannot be restored, because Orbax would count them among the latest.

    In a bucket a step without its last object is an interrupted save, which Orbax removes.
    """
    if not directory.exists():
        return
    for folder in sorted(directory.iterdir()):
        counted = not paths.is_remote(folder) or (folder / _COMMITTED_MARK).exists()
        if folder.name.isdigit() and folder.is_dir() and counted and not _is_complete(folder):
            folder.rename(directory / f"incomplete-{folder.name}-{time.time_ns()}")


def set_damaged_aside(directory: paths.Path, step: int) -> paths.Path:
    """Renames the folder of a damaged step, so that the step can be saved again.

    Returns:
      The new path; no content is lost.
    """
    aside = directory / f"damaged-{step}-{time.time_ns()}"
    (directory / str(step)).rename(
        aside
    )  # in a bucket object by object: half a step is damaged too, and goes next time
    return aside


def leftovers(directory: paths.Path) -> Iterator[Leftover]:
    """Yields the folders among the checkpoints that are not complete steps."""
    there = set(complete(directory))
    for folder in sorted(directory.iterdir()) if directory.exists() else ():
        put_aside = folder.name.split("-")[0]
        if ".orbax-checkpoint-tmp" in folder.name:
            yield Leftover(folder, "unfinished")
        elif put_aside in ("damaged", "incomplete"):
            yield Leftover(folder, put_aside)
        elif folder.name.isdigit() and int(folder.name) not in there:
            yield Leftover(folder, "empty")


def saved_at(step_folder: paths.Path) -> float:
    """Returns the time at which a complete step was committed, in seconds since 1970."""
    return json.loads((step_folder / _COMPLETE_MARK).read_text())["commit_timestamp_nsecs"] / 1e9


def remove(folder: paths.Path) -> None:
    """Removes a step or a leftover; the file that marks it complete is removed first."""
    if (folder / _COMPLETE_MARK).exists():
        (folder / _COMPLETE_MARK).unlink()
    folder.rmtree()
