"""Reads the compiler's buffer assignment and attributes the HBM in use at the peak to values.

`xla_dump_to` writes two files: the location of each value (`…buffer-assignment.txt`) and the instructions between
which it is live (`…live-range.txt`). Values share memory, one after another and as aliases, so their sizes cannot be
added up. Instead the occupied bytes are measured at each instruction, and at the peak each byte is attributed to one
value.

    allocation 215: size 2510701056, preallocated-temp:
     value: <2750 fusion.18 @0> (size=1441792,offset=201719808): bf16[1,256,2816]{2,1,0:T(8,128)(2,1)}
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from parallel.hlo import program
from parallel.hlo.program import Array

_ALLOCATION = re.compile(r"allocation \d+: size (?P<size>\d+)(?P<rest>(?:.*?parameter (?P<parameter>\d+))?.*)")
_VALUE = re.compile(
    r"\s*value: <\d+ (?P<name>[\w.\-]+)(?P<index>\{[\d,]*\})? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<type>.*)"
)
_HBM_COLORS = ("0", "3")
_LIVES = re.compile(r"\s+(?P<name>[\w.\-]+)(?P<index>\{[\d,]*\}):(?P<first>\d+)-(?P<last>\d+)")


class Value(NamedTuple):
    """A value in HBM.

    Attributes:
      name: the instruction that makes it.
      array: its shape and dtype; None for a tuple of pointers.
      size, offset: bytes, in the memory of temporaries.
      first, last: the first and last instruction during which it is live.
    """

    name: str
    array: Array | None
    size: int
    offset: int
    first: int
    last: int


class Argument(NamedTuple):
    """An argument of the program, which is live for the whole step.

    Attributes:
      number: of the entry parameter.
      size: bytes.
    """

    number: int
    size: int


class Buffers(NamedTuple):
    """The contents of HBM.

    Attributes:
      arguments: state and batch.
      values: temporaries.
      temp_bytes: memory of temporaries, including gaps.
      other_bytes: constants, and results that do not alias an argument.
    """

    arguments: list[Argument]
    values: list[Value]
    temp_bytes: int
    other_bytes: int


class Held(NamedTuple):
    """A value at the peak, with the bytes that are attributed to it."""

    value: Value
    bytes: int


def read(folder: Path) -> Buffers:
    """Reads the files that the compiler wrote to `xla_dump_to` for one program.

    Raises:
      FileNotFoundError: the compiler did not write them.
    """
    assignment = _one(folder, "after_optimizations-buffer-assignment.txt")
    lives = _one(folder, "after_optimizations-live-range.txt")
    return parse(assignment.read_text(), lives.read_text())


def _one(folder: Path, ending: str) -> Path:
    found = [path for path in sorted(folder.glob(f"*{ending}")) if path.stat().st_size]
    if not found:
        raise FileNotFoundError(f"the compiler left no …{ending} in {folder}")
    return max(found, key=lambda path: path.stat().st_size)


def parse(assignment: str, live_ranges: str) -> Buffers:
    """Parses the text of both files."""
    lives = {
        (found["name"], found["index"].strip("{}")): (int(found["first"]), int(found["last"]))
        for line in live_ranges.partition("BufferLiveRange:")[2].partition("Live ranges at")[0].splitlines()
        if (found := _LIVES.fullmatch(line))
    }
    arguments, values, temp, other, kind, base = [], [], 0, 0, "", 0
    for line in assignment.splitlines():
        if allocation := _ALLOCATION.match(line):
            size, rest = int(allocation["size"]), allocation["rest"]
            kind = _kind(rest)
            if kind == "argument":
                arguments.append(Argument(int(allocation["parameter"]), size))
            base, temp = (temp, temp + size) if kind == "temporary" else (base, temp)
            other += size if kind == "other" else 0
        elif kind == "temporary" and (found := _VALUE.fullmatch(line)):
            when = lives.get((found["name"], (found["index"] or "{}").strip("{}")))
            if when is not None:
                arrays = program.arrays_of(found["type"]) if not found["type"].startswith("(") else [None]
                array = arrays[0] if arrays else None
                values.append(Value(found["name"], array, int(found["size"]), base + int(found["offset"]), *when))
    return Buffers(arguments, values, temp, other)


def _kind(rest: str) -> str:
    """Returns the kind of an allocation; memory colors 0 (the default) and 3 are HBM."""
    color = re.search(r"color (\d+)", rest)
    if "thread-local" in rest or (color and color[1] not in _HBM_COLORS):
        return "elsewhere"
    if "parameter" in rest:
        return "argument"
    return "temporary" if "preallocated-temp" in rest else "other"


def fullest(buffers: Buffers) -> list[Held]:
    """Returns the temporaries at the instruction with most bytes in use, largest first."""
    if not buffers.values:
        return []
    births = sorted({value.first for value in buffers.values})
    by_first = sorted(buffers.values, key=lambda value: value.first)
    firsts = [value.first for value in by_first]

    def live(moment: int) -> list[Value]:
        return [value for value in by_first[: bisect.bisect_right(firsts, moment)] if value.last >= moment]

    moment = max(births, key=lambda m: _in_use(live(m)))
    return sorted(_attributed(live(moment)), key=lambda held: -held.bytes)


def _in_use(values: Sequence[Value]) -> int:
    total, end = 0, 0
    for value in sorted(values, key=lambda v: v.offset):
        stop = value.offset + value.size
        total += max(0, stop - max(end, value.offset))
        end = max(end, stop)
    return total


def _attributed(values: Sequence[Value]) -> Iterator[Held]:
    """Attributes each byte to the largest value that covers it; of equally large ones, to the first to be live."""
    taken: list[tuple[int, int]] = []
    for value in sorted(values, key=lambda v: (-v.size, v.first)):
        free = _without((value.offset, value.offset + value.size), taken)
        if own := sum(stop - start for start, stop in free):
            yield Held(value, own)
            taken = sorted([*taken, *free])


def _without(place: tuple[int, int], taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the parts of a range that do not overlap `taken`, which is sorted and disjoint."""
    start, stop = place
    free = []
    for low, high in taken:
        if high <= start or low >= stop:
            continue
        if low > start:
            free.append((start, low))
        start = max(start, high)
    return [*free, (start, stop)] if start < stop else free
