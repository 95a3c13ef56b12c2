"""Whether what is in a step is what was saved: every array and every stream is read, on one machine.

The one idea: the model is not needed. The description, which has its own checksum, tells the kind of each array and the
number that its content had on the devices; the same number is made here of what the files give.
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

_UNSEALED = "saved by an earlier revision: its positions in the data carry no step and no stream"


class Verdict(NamedTuple):
    """What came of one step.

    Attributes:
      step: its number.
      damaged: a line for each thing that is not what was saved.
      arrays: how many there are.
      read_bytes: of arrays, as they are in memory.
      seconds: it took.
      note: what this revision would record and the one that saved the step did not; "" where that is nothing.
    """

    step: int
    damaged: tuple[str, ...]
    arrays: int
    read_bytes: int
    seconds: float
    note: str = ""

    def describe(self) -> str:
        """One line, or one and a line for each damage."""
        read = f"{units.counted(self.arrays, 'array')}, {units.size(self.read_bytes)} in {units.seconds(self.seconds)}"
        if not self.damaged:
            return f"step {self.step}: sound ({read}{f'; {self.note}' if self.note else ''})"
        return "\n  ".join((f"step {self.step}: DAMAGED ({read})", *self.damaged))


def verify(step_folder: paths.Path) -> Verdict:
    """Reads all of a step; never raises for what is wrong with it."""
    began, read_bytes, content, described = time.monotonic(), 0, {}, None
    damaged: list[str] = []
    try:
        described = description.read(step_folder)
    except Exception as error:  # of many types: whatever files and formats make of a wrong byte
        damaged.append(f"{description.PART}: {said(error)}")
    else:
        content = described.content
        damaged += _arrays(step_folder, content)
        read_bytes = sum(_bytes(kind) for kind, _ in content.values())
    try:
        found = streams.StreamsHandler().restore(step_folder / "data")
        if described:
            described.positions(found)
    except Exception as error:
        damaged.append(f"data: {said(error)}")
    note = "" if described is None or described.seals_positions else _UNSEALED
    seconds = time.monotonic() - began
    return Verdict(int(step_folder.name), tuple(damaged), len(content), read_bytes, seconds, note)


def _arrays(step_folder: paths.Path, content: dict[str, list]) -> Iterator[str]:
    try:
        arrays = Arrays(step_folder)
    except Exception as error:
        yield f"state: what arrays there are cannot be read: {said(error)}"
        return
    for name, (kind, number) in content.items():
        try:
            if wrong := _wrong(arrays, name, kind, number):
                yield f"{name}: {wrong}"
        except Exception as error:
            yield f"{name}: cannot be read: {said(error)}"


def _wrong(arrays: Arrays, name: str, kind: str, number: int) -> str:
    if name not in arrays:
        return "is missing"
    if (found := arrays.kind(name)) != kind:
        return f"is {found}, was saved as {kind}"
    return "" if arrays.number(name) == number else "its content is not what was saved"


def _bytes(kind: str) -> int:
    """Of `float32[8, 6]`."""
    dtype, shape = kind.removesuffix("]").split("[")
    bits = int((re.findall(r"\d+", dtype) or ["8"])[0])
    return math.prod(int(n) for n in shape.split(",") if n.strip()) * bits // 8
