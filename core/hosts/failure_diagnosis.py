"""Decides on host 0 whether a run must end, and which host caused it.

A lost host makes the collectives of the others fail, and an exception on one host leaves the others waiting, so a host
that only sees its own state would name the wrong cause.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from core import units
from core.hosts import activity, exit_codes
from core.hosts.activity import Place

SETTLING_SECONDS = 1.5  # wait for further errors after the first: hosts may fail together or because of one another
JOINING_SECONDS = 600.0  # minimum limit for a large slice to start
LATER_SECONDS = 60.0  # added to a limit that the work itself enforces, whose own message names the cause
LEAVING_SECONDS = 10.0  # for all hosts to leave after one has left with an exit code
EARLY_SECONDS = 3.0  # for other hosts to finish their loop after one has left


Numbers = Mapping[str, Sequence[int | str]]  # name of an array -> one fingerprint for each copy on a host


class Limits(NamedTuple):
    """Time limits for the activities of a host.

    Attributes:
      step_seconds: limit for a step, and for the time between two steps.
      slow_seconds: limit for other activities; some have a longer one or none.
      silent_seconds: limit for the time without a message, and for meeting, evaluating or ending while others wait in a
        step.
      apart_seconds: limit for saving or restoring while others wait in a step.
      reports_only: whether hosts over a limit are only reported.
    """

    step_seconds: float
    slow_seconds: float
    silent_seconds: float = 20.0
    apart_seconds: float = 120.0
    reports_only: bool = False

    def apart(self, place: Place) -> float | None:
        """Returns how many seconds this activity may last while others wait in a step; None: no limit."""
        if place.activity in (activity.SAVING, activity.RESTORING):
            return self.apart_seconds
        return (
            self.silent_seconds if place.activity in (activity.MEETING, activity.EVALUATING, activity.ENDING) else None
        )

    def of(self, place: Place) -> float:
        """Returns the limit of an activity in seconds."""
        if place.activity in (activity.TRAINING, activity.BETWEEN):
            return self.step_seconds
        if place.activity == activity.JOINING:
            return max(JOINING_SECONDS, self.slow_seconds)
        if place.limit_seconds:
            return max(self.slow_seconds, place.limit_seconds + LATER_SECONDS)
        return float("inf") if place.activity == activity.PREPARING else self.slow_seconds


USUAL_LIMITS = Limits(600.0, 3600.0)  # for simulated hosts, which are processes on one machine
ON_TPU = USUAL_LIMITS._replace(silent_seconds=120.0, apart_seconds=600.0)


@dataclasses.dataclass
class Seen:
    """The state of a host as known to the host that judges it.

    Attributes:
      name: such as `host 2 (10.0.0.4)`.
      place: the step and activity that it last reported.
      heard_seconds: time since its last message.
      raised: its exception, and when that was reported (seconds, monotonic clock of the judging host).
      left: its exit code (0: done), the reason, and when they were reported.
      is_consequence: whether the loss of another host can have caused its exception.
      gone: whether its connection is closed.
    """

    name: str
    place: Place
    heard_seconds: float = 0.0
    raised: tuple[str, float] | None = None
    left: tuple[int, str, float] | None = None
    is_consequence: bool = False
    gone: bool = False


class Verdict(NamedTuple):
    """The reason to end a run.

    Attributes:
      hosts: the hosts that caused it.
      says: the reason, in one sentence.
      code: the exit code of those hosts, unless they have one of their own.
      others: the exit code of the other hosts.
      wants_stacks: whether to show the stacks of those hosts' threads.
      step: the step that it is about; None: the current one.
    """

    hosts: tuple[int, ...]
    says: str
    code: int
    others: int = exit_codes.PEER_LOST
    wants_stacks: bool = False
    step: int | None = None


def judge(seen: Mapping[int, Seen], *, limits: Limits, now: float) -> Verdict | None:
    """Returns the verdict; None if there is no reason to end, or further reports are expected.

    `now` is in seconds, on the clock used in `seen`.
    """
    ended = _lost(seen) or _raised(seen, now) or _left(seen, now) or _left_early(seen, now)
    return ended or (None if limits.reports_only else overdue(seen, limits=limits))


def overdue(seen: Mapping[int, Seen], *, limits: Limits) -> Verdict | None:
    """Returns the verdict on hosts that are silent, or delay others, for too long; None if none is."""
    return _apart(seen, limits) or _silent(seen, limits) or _hung(seen, limits)


def judge_host_zero(zero: Seen, own: Seen, *, limits: Limits, now: float) -> Verdict | None:
    """Returns this host's verdict on host 0; None if there is no reason to end.

    Args:
      zero: the state of host 0, as this host knows it.
      own: the state of this host.
      now: seconds, on the clock used in `zero` and `own`.
    """
    both = {0: zero, 1: own}
    silent = None if limits.reports_only else host_zero_overdue(zero, limits=limits)
    return _lost({0: zero}) or silent or _left(both, now) or _left_early(both, now)


def host_zero_overdue(zero: Seen, *, limits: Limits) -> Verdict | None:
    """Returns the verdict on host 0 if it has been silent for too long; otherwise None."""
    return _silent({0: zero}, limits)


def _lost(seen: Mapping[int, Seen]) -> Verdict | None:
    lost = [i for i, s in seen.items() if s.gone and not s.raised and not s.left]
    if not lost:
        return None
    says = "; ".join(f"{seen[i].name} was lost: last seen at {seen[i].place}" for i in lost)
    return Verdict(tuple(lost), says + _elsewhere(seen, lost), exit_codes.PEER_LOST)


def _raised(seen: Mapping[int, Seen], now: float) -> Verdict | None:
    """May return None at first: other hosts may raise, too, or have caused the error."""
    raised = {i: s.raised for i, s in seen.items() if s.raised}
    if not raised:
        return None
    all_said = all(s.raised or s.left for s in seen.values())
    if not all_said and now - min(at for _, at in raised.values()) < SETTLING_SECONDS:
        return None
    if left := _failed(seen):
        return _ended(seen, left)
    own = [i for i in raised if not seen[i].is_consequence]
    first = min(raised, key=lambda i: raised[i][1])
    culprits = own or (sorted(raised) if all_said else [first])
    says = "; ".join(f"{seen[i].name} raised {raised[i][0]} (at {seen[i].place})" for i in culprits)
    return Verdict(tuple(culprits), says, exit_codes.RAISED)


def _left(seen: Mapping[int, Seen], now: float) -> Verdict | None:
    left = _failed(seen)
    if not left or all(s.left for s in seen.values()):
        return None
    if now - min(at for _, _, at in left.values()) < LEAVING_SECONDS:
        return None
    return _ended(seen, left)


def _failed(seen: Mapping[int, Seen]) -> dict[int, tuple[int, str, float]]:
    return {i: s.left for i, s in seen.items() if s.left and s.left[0]}


def _ended(seen: Mapping[int, Seen], left: Mapping[int, tuple[int, str, float]]) -> Verdict:
    """If a restart cannot help, the other hosts end with the same code."""
    codes = [code for code, _, _ in left.values()]
    others = next((code for code in codes if not exit_codes.ending(code).restart), exit_codes.PEER_LOST)
    says = "; ".join(f"{seen[i].name} ended with exit code {code}: {why}" for i, (code, why, _) in left.items())
    return Verdict(tuple(left), says, exit_codes.PEER_LOST, others)


def _left_early(seen: Mapping[int, Seen], now: float) -> Verdict | None:
    """Blames hosts that ended with exit code 0 while others are in their loop."""
    stepping = [i for i, s in seen.items() if s.place.activity in activity.STEPPING and not s.left]
    early = [i for i, s in seen.items() if s.left and s.left[0] == 0 and now - s.left[2] > EARLY_SECONDS]
    if not stepping or not early:
        return None
    says = "; ".join(f"{seen[i].name} ended its training loop at step {seen[i].place.step}" for i in early)
    there = ", ".join(f"{seen[i].name} at {seen[i].place}" for i in stepping[:3])
    return Verdict(tuple(early), f"{says} while others were still in theirs: {there}", exit_codes.PEER_LOST)


def _apart(seen: Mapping[int, Seen], limits: Limits) -> Verdict | None:
    """Blames hosts for a long wait in which some are in a step and others are not."""
    if any(s.place.activity in activity.ALONE for s in seen.values()):
        return None  # such a host delays all others
    waiting = [s.place.seconds for s in seen.values() if s.place.activity in (activity.COMPILING, activity.TRAINING)]
    patient = {i: limit for i, s in seen.items() if (limit := limits.apart(s.place)) is not None}
    elsewhere = {i: seen[i].place for i in patient}
    if not waiting or not elsewhere:
        return None
    patience = max(patient.values())
    if min(*waiting, *(place.seconds for place in elsewhere.values())) < patience:
        return None
    through = [i for i, place in elsewhere.items() if place.activity == activity.ENDING]
    culprits = through or behind({i: s.place for i, s in seen.items()})
    says = "; ".join(f"{seen[i].name} is at {seen[i].place}" for i in culprits)
    says += f"{_elsewhere(seen, culprits)}: they wait for one another in different places"
    return Verdict(tuple(culprits), says, exit_codes.HUNG, wants_stacks=True)


def _silent(seen: Mapping[int, Seen], limits: Limits) -> Verdict | None:
    silent = [i for i, s in seen.items() if s.heard_seconds > limits.silent_seconds and not s.left]
    if not silent:
        return None
    says = "; ".join(
        f"{seen[i].name} has been silent for {seen[i].heard_seconds:.0f} s: last seen at {seen[i].place}"
        for i in silent
    )
    return Verdict(tuple(silent), says + _elsewhere(seen, silent), exit_codes.HUNG)


def _hung(seen: Mapping[int, Seen], limits: Limits) -> Verdict | None:
    """Blames the hosts that delay the others, once all of these exceed their limits."""
    if any(s.raised or s.left for s in seen.values()):
        return None
    over = {i for i, s in seen.items() if s.place.seconds > limits.of(s.place)}
    culprits = behind({i: s.place for i, s in seen.items()}) if over else []
    if not over or not over.issuperset(culprits):
        return None
    if len(culprits) == len(seen) > 1:
        places = {str(s.place) for s in seen.values()}
        where = places.pop() if len(places) == 1 else "; ".join(f"{s.name} at {s.place}" for s in seen.values())
        longest = max(s.place.seconds for s in seen.values())
        says = f"no host completed a step for {longest:.0f} s, and no host is behind the others: {where}"
        return Verdict(tuple(culprits), says, exit_codes.HUNG, wants_stacks=True)
    says = "; ".join(f"{seen[i].name} has been at {seen[i].place} for {seen[i].place.seconds:.0f} s" for i in culprits)
    allowed = min(limits.of(seen[i].place) for i in culprits)
    says = f"{says} (limit {allowed:g} s){_elsewhere(seen, culprits)}"
    return Verdict(tuple(culprits), says, exit_codes.HUNG, wants_stacks=True)


def behind(places: Mapping[int, Place]) -> list[int]:
    """Returns the hosts that delay the others; all of them if none stands out.

    These are the hosts in an activity without collectives, if others are in another. Otherwise they are those outside
    the largest group with the same activity and step, if one is largest. Otherwise, if all are in one activity, they
    are those at the earliest step.
    """
    alone = [i for i, p in places.items() if p.activity in activity.ALONE]
    if alone and len(alone) < len(places):
        return alone
    groups: dict[tuple[str, int], list[int]] = {}
    for index, place in places.items():
        groups.setdefault((place.activity, place.step), []).append(index)
    sizes = sorted(map(len, groups.values()))
    if len(groups) > 1 and sizes[-1] > sizes[-2]:
        largest = max(groups.values(), key=len)
        return [i for i in places if i not in largest]
    earliest = min(p.step for p in places.values())
    late = [i for i, p in places.items() if p.step == earliest]
    return late if len({p.activity for p in places.values()}) == 1 else list(places)


def _elsewhere(seen: Mapping[int, Seen], culprits: Sequence[int]) -> str:
    """Returns the end of a sentence; empty if the others are at the same place as the `culprits`."""
    there = {str(seen[i].place) for i in culprits}
    others = {str(s.place) for i, s in seen.items() if i not in culprits} - there
    return f"; the others at {' and '.join(sorted(others)[:3])}" if others else ""


def judge_copies(step: int, by_host: Mapping[int, Numbers]) -> Verdict | None:
    """Returns the verdict on hosts whose copies of arrays differ from the majority; None if all are equal.

    `by_host` has the fingerprints of each host.
    """
    wrong: dict[int, list[str]] = {}
    for name in sorted({name for numbers in by_host.values() for name in numbers}):
        for host in _minority({host: numbers[name] for host, numbers in by_host.items() if name in numbers}):
            wrong.setdefault(host, []).append(name)
    if not wrong:
        return None
    hosts = sorted(wrong)
    names = list(dict.fromkeys(name for host in hosts for name in wrong[host]))
    listed = ", ".join(units.shortened(names, most=3))
    whose = f"host{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))}"
    if len(hosts) == len(by_host) > 1:
        says = f"after step {step}, {whose} disagree, and none is in the majority: {listed}"
    else:
        says = f"after step {step}, {whose} disagree{'s' * (len(hosts) == 1)} with the majority: {listed}"
    return Verdict(tuple(hosts), says, exit_codes.DIVERGED, others=exit_codes.DIVERGED, step=step)


def _minority(copies: Mapping[int, Sequence[int | str]]) -> list[int]:
    """Returns the hosts with a copy unlike the most frequent one; all hosts after a tie."""
    counts = collections.Counter(number for held in copies.values() for number in held)
    if len(counts) < 2:
        return []
    (most, votes), (_, next_votes), *_ = counts.most_common()
    if votes == next_votes:
        return list(copies)
    return [host for host, held in copies.items() if any(number != most for number in held)]
