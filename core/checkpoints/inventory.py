"""Lists the checkpoints of a run from their metadata, without reading any array."""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import NamedTuple

from core import paths, units
from core.checkpoints import description, steps
from core.checkpoints.description import said

HEADER = ("step", "saved", "size", "arrays", "revision", "config", "")
_LEFTOVERS = {
    "damaged": "set aside: its content differs from what was saved",
    "incomplete": "set aside: the save did not finish",
    "unfinished": "a save in progress, or one that did not finish",
    "empty": "not a checkpoint: parts are missing",
}


class CheckpointFolder(NamedTuple):
    """One folder among the checkpoints.

    Attributes:
      name: the step, or the folder's name if it is not a step.
      saved: local time; "" if unknown.
      size_bytes: of its files.
      arrays: how many arrays it has; None if unknown.
      revision: git revision of the code that saved it.
      config: the first digits of a hash of the configuration, equal for equal configurations.
      status: `complete` if the metadata is intact, otherwise what is wrong.
    """

    name: str
    saved: str
    size_bytes: int
    arrays: int | None
    revision: str
    config: str
    status: str

    def cells(self) -> tuple[str, ...]:
        """Returns the fields as text, in the order of HEADER."""
        arrays = "" if self.arrays is None else str(self.arrays)
        return self.name, self.saved, units.size(self.size_bytes), arrays, self.revision, self.config, self.status


def folders(directory: paths.Path) -> list[CheckpointFolder]:
    """Returns every complete step, ascending, and then every other folder."""
    by_name: dict[str, int] = {}
    for name, size_bytes in paths.sizes(directory).items():
        by_name[name.split("/")[0]] = by_name.get(name.split("/")[0], 0) + size_bytes
    found = [_step(directory / str(step), by_name.get(str(step), 0)) for step in steps.complete(directory)]
    for left in steps.leftovers(directory):
        name = left.folder.name
        found.append(CheckpointFolder(name, "", by_name.get(name, 0), None, "", "", _LEFTOVERS[left.what]))
    return found


def _step(folder: paths.Path, size_bytes: int) -> CheckpointFolder:
    try:
        found = description.read(folder)
    except Exception as error:  # a corrupt file can cause many types of error
        return CheckpointFolder(folder.name, "", size_bytes, None, "", "", f"DAMAGED metadata: {said(error)}")
    config = hashlib.sha256(found.meta.get("config", "").encode()).hexdigest()[:8]
    revision = str(found.meta.get("git_revision", ""))[:20]
    return CheckpointFolder(folder.name, _saved(folder), size_bytes, len(found.content), revision, config, "complete")


def _saved(folder: paths.Path) -> str:
    """Returns the local time of the save; "" if its file, which no restore needs, cannot be read."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(steps.saved_at(folder)))
    return ""
