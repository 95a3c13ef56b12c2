"""The file system of gs:// paths: gcsfs, which first checks within seconds that the service can be reached."""

import os
import socket
import threading
import time
import urllib.parse
from typing import Any

import gcsfs

from core.errors import UnreachableError

REACH_SECONDS = 5.0
_PAUSE_SECONDS = 0.5
_REMEMBERED_SECONDS = 60.0  # a command that goes on after the error waits once, not for each path

_reached: set[str] = set()
_failed: dict[str, tuple[float, str]] = {}  # when an address was last tried, and the reason


class Buckets(gcsfs.GCSFileSystem):
    """A gcsfs file system whose constructor raises `UnreachableError` if the service cannot be reached."""

    def __init__(self, *args: Any, **kwargs: Any):
        if not (kwargs.get("session_kwargs") or {}).get("trust_env"):  # then requests go through a proxy
            require_reachable(kwargs.get("endpoint_url") or address())
        super().__init__(*args, **kwargs)


def address() -> str:
    """Returns the address of Google Cloud Storage, or of its emulator."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator and emulator != "default":
        return emulator if "://" in emulator else f"http://{emulator}"
    return f"https://storage.{os.environ.get('GOOGLE_CLOUD_UNIVERSE_DOMAIN') or 'googleapis.com'}"


def require_reachable(address: str) -> None:
    """Raises UnreachableError if no connection is made within REACH_SECONDS; remembers the result."""
    if address in _reached:
        return
    tried_at, reason = _failed.get(address, (-_REMEMBERED_SECONDS, ""))
    if time.monotonic() - tried_at > _REMEMBERED_SECONDS:
        reason = _tried(address)
        _failed[address] = (time.monotonic(), reason)
    if reason:
        raise UnreachableError(
            f"gs:// cannot be reached from this machine: {address}: {reason}. Check its network, or give a local path"
        )
    _reached.add(address)


def _tried(address: str) -> str:
    """Returns the last error, or an empty text after a connection."""
    found, end = urllib.parse.urlsplit(address), time.monotonic() + REACH_SECONDS
    place = (found.hostname, found.port or {"http": 80}.get(found.scheme, 443))
    reasons = [f"no answer within {REACH_SECONDS:g} s"]
    is_reached = threading.Event()

    def connect() -> None:
        while time.monotonic() < end:
            try:
                socket.create_connection(place, timeout=REACH_SECONDS).close()
            except (OSError, UnicodeError) as error:  # UnicodeError: no host can have such a name
                reasons.append(getattr(error, "strerror", "") or str(error))
                time.sleep(_PAUSE_SECONDS)
            else:
                is_reached.set()
                return

    threading.Thread(target=connect, daemon=True).start()  # looking up a name has no limit of its own
    return "" if is_reached.wait(REACH_SECONDS) else reasons[-1]
