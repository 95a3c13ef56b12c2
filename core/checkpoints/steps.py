"""Which steps a folder of checkpoints has: complete ones, and how what is not is put aside."""

from __future__ import annotations

import time

from core import paths  # isort: skip (paths decides how etils reaches buckets, before orbax imports it)
import orbax.checkpoint as ocp

_COMPLETE_MARK = "_CHECKPOINT_METADATA"


def complete(directory: paths.Path) -> list[int]:
    """Steps that hold everything a restore needs, ascending. An empty folder named 3 is not one."""
    if not directory.exists():
        return []
    found = ocp.path.step.standard_name_format().find_all(directory)
    return sorted(step.step for step in found if _is_complete(step.path))


def _is_complete(folder: paths.Path) -> bool:
    return all((folder / name).exists() for name in (_COMPLETE_MARK, "state", "meta"))


def set_incomplete_aside(directory: paths.Path) -> None:
    """Renames local step folders that cannot be restored: orbax would count them among the latest.

    In a bucket there are none: a step without its last object is not listed, and orbax removes it.
    """
    if paths.is_remote(directory) or not directory.exists():
        return
    for folder in sorted(directory.iterdir()):
        if folder.name.isdigit() and folder.is_dir() and not _is_complete(folder):
            folder.rename(directory / f"incomplete-{folder.name}-{time.time_ns()}")


def set_damaged_aside(directory: paths.Path, step: int) -> paths.Path:
    """Renames the folder of a step whose content cannot be trusted, so that the step can be saved again.

    Returns:
      Where it is now; nothing of it is lost.
    """
    aside = directory / f"damaged-{step}-{time.time_ns()}"
    (directory / str(step)).rename(aside)
    return aside
