"""The heartbeat between the hosts of a run: they monitor one another, and all stop when one fails, naming the cause.

    host 1 ──┐  every second, and at a new step (at most four        ┌── host 0: its own state;
    host 2 ──┼─ times a second): step, activity, seconds in it; ─────┤   the verdict, to all
    host 3 ──┘  immediately: the error that ends it                  └── (core.hosts.failure_diagnosis)

It runs in a thread of its own, because a host that has lost a peer is blocked in a collective, in C++, where no
exception reaches it; the thread ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import queue
import re
import selectors
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core import units
from core.hosts import activity, exit_codes, failure_diagnosis, host_messages
from core.hosts.activity import Place
from core.hosts.failure_diagnosis import Limits, Numbers, Seen, Verdict
from core.hosts.rendezvous import Roll

BEAT_SECONDS = 1.0
_POLL_SECONDS = 0.25
_SEND_SECONDS = 1.0
_STACKS_SECONDS = 3.0  # timeout for a hung host to send its stacks
_PARTING_SECONDS = 3.0  # host 0 ends last: it runs JAX's coordinator, without which the others would abort
_MOST_CHARACTERS = 1000  # limit on a host's reason to end: a verdict lists those of all hosts in one message
_MOST_STACK_CHARACTERS, _MOST_STACKS = 16_000, 8
_ANSWER_SECONDS = failure_diagnosis.SETTLING_SECONDS + _STACKS_SECONDS + 2 * _SEND_SECONDS

_INTACT = "Checkpoints from before the difference are intact; see docs/reference/messages.md."

_watch: _Watch | None = None
_on_verdict: Callable[[Verdict], None] | None = None


class DivergedError(RuntimeError):
    """Copies of an array on the devices of this process differ."""

    exit_code = exit_codes.DIVERGED
    ends_without_save = True
    says_all = True

    def __init__(self, step: int, names: Sequence[str]):
        """Takes the step after which they differed, and the names of the arrays."""
        listed = ", ".join(units.shortened(names, most=3))
        super().__init__(f"after step {step}, copies on the devices of this process differ: {listed}. {_INTACT}")


def start(roll: Roll | None, *, limits: Limits) -> None:
    """Starts monitoring, in a thread of its own.

    Args:
      roll: all hosts and the connections to them, which the thread then owns; None: a single process.
      limits: the time limits by which this host judges.
    """
    global _watch
    assert _watch is None, "the hosts are watched already"
    _watch = _Watch(roll or Roll(0, 1, ("",), {}), limits)
    activity.at(activity.JOINING)  # restarts the time limit, because waiting for the others does not count
    _watch.start()
    atexit.register(leave)


def on_verdict(act: Callable[[Verdict], None]) -> None:
    """Registers a function, called with the verdict that ends this process; it must be quick."""
    global _on_verdict
    _on_verdict = act


def raised(error: str, *, code: int, is_consequence: bool) -> None:
    """Reports the error that ends this process, and waits a few seconds for the verdict.

    Args:
      code: exit code of this process, if it is the cause.
      is_consequence: whether the loss of another host can have caused the error.
    """
    if _watch is not None:
        _watch.tell({"raised": error[:_MOST_CHARACTERS], "is_consequence": is_consequence}, own_code=code)
        _watch.join(_ANSWER_SECONDS)


def leave(code: int = exit_codes.DONE, why: str = "") -> None:
    """Reports that this process is about to exit, and why.

    With a nonzero code, host 0 waits a limited time for the others to leave.
    """
    if _watch is not None:
        passed_on = _watch.tell({"left": code, "why": why[:_MOST_CHARACTERS]}, own_code=code or None)
        if code:
            _watch.join(_ANSWER_SECONDS + failure_diagnosis.LEAVING_SECONDS)
        else:
            passed_on.wait(_SEND_SECONDS)


def stop() -> None:
    """Stops monitoring in a process that continues; call `leave` first."""
    global _watch
    if _watch is not None:
        _watch.tell({"stop": True})
        _watch.join(_ANSWER_SECONDS)
        _watch = None
        atexit.unregister(leave)


def compare(step: int, numbers: Numbers) -> None:
    """Reports fingerprints of this host's replicated arrays after a step; differences between hosts end the run.

    `numbers` has, by the name of an array, the fingerprint of each copy on this host.

    Raises DivergedError if this process is not monitored and its own copies differ.
    """
    if _watch is not None:
        _watch.tell({"compared": step, "numbers": {name: list(held) for name, held in numbers.items()}})
    elif differing := [name for name, held in numbers.items() if len(set(held)) > 1]:
        raise DivergedError(step, differing)


class _Watch(threading.Thread):
    """The monitoring thread. Other threads only add to its queue and wake it."""

    def __init__(self, roll: Roll, limits: Limits):
        super().__init__(name="peers", daemon=True)
        self._index, self._limits, self._key = roll.index, limits, roll.key
        self._names = [f"host {i}" + f" ({there})" * bool(there) for i, there in enumerate(roll.addresses)]
        self._links = dict(roll.connections)
        self._inboxes = {host: host_messages.Inbox(roll.key) for host in self._links}
        self._heard_at = dict.fromkeys(self._links, time.monotonic())
        nowhere = Place(0, activity.JOINING, 0.0)
        self._seen = {i: Seen(self._names[i], nowhere) for i in sorted({self._index, *self._links})}
        self._stacks: dict[int, str] = {}
        self._compared: dict[int, dict[int, Numbers]] = {}
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
        """Returns an event that is set when the thread has passed on `message`."""
        self._own_code = self._own_code if own_code is None else own_code
        passed_on = threading.Event()
        self._told.put((message, passed_on))
        with contextlib.suppress(OSError):
            self._wake.send(b"!")
        return passed_on

    def run(self) -> None:
        """An error ends the process, because the others would not notice that monitoring is gone."""
        try:
            self._watch_on()
        except Exception:
            _print(f"the watch over the hosts failed:\n{traceback.format_exc()}")
            os._exit(exit_codes.RAISED)

    def _watch_on(self) -> None:
        beat_at = time.monotonic()
        while not self._may_go():
            self._listen(until=min(beat_at, time.monotonic() + _POLL_SECONDS))
            while not self._told.empty():
                message, passed_on = self._told.get()
                self._pass_on(message)
                passed_on.set()
            if time.monotonic() >= beat_at or activity.place().step != self._seen[self._index].place.step:
                beat_at = time.monotonic() + BEAT_SECONDS
                self._beat()
            if verdict := self._judged():
                self._end(self._with_stacks(verdict), grouped_by_text(self._stacks))
            if self._limits.reports_only:
                self._report()
        faulthandler.cancel_dump_traceback_later()
        for link in self._links.values():
            _hang_up(link)

    def _may_go(self) -> bool:
        """After an error of its own, host 0 waits until the other connections are closed."""
        own = self._seen[self._index]
        others = [seen for host, seen in self._seen.items() if host != self._index]
        for_a_reason = own.left is not None and own.left[0] != 0
        return self._stopped or (for_a_reason and (self._index != 0 or all(s.gone for s in others)))

    def _beat(self) -> None:
        if self._seen[self._index].left is None:
            # Prints the stacks unless called again in time, also while C code holds the GIL; takes 0.15 ms.
            faulthandler.dump_traceback_later(self._limits.silent_seconds, exit=False)
        here = activity.place()
        self._seen[self._index].place = here
        self._send({"at": list(here)})

    def _send(self, message: Mapping[str, Any]) -> None:
        for host, link in self._links.items():
            if not self._seen[host].gone:
                host_messages.send(link, message, self._key, seconds=_SEND_SECONDS)

    def _pass_on(self, event: dict[str, Any]) -> None:
        if "stop" in event:
            self._stopped = True
            return
        self._beat()  # so that the others know the current place
        self._note(self._index, event)
        if "left" in event:  # the interpreter ends this thread before the process, which may take longer on a busy host
            faulthandler.cancel_dump_traceback_later()
        if self._index != 0 or "left" in event:
            self._send(event)

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
        except (OSError, host_messages.Stranger):
            piece, messages = b"", []
        self._heard_at[host] = time.monotonic()
        for message in messages:
            self._note(host, message)
        if not piece:
            self._selector.unregister(link)
            self._seen[host].gone = True
            link.close()

    def _note(self, host: int, message: Mapping[str, Any]) -> None:
        """A verdict of host 0 ends this process."""
        seen, now = self._seen[host], time.monotonic()
        match message:
            case {"at": [int(step), str(what), seconds, limit_seconds, str(part)]}:
                seen.place = Place(step, what, seconds, limit_seconds, part)
            case {"raised": error, "is_consequence": is_consequence}:
                seen.raised, seen.is_consequence = (error, now), is_consequence
            case {"left": code, "why": why}:
                seen.left = (code, why, now)
            case {"compared": step, "numbers": numbers} if self._index == 0:  # which compares them
                self._compared.setdefault(step, {})[host] = numbers
            case {"stacks": text}:
                self._stacks[host] = text
            case {"show stacks": _}:
                self._send({"stacks": stacks_of_all_threads()})
            case {"verdict": verdict, "stacks of": shown}:
                self._end(Verdict(*verdict), shown)

    def _judged(self) -> Verdict | None:
        """Host 0 judges all hosts, and the others judge host 0; None: the run goes on."""
        now, before = time.monotonic(), self._judged_at
        self._judged_at = now
        if now - before > self._limits.silent_seconds / 2:  # this process was suspended, not the others
            self._heard_at = dict.fromkeys(self._heard_at, now)
            return None
        for host, heard_at in self._heard_at.items():
            self._seen[host].heard_seconds = now - heard_at
        if self._index == 0:
            return failure_diagnosis.judge(self._seen, limits=self._limits, now=now) or self._diverged()
        own = Seen(self._names[self._index], activity.place())
        return failure_diagnosis.judge_host_zero(self._seen[0], own, limits=self._limits, now=now)

    def _report(self) -> None:
        if self._index == 0:
            overdue = failure_diagnosis.overdue(self._seen, limits=self._limits)
        else:
            overdue = failure_diagnosis.host_zero_overdue(self._seen[0], limits=self._limits)
        hosts = overdue.hosts if overdue else None
        if overdue and hosts != self._reported:
            self._with_stacks(overdue)
            lines = [f"watchdog: {overdue.says}. The run continues: the watchdog only reports."]
            lines += [f"The threads of {self._named(of)}:\n{text}" for of, text in grouped_by_text(self._stacks)]
            self._stacks.clear()
            _print("\n".join(lines))
        self._reported = hosts

    def _diverged(self) -> Verdict | None:
        complete = [step for step, by_host in self._compared.items() if len(by_host) == len(self._names)]
        verdicts = [failure_diagnosis.judge_copies(step, self._compared.pop(step)) for step in sorted(complete)]
        return next(filter(None, verdicts), None)

    def _with_stacks(self, verdict: Verdict) -> Verdict:
        if not verdict.wants_stacks:
            return verdict
        if self._index in verdict.hosts:
            self._stacks[self._index] = stacks_of_all_threads()
        asked = {host: self._links[host] for host in verdict.hosts if host in self._links}
        for link in asked.values():
            host_messages.send(link, {"show stacks": True}, self._key, seconds=_SEND_SECONDS)
        deadline = time.monotonic() + _STACKS_SECONDS
        while not self._stacks.keys() >= asked.keys() and time.monotonic() < deadline:
            self._listen(until=min(deadline, time.monotonic() + BEAT_SECONDS))
        return verdict

    def _end(self, verdict: Verdict, shown: Sequence[tuple[Sequence[int], str]]) -> None:
        """Host 0 sends the verdict to the others before it ends."""
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
        return ", ".join(units.shortened([self._names[host] for host in hosts], most=3))


def stacks_of_all_threads() -> str:
    """Returns the Python stacks of the threads, innermost call first."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(_MOST_STACK_CHARACTERS)


def grouped_by_text(of_hosts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Groups hosts by stack, ignoring memory addresses; returns (hosts, text) of the first groups."""
    hosts: dict[str, list[int]] = {}
    for host in sorted(of_hosts):
        hosts.setdefault(re.sub(r"0x[0-9a-f]+", "", of_hosts[host]), []).append(host)
    return [(alike, of_hosts[alike[0]]) for alike in hosts.values()][:_MOST_STACKS]


def _hang_up(link: socket.socket) -> None:
    """Reads the rest first: closing with unread data would discard what was sent last."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_WR)
        link.settimeout(_SEND_SECONDS)
        while link.recv(1 << 16):
            pass
    link.close()


def _advice(verdict: Verdict, index: int) -> str:
    if verdict.code == exit_codes.DIVERGED:
        return _INTACT
    return "" if index in verdict.hosts else "Read the end of its log."


def _print(text: str) -> None:
    """Avoids Python's buffer of stderr, whose lock the main thread may hold."""
    flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
    flushing.start()
    flushing.join(_SEND_SECONDS / 2)
    os.write(2, f"\n{text.rstrip()}\n".encode())
