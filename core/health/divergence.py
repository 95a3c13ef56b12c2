"""Finds the hosts whose copies of replicated arrays differ, by comparing fingerprints.

The majority of the copies is taken as correct; if there is no majority, all hosts are named.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from core import units
from core.health import exit_codes
from core.health.failure_diagnosis import Verdict

Numbers = Mapping[str, Sequence[int | str]]  # name -> one fingerprint for each copy on a host

_MOST_NAMES = 3


def judge(step: int, by_host: Mapping[int, Numbers]) -> Verdict | None:
    """Returns the verdict on hosts that have diverged; None if all copies are equal.

    Args:
      step: the step after which the fingerprints were taken.
      by_host: the fingerprints of each host.
    """
    wrong: dict[int, list[str]] = {}
    for name in sorted({name for numbers in by_host.values() for name in numbers}):
        for host in _minority({host: numbers[name] for host, numbers in by_host.items() if name in numbers}):
            wrong.setdefault(host, []).append(name)
    if not wrong:
        return None
    hosts = sorted(wrong)
    names = list(dict.fromkeys(name for host in hosts for name in wrong[host]))
    listed = ", ".join(units.shortened(names, most=_MOST_NAMES))
    whose = f"host{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))}"
    if len(hosts) == len(by_host) > 1:
        says = f"after step {step}, {whose} disagree, and none is in the majority: {listed}"
    else:
        says = f"after step {step}, {whose} disagree{'s' * (len(hosts) == 1)} with the majority: {listed}"
    return Verdict(tuple(hosts), says, exit_codes.DIVERGED, others=exit_codes.DIVERGED)


def _minority(copies: Mapping[int, Sequence[int | str]]) -> list[int]:
    """Returns the hosts with a copy that differs from the most frequent one; all hosts if there is a tie."""
    counts = collections.Counter(number for held in copies.values() for number in held)
    if len(counts) < 2:
        return []
    (most, votes), (_, next_votes), *_ = counts.most_common()
    if votes == next_votes:
        return list(copies)
    return [host for host, held in copies.items() if any(number != most for number in held)]
