"""Chooses which checkpoints to delete; the newest intact one is always kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from core import paths
from core.checkpoints import steps, verifying
from core.errors import UserError


class PruningPlan(NamedTuple):
    """The steps to keep and the folders to delete.

    Attributes:
      keep: steps, ascending.
      remove: folders.
    """

    keep: list[int]
    remove: list[paths.Path]


def plan(folder: paths.Path, *, keep: int, set_aside: bool, say: Callable[[str], None]) -> PruningPlan:
    """Verifies steps from the newest backwards until one is intact, and keeps that one and the latest `keep`.

    Args:
      folder: the folder of checkpoints.
      keep: how many of the latest steps to keep, at least 1.
      set_aside: whether to delete also the folders that a run renamed to damaged-* or incomplete-*.
      say: receives one line for each step that was verified.

    Raises:
      UserError: steps would be deleted and none is intact.
    """
    assert keep > 0
    present = steps.complete(folder)
    kept = set(present[-keep:])
    if len(kept) < len(present):
        kept.add(_newest_intact(folder, present, say))
    aside = [left.folder for left in steps.leftovers(folder) if left.what in ("damaged", "incomplete")]
    gone = [folder / str(step) for step in present if step not in kept]
    return PruningPlan(sorted(kept), gone + (aside if set_aside else []))


def _newest_intact(folder: paths.Path, present: list[int], say: Callable[[str], None]) -> int:
    for step in reversed(present):
        result = verifying.verify(folder / str(step))
        say(result.describe())
        if not result.damaged:
            return step
    raise UserError(f"no checkpoint in {folder} is intact: nothing is removed")
