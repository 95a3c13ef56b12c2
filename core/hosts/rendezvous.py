"""Rendezvous of all hosts over TCP, before JAX's distributed runtime starts.

If a host is missing, JAX's own start-up ends the process from C++, and it does not compare configurations. Therefore
the hosts first connect to host 0 on the coordinator's port. Host 0 tells them that all are present, which are missing,
or how their configurations differ, and releases the port for JAX.
"""

import collections
import contextlib
import difflib
import errno
import hashlib
import ipaddress
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from core import units
from core.errors import UserError
from core.files import foreign_json
from core.hosts import host_messages
from core.hosts.host_messages import Inbox, Stranger

_RETRY_SECONDS = 0.1
_HELLO_SECONDS = 5.0
_PORT_SECONDS = 10.0
_MOST_LINES = 20  # of a difference
_MOST_WAITING = 32  # connections that have not said hello yet; of more, the oldest is closed, and a host tries again


class Roll(NamedTuple):
    """The hosts of a run and the connections to them.

    Attributes:
      addresses: address of each host; "" if unknown.
      connections: on host 0, one to each other host, by index; on the others, `{0: the connection to host 0}`.
      key: authenticates the messages of this start.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    count: int  # type: ignore[assignment]  # hides tuple.count
    addresses: tuple[str, ...]
    connections: Mapping[int, socket.socket]
    key: bytes = b""

    def close(self) -> None:
        """Closes all connections."""
        for connection in self.connections.values():
            connection.close()


class _Call(NamedTuple):
    """The arguments of `answer`; `deadline` is on the clock of `time.monotonic`."""

    address: str
    index: int  # type: ignore[assignment]  # hides tuple.index
    count: int  # type: ignore[assignment]  # hides tuple.count
    timeout_seconds: float
    deadline: float
    description: str
    addresses: Sequence[str]
    key: bytes

    def missing(self, hosts: Sequence[int], *, also: str = "") -> str:
        names = ", ".join(f"{i} ({a})" if (a := _known(self.addresses, i)) else f"{i}" for i in hosts)
        return (
            f"waited {self.timeout_seconds:g} s at {self.address} for {units.counted(self.count, 'host')}; "
            f"missing: host {names}. {also}"
            "Read the end of each missing host's log; start the same command on every host."
        )


def answer(
    address: str,
    *,
    index: int,
    count: int,
    timeout_seconds: float,
    description: str = "",
    addresses: Sequence[str] = (),
    secret: str = "",
) -> Roll:
    """Waits until all hosts are connected: host 0 listens, the others connect to it.

    Args:
      address: "HOST:PORT" of host 0, the same on every host.
      index, count: index of this host, from 0, and the number of hosts.
      timeout_seconds: how long to wait for all hosts.
      description: configuration of this host, which must be equal on all hosts.
      addresses: addresses of all hosts by index, to name a missing one.
      secret: known to the hosts of this start alone.
    """
    deadline = time.monotonic() + timeout_seconds
    key = hashlib.sha256(secret.encode()).digest()
    call = _Call(address, index, count, timeout_seconds, deadline, description, addresses, key)
    return _take(call) if index == 0 else _ask(call)


def split(address: str) -> tuple[str, int]:
    """Splits "HOST:PORT" into host and port; an IPv6 host is in brackets. Raises UserError if it is malformed."""
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536
    if not host or not is_port or (":" in host) != is_bracketed:
        raise UserError(
            f"the coordinator address is {address!r}; expected HOST:PORT, for example 10.0.0.2:8476 or [fd00::2]:8476"
        )
    return host, int(port)


def host_differences(texts: Sequence[str]) -> str:
    """Returns a paragraph for each group of hosts whose text differs from the most frequent one.

    For example `host 2: -BATCH_SIZE = 16 +BATCH_SIZE = 32`: minus marks the others' line.
    """
    counts = collections.Counter(texts)
    meant = max(texts, key=counts.__getitem__)  # the first of equally frequent ones: host 0's
    others: dict[str, list[int]] = {}
    for host, text in enumerate(texts):
        if text != meant:
            others.setdefault(text, []).append(host)
    return "\n".join(f"host {', '.join(map(str, who))}: {_changes(meant, text)}" for text, who in others.items())


def _changes(meant: str, text: str) -> str:
    lines = [
        line
        for line in difflib.unified_diff(meant.splitlines(), text.splitlines(), lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    if len(lines) == 2 and [line[0] for line in lines] == ["-", "+"]:
        return " ".join(lines)
    return (
        "".join(f"\n  {line}" for line in units.shortened(lines, most=_MOST_LINES)) or "the same lines, with other ends"
    )


def _known(addresses: Sequence[str], index: int) -> str:
    return addresses[index] if index < len(addresses) else ""


# Host 0


class _Present(NamedTuple):
    connection: socket.socket
    address: str
    description: str


def _take(call: _Call) -> Roll:
    with contextlib.ExitStack() as unless_all_is_well:
        with _listening(call.address, deadline=call.deadline) as listener, _Door(listener, call) as door:
            unless_all_is_well.callback(door.close_present)
            present = door.admit_all()
        missing = [index for index in range(1, call.count) if index not in present]
        if missing:
            message = call.missing(missing, also=door.about_strangers())
            _say_to_all(present, {"missing": message}, call.key)
            raise TimeoutError(message)
        texts = [call.description, *(present[index].description for index in range(1, call.count))]
        if differing := host_differences(texts):
            _say_to_all(present, {"differing": differing}, call.key)
            raise UserError(_differing_message(differing))
        found = [split(call.address)[0], *(present[index].address for index in range(1, call.count))]
        known = [_known(call.addresses, index) or there for index, there in enumerate(found)]
        _say_to_all(present, {"all here": known}, call.key)
        unless_all_is_well.pop_all()
    connections = {index: there.connection for index, there in present.items()}
    return Roll(0, call.count, tuple(known), connections, call.key)


def _differing_message(differing: str) -> str:
    return (
        "the hosts have different configurations (- marks the other hosts' lines):\n"
        f"{differing}\nStart the same command, from the same files, on every host."
    )


@contextlib.contextmanager
def _listening(address: str, *, deadline: float) -> Iterator[socket.socket]:
    host, port = split(address)
    give_up = min(deadline, time.monotonic() + _PORT_SECONDS)
    while True:
        try:
            listener = socket.create_server((bindable(host), port), family=_family(host), backlog=4096)
            break
        except OSError as error:
            if time.monotonic() < give_up:  # the previous run may still be closing the port
                time.sleep(_RETRY_SECONDS)
                continue
            raise UserError(
                f"host 0 cannot listen at {address}: {error}; is another run still active on this host? "
                "Stop it, or choose another port."
            ) from error
    with listener:
        yield listener


def bindable(host: str) -> str:
    """Returns the address to listen on: `host` if this machine has it, else "" for all interfaces.

    A machine's own name may mean 127.0.1.1 on it, where others cannot reach it: that is "", too.

    Raises UserError if `host` cannot be looked up, and OSError if binding fails otherwise.
    """
    with socket.socket(_family(host)) as probe:
        try:
            probe.bind((host, 0))
        except socket.gaierror as error:
            raise UserError(f"the coordinator's host {host!r} cannot be looked up: {error}") from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return ""
            raise
        is_own_name = not (host == "localhost" or _is_loopback(host))
        return "" if is_own_name and _is_loopback(probe.getsockname()[0]) else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class _Waiting(NamedTuple):
    """A connection that has not said hello yet; `until` is on the clock of `time.monotonic`."""

    connection: socket.socket
    address: str
    inbox: Inbox
    until: float


class _Door:
    """Reads the first message of every connection, concurrently, and keeps those of the hosts."""

    def __init__(self, listener: socket.socket, call: _Call):
        self._listener, self._call = listener, call
        self._present: dict[int, _Present] = {}
        self._waiting: dict[socket.socket, _Waiting] = {}  # oldest first
        self._strangers = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> "_Door":
        return self

    def __exit__(self, *_: object) -> None:
        for waiting in list(self._waiting):
            self._turn_away(waiting)
        self._selector.close()

    def admit_all(self) -> dict[int, _Present]:
        """Returns the other hosts by index: all of them, or those there at the deadline."""
        while len(self._present) < self._call.count - 1 and (now := time.monotonic()) < self._call.deadline:
            for late in [each for each in self._waiting.values() if each.until <= now]:
                self._turn_away(late.connection)
            until = min([self._call.deadline, *(each.until for each in self._waiting.values())])
            for key, _ in self._selector.select(max(until - now, 0.0)):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._waiting:
                    self._read(self._waiting[key.fileobj])
        return self._present

    def close_present(self) -> None:
        for there in self._present.values():
            there.connection.close()

    def about_strangers(self) -> str:
        if not self._strangers:
            return ""
        return (
            f"{units.counted(self._strangers, 'connection')} of other programs, or of hosts of another start or "
            "revision, did not count. "
        )

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._free_a_descriptor(error)
            return
        connection.setblocking(False)
        until = time.monotonic() + _HELLO_SECONDS
        self._waiting[connection] = _Waiting(connection, address, Inbox(self._call.key), until)
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._waiting) > _MOST_WAITING:
            self._turn_away(next(iter(self._waiting)))

    def _free_a_descriptor(self, error: OSError) -> None:
        if not self._waiting:
            raise UserError(
                f"host 0 cannot accept the connection of another host: {error}. It needs one open file for each of the "
                f"{self._call.count} hosts: raise the limit (ulimit -n)"
            ) from error
        self._turn_away(next(iter(self._waiting)))

    def _read(self, waiting: _Waiting) -> None:
        try:
            piece = waiting.connection.recv(1 << 16)
            messages = waiting.inbox.add(piece)
        except BlockingIOError:
            return
        except (OSError, Stranger):
            piece, messages = b"", []
        if messages:
            self._admit(waiting, messages[0])
        elif not piece:
            self._turn_away(waiting.connection)

    def _admit(self, waiting: _Waiting, hello: Mapping[str, Any]) -> None:
        kinds = {"host": int, "of": int, "description": str}
        if not all(foreign_json.is_a(hello.get(name), kind) for name, kind in kinds.items()):
            self._turn_away(waiting.connection)
            return
        index, count, description = (hello[name] for name in kinds)
        if count != self._call.count or not 0 < index < count:
            self._send(waiting.connection, {"refused": self._call.count})
            self._leave(waiting.connection)
            waiting.connection.close()
            return
        self._leave(waiting.connection)
        if index in self._present:  # the host was restarted; an earlier process that still runs is told to end
            self._send(self._present[index].connection, {"replaced": True})
            self._present[index].connection.close()
        self._present[index] = _Present(waiting.connection, waiting.address, description)

    def _send(self, connection: socket.socket, message: Mapping[str, Any]) -> None:
        host_messages.send(connection, message, self._call.key, seconds=_HELLO_SECONDS)

    def _leave(self, connection: socket.socket) -> None:
        del self._waiting[connection]
        self._selector.unregister(connection)

    def _turn_away(self, connection: socket.socket) -> None:
        self._leave(connection)
        connection.close()
        self._strangers += 1


def _say_to_all(present: Mapping[int, _Present], message: Mapping[str, Any], key: bytes) -> None:
    for there in present.values():  # a closed connection is noticed by its next user
        host_messages.send(there.connection, message, key, seconds=_HELLO_SECONDS)


# The others

_NO_ANSWER = "it does not answer as a host of this start"


def _ask(call: _Call) -> Roll:
    failure = _NO_ANSWER
    while time.monotonic() < call.deadline:
        answered = None
        try:
            answered = _hello(call)
            failure = _NO_ANSWER
        except socket.gaierror as error:
            failure = f"this host cannot look up the name: {error.strerror}"
        except OSError as error:
            failure = error.strerror or str(error)
        if answered is not None:  # not within the `try`: host 0's reply may be a TimeoutError, which is an OSError
            return _answered(*answered, call)
        time.sleep(_RETRY_SECONDS)
    raise TimeoutError(call._replace(addresses=[f"the coordinator at {call.address}: {failure}"]).missing([0]))


def _answered(connection: socket.socket, reply: Mapping[str, Any], call: _Call) -> Roll:
    try:
        addresses = _read_reply(reply, call)
    except BaseException:
        connection.close()
        raise
    return Roll(call.index, call.count, addresses, {0: connection}, call.key)


def _hello(call: _Call) -> tuple[socket.socket, dict[str, Any]] | None:
    """Returns the connection and host 0's reply, or None without a reply."""
    left = max(call.deadline - time.monotonic(), _RETRY_SECONDS)
    with contextlib.ExitStack() as unless_all_is_well:
        connection = unless_all_is_well.enter_context(socket.create_connection(split(call.address), timeout=left))
        hello = {"host": call.index, "of": call.count, "description": call.description}
        host_messages.send(connection, hello, call.key, seconds=left)
        # Host 0 decides which hosts are missing; wait a little longer than it does.
        seconds = call.deadline - time.monotonic() + 2 * _HELLO_SECONDS
        with contextlib.suppress(Stranger):
            if (reply := host_messages.receive(connection, call.key, seconds=seconds)) is not None:
                unless_all_is_well.pop_all()
                return connection, reply
    return None


def _read_reply(reply: Mapping[str, Any], call: _Call) -> tuple[str, ...]:
    this = f"host {call.index} of {call.count}"
    match reply:
        case {"all here": [*addresses]}:
            return tuple(map(str, addresses))
        case {"refused": count}:
            raise UserError(f"this is {this}, but host 0 at {call.address} has a job of {units.counted(count, 'host')}")
        case {"replaced": _}:
            raise UserError(f"another process has already connected as {this} to host 0 at {call.address}")
        case {"differing": differing}:
            raise UserError(_differing_message(differing))
        case {"missing": message}:
            raise TimeoutError(message)
    raise UserError(f"host 0 at {call.address} answered {sorted(reply)}: is it another version of this program?")
