"""Which checkpoints can go. The newest one that is sound never does, however few are to be kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from core import paths
from core.checkpoints import steps
from launch.saved import verifying


class Plan(NamedTuple):
    """What stays and what goes.

    Attributes:
      keep: steps, ascending.
      remove: folders.
    """

    keep: list[int]
    remove: list[paths.Path]


def plan(folder: paths.Path, *, keep: int, set_aside: bool, say: Callable[[str], None]) -> Plan:
    """Reads the newest steps until one is sound, and keeps it beside the latest `keep`.

    Args:
      folder: of checkpoints.
      keep: how many of the latest stay.
      set_aside: whether folders that a run put aside go too.
      say: told of each step that was read.

    Raises:
      ValueError: `keep` below 1, or steps are to go and none is sound.
    """
    if keep < 1:
        raise ValueError(f"--keep {keep}: expected at least 1")
    there = steps.complete(folder)
    kept = set(there[-keep:])
    if len(kept) < len(there):
        kept.add(_newest_sound(folder, there, say))
    aside = [left.folder for left in steps.leftovers(folder) if left.what in ("damaged", "incomplete")]
    gone = [folder / str(step) for step in there if step not in kept]
    return Plan(sorted(kept), gone + (aside if set_aside else []))


def _newest_sound(folder: paths.Path, there: list[int], say: Callable[[str], None]) -> int:
    for step in reversed(there):
        verdict = verifying.verify(folder / str(step))
        say(verdict.describe())
        if not verdict.damaged:
            return step
    raise ValueError(f"no checkpoint in {folder} is sound: nothing is removed")
