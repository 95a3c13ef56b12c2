"""Which hosts hold other numbers than the rest, by the numbers that stand for what each of them holds.

The one idea: where several copies of the same array exist, most of them are right. Of two, nobody knows which.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from core import listing
from core.health import exit_codes
from core.health.failure_diagnosis import Verdict

Numbers = Mapping[str, Sequence[int | str]]  # by name of what is held: one for every copy that a host has

_MOST_NAMES = 3


def judge(step: int, by_host: Mapping[int, Numbers]) -> Verdict | None:
    """The verdict on hosts that have diverged; None where all copies of everything are equal.

    Args:
      step: behind which the numbers were taken.
      by_host: what each host says it holds.
    """
    wrong: dict[int, list[str]] = {}
    for name in sorted({name for numbers in by_host.values() for name in numbers}):
        for host in _minority({host: numbers[name] for host, numbers in by_host.items() if name in numbers}):
            wrong.setdefault(host, []).append(name)
    if not wrong:
        return None
    hosts = sorted(wrong)
    names = list(dict.fromkeys(name for host in hosts for name in wrong[host]))
    listed = ", ".join(listing.shortened(names, most=_MOST_NAMES))
    whose = f"host {', '.join(map(str, hosts))}"
    if len(hosts) == len(by_host) > 1:
        says = f"behind step {step} {whose} hold different numbers, and none is in the majority: {listed}"
    else:
        says = f"behind step {step} {whose} held other numbers than most: {listed}"
    return Verdict(tuple(hosts), says, exit_codes.DIVERGED, others=exit_codes.DIVERGED)


def _minority(copies: Mapping[int, Sequence[int | str]]) -> list[int]:
    """Hosts with a copy that is not what most copies are; all that hold one where no number is the most frequent."""
    counts = collections.Counter(number for held in copies.values() for number in held)
    if len(counts) < 2:
        return []
    (most, votes), (_, next_votes), *_ = counts.most_common()
    if votes == next_votes:
        return list(copies)
    return [host for host, held in copies.items() if any(number != most for number in held)]
