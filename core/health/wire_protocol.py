"""Messages between hosts over TCP: JSON objects with a header.

    b"renga" | length, 4 bytes | JSON

Connections from other programs are recognized by the first five bytes and not read any further.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

MAX_BYTES = 2**22  # the largest messages, descriptions of a run, have tens of KB

_MAGIC = b"renga"
_HEAD = struct.Struct(f">{len(_MAGIC)}sI")


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
