"""Reads the compiler's buffer assignment and attributes the HBM in use at the peak to values.

Two of the files that `xla_dump_to` writes are read: the locations of values (`…buffer-assignment.txt`), and the
instructions between which each is live (`…live-range.txt`). Lines of the first file:

    allocation 215: size 2510701056, preallocated-temp:
     value: <2750 fusion.18 @0> (size=1441792,offset=201719808): bf16[1,256,2816]{2,1,0:T(8,128)(2,1)}
"""

import bisect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from parallel.compiled.hlo import program
from parallel.compiled.hlo.program import Array

_ALLOCATION = re.compile(r"allocation \d+: size (?P<size>\d+)(?P<rest>(?:.*?parameter (?P<parameter>\d+))?.*)")
_VALUE = re.compile(
    r"\s*value: <\d+ (?P<name>[\w.\-]+)(?P<index>\{[\d,]*\})? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<type>.*)"
)
_HBM_COLORS = ("0", "3")  # of memory; 0 is the default
_LIVES = re.compile(r"\s+(?P<name>[\w.\-]+)(?P<index>\{[\d,]*\}):(?P<first>\d+)-(?P<last>\d+)")


class Value(NamedTuple):
    """A temporary value in HBM.

    Attributes:
      array: None for a tuple of pointers.
      size, offset: bytes; the offset is from the beginning of the memory of temporaries.
      first, last: numbers of the first and last instruction during which it is live.
    """

    name: str
    array: Array | None
    size: int
    offset: int
    first: int
    last: int


class Buffers(NamedTuple):
    """A program's arguments (bytes by number of the entry parameter) and temporaries in HBM."""

    arguments: dict[int, int]
    values: list[Value]


def read(folder: Path) -> Buffers:
    """Reads the buffers of a program from the folder that was its `xla_dump_to`.

    Raises:
      FileNotFoundError: a file is missing or empty.
    """
    texts = []
    for ending in ("after_optimizations-buffer-assignment.txt", "after_optimizations-live-range.txt"):
        largest = max(folder.glob(f"*{ending}"), key=lambda path: path.stat().st_size, default=None)
        if largest is None or not largest.stat().st_size:
            raise FileNotFoundError(f"the compiler left no …{ending} in {folder}")
        texts.append(largest.read_text())
    return parse(*texts)


def parse(assignment: str, live_ranges: str) -> Buffers:
    """Parses the texts of a buffer assignment and of its live ranges."""
    lives = {
        (found["name"], found["index"].strip("{}")): (int(found["first"]), int(found["last"]))
        for line in live_ranges.partition("BufferLiveRange:")[2].partition("Live ranges at")[0].splitlines()
        if (found := _LIVES.fullmatch(line))
    }
    buffers, base, end, is_temporary = Buffers({}, []), 0, 0, False
    for line in assignment.splitlines():
        if allocation := _ALLOCATION.match(line):
            size, rest = int(allocation["size"]), allocation["rest"]
            color = re.search(r"color (\d+)", rest)
            is_in_hbm = "thread-local" not in rest and (color is None or color[1] in _HBM_COLORS)
            is_temporary = is_in_hbm and "preallocated-temp" in rest
            if is_temporary:
                base, end = end, end + size
            elif is_in_hbm and allocation["parameter"]:
                buffers.arguments[int(allocation["parameter"])] = size
        elif is_temporary and (value := _VALUE.fullmatch(line)):
            when = lives.get((value["name"], (value["index"] or "{}").strip("{}")))
            if when is not None:
                array = next(iter(program.arrays_of(value["type"])), None) if value["type"][0] != "(" else None
                buffers.values.append(
                    Value(value["name"], array, int(value["size"]), base + int(value["offset"]), *when)
                )
    return buffers


def fullest(values: Sequence[Value]) -> list[tuple[Value, int]]:
    """Returns the temporaries at the peak, each with the bytes attributed to it."""
    by_first = sorted(values, key=lambda value: value.first)
    firsts = [value.first for value in by_first]

    def live(moment: int) -> list[Value]:
        return [value for value in by_first[: bisect.bisect_right(firsts, moment)] if value.last >= moment]

    moment = max(sorted(set(firsts)), key=lambda m: _in_use(live(m)), default=0)
    return sorted(_attributed(live(moment)), key=lambda pair: -pair[1])


def _in_use(values: Sequence[Value]) -> int:
    total, end = 0, 0
    for value in sorted(values, key=lambda v: v.offset):
        stop = value.offset + value.size
        total += max(0, stop - max(end, value.offset))
        end = max(end, stop)
    return total


def _attributed(values: Sequence[Value]) -> Iterator[tuple[Value, int]]:
    taken: list[tuple[int, int]] = []
    for value in sorted(values, key=lambda v: (-v.size, v.first)):
        free, start, stop = [], value.offset, value.offset + value.size
        for low, high in taken:  # sorted and disjoint
            if low < stop and high > start:
                if low > start:
                    free.append((start, low))
                start = high
        if start < stop:
            free.append((start, stop))
        if own := sum(high - low for low, high in free):
            yield value, own
            taken = sorted([*taken, *free])
