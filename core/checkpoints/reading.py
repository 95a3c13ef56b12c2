"""Reads a step on all hosts, and distinguishes damaged checkpoints from failures to read them.

A wrong checksum, a missing file or bytes that cannot be decoded prove that the checkpoint is damaged. A lack of memory,
a missing permission or an unreachable bucket do not: a later attempt may succeed. Only proven damage may set a step
aside, and only after an older step was restored: if no step can be read, this revision or its libraries may be at
fault.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from core import distributed
from core.checkpoints import description
from core.checkpoints.description import DamagedError
from core.checkpoints.streams import DamagedStreamError

SLOW_SECONDS = 3600  # timeout for the slowest host: hosts may read different amounts at different speeds
RETRY_SECONDS = 5.0  # pause before the single retry of a read that may succeed later

# Exceptions that wrong or missing bytes cause in checksums, JSON, zarr and zstd.
_PROOFS = (
    DamagedError,
    DamagedStreamError,
    FileNotFoundError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    zlib.error,
)
# TensorStore raises ValueError for every error, with the status first. Too many open files are RESOURCE_EXHAUSTED, an
# input or output error of a disk is UNKNOWN.
_OF_THE_READER = re.compile(
    r"\b(RESOURCE_EXHAUSTED|UNAVAILABLE|PERMISSION_DENIED|UNAUTHENTICATED|DEADLINE_EXCEEDED|ABORTED|CANCELLED|INTERNAL"
    r"|UNKNOWN)\b"
)


# A missing file is retried: on file systems that cache listings, another host's file may appear later.
_NOT_THERE = re.compile(r"\bNOT_FOUND\b")


class UnreadableError(RuntimeError):
    """A step could not be read, for a reason that does not prove damage."""


class _Try(NamedTuple):
    """The result of a read, or its error; `is_lasting` if a retry is pointless."""

    found: Any
    says: str = ""
    is_proof: bool = False
    is_lasting: bool = True


def on_all_hosts(read: Callable[[], Any]) -> tuple[Any, str]:
    """Runs `read` on all hosts. All hosts must call it.

    A read that fails without proof of damage, or because a file is missing, is retried once.

    Args:
      read: reads this host's part; must not wait for other hosts.

    Returns:
      This host's result, and a description of the damage, equal on all hosts; "" if no host found any.

    Raises:
      UnreadableError: raised on all hosts if the read failed on any of them for a reason that does not prove damage.
    """
    tried = _tried(read)
    if not tried.is_lasting:
        print(f"reading a checkpoint failed, once more in {RETRY_SECONDS:g} s: {tried.says}", flush=True)
        time.sleep(RETRY_SECONDS)
        tried = _tried(read)
    answer = json.dumps([tried.says, tried.is_proof])
    answers = distributed.all_gather_text("checkpoints/read", answer, timeout_seconds=SLOW_SECONDS)
    failed = {host: answer for host, answer in enumerate(map(json.loads, answers)) if answer[0]}
    together = _together({host: says for host, (says, _) in failed.items()})
    if not all(is_proof for _, is_proof in failed.values()):
        raise UnreadableError(together)
    return tried.found, together


def agreed(says: str) -> str:
    """Combines the problems that hosts report, on every host; "" if none does. All hosts must call it in order."""
    answers = distributed.all_gather_text("checkpoints/agreed", says, timeout_seconds=SLOW_SECONDS)
    if len(set(answers)) == 1:
        return says
    return _together({host: answer for host, answer in enumerate(answers) if answer})


def _together(says: dict[int, str]) -> str:
    return "; ".join(f"host {host}: {text}" for host, text in says.items())


def _tried(read: Callable[[], Any]) -> _Try:
    """Runs `read` and converts an exception to text, so that its traceback keeps nothing in memory."""
    try:
        return _Try(read())
    except Exception as error:  # of many types: whatever files, formats, buckets and devices make of it
        reason = _reason(error)
        is_proof, says = is_proof_of_damage(reason), description.said(reason)
        is_there = not isinstance(reason, FileNotFoundError) and not _NOT_THERE.search(str(reason))
        return _Try(None, says, is_proof, is_lasting=is_proof and is_there)


def _reason(error: BaseException) -> BaseException:
    """Returns the first exception of a chain, because libraries wrap it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def is_proof_of_damage(error: BaseException) -> bool:
    """Returns True if an error proves that the step is damaged, and not only that it could not be read."""
    if isinstance(error, (DamagedError, DamagedStreamError)):
        return True
    return isinstance(error, _PROOFS) and not _OF_THE_READER.search(str(error))
