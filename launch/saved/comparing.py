"""What is different between two checkpoints: their trees, their numbers, their configurations and versions.

The one idea: arrays whose numbers are equal are equal, so only those that differ are read.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from core import paths
from core.checkpoints import description
from core.checkpoints.arrays import Arrays
from core.checkpoints.description import said

LARGEST = 20  # leaves whose differences are shown


class LeafDifference(NamedTuple):
    """How far apart two arrays of the same kind are.

    Attributes:
      name: of the leaf.
      relative: the length of the difference of the two as vectors, divided by the length of the first; of the elements
        that are finite in both.
      largest: the largest difference of two such elements.
      elements: how many differ; NaN and NaN do not.
      not_finite: how many of these are NaN or infinite in one of the two, or in both.
      of: how many there are.
    """

    name: str
    relative: float
    largest: float
    elements: int
    not_finite: int
    of: int

    def describe(self) -> str:
        """One line."""
        counted = f"{self.elements:,} of {self.of:,} elements"
        if self.not_finite:
            counted += f" ({self.not_finite:,} of them NaN or infinite)"
        return f"{self.relative:.2e} of its length, at most {self.largest:.3g}, {counted}  {self.name}"


def compare(first: paths.Path, second: paths.Path, *, values: bool = True) -> Iterator[str]:
    """Lines that say what is different; none where nothing is.

    Args:
      first: the folder of a step.
      second: of another.
      values: whether to read the arrays that differ and say by how much.

    Raises:
      DamagedError: a description is not what was saved.
    """
    one, other = (_description(folder) for folder in (first, second))
    yield from _texts("config", one.meta, other.meta)
    yield from _values("versions", one.meta.get("versions", {}), other.meta.get("versions", {}))
    plain = [{k: v for k, v in d.meta.items() if k not in ("config", "versions")} for d in (one, other)]
    yield from _values("", *plain)
    yield from _kinds(one.content, other.content)
    both = [name for name, (kind, _) in one.content.items() if other.content.get(name, [None])[0] == kind]
    changed = [name for name in both if one.content[name][1] != other.content[name][1]]
    if changed:
        yield f"arrays: {len(both) - len(changed)} are equal, {len(changed)} of the same kind are not"
    if changed and values:
        yield from _differences(first, second, changed)


def _description(folder: paths.Path) -> description.Description:
    try:
        return description.read(folder)
    except Exception as error:  # of many types: whatever a file makes of a wrong byte
        raise description.DamagedError(f"the description of {folder} cannot be read: {said(error)}") from error


def _texts(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    before, after = (str(meta.get(name, "")).splitlines() for meta in (one, other))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    if lines:
        yield f"{name}:\n  " + "\n  ".join(line for line in lines if not line.startswith("@@"))


def _values(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            yield f"{f'{name}: ' if name else ''}{key}: {one.get(key)} -> {other.get(key)}"


def _kinds(one: Mapping[str, list], other: Mapping[str, list]) -> Iterator[str]:
    for name in sorted(one.keys() | other.keys()):
        kinds = [content[name][0] if name in content else "not there" for content in (one, other)]
        if kinds[0] != kinds[1]:
            yield f"{name}: {kinds[0]} -> {kinds[1]}"


def _differences(first: paths.Path, second: paths.Path, names: list[str]) -> Iterator[str]:
    try:
        one, other = Arrays(first), Arrays(second)
        found = sorted((_difference(one, other, name) for name in names), key=lambda d: (not d.not_finite, -d.relative))
    except Exception as error:  # of many types: whatever files and formats make of a wrong byte
        raise description.DamagedError(f"an array of {first} or {second} cannot be read: {said(error)}") from error
    for difference in found[:LARGEST]:
        yield f"  {difference.describe()}"
    if len(found) > LARGEST:
        yield f"  … and {len(found) - LARGEST} that differ less"


def _difference(one: Arrays, other: Arrays, name: str) -> LeafDifference:
    squares, difference_squares, largest, elements, not_finite, of = 0.0, 0.0, 0.0, 0, 0, 0
    for block in one.blocks(name):
        a, b = (np.asarray(x).astype(np.float64) for x in (block.values, other.read(name, block)))
        finite = np.isfinite(a) & np.isfinite(b)
        differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
        elements += int(np.sum(differ))
        not_finite += int(np.sum(differ & ~finite))
        of += a.size
        a, apart = a[finite], np.abs(a[finite] - b[finite])
        squares += float(np.sum(a * a))
        difference_squares += float(np.sum(apart * apart))
        largest = max(largest, float(np.max(apart, initial=0.0)))
    length, apart_by = math.sqrt(squares), math.sqrt(difference_squares)
    relative = apart_by / length if length else math.inf if apart_by else 0.0
    return LeafDifference(name, relative, largest, elements, not_finite, of)
