"""Compares two checkpoints."""

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from core import units
from core.checkpoints import reading, steps
from core.checkpoints.arrays import Arrays
from core.files import paths

MOST_SHOWN = 20  # arrays whose differences are listed


class ArrayDifference(NamedTuple):
    """How two arrays of the same shape and dtype differ.

    Attributes:
      relative: ||a - b|| / ||a|| over elements that are finite in both; inf if only `a` is zero there.
      largest: the largest |a - b| over the same elements.
      elements: number of elements that differ; NaN equals NaN.
      not_finite: how many of these are NaN or infinite in at least one array.
    """

    name: str
    relative: float
    largest: float
    elements: int
    not_finite: int
    size: int

    def describe(self) -> str:
        """Returns the difference as one line of text."""
        counted = f"{self.elements:,} of {self.size:,} elements differ"
        if self.not_finite:
            counted += f" ({self.not_finite:,} of them NaN or infinite)"
        return f"relative difference {self.relative:.2e}, largest {self.largest:.3g}, {counted}  {self.name}"


def compare(first: paths.Path, second: paths.Path, *, values: bool = True) -> Iterator[str]:
    """Yields lines of text about the differences between two steps.

    If not `values`, no array is read.
    """
    one, other = (_description(folder) for folder in (first, second))
    yield from _text_differences("config", one.meta, other.meta)
    yield from _value_differences("versions", one.meta.get("versions", {}), other.meta.get("versions", {}))
    plain = [{k: v for k, v in d.meta.items() if k not in ("config", "versions")} for d in (one, other)]
    for meta, described in zip(plain, (one, other), strict=True):
        meta["source of frozen parameters"] = described.left_out.source if described.left_out else None
    yield from _value_differences("", *plain)
    yield from _kind_differences(one.content, other.content)
    both = [name for name, (kind, _) in one.content.items() if other.content.get(name, [None])[0] == kind]
    changed = [name for name in both if one.content[name][1] != other.content[name][1]]
    if changed:
        yield f"arrays of the same shape and dtype: {len(both) - len(changed)} equal, {len(changed)} different"
    saved = [name for name in changed if name in one.saved and name in other.saved]
    if saved and values:
        yield from _array_differences(first, second, saved)
    if len(saved) < len(changed):
        yield f"{units.counted(len(changed) - len(saved), 'different array')} left out of a step: not read"


def _description(folder: paths.Path) -> steps.Description:
    with reading.refusing_damage(folder):
        return steps.read(folder)


def _text_differences(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    before, after = (str(meta.get(name, "")).splitlines() for meta in (one, other))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    if lines:
        yield f"{name}:\n  " + "\n  ".join(line for line in lines if not line.startswith("@@"))


def _value_differences(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            yield f"{f'{name}: ' if name else ''}{key}: {one.get(key)} -> {other.get(key)}"


def _kind_differences(one: Mapping[str, list], other: Mapping[str, list]) -> Iterator[str]:
    for name in sorted(one.keys() | other.keys()):
        kinds = [content[name][0] if name in content else "missing" for content in (one, other)]
        if kinds[0] != kinds[1]:
            yield f"{name}: {kinds[0]} -> {kinds[1]}"


def _array_differences(first: paths.Path, second: paths.Path, names: list[str]) -> Iterator[str]:
    with reading.refusing_damage(first, second):
        one, other = Arrays(first), Arrays(second)
        found = sorted((_difference(one, other, name) for name in names), key=lambda d: (not d.not_finite, -d.relative))
    for difference in found[:MOST_SHOWN]:
        yield f"  {difference.describe()}"
    if len(found) > MOST_SHOWN:
        yield f"  … and {len(found) - MOST_SHOWN} arrays that differ less"


def _difference(one: Arrays, other: Arrays, name: str) -> ArrayDifference:
    squares, difference_squares, largest, elements, not_finite, size = 0.0, 0.0, 0.0, 0, 0, 0
    for block in one.blocks(name):
        a, b = (np.asarray(x).astype(np.float64) for x in (block.values, other.read(name, block)))
        finite = np.isfinite(a) & np.isfinite(b)
        differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
        elements += int(np.sum(differ))
        not_finite += int(np.sum(differ & ~finite))
        size += a.size
        a, distance = a[finite], np.abs(a[finite] - b[finite])
        squares += float(np.sum(a * a))
        difference_squares += float(np.sum(distance * distance))
        largest = max(largest, float(np.max(distance, initial=0.0)))
    norm, difference_norm = math.sqrt(squares), math.sqrt(difference_squares)
    relative = difference_norm / norm if norm else math.inf if difference_norm else 0.0
    return ArrayDifference(name, relative, largest, elements, not_finite, size)
