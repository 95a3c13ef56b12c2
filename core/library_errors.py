"""Recognizes errors of XLA, TensorStore, Gloo and the system by the text of their messages."""

import errno
import os
import re
from typing import NamedTuple

_READERS = (  # statuses of a service or a reader in trouble, which say nothing of what was to be read
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "CANCELLED",
    "INTERNAL",
    "UNKNOWN",
)
_STATUS = re.compile(rf"\b({'|'.join((*_READERS, 'NOT_FOUND'))})\b")
_MAKE_ROOM = "Make room, or raise the limit (quota, ulimit -f)"
_OPEN_MORE = "Raise the limit of open files (ulimit -n)"
_SHORTAGES = {
    os.strerror(number): (number, mending)
    for mending, numbers in (
        (_MAKE_ROOM, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
        (_OPEN_MORE, (errno.EMFILE, errno.ENFILE)),
    )
    for number in numbers
}
_NUMBERS = {number for number, _ in _SHORTAGES.values()}


def _statuses(error: BaseException) -> set[str]:
    return set(_STATUS.findall(str(error)))


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory is exhausted."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in _statuses(error)
    )


def is_of_reader(error: BaseException) -> bool:
    """Returns whether an error is of the service or the reader, such as UNAVAILABLE, not of the data."""
    return not _statuses(error).isdisjoint(_READERS)


def is_not_found(error: BaseException) -> bool:
    """Returns whether an error says that what was to be read is not there."""
    return isinstance(error, FileNotFoundError) or "NOT_FOUND" in _statuses(error)


def is_unconnected(error: BaseException) -> bool:
    """Returns whether an error says that hosts did not connect for a collective (Gloo)."""
    return "Gloo context initialization failed" in str(error)


class Shortage(NamedTuple):
    """An exhausted resource: the system's message, and what a user can do."""

    said: str
    mending: str


def shortage(error: BaseException) -> Shortage | None:
    """Returns what an error reports as exhausted, disk space or open files; None if neither."""
    number = error.errno if isinstance(error, OSError) else None
    for said, (known, mending) in _SHORTAGES.items():
        if number == known or (number not in _NUMBERS and said in str(error)):
            return Shortage(said, mending)
    return None


def absent_tasks(error: BaseException) -> list[int]:
    """Returns indices of the processes missing at a barrier of JAX's coordination service."""
    listed = re.search(r"timed out task names:\s*((?:\S*\d+\s+)+)", f"{error}\n")
    return sorted(map(int, re.findall(r"(\d+)\s", listed[1]))) if listed else []
