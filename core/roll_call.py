"""Who is here, and do all mean the same: a roll call over plain TCP, before the distributed runtime starts.

JAX's own start ends the whole process from C++ when a host does not come, where no message of ours can be raised, and
hosts with different configurations train on without a word. So the hosts first meet on the coordinator's port: each
says which of how many it is and hands over a text that describes what it would run; host 0 waits for all of them,
compares, and tells every one of them that all are here, which are missing, or how they differ. Only then is the port
handed to JAX. The connections stay: over them the hosts watch one another (`core.watch.peers`).
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from core import units
from core.errors import UserError
from core.watch import difference, frames

_RETRY_SECONDS = 0.1
_HELLO_SECONDS = 2.0
_PORT_SECONDS = 10.0


class Roll(NamedTuple):
    """All hosts of a job, and the way to them.

    Attributes:
      index: which host this is.
      count: how many there are.
      addresses: of each host, as far as known.
      connections: for host 0, one to each other host, by index; for the others, `{0: the one to host 0}`.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    count: int  # type: ignore[assignment]  # hides tuple.count
    addresses: tuple[str, ...]
    connections: Mapping[int, socket.socket]

    def close(self) -> None:
        """Hangs up."""
        for connection in self.connections.values():
            connection.close()


class _Call(NamedTuple):
    """What `answer` was asked, and until when."""

    address: str
    index: int  # type: ignore[assignment]  # hides tuple.index
    count: int  # type: ignore[assignment]  # hides tuple.count
    timeout_seconds: float
    deadline: float
    description: str
    addresses: Sequence[str]

    def missing(self, hosts: Sequence[int]) -> str:
        """The message that names them."""
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
    """Returns when all hosts are here. Every host calls it: host 0 takes the roll, the others answer it.

    Args:
      address: "HOST:PORT" of host 0, the same on every host.
      index: which host this is, 0 to count - 1.
      count: how many hosts the job has.
      timeout_seconds: how long to wait for the last of them.
      description: what this host would run, to be equal on all of them.
      addresses: of all hosts by index, where they are known: to name one that does not come.

    Raises:
      TimeoutError: some hosts did not come; names them, or host 0's address when that is the one.
      ValueError: the port is taken, another process has the same index, this host has another count, or the
        descriptions differ (on all hosts, with what differs).
    """
    deadline = time.monotonic() + timeout_seconds
    call = _Call(address, index, count, timeout_seconds, deadline, description, addresses)
    return _take(call) if index == 0 else _ask(call)


def split(address: str) -> tuple[str, int]:
    """The host and port of "HOST:PORT". Raises ValueError when it is not of that form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"the coordinator address is {address!r}; expected HOST:PORT, for example 10.0.0.2:8476")
    return host.strip("[]"), int(port)


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
        if differing := difference.between_hosts(texts):
            _say_to_all(present, {"differing": differing})
            raise UserError(_differing_message(differing))
        found = [split(call.address)[0], *(present[index].address for index in range(1, call.count))]
        known = [_known(call.addresses, index) or there for index, there in enumerate(found)]
        _say_to_all(present, {"all here": known})
        unless_all_is_well.pop_all()
    return Roll(0, call.count, tuple(known), {index: there.connection for index, there in present.items()})


def _differing_message(differing: str) -> str:
    return (
        "the hosts would not run the same (a minus is what the others have):\n"
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
            if time.monotonic() < give_up:  # The port of a run that is just ending.
                time.sleep(_RETRY_SECONDS)
                continue
            raise UserError(
                f"host 0 cannot listen at {address}: {error}; is another run still alive on this host? "
                "Stop it, or choose another port."
            ) from error
    with listener:
        yield listener


def bindable(host: str) -> str:
    """`host` when it is an address of this machine, else "" (all interfaces: host 0 is behind another address)."""
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
        hello = frames.receive(connection, seconds=_HELLO_SECONDS) or {}
    except frames.Stranger:
        hello = {}
    index, their_count, description = (hello.get(key) for key in ("host", "of", "description"))
    if not (isinstance(index, int) and isinstance(their_count, int) and isinstance(description, str)):
        connection.close()  # Something else that knocks at every port.
        return
    if their_count != count or not 0 < index < count:
        frames.send(connection, {"refused": count}, seconds=_HELLO_SECONDS)
        return
    if index in present:  # A host that was started again; unless it still lives, nobody hears this.
        frames.send(present[index].connection, {"replaced": True}, seconds=_HELLO_SECONDS)
    present[index] = _Present(connection, address, description)


def _say_to_all(present: Mapping[int, _Present], message: Mapping[str, Any]) -> None:
    for there in present.values():  # Who hung up is missed by whoever watches the connections next.
        frames.send(there.connection, message, seconds=_HELLO_SECONDS)


# The others


def _ask(call: _Call) -> Roll:
    """Tries again when a connection breaks, until the deadline."""
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
    """One attempt: an open connection and what host 0 says on it; None where it says nothing."""
    with contextlib.ExitStack() as unless_all_is_well, contextlib.suppress(OSError, frames.Stranger):
        left = max(call.deadline - time.monotonic(), _RETRY_SECONDS)
        connection = unless_all_is_well.enter_context(socket.create_connection(split(call.address), timeout=left))
        hello = {"host": call.index, "of": call.count, "description": call.description}
        frames.send(connection, hello, seconds=left)
        # Host 0 decides who is missing; wait a little longer than it does.
        reply = frames.receive(connection, seconds=call.deadline - time.monotonic() + 2 * _HELLO_SECONDS)
        if reply is not None:
            unless_all_is_well.pop_all()
            return connection, reply
    return None


def _read_reply(reply: Mapping[str, Any], call: _Call) -> tuple[str, ...]:
    """The addresses of all; raises what host 0 has against this job."""
    this = f"host {call.index} of {call.count}"
    match reply:
        case {"all here": addresses}:
            return tuple(addresses)
        case {"refused": count}:
            raise UserError(f"this is {this}, but host 0 at {call.address} has a job of {units.counted(count, 'host')}")
        case {"replaced": _}:
            raise UserError(f"another process also says that it is {this} to host 0 at {call.address}")
        case {"differing": differing}:
            raise UserError(_differing_message(differing))
        case {"missing": message}:
            raise TimeoutError(message)
    raise UserError(f"host 0 at {call.address} answered {sorted(reply)}: is it another version of this program?")
