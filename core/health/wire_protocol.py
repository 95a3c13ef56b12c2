"""Messages between hosts over plain TCP: one JSON object each, with its length in front.

    b"renga" | length, 4 bytes | JSON

The one idea: whoever knocks at the port and is not one of ours is recognised by the first five bytes, and nothing that
a stranger sends is read any further, or run.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

MAX_BYTES = 2**22  # the description of a run is tens of KB

_MAGIC = b"renga"
_HEAD = struct.Struct(f">{len(_MAGIC)}sI")


class Stranger(ValueError):
    """What came is no message of ours."""


class Inbox:
    """The messages in a stream of bytes that arrives in pieces."""

    def __init__(self):
        self._pending = bytearray()

    def add(self, piece: bytes) -> list[dict[str, Any]]:
        """The messages that are complete with this piece. Raises Stranger."""
        self._pending += piece
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def missing_bytes(self) -> int:
        """How many more the message that has begun needs, as far as is known."""
        if len(self._pending) < _HEAD.size:
            return _HEAD.size - len(self._pending)
        return _HEAD.size + _length(self._pending) - len(self._pending)

    def _next(self) -> dict[str, Any] | None:
        if self._pending and not _MAGIC.startswith(self._pending[: len(_MAGIC)]):
            raise Stranger("no message of ours")
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
            raise Stranger("no JSON") from error
        if not isinstance(message, dict):
            raise Stranger("no object")
        return message


def pack(message: Mapping[str, Any]) -> bytes:
    """The bytes of a message."""
    body = json.dumps(message).encode()
    assert len(body) <= MAX_BYTES, f"a message of {len(body)} bytes; at most {MAX_BYTES}"
    return _HEAD.pack(_MAGIC, len(body)) + body


def send(connection: socket.socket, message: Mapping[str, Any], *, seconds: float) -> bool:
    """Whether the message went out; a connection that is gone, or full for so long, is no error here.

    Nothing more goes over it then: what was sent may be a part of a message, which the next would seem to go on with.
    """
    packed = pack(message)
    try:
        connection.settimeout(seconds)
        connection.sendall(packed)
        return True
    except OSError:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # the reader on this side learns of it too
        return False


def receive(connection: socket.socket, *, seconds: float) -> dict[str, Any] | None:
    """The next message, and not a byte of the one after it; None when none came in time.

    Raises:
      Stranger: the other side is not one of ours.
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
