"""Rendezvous of all hosts over TCP, before JAX's distributed runtime starts.

If a host is missing, JAX's own start-up ends the process from C++ without an exception, and it does not notice hosts
with different configurations. Therefore the hosts first connect to host 0 on the coordinator's port. Each sends its
index, the number of hosts that it expects and a description of its configuration. Host 0 waits for all of them,
compares the descriptions, and tells every host that all are present, which are missing, or how they differ. Then it
releases the port for JAX. The connections stay open for the heartbeat (`core.health.heartbeat`).

Messages are JSON objects with a header: b"renga" | length, 4 bytes | JSON. Connections from other programs are
recognized by the first five bytes and not read any further.
"""

import collections
import contextlib
import difflib
import errno
import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from core import units
from core.errors import UserError

MAX_BYTES = 2**22  # the largest messages, descriptions of a run, have tens of KB

_MAGIC = b"renga"
_HEAD = struct.Struct(f">{len(_MAGIC)}sI")
_RETRY_SECONDS = 0.1
_HELLO_SECONDS = 2.0
_PORT_SECONDS = 10.0
_MOST_LINES = 20  # of a difference


class Stranger(ValueError):
    """The received bytes are not a message of this protocol."""


class Inbox:
    """Decodes messages from a stream of bytes that arrives in parts."""

    def __init__(self):
        self._pending = bytearray()

    def add(self, piece: bytes) -> list[dict[str, Any]]:
        """Returns the messages that this part completes. Raises Stranger for other bytes."""
        self._pending += piece
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def missing_bytes(self) -> int:
        """Returns how many bytes the current message still needs at least."""
        if len(self._pending) < _HEAD.size:
            return _HEAD.size - len(self._pending)
        return _HEAD.size + _length(self._pending) - len(self._pending)

    def _next(self) -> dict[str, Any] | None:
        if self._pending and not _MAGIC.startswith(self._pending[: len(_MAGIC)]):
            raise Stranger("not a message of this protocol")
        if len(self._pending) < _HEAD.size:
            return None
        end = _HEAD.size + _length(self._pending)
        if len(self._pending) < end:
            return None
        body = bytes(self._pending[_HEAD.size : end])
        del self._pending[:end]
        try:
            message = json.loads(body)
        except ValueError as error:
            raise Stranger("not JSON") from error
        if not isinstance(message, dict):
            raise Stranger("not a JSON object")
        return message


def pack(message: Mapping[str, Any]) -> bytes:
    """Encodes a message."""
    body = json.dumps(message).encode()
    assert len(body) <= MAX_BYTES, f"a message of {len(body)} bytes; at most {MAX_BYTES}"
    return _HEAD.pack(_MAGIC, len(body)) + body


def send(connection: socket.socket, message: Mapping[str, Any], *, seconds: float) -> bool:
    """Sends a message; returns False if the connection is closed, or blocked for `seconds`.

    The connection is then shut down, because part of the message may have been sent.
    """
    packed = pack(message)
    try:
        connection.settimeout(seconds)
        connection.sendall(packed)
        return True
    except OSError:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # also ends reads on this side
        return False


def receive(connection: socket.socket, *, seconds: float) -> dict[str, Any] | None:
    """Receives the next message, reading no bytes beyond it; None if none arrives in time.

    Raises:
      Stranger: the other side does not use this protocol.
    """
    inbox, deadline = Inbox(), time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while True:
            connection.settimeout(max(deadline - time.monotonic(), 0.01))
            piece = connection.recv(min(inbox.missing_bytes(), 1 << 16))
            if not piece:
                return None
            if found := inbox.add(piece):
                return found[0]
    return None


def _length(pending: bytearray) -> int:
    length = _HEAD.unpack_from(pending)[1]
    if length > MAX_BYTES:
        raise Stranger(f"{length} bytes")
    return length


