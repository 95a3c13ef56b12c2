"""Which steps a folder of checkpoints has: complete ones, and how what is not is put aside."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import NamedTuple

from core import paths  # isort: skip (paths decides how etils reaches buckets, before orbax imports it)
import orbax.checkpoint as ocp

_COMPLETE_MARK = "_CHECKPOINT_METADATA"
_COMMITTED_MARK = "commit_success.txt"  # the last object that orbax writes into a bucket


class Leftover(NamedTuple):
    """A folder beside the steps that no restore takes.

    Attributes:
      folder: where it is.
      what: `damaged`, `incomplete` (put aside by a run), `unfinished` (a save that has not ended) or `empty` (a step
        without all that a restore needs).
    """

    folder: paths.Path
    what: str


def complete(directory: paths.Path) -> list[int]:
    """Steps that hold everything a restore needs, ascending. An empty folder named 3 is not one."""
    if not directory.exists():
        return []
    found = ocp.path.step.standard_name_format().find_all(directory)
    return sorted(step.step for step in found if _is_complete(step.path))


def _is_complete(folder: paths.Path) -> bool:
    return all((folder / name).exists() for name in (_COMPLETE_MARK, "state", "meta"))


def set_incomplete_aside(directory: paths.Path) -> None:
    """Renames step folders that cannot be restored: orbax would count them among the latest.

    In a bucket a step without its last object is a save that did not end: orbax removes it.
    """
    if not directory.exists():
        return
    for folder in sorted(directory.iterdir()):
        counted = not paths.is_remote(folder) or (folder / _COMMITTED_MARK).exists()
        if folder.name.isdigit() and folder.is_dir() and counted and not _is_complete(folder):
            folder.rename(directory / f"incomplete-{folder.name}-{time.time_ns()}")


def set_damaged_aside(directory: paths.Path, step: int) -> paths.Path:
    """Renames the folder of a step whose content cannot be trusted, so that the step can be saved again.

    Returns:
      Where it is now; nothing of it is lost.
    """
    aside = directory / f"damaged-{step}-{time.time_ns()}"
    (directory / str(step)).rename(
        aside
    )  # in a bucket object by object: half a step is damaged too, and goes next time
    return aside


def leftovers(directory: paths.Path) -> Iterator[Leftover]:
    """What is in a folder of checkpoints and is no complete step."""
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
    """When a complete step was committed, in seconds since 1970."""
    return json.loads((step_folder / _COMPLETE_MARK).read_text())["commit_timestamp_nsecs"] / 1e9


def remove(folder: paths.Path) -> None:
    """Removes a step or a leftover; what makes it a step goes first, so that half of one is never taken for a step."""
    if (folder / _COMPLETE_MARK).exists():
        (folder / _COMPLETE_MARK).unlink()
    folder.rmtree()
