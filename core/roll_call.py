"""Who is here: a roll call over plain TCP, before the distributed runtime starts.

JAX's own start ends the whole process from C++ when a host does not come, where no message of ours can be raised. So
the hosts first meet on the coordinator's port: each says "renga INDEX of COUNT", host 0 waits for all of them and
tells every one of them either that all are here or which are missing. Only then is the port handed to JAX.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator

_RETRY_SECONDS = 0.1
_LINE_SECONDS = 2.0
_PORT_SECONDS = 10.0
_ALL_HERE = "all here"
_REPLACED = "replaced"


def answer(address: str, *, index: int, count: int, timeout_seconds: float) -> None:
    """Returns when all hosts are here. Every host calls it: host 0 takes the roll, the others answer it.

    Args:
      address: "HOST:PORT" of host 0, the same on every host.
      index: which host this is, 0 to count - 1.
      count: how many hosts the job has.
      timeout_seconds: how long to wait for the last of them.

    Raises:
      TimeoutError: some hosts did not come; names them, or host 0's address when that is the one.
      ValueError: the port is taken, another process has the same index, or this host has another count.
    """
    deadline = time.monotonic() + timeout_seconds
    if index == 0:
        _take(address, count=count, deadline=deadline, timeout_seconds=timeout_seconds)
    else:
        reply = _ask(address, line=f"renga {index} of {count}", deadline=deadline)
        _read_reply(reply, address=address, index=index, count=count, timeout_seconds=timeout_seconds)


def split(address: str) -> tuple[str, int]:
    """The host and port of "HOST:PORT". Raises ValueError when it is not of that form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"the coordinator address is {address!r}; expected HOST:PORT, for example 10.0.0.2:8476")
    return host.strip("[]"), int(port)


def _missing_message(names: str, *, address: str, count: int, timeout_seconds: float) -> str:
    return (
        f"waited {timeout_seconds:g} s at {address} for {count} hosts; missing: host {names}. "
        "Read the end of each missing host's log; start the same command on every host."
    )


# Host 0


def _take(address: str, *, count: int, deadline: float, timeout_seconds: float) -> None:
    present: dict[int, socket.socket] = {}
    with _listening(address, deadline=deadline) as listener, contextlib.ExitStack() as open_sockets:
        while len(present) < count - 1 and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(TimeoutError):
                connection = open_sockets.enter_context(listener.accept()[0])
                _admit(connection, present=present, count=count)
        missing = [str(index) for index in range(1, count) if index not in present]
        for connection in present.values():
            _say(connection, f"missing {', '.join(missing)}" if missing else _ALL_HERE)
        _wait_for_goodbyes(present)
    if missing:
        names = ", ".join(missing)
        raise TimeoutError(_missing_message(names, address=address, count=count, timeout_seconds=timeout_seconds))


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
            raise ValueError(
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
            raise ValueError(f"the coordinator's host {host!r} cannot be looked up: {error}") from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return ""
            raise
    return host


def _admit(connection: socket.socket, *, present: dict[int, socket.socket], count: int) -> None:
    words = _hear(connection, seconds=_LINE_SECONDS).split()
    if len(words) != 4 or words[0] != "renga" or not (words[1].isdigit() and words[3].isdigit()):
        connection.close()  # Something else that knocks at every port.
        return
    index, their_count = int(words[1]), int(words[3])
    if their_count != count or not 0 < index < count:
        _say(connection, f"refused {count}")
        return
    if index in present:
        _say(present[index], _REPLACED)  # A host that was started again; unless it still lives, nobody hears this.
    present[index] = connection


def _wait_for_goodbyes(present: dict[int, socket.socket]) -> None:
    """Lets the others close first, so that the port is free at once for the runtime."""
    for connection in present.values():
        _hear(connection, seconds=_LINE_SECONDS)


# The others


def _ask(address: str, *, line: str, deadline: float) -> str:
    """Host 0's reply, or "" when it was not there until the deadline; tries again when a connection breaks."""
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection(split(address), timeout=left) as connection:
            _say(connection, line)
            # Host 0 decides who is missing; wait a little longer than it does.
            if reply := _hear(connection, seconds=deadline - time.monotonic() + 2 * _LINE_SECONDS):
                return reply
        time.sleep(_RETRY_SECONDS)
    return ""


def _read_reply(reply: str, *, address: str, index: int, count: int, timeout_seconds: float) -> None:
    if reply == _ALL_HERE:
        return
    kind, _, rest = reply.partition(" ")
    if kind == "refused":
        raise ValueError(f"this is host {index} of {count}, but host 0 at {address} has a job of {rest} hosts")
    if reply == _REPLACED:
        raise ValueError(f"another process also says that it is host {index} of {count} to host 0 at {address}")
    names = rest if kind == "missing" else f"0 (the coordinator at {address} gave no answer)"
    raise TimeoutError(_missing_message(names, address=address, count=count, timeout_seconds=timeout_seconds))


def _say(connection: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # It hung up: the roll shows it as missing, or it was replaced.
        connection.sendall(f"{line}\n".encode())


def _hear(connection: socket.socket, *, seconds: float) -> str:
    """One line of at most 4 KiB, or "" when none came."""
    connection.settimeout(max(seconds, 0.01))
    heard = b""
    with contextlib.suppress(OSError):
        while not heard.endswith(b"\n") and len(heard) < 4096 and (part := connection.recv(512)):
            heard += part
    return heard.decode(errors="replace").strip() if heard.endswith(b"\n") else ""
