"""Which checkpoints a run has, as far as their descriptions tell: nothing large is read."""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import NamedTuple

from core import paths, units
from core.checkpoints import description, steps
from core.checkpoints.description import said

HEADER = ("step", "saved", "size", "arrays", "revision", "config", "")


class Row(NamedTuple):
    """One folder.

    Attributes:
      name: the step, or the folder's name where it is none.
      saved: local time.
      size_bytes: of its files.
      arrays: how many; None where nothing tells.
      revision: of the code, as git named it.
      config: the first letters of a hash of the configuration; equal configurations have equal ones.
      state: `described` where it can be restored as far as its description tells, else what is wrong.
    """

    name: str
    saved: str
    size_bytes: int
    arrays: int | None
    revision: str
    config: str
    state: str

    def cells(self) -> tuple[str, ...]:
        """As text, under HEADER."""
        arrays = "" if self.arrays is None else str(self.arrays)
        return self.name, self.saved, units.size(self.size_bytes), arrays, self.revision, self.config, self.state


def rows(folder: paths.Path) -> list[Row]:
    """A row for each step, ascending, then one for each leftover."""
    listed = paths.sizes(folder)
    by_name: dict[str, int] = {}
    for name, size_bytes in listed.items():
        by_name[name.split("/")[0]] = by_name.get(name.split("/")[0], 0) + size_bytes
    found = [_step(folder / str(step), by_name.get(str(step), 0)) for step in steps.complete(folder)]
    asides = [_leftover(left, by_name.get(left.folder.name, 0)) for left in steps.leftovers(folder)]
    return found + asides


def _step(folder: paths.Path, size_bytes: int) -> Row:
    try:
        found = description.read(folder)
    except Exception as error:  # of many types: whatever a file makes of a wrong byte
        return Row(folder.name, "", size_bytes, None, "", "", f"DAMAGED description: {said(error)}")
    config = hashlib.sha256(found.meta.get("config", "").encode()).hexdigest()[:8]
    revision = str(found.meta.get("git_revision", ""))[:20]
    return Row(folder.name, _saved(folder), size_bytes, len(found.content), revision, config, "described")


def _saved(folder: paths.Path) -> str:
    """Local time; "" where the file that tells it, which no restore reads, cannot be read."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(steps.saved_at(folder)))
    return ""


def _leftover(left: steps.Leftover, size_bytes: int) -> Row:
    says = {
        "damaged": "put aside: its content was not what was saved",
        "incomplete": "put aside: a save that did not end",
        "unfinished": "a save that goes on, or did not end",
        "empty": "no step: parts are missing",
    }
    return Row(left.folder.name, "", size_bytes, None, "", "", says[left.what])


def aligned(table: list[tuple[str, ...]]) -> str:
    """Lines with columns under one another."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