class Roll(NamedTuple):
    """The hosts of a job and the connections to them.

    Attributes:
      index: index of this host.
      count: number of hosts.
      addresses: address of each host; "" if unknown.
      connections: on host 0, one to each other host, by index; on the others, `{0: the connection to host 0}`.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    count: int  # type: ignore[assignment]  # hides tuple.count
    addresses: tuple[str, ...]
    connections: Mapping[int, socket.socket]

    def close(self) -> None:
        """Closes all connections."""
        for connection in self.connections.values():
            connection.close()


class _Call(NamedTuple):
    """The arguments of `answer`, and the deadline."""

    address: str
    index: int  # type: ignore[assignment]  # hides tuple.index
    count: int  # type: ignore[assignment]  # hides tuple.count
    timeout_seconds: float
    deadline: float
    description: str
    addresses: Sequence[str]

    def missing(self, hosts: Sequence[int]) -> str:
        """Returns the message that names the missing hosts."""
        names = ", ".join(f"{i} ({a})" if (a := _known(self.addresses, i)) else f"{i}" for i in hosts)
        return (
            f"waited {self.timeout_seconds:g} s at {self.address} for {units.counted(self.count, 'host')}; "
            f"missing: host {names}. "
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
) -> Roll:
    """Waits until all hosts are connected. Every host calls it: host 0 listens, the others connect to it.

    Args:
      address: "HOST:PORT" of host 0, the same on every host.
      index: index of this host, 0 to count - 1.
      count: number of hosts of the job.
      timeout_seconds: how long to wait for all hosts.
      description: configuration of this host, which must be equal on all of them.
      addresses: addresses of all hosts by index, if known, to name a missing one.

    Raises:
      TimeoutError: some hosts are missing; names them, or host 0's address if host 0 is missing.
      UserError: the port is in use, another process has the same index, this host has another count, or the
        descriptions differ (raised on all hosts, with the difference).
    """
    deadline = time.monotonic() + timeout_seconds
    call = _Call(address, index, count, timeout_seconds, deadline, description, addresses)
    return _take(call) if index == 0 else _ask(call)


def split(address: str) -> tuple[str, int]:
    """Splits "HOST:PORT" into host and port. Raises UserError if it is malformed."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"the coordinator address is {address!r}; expected HOST:PORT, for example 10.0.0.2:8476")
    return host.strip("[]"), int(port)


def host_differences(texts: Sequence[str]) -> str:
    """Returns one paragraph for each group of hosts whose text differs from the majority's; empty if all are equal.

    The majority is taken as correct, so that a single host with another configuration is named even if it is host 0.
    For example `host 2: -BATCH_SIZE = 16 +BATCH_SIZE = 32`: minus marks the others' line, plus that of host 2.

    Args:
      texts: one per host, in order.
    """
    counts = collections.Counter(texts)
    meant = max(texts, key=counts.__getitem__)  # the first of equally frequent ones: host 0's
    others: dict[str, list[int]] = {}
    for host, text in enumerate(texts):
        if text != meant:
            others.setdefault(text, []).append(host)
    return "\n".join(f"host {', '.join(map(str, who))}: {_changes(meant, text)}" for text, who in others.items())


