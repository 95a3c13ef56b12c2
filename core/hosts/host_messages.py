"""Messages between the hosts of a start: JSON objects over TCP, each with an authentication code.

b"renga" | length of the JSON, 4 bytes | HMAC-SHA-256 of the JSON, 32 bytes | JSON
"""

import contextlib
import hashlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from core.files import foreign_json

MAX_BYTES = 2**22  # the largest messages, descriptions of a run, have tens of KB

_MAGIC = b"renga"
_HEAD = struct.Struct(f">{len(_MAGIC)}sI{hashlib.sha256().digest_size}s")


class Stranger(ValueError):
    """The received bytes are not a message of this start."""


class Inbox:
    """Decodes messages from a stream of bytes that arrives in parts."""

    def __init__(self, key: bytes):
        self._key = key
        self._pending = bytearray()

    def add(self, piece: bytes) -> list[dict[str, Any]]:
        """Returns the messages that this part completes; raises Stranger for bytes of another origin."""
        self._pending += piece
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def missing_bytes(self) -> int:
        """Returns the least number of bytes that the current message still needs."""
        if len(self._pending) < _HEAD.size:
            return _HEAD.size - len(self._pending)
        return _HEAD.size + self._length() - len(self._pending)

    def _next(self) -> dict[str, Any] | None:
        if self._pending and not _MAGIC.startswith(self._pending[: len(_MAGIC)]):
            raise Stranger("not a message of this protocol")
        if len(self._pending) < _HEAD.size or self.missing_bytes() > 0:
            return None
        _, length, code = _HEAD.unpack_from(self._pending)
        body = bytes(self._pending[_HEAD.size : _HEAD.size + length])
        del self._pending[: _HEAD.size + length]
        if not hmac.compare_digest(code, _code(body, self._key)):
            raise Stranger("not authenticated with the key of this start")
        try:
            message = foreign_json.loads(body)
        except foreign_json.MalformedError as error:
            raise Stranger(str(error)) from error
        if not isinstance(message, dict):
            raise Stranger("not a JSON object")
        return message

    def _length(self) -> int:
        length = _HEAD.unpack_from(self._pending)[1]
        if length > MAX_BYTES:
            raise Stranger(f"a message of {length} bytes")
        return length


def pack(message: Mapping[str, Any], key: bytes) -> bytes:
    """Encodes a message with its authentication code."""
    body = json.dumps(message).encode()
    assert len(body) <= MAX_BYTES, f"a message of {len(body)} bytes; at most {MAX_BYTES}"
    return _HEAD.pack(_MAGIC, len(body), _code(body, key)) + body


def _code(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, body, "sha256")


def send(connection: socket.socket, message: Mapping[str, Any], key: bytes, *, seconds: float) -> bool:
    """Sends a message; returns False after an error, or if the other side blocks for `seconds`.

    The connection is then shut down, because part of the message may have been sent.

    Args:
      key: authenticates the message.
    """
    packed = pack(message, key)
    try:
        connection.settimeout(seconds)
        connection.sendall(packed)
        return True
    except OSError:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # also ends reads on this side
        return False


def receive(connection: socket.socket, key: bytes, *, seconds: float) -> dict[str, Any] | None:
    """Receives the next message, and no bytes beyond it; None if none comes in `seconds`.

    Raises Stranger for bytes of another origin.
    """
    inbox, deadline = Inbox(key), time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while True:
            connection.settimeout(max(deadline - time.monotonic(), 0.01))
            piece = connection.recv(min(inbox.missing_bytes(), 1 << 16))
            if not piece:
                return None
            if found := inbox.add(piece):
                return found[0]
    return None
