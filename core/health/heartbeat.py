"""The hosts of a run watch one another, and end together, for the cause that one of them names.

    host 1 ──┐  once a second, and at a new step (four times a       ┌── host 0: where it is itself;
    host 2 ──┼─ second at most): step, phase, seconds in it; ────────┤   the verdict, to all
    host 3 ──┘  at once: what ends it                                └── (core.health.failure_diagnosis)

The connections are those of the roll call, kept open. A process that is killed hangs up, and is missed at once; one
that is frozen falls silent. The one idea: a thread of its own does all of it, because a host that has lost a peer sits
in a collective, in C++, where no exception reaches it; that thread ends the process when it must. JAX's own heartbeat
stays behind this as it was, for what this does not see.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core import listing
from core.health import divergence, exit_codes, failure_diagnosis, phase, stacks, wire_protocol
from core.health.failure_diagnosis import Limits, Seen, Verdict
from core.health.phase import Place
from core.rendezvous import Roll

BEAT_SECONDS = 1.0
_POLL_SECONDS = 0.25
_SEND_SECONDS = 1.0
_STACKS_SECONDS = 3.0  # for a stuck host to say what its threads do
_PARTING_SECONDS = 3.0  # host 0 ends last: with it goes JAX's coordinator, which would take the others along
_MOST_CHARACTERS = 1000  # of what a host says of its end: a verdict names all of them in one message
_ANSWER_SECONDS = failure_diagnosis.SETTLING_SECONDS + _STACKS_SECONDS + 2 * _SEND_SECONDS

_watch: _Watch | None = None
_on_verdict: Callable[[Verdict], None] | None = None


def start(roll: Roll | None, *, limits: Limits) -> None:
    """Watches from now on, in a thread of its own.

    Args:
      roll: all hosts and the connections to them, which belong to the thread from now on; None for a process alone,
        which is watched for being stuck.
      limits: how long a host may stay where it is; host 0's hold for all.
    """
    global _watch
    assert _watch is None, "the hosts are watched already"
    _watch = _Watch(roll or Roll(0, 1, ("",), {}), limits)
    phase.at(phase.JOINING)  # how long the others were waited for does not count
    _watch.start()
    atexit.register(leave)


def on_verdict(act: Callable[[Verdict], None]) -> None:
    """Has `act` called with the verdict that ends this process, in the thread that then ends it: it must be quick."""
    global _on_verdict
    _on_verdict = act


def raised(error: str, *, code: int, is_consequence: bool) -> None:
    """Tells the others what ends this process, and waits until one verdict ends them all; returns if none comes.

    Args:
      error: type and message.
      code: the exit code of this process, if it is the cause.
      is_consequence: it is what the loss of another host looks like from here.
    """
    if _watch is not None:
        _watch.tell({"raised": error[:_MOST_CHARACTERS], "is_consequence": is_consequence}, own_code=code)
        _watch.join(_ANSWER_SECONDS)


def leave(code: int = exit_codes.DONE, why: str = "") -> None:
    """Tells the others that this process ends of itself.

    With a code, for a reason: nothing is watched any more. Host 0 waits for the others to leave too, at most
    `failure_diagnosis.LEAVING_SECONDS`. Without one it is monitored until it is gone, because JAX waits for the others
    at exit, too.
    """
    if _watch is not None:
        passed_on = _watch.tell({"left": code, "why": why[:_MOST_CHARACTERS]}, own_code=code or None)
        if code:
            _watch.join(_ANSWER_SECONDS + failure_diagnosis.LEAVING_SECONDS)
        else:
            passed_on.wait(_SEND_SECONDS)


def stop() -> None:
    """Watches no more, after `leave`, in a process that goes on by itself."""
    global _watch
    if _watch is not None:
        _watch.tell({"stop": True})
        _watch.join(_ANSWER_SECONDS)
        _watch = None
        atexit.unregister(leave)


def compare(step: int, numbers: divergence.Numbers) -> None:
    """Hands over what stands for what this host holds behind a step; hosts that differ end the run. Waits for none."""
    if _watch is not None:
        _watch.tell({"compared": step, "numbers": {name: list(held) for name, held in numbers.items()}})


class _Watch(threading.Thread):
    """The thread. Everything it knows is its own; others only add to its queue and wake it."""

    def __init__(self, roll: Roll, limits: Limits):
        super().__init__(name="peers", daemon=True)
        self._index, self._limits = roll.index, limits
        self._names = [f"host {i}" + f" ({there})" * bool(there) for i, there in enumerate(roll.addresses)]
        self._links = dict(roll.connections)
        self._inboxes = {host: wire_protocol.Inbox() for host in self._links}
        self._heard_at = dict.fromkeys(self._links, time.monotonic())
        nowhere = Place(0, phase.JOINING, 0.0)
        self._seen = {i: Seen(self._names[i], nowhere) for i in sorted({self._index, *self._links})}
        self._stacks: dict[int, str] = {}
        self._compared: dict[int, dict[int, divergence.Numbers]] = {}
        self._told: queue.SimpleQueue[tuple[dict[str, Any], threading.Event]] = queue.SimpleQueue()
        self._judged_at = time.monotonic()
        self._own_code: int | None = None
        self._reported: tuple[int, ...] | None = None
        self._stopped = False
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for host, link in self._links.items():
            self._selector.register(link, selectors.EVENT_READ, host)

    def tell(self, message: dict[str, Any], *, own_code: int | None = None) -> threading.Event:
        """Has the thread pass `message` on, and the event set once it has.

        Each message has an event of its own: one for all would be set by what was told before and still waits.

        Args:
          message: for the thread.
          own_code: what this process ends with, if it is the cause.
        """
        self._own_code = self._own_code if own_code is None else own_code
        passed_on = threading.Event()
        self._told.put((message, passed_on))
        with contextlib.suppress(OSError):
            self._wake.send(b"!")
        return passed_on

    def run(self) -> None:
        """Watches; a fault in this ends the process, for without the thread nobody would learn of anything."""
        try:
            self._watch_on()
        except Exception:
            _print(f"the watch over the hosts failed:\n{traceback.format_exc()}")
            os._exit(exit_codes.RAISED)

    def _watch_on(self) -> None:
        """Beats, listens and judges, until this process leaves or must end."""
        beat_at = time.monotonic()
        while not self._may_go():
            self._listen(until=min(beat_at, time.monotonic() + _POLL_SECONDS))
            while not self._told.empty():
                message, passed_on = self._told.get()
                self._pass_on(message)
                passed_on.set()
            if time.monotonic() >= beat_at or phase.place().step != self._seen[self._index].place.step:
                beat_at = time.monotonic() + BEAT_SECONDS
                self._beat()
            if verdict := self._judged():
                self._end(self._with_stacks(verdict), stacks.by_text(self._stacks))
            if self._limits.reports_only:
                self._report()
        stacks.print_no_more()
        for link in self._links.values():
            _hang_up(link)

    def _may_go(self) -> bool:
        """When this process has left for a reason; host 0 only once the others have too."""
        own = self._seen[self._index]
        others = [seen for host, seen in self._seen.items() if host != self._index]
        for_a_reason = own.left is not None and own.left[0] != 0
        return self._stopped or (for_a_reason and (self._index != 0 or all(s.gone for s in others)))

    def _beat(self) -> None:
        stacks.print_unless_called_again(self._limits.silent_seconds)
        here = phase.place()
        self._seen[self._index].place = here
        self._send({"at": list(here)})

    def _send(self, message: Mapping[str, Any]) -> None:
        for host, link in self._links.items():
            if not self._seen[host].gone:
                wire_protocol.send(link, message, seconds=_SEND_SECONDS)

    def _pass_on(self, message: dict[str, Any]) -> None:
        if "stop" in message:
            self._stopped = True
            return
        self._beat()  # where it happened
        self._note(self._index, message)
        if self._index != 0 or "left" in message:
            self._send(message)

    def _listen(self, *, until: float) -> None:
        for key, _ in self._selector.select(max(until - time.monotonic(), 0.0)):
            if key.data is None:
                self._woken.recv(4096)
            else:
                self._hear(key.data)

    def _hear(self, host: int) -> None:
        link = self._links[host]
        try:
            link.settimeout(_SEND_SECONDS)
            piece = link.recv(1 << 16)
            messages = self._inboxes[host].add(piece)
        except (OSError, wire_protocol.Stranger):
            piece, messages = b"", []
        self._heard_at[host] = time.monotonic()
        for message in messages:
            self._note(host, message)
        if not piece:
            self._selector.unregister(link)
            self._seen[host].gone = True
            link.close()

    def _note(self, host: int, message: Mapping[str, Any]) -> None:
        """Remembers what a host says; host 0's verdict ends this process."""
        seen, now = self._seen[host], time.monotonic()
        match message:
            case {"at": [int(step), str(what), seconds, limit_seconds]}:
                seen.place = Place(step, what, seconds, limit_seconds)
            case {"raised": error, "is_consequence": is_consequence}:
                seen.raised, seen.is_consequence = (error, now), is_consequence
            case {"left": code, "why": why}:
                seen.left = (code, why, now)
            case {"compared": step, "numbers": numbers}:
                self._compared.setdefault(step, {})[host] = numbers
            case {"stacks": text}:
                self._stacks[host] = text
            case {"show stacks": _}:
                self._send({"stacks": stacks.of_all_threads()})
            case {"verdict": verdict, "stacks of": shown}:
                self._end(Verdict(*verdict), shown)

    def _judged(self) -> Verdict | None:
        """Host 0's judgement of all; of the others, whether host 0 itself is lost."""
        now, before = time.monotonic(), self._judged_at
        self._judged_at = now
        if now - before > self._limits.silent_seconds / 2:  # this process slept: the silence was its own
            self._heard_at = dict.fromkeys(self._heard_at, now)
            return None
        for host, heard_at in self._heard_at.items():
            self._seen[host].heard_seconds = now - heard_at
        if self._index == 0:
            return failure_diagnosis.judge(self._seen, limits=self._limits, now=now) or self._diverged()
        own = Seen(self._names[self._index], phase.place())
        return failure_diagnosis.judge_host_zero(self._seen[0], own, limits=self._limits, now=now)

    def _report(self) -> None:
        """Names the hosts that are overdue, once for as long as they are the same, and ends nothing.

        Host 0 names any host. Each of the others names host 0, in its own log, when host 0 is silent.
        """
        if self._index == 0:
            overdue = failure_diagnosis.overdue(self._seen, limits=self._limits)
        else:
            overdue = failure_diagnosis.host_zero_overdue(self._seen[0], limits=self._limits)
        hosts = overdue.hosts if overdue else None
        if overdue and hosts != self._reported:
            self._with_stacks(overdue)
            lines = [f"watchdog: {overdue.says}. The run goes on: the watchdog only reports."]
            lines += [f"The threads of {self._named(of)}:\n{text}" for of, text in stacks.by_text(self._stacks)]
            self._stacks.clear()
            _print("\n".join(lines))
        self._reported = hosts

    def _diverged(self) -> Verdict | None:
        complete = [step for step, by_host in self._compared.items() if len(by_host) == len(self._names)]
        verdicts = [divergence.judge(step, self._compared.pop(step)) for step in sorted(complete)]
        return next(filter(None, verdicts), None)

    def _with_stacks(self, verdict: Verdict) -> Verdict:
        """Asks those who are at fault what their threads do, where that says something."""
        if not verdict.wants_stacks:
            return verdict
        if self._index in verdict.hosts:
            self._stacks[self._index] = stacks.of_all_threads()
        asked = {host: self._links[host] for host in verdict.hosts if host in self._links}
        for link in asked.values():
            wire_protocol.send(link, {"show stacks": True}, seconds=_SEND_SECONDS)
        deadline = time.monotonic() + _STACKS_SECONDS
        while not self._stacks.keys() >= asked.keys() and time.monotonic() < deadline:
            self._listen(until=min(deadline, time.monotonic() + BEAT_SECONDS))
        return verdict

    def _end(self, verdict: Verdict, shown: Sequence[tuple[Sequence[int], str]]) -> None:
        """Ends this process, with the stacks of some hosts; host 0 tells the others before, and waits for them."""
        own = f"{self._names[self._index]} of {len(self._names)}"
        lines = [f"{own} ends: {verdict.says}. {_advice(verdict, self._index)}"]
        for hosts, text in shown:
            lines.append(f"The threads of {self._named(hosts)}:\n{text}")
        _print("\n".join(lines))
        if _on_verdict is not None:
            with contextlib.suppress(Exception):  # this process ends all the same
                _on_verdict(verdict)
        if self._index == 0:
            self._send({"verdict": list(verdict), "stacks of": shown})
            deadline = time.monotonic() + _PARTING_SECONDS
            awaited = [host for host in self._links if self._seen[host].heard_seconds < self._limits.silent_seconds / 2]
            while not all(self._seen[host].gone for host in awaited) and time.monotonic() < deadline:
                self._listen(until=deadline)
        at_fault = self._index in verdict.hosts
        code = verdict.others if not at_fault else verdict.code if self._own_code is None else self._own_code
        os._exit(code)

    def _named(self, hosts: Sequence[int]) -> str:
        return ", ".join(listing.shortened([self._names[host] for host in hosts], most=3))


def _hang_up(link: socket.socket) -> None:
    """In order: closing with something unread would take back what was said last."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_WR)
        link.settimeout(_SEND_SECONDS)
        while link.recv(1 << 16):
            pass
    link.close()


def _advice(verdict: Verdict, index: int) -> str:
    if verdict.code == exit_codes.DIVERGED:
        return "Checkpoints from before are sound; see launch/README.md, When a run ends."
    return "" if index in verdict.hosts else "Read the end of its log."


def _print(text: str) -> None:
    """To stderr without Python's buffers: the main thread may hold their locks."""
    flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
    flushing.start()
    flushing.join(_SEND_SECONDS / 2)
    os.write(2, f"\n{text.rstrip()}\n".encode())