def _changes(meant: str, text: str) -> str:
    """Formats a difference: `-a +b` on one line if one line changed, otherwise one line per change."""
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
    present: dict[int, _Present] = {}
    with contextlib.ExitStack() as unless_all_is_well:
        with _listening(call.address, deadline=call.deadline) as listener:
            while len(present) < call.count - 1 and (left := call.deadline - time.monotonic()) > 0:
                listener.settimeout(left)
                with contextlib.suppress(TimeoutError):
                    connection, (there, *_) = listener.accept()
                    unless_all_is_well.enter_context(connection)
                    _admit(connection, there, present=present, count=call.count)
        missing = [index for index in range(1, call.count) if index not in present]
        if missing:
            _say_to_all(present, {"missing": call.missing(missing)})
            raise TimeoutError(call.missing(missing))
        texts = [call.description, *(present[index].description for index in range(1, call.count))]
        if differing := host_differences(texts):
            _say_to_all(present, {"differing": differing})
            raise UserError(_differing_message(differing))
        found = [split(call.address)[0], *(present[index].address for index in range(1, call.count))]
        known = [_known(call.addresses, index) or there for index, there in enumerate(found)]
        _say_to_all(present, {"all here": known})
        unless_all_is_well.pop_all()
    return Roll(0, call.count, tuple(known), {index: there.connection for index, there in present.items()})


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
            listener = socket.create_server((bindable(host), port), backlog=4096)
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
    """Returns the address to listen on: `host` if this machine has it, else "" for all interfaces, as behind NAT."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except socket.gaierror as error:
            raise UserError(f"the coordinator's host {host!r} cannot be looked up: {error}") from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return ""
            raise
    return host


def _admit(connection: socket.socket, address: str, *, present: dict[int, _Present], count: int) -> None:
    try:
        hello = receive(connection, seconds=_HELLO_SECONDS) or {}
    except Stranger:
        hello = {}
    index, their_count, description = (hello.get(key) for key in ("host", "of", "description"))
    if not (isinstance(index, int) and isinstance(their_count, int) and isinstance(description, str)):
        connection.close()  # not one of our hosts, for example a port scanner
        return
    if their_count != count or not 0 < index < count:
        send(connection, {"refused": count}, seconds=_HELLO_SECONDS)
        return
    if index in present:  # the host was restarted; an earlier process that still runs is told to end
        send(present[index].connection, {"replaced": True}, seconds=_HELLO_SECONDS)
    present[index] = _Present(connection, address, description)


def _say_to_all(present: Mapping[int, _Present], message: Mapping[str, Any]) -> None:
    for there in present.values():  # a closed connection is noticed by its next user
        send(there.connection, message, seconds=_HELLO_SECONDS)


# The others


def _ask(call: _Call) -> Roll:
    """Connects to host 0 and waits for its reply; retries until the deadline."""
    while time.monotonic() < call.deadline:
        if answered := _hello(call):
            connection, reply = answered
            try:
                addresses = _read_reply(reply, call)
            except BaseException:
                connection.close()
                raise
            return Roll(call.index, call.count, addresses, {0: connection})
        time.sleep(_RETRY_SECONDS)
    raise TimeoutError(call._replace(addresses=[f"the coordinator at {call.address} gave no answer"]).missing([0]))


def _hello(call: _Call) -> tuple[socket.socket, dict[str, Any]] | None:
    """Makes one attempt; returns the connection and host 0's reply, or None without a reply."""
    with contextlib.ExitStack() as unless_all_is_well, contextlib.suppress(OSError, Stranger):
        left = max(call.deadline - time.monotonic(), _RETRY_SECONDS)
        connection = unless_all_is_well.enter_context(socket.create_connection(split(call.address), timeout=left))
        hello = {"host": call.index, "of": call.count, "description": call.description}
        send(connection, hello, seconds=left)
        # Host 0 decides which hosts are missing; wait a little longer than it does.
        reply = receive(connection, seconds=call.deadline - time.monotonic() + 2 * _HELLO_SECONDS)
        if reply is not None:
            unless_all_is_well.pop_all()
            return connection, reply
    return None


def _read_reply(reply: Mapping[str, Any], call: _Call) -> tuple[str, ...]:
    """Returns the addresses of all hosts, or raises the error that host 0 reports."""
    this = f"host {call.index} of {call.count}"
    match reply:
        case {"all here": addresses}:
            return tuple(addresses)
        case {"refused": count}:
            raise UserError(f"this is {this}, but host 0 at {call.address} has a job of {units.counted(count, 'host')}")
        case {"replaced": _}:
            raise UserError(f"another process has already connected as {this} to host 0 at {call.address}")
        case {"differing": differing}:
            raise UserError(_differing_message(differing))
        case {"missing": message}:
            raise TimeoutError(message)
    raise UserError(f"host 0 at {call.address} answered {sorted(reply)}: is it another version of this program?")
