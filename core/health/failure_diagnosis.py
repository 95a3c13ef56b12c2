"""What host 0 makes of all that it knows of the others: whose fault it is that the run must end, if it must.

The one idea: a run ends once, for one cause, and the cause is decided in one place. A lost host makes the collectives
of the others fail, and an exception on one host leaves the rest waiting; whoever only looks at itself would name the
wrong one. So every host says what it knows, and host 0 judges. Nothing here touches a socket or a clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from core.health import exit_codes, phase
from core.health.phase import Place

SETTLING_SECONDS = 1.5  # for hosts that fail together, or because of one another
JOINING_SECONDS = 600.0  # for a large slice to come up
LATER_SECONDS = 60.0  # than a limit that the work itself sets: its own message, which names the cause, comes first
LEAVING_SECONDS = 10.0  # for all hosts to leave, once one has left with an exit code
EARLY_SECONDS = 3.0  # for those who are still in their loop when one has left


class Limits(NamedTuple):
    """How long a host may stay where it is.

    Attributes:
      step_seconds: in a step, and between two.
      slow_seconds: compiling, reading, opening, evaluating, saving and restoring; joining, once all are here, has
        JOINING_SECONDS at least, and a save as long as its own limit (`core.checkpoints.writing`) allows.
      silent_seconds: without a word of a host that has not hung up either; less than what JAX's own heartbeat waits.
        For so long, too, one host may evaluate or end alone while others wait for it in a step.
      apart_seconds: one host may save or restore alone while others wait for it in a step.
      reports_only: hosts that are stuck, silent or apart are named with their stacks, and nothing is ended.
    """

    step_seconds: float
    slow_seconds: float
    silent_seconds: float = 20.0
    apart_seconds: float = 120.0
    reports_only: bool = False

    def apart(self, place: Place) -> float | None:
        """For something that all hosts do together and one does alone; None for what is not done together."""
        if place.phase in (phase.SAVING, phase.RESTORING):
            return self.apart_seconds
        return self.silent_seconds if place.phase in (phase.EVALUATING, phase.ENDING) else None

    def of(self, place: Place) -> float:
        """For what a host does there; no limit where it prepares data, under limits of its own."""
        if place.phase in (phase.TRAINING, phase.BETWEEN):
            return self.step_seconds
        if place.phase == phase.JOINING:
            return max(JOINING_SECONDS, self.slow_seconds)
        if place.limit_seconds:
            return max(self.slow_seconds, place.limit_seconds + LATER_SECONDS)
        return float("inf") if place.phase == phase.PREPARING else self.slow_seconds


USUAL_LIMITS = Limits(600.0, 3600.0)  # of a rehearsal, whose hosts are processes of one machine
ON_TPU = USUAL_LIMITS._replace(silent_seconds=120.0, apart_seconds=600.0)


@dataclasses.dataclass
class Seen:
    """What is known of one host.

    Attributes:
      name: `host 2 (10.0.0.4)`.
      place: where it said it was.
      heard_seconds: since when nothing came of it.
      raised: the exception that ends it, and the moment at which it said so.
      left: its exit code when it ends of itself (0: done), and the moment.
      is_consequence: what it raised is what the loss of another host looks like.
      gone: it has hung up.
    """

    name: str
    place: Place
    heard_seconds: float = 0.0
    raised: tuple[str, float] | None = None
    left: tuple[int, str, float] | None = None
    is_consequence: bool = False
    gone: bool = False


class Verdict(NamedTuple):
    """The end of a run.

    Attributes:
      hosts: whose fault it is.
      says: one sentence.
      code: the exit code of those hosts, where they have none of their own.
      others: the exit code of the rest.
      wants_stacks: what those hosts' threads were doing is worth showing.
    """

    hosts: tuple[int, ...]
    says: str
    code: int
    others: int = exit_codes.PEER_LOST
    wants_stacks: bool = False


def judge(seen: Mapping[int, Seen], *, limits: Limits, now: float) -> Verdict | None:
    """The verdict, or None while there is nothing to end for, or not all is known that soon will be.

    Args:
      seen: all hosts, by index.
      limits: how long a host may stay where it is.
      now: the moment, on the clock of what `seen` remembers.
    """
    ended = _lost(seen) or _raised(seen, now) or _left(seen, now) or _left_early(seen, now)
    return ended or (None if limits.reports_only else overdue(seen, limits=limits))


def overdue(seen: Mapping[int, Seen], *, limits: Limits) -> Verdict | None:
    """The hosts that have been where they are for longer than they may: a matter of limits, and not yet an end."""
    return _apart(seen, limits) or _silent(seen, limits) or _hung(seen, limits)


def judge_host_zero(zero: Seen, own: Seen, *, limits: Limits, now: float) -> Verdict | None:
    """What another host makes of host 0, which can no longer say it: it is gone, silent, or through."""
    both = {0: zero, 1: own}
    silent = None if limits.reports_only else host_zero_overdue(zero, limits=limits)
    return _lost({0: zero}) or silent or _left(both, now) or _left_early(both, now)


def host_zero_overdue(zero: Seen, *, limits: Limits) -> Verdict | None:
    """As `overdue`, of host 0 as another host sees it: host 0 names all others, but cannot report its own silence."""
    return _silent({0: zero}, limits)


def _lost(seen: Mapping[int, Seen]) -> Verdict | None:
    lost = [i for i, s in seen.items() if s.gone and not s.raised and not s.left]
    if not lost:
        return None
    says = "; ".join(f"{seen[i].name} was lost: last seen at {seen[i].place}" for i in lost)
    return Verdict(tuple(lost), says + _elsewhere(seen, lost), exit_codes.PEER_LOST)


def _raised(seen: Mapping[int, Seen], now: float) -> Verdict | None:
    """Waits a little: the others may raise the same, or what was raised is but what a loss looks like."""
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
    """A host that ends with an exit code, when the others do not."""
    left = _failed(seen)
    if not left or all(s.left for s in seen.values()):
        return None
    if now - min(at for _, _, at in left.values()) < LEAVING_SECONDS:
        return None
    return _ended(seen, left)


def _failed(seen: Mapping[int, Seen]) -> dict[int, tuple[int, str, float]]:
    """The hosts that ended with an exit code other than 0: `Seen.left` of each."""
    return {i: s.left for i, s in seen.items() if s.left and s.left[0]}


def _ended(seen: Mapping[int, Seen], left: Mapping[int, tuple[int, str, float]]) -> Verdict:
    """Where another start cannot help those who ended, it cannot help the others: they end with the same code."""
    codes = [code for code, _, _ in left.values()]
    others = next((code for code in codes if not exit_codes.ending(code).restart), exit_codes.PEER_LOST)
    says = "; ".join(f"{seen[i].name} ended with exit code {code}: {why}" for i, (code, why, _) in left.items())
    return Verdict(tuple(left), says, exit_codes.PEER_LOST, others)


def _left_early(seen: Mapping[int, Seen], now: float) -> Verdict | None:
    """A host that has ended well while others are in their steps."""
    stepping = [i for i, s in seen.items() if s.place.phase in phase.STEPPING and not s.left]
    early = [i for i, s in seen.items() if s.left and s.left[0] == 0 and now - s.left[2] > EARLY_SECONDS]
    if not stepping or not early:
        return None
    says = "; ".join(f"{seen[i].name} left its loop at step {seen[i].place.step}" for i in early)
    there = ", ".join(f"{seen[i].name} at {seen[i].place}" for i in stepping[:3])
    return Verdict(tuple(early), f"{says}, with others in theirs: {there}", exit_codes.PEER_LOST)


def _apart(seen: Mapping[int, Seen], limits: Limits) -> Verdict | None:
    """Some evaluate, save or are through, and others wait for them in a step: not all took the same branch."""
    if any(s.place.phase in phase.ALONE for s in seen.values()):
        return None  # it holds up both
    waiting = [s.place.seconds for s in seen.values() if s.place.phase in (phase.COMPILING, phase.TRAINING)]
    patient = {i: limit for i, s in seen.items() if (limit := limits.apart(s.place)) is not None}
    elsewhere = {i: seen[i].place for i in patient}
    if not waiting or not elsewhere:
        return None
    patience = max(patient.values())
    if min(*waiting, *(place.seconds for place in elsewhere.values())) < patience:
        return None
    through = [i for i, place in elsewhere.items() if place.phase == phase.ENDING]
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
    """Somebody is over its limit; those who hold the others up, once they are over theirs."""
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
        says = f"no host made a step for {longest:.0f} s, and none is behind the others: {where}"
        return Verdict(tuple(culprits), says, exit_codes.HUNG, wants_stacks=True)
    says = "; ".join(f"{seen[i].name} has been at {seen[i].place} for {seen[i].place.seconds:.0f} s" for i in culprits)
    allowed = min(limits.of(seen[i].place) for i in culprits)
    says = f"{says} (limit {allowed:g} s){_elsewhere(seen, culprits)}"
    return Verdict(tuple(culprits), says, exit_codes.HUNG, wants_stacks=True)


def behind(places: Mapping[int, Place]) -> list[int]:
    """The hosts that hold the others up; all of them where none can be told from the rest.

    First who does something by itself while others wait for it; then who is in another collective than most; then who
    is at an earlier step.
    """
    alone = [i for i, p in places.items() if p.phase in phase.ALONE]
    if alone and len(alone) < len(places):
        return alone
    groups: dict[tuple[str, int], list[int]] = {}
    for index, place in places.items():
        groups.setdefault((place.phase, place.step), []).append(index)
    sizes = sorted(map(len, groups.values()))
    if len(groups) > 1 and sizes[-1] > sizes[-2]:
        largest = max(groups.values(), key=len)
        return [i for i in places if i not in largest]
    earliest = min(p.step for p in places.values())
    late = [i for i, p in places.items() if p.step == earliest]
    return late if len({p.phase for p in places.values()}) == 1 else list(places)


def _elsewhere(seen: Mapping[int, Seen], culprits: Sequence[int]) -> str:
    """Where the others are, if that is elsewhere."""
    there = {str(seen[i].place) for i in culprits}
    others = {str(s.place) for i, s in seen.items() if i not in culprits} - there
    return f"; the others at {' and '.join(sorted(others)[:3])}" if others else ""
