"""Lists and verifies checkpoints, and plans their pruning, on one machine, without the model."""

import contextlib
import hashlib
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from core import units
from core.checkpoints import reading, steps
from core.checkpoints.arrays import Arrays
from core.checkpoints.steps import said
from core.errors import UserError
from core.files import paths

HEADER = ("step", "saved", "size", "arrays", "revision", "config", "")
_LEFTOVERS = {
    "damaged": "set aside: its content differs from what was saved",
    "incomplete": "set aside: the save did not finish",
    "unfinished": "a save in progress, or one that did not finish",
    "empty": "not a checkpoint: parts are missing",
}
_UNSEALED = "saved by an earlier revision: its data positions are not tied to their step and stream"


def table(directory: paths.Path) -> list[tuple[str, ...]]:
    """Returns rows with the columns HEADER: complete steps, ascending, then other folders."""
    sizes: dict[str, int] = {}
    for file, size_bytes in paths.sizes(directory).items():
        folder = file.split("/")[0]
        sizes[folder] = sizes.get(folder, 0) + size_bytes
    rows = [_step_row(directory / str(step), units.size(sizes.get(str(step), 0))) for step in steps.complete(directory)]
    for left in steps.leftovers(directory):
        name = left.folder.name
        rows.append((name, "", units.size(sizes.get(name, 0)), "", "", "", _LEFTOVERS[left.what]))
    return rows


def _step_row(folder: paths.Path, size: str) -> tuple[str, ...]:
    try:
        found = steps.read(folder)
    except Exception as error:  # a corrupt file can cause many types of error
        return folder.name, "", size, "", "", "", f"DAMAGED metadata: {said(error)}"
    config = hashlib.sha256(found.meta.get("config", "").encode()).hexdigest()[:8]
    revision = str(found.meta.get("git_revision", ""))[:20]
    saved = ""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # no restore needs this file
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(steps.saved_at(folder)))
    without = f", without {len(left.arrays)} frozen arrays of {left.source}" if (left := found.left_out) else ""
    return folder.name, saved, size, str(len(found.saved)), revision, config, f"complete{without}"


class Verification(NamedTuple):
    """The result of verifying one step.

    Attributes:
      damaged: a line for each damaged part; empty if the step is intact.
      arrays: number of arrays in the step; 0 if the metadata is damaged.
      note: what could not be checked; "" if nothing.
    """

    step: int
    damaged: tuple[str, ...]
    arrays: int
    read_bytes: int
    seconds: float
    note: str = ""

    def describe(self) -> str:
        """Describes the result, with a line for each damaged part."""
        read = f"{units.counted(self.arrays, 'array')}, {units.size(self.read_bytes)} in {units.seconds(self.seconds)}"
        if not self.damaged:
            return f"step {self.step}: intact ({read}{f'; {self.note}' if self.note else ''})"
        return "\n  ".join((f"step {self.step}: DAMAGED ({read})", *self.damaged))


def verify(step_folder: paths.Path) -> Verification:
    """Verifies one step; errors in reading are reported as damage."""
    began, kinds, described = time.monotonic(), {}, None
    damaged: list[str] = []
    try:
        described = steps.read(step_folder)
    except Exception as error:  # a corrupt file can cause many types of error
        damaged.append(f"{steps.PART}: {said(error)}")
    else:
        kinds = {name: kind for name, (kind, _) in described.saved.items()}
        damaged += _damaged_arrays(step_folder, described.saved)
    try:
        found = steps.read_streams(step_folder)
        if described:
            described.positions(found)
    except Exception as error:
        damaged.append(f"{steps.STREAMS_PART}: {said(error)}")
    notes = [] if described is None or described.seals_positions else [_UNSEALED]
    if described and (left_out := described.left_out):
        notes.append(f"{units.counted(len(left_out.arrays), 'frozen array')} not read, which are in {left_out.source}")
    read_bytes = sum(map(_bytes, kinds.values()))
    seconds = time.monotonic() - began
    return Verification(int(step_folder.name), tuple(damaged), len(kinds), read_bytes, seconds, "; ".join(notes))


def require_intact_parameters(step_folder: paths.Path) -> None:
    """Raises UserError if the metadata or the parameters of a step are damaged."""
    with reading.refusing_damage(step_folder):
        saved = steps.read(step_folder).saved
        parameters = {name: found for name, found in saved.items() if name.startswith("params/")}
        if damaged := list(_damaged_arrays(step_folder, parameters)):
            raise steps.DamagedError("; ".join(units.shortened(damaged, most=3)))


def _damaged_arrays(step_folder: paths.Path, content: dict[str, list]) -> Iterator[str]:
    try:
        arrays = Arrays(step_folder)
    except Exception as error:
        yield f"state: the list of arrays cannot be read: {said(error)}"
        return
    for name, (kind, number) in content.items():
        try:
            if problem := _problem(arrays, name, kind, number):
                yield f"{name}: {problem}"
        except Exception as error:
            yield f"{name}: cannot be read: {said(error)}"


def _problem(arrays: Arrays, name: str, kind: str, number: int) -> str:
    if name not in arrays:
        return "is missing"
    if (found := arrays.kind(name)) != kind:
        return f"is {found}, but was saved as {kind}"
    return "" if arrays.number(name) == number else "its content differs from what was saved"


def _bytes(kind: str) -> int:
    dtype, shape = kind.removesuffix("]").split("[")
    bits = int((re.findall(r"\d+", dtype) or ["8"])[0])
    return math.prod(int(n) for n in shape.split(",") if n.strip()) * bits // 8


def plan_pruning(
    folder: paths.Path, *, keep: int, set_aside: bool, say: Callable[[str], None]
) -> tuple[list[int], list[paths.Path]]:
    """Returns the steps to keep, ascending, and the folders to delete.

    Args:
      keep: how many of the latest steps to keep, at least 1; the best and the newest intact one are kept, too.
      set_aside: whether to delete folders that a run renamed to damaged-* or incomplete-*.
      say: receives the result of each verified step.
    """
    assert keep > 0
    present = steps.complete(folder)
    kept = set(present[-keep:])
    if found := steps.find_best(folder):
        kept.add(found.step)
    if len(kept) < len(present):
        kept.add(_newest_intact(folder, present, say))
    aside = [left.folder for left in steps.leftovers(folder) if left.what in ("damaged", "incomplete")]
    gone = [folder / str(step) for step in present if step not in kept]
    return sorted(kept), gone + (aside if set_aside else [])


def _newest_intact(folder: paths.Path, present: list[int], say: Callable[[str], None]) -> int:
    for step in reversed(present):
        result = verify(folder / str(step))
        say(result.describe())
        if not result.damaged:
            return step
    raise UserError(f"no checkpoint in {folder} is intact: nothing is removed")
