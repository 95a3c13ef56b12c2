"""Parses the groups of chips of a collective, in the notations of HLO.

{{0,1},{2,3}}                                lists
[4,4]<=[4,4]T(1,0)                           iota of 16 as [4, 4], transposed: 4 groups of 4
mesh['a'=4,'b'=4], device_ids=(...) {'a'}    mesh axes that vary in a group; 'b':(2)2 is part of an axis
source_target_pairs={{0,1},{1,0}}            a permute
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from parallel.compiled.hlo.program import Instruction

_PAIRS = r"source_target_pairs=\{((?:\{[\d,\s]*\},?\s*)*)\}"


def pairs(at: Instruction) -> list[list[int]]:
    """Returns the (source, target) pairs of a collective-permute; empty for other collectives."""
    found = re.search(_PAIRS, at.attributes)
    return _explicit(found[1]) if found else []


def _explicit(text: str) -> list[list[int]]:
    return [[int(i) for i in group.split(",") if i.strip()] for group in re.findall(r"\{([\d,\s]*)\}", text)]


def device_groups(at: Instruction, chips: int) -> list[list[int]]:
    """Returns the groups of a collective, in the program's numbers of chips.

    The groups of a permute are the chips that its pairs connect. Without groups, all `chips` are one.

    Raises:
      RuntimeError: the groups are in an unknown notation.
    """
    if re.search(_PAIRS, at.attributes):
        return _joined(pairs(at))
    found = re.search(r"replica_groups=(.*)", at.attributes, re.S)
    text = found[1] if found else "{}"
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        return _iota(_beginning(r"\S+?(?=,\s|,?$)", text)).tolist()
    groups = _explicit(_beginning(r"\{\}|\{.*?\}\}", text))
    counts_replicas = at.attribute("channel_id") is not None and at.attribute("use_global_device_ids") != "true"
    if not any(groups) or (groups == [[0]] and counts_replicas):
        return [list(range(chips))]
    return groups


def _beginning(pattern: str, text: str) -> str:
    found = re.match(pattern, text)
    if found is None:
        raise RuntimeError(f"replica groups in an unknown format: {text[:100]}")
    return found[0]


def _iota(text: str) -> np.ndarray:
    """Parses `[2,8]<=[8,2]T(1,0)` (iota of 16 as [8, 2], transposed, as [2, 8]) and `[8,2]T(1,0)` (the same, flat)."""
    numbers = [[int(n) for n in part.split(",")] for part in re.findall(r"[\[(]([\d,]+)[\])]", text)]
    shape, source = numbers[0], numbers[1] if "<=" in text else numbers[0]
    count = np.arange(math.prod(source)).reshape(source)
    return (count.transpose(numbers[-1]) if "T(" in text else count).reshape(shape if "<=" in text else -1)


def _mesh_groups(text: str) -> list[list[int]]:
    found = re.match(r"mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\))? \{(?P<over>[^}]*)\}", text, re.S)
    if found is None:
        raise RuntimeError(f"replica groups in an unknown format: {text[:100]}")
    sizes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", found["axes"])}
    order = np.arange(math.prod(sizes.values()))
    if found["ids"]:
        order = _iota(found["ids"]) if "[" in found["ids"] else np.array([int(i) for i in found["ids"].split(",")])
    over = re.findall(r"'?([A-Za-z_]\w*)'?(?::\((\d+)\)(\d+))?", found["over"])
    splits, varying = _split_axes(sizes, over)
    kept = [i for i in range(len(splits)) if i not in varying]
    return order.reshape(splits).transpose(*kept, *varying).reshape(-1, math.prod(splits[i] for i in varying)).tolist()


def _split_axes(sizes: Mapping[str, int], over: Sequence[tuple[str, str, str]]) -> tuple[list[int], list[int]]:
    splits, varying = [], []
    for name, size in sizes.items():
        cut = 1
        for _, before, width in sorted((o for o in over if o[0] == name), key=lambda o: int(o[1] or 1)):
            splits.append(int(before or 1) // cut)
            varying.append(len(splits))
            splits.append(int(width or size))
            cut = int(before or 1) * int(width or size)
        splits.append(size // cut)
    return splits, varying


def _joined(pairs: Sequence[Sequence[int]]) -> list[list[int]]:
    group_of: dict[int, set[int]] = {}
    for pair in pairs:
        merged = set(pair).union(*(group_of.get(i, set()) for i in pair))
        group_of.update(dict.fromkeys(merged, merged))
    return sorted(map(list, {tuple(sorted(g)) for g in group_of.values()}))
