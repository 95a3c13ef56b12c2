"""Reads a whole checkpoint step on one machine and compares its content with the recorded fingerprints and checksums.

The model is not needed: the metadata, which has its own checksum, records the dtype, the shape and the fingerprint of
every array as computed on the devices. The same fingerprint is computed here from the files.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from core import paths, units
from core.checkpoints import description, streams
from core.checkpoints.arrays import Arrays
from core.checkpoints.description import said

_UNSEALED = "saved by an earlier revision: its data positions are not tied to their step and stream"


class Verification(NamedTuple):
    """The result of verifying one step.

    Attributes:
      step: its number.
      damaged: one line for each part that differs from what was saved; empty if the step is intact.
      arrays: how many arrays it has.
      read_bytes: their size in memory.
      seconds: how long reading took.
      note: what could not be checked because an earlier revision did not record it; "" if nothing.
    """

    step: int
    damaged: tuple[str, ...]
    arrays: int
    read_bytes: int
    seconds: float
    note: str = ""

    def describe(self) -> str:
        """Returns one line, and one more for each damaged part."""
        read = f"{units.counted(self.arrays, 'array')}, {units.size(self.read_bytes)} in {units.seconds(self.seconds)}"
        if not self.damaged:
            return f"step {self.step}: intact ({read}{f'; {self.note}' if self.note else ''})"
        return "\n  ".join((f"step {self.step}: DAMAGED ({read})", *self.damaged))


def verify(step_folder: paths.Path) -> Verification:
    """Verifies one step. Damage is reported in the result and never raised."""
    began, read_bytes, content, described = time.monotonic(), 0, {}, None
    damaged: list[str] = []
    try:
        described = description.read(step_folder)
    except Exception as error:  # a corrupt file can cause many types of error
        damaged.append(f"{description.PART}: {said(error)}")
    else:
        content = described.content
        damaged += _damaged_arrays(step_folder, content)
        read_bytes = sum(_bytes(kind) for kind, _ in content.values())
    try:
        found = streams.StreamsHandler().restore(step_folder / "data")
        if described:
            described.positions(found)
    except Exception as error:
        damaged.append(f"data: {said(error)}")
    note = "" if described is None or described.seals_positions else _UNSEALED
    seconds = time.monotonic() - began
    return Verification(int(step_folder.name), tuple(damaged), len(content), read_bytes, seconds, note)


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
    """Returns the size in bytes of an array described as `float32[8, 6]`."""
    dtype, shape = kind.removesuffix("]").split("[")
    bits = int((re.findall(r"\d+", dtype) or ["8"])[0])
    return math.prod(int(n) for n in shape.split(",") if n.strip()) * bits // 8
