"""Reading a step on all hosts, and telling a step that is damaged from one that could not be read.

The one idea: damage must be proven. A checksum that differs, a file that is missing or bytes that do not decode speak
of the checkpoint; a full memory, a permission or a bucket that does not answer speak of the reader, and the same bytes
may be read by the next one. Only the first sort may put a step aside, and only once an older one was read: what no step
gives may be the fault of this revision or of its libraries.
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

SLOW_SECONDS = 3600  # for the slowest host: some have more to read than others, or a slower way to it
RETRY_SECONDS = 5.0  # before the one other try of a read that may succeed where it failed

# What files and formats make of bytes that are wrong or missing: checksums, JSON, zarr, zstd.
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
# TensorStore raises ValueError for whatever befalls it, with its status in front. Local files that cannot be opened for
# want of descriptors are RESOURCE_EXHAUSTED, a disk's input or output error is UNKNOWN.
_OF_THE_READER = re.compile(
    r"\b(RESOURCE_EXHAUSTED|UNAVAILABLE|PERMISSION_DENIED|UNAUTHENTICATED|DEADLINE_EXCEEDED|ABORTED|CANCELLED|INTERNAL"
    r"|UNKNOWN)\b"
)


# A file that is not there: another host's may be listed later where a file system remembers what it listed before.
_NOT_THERE = re.compile(r"\bNOT_FOUND\b")


class UnreadableError(RuntimeError):
    """A step could not be read, which says nothing of what is in it."""


class _Try(NamedTuple):
    """What came of a read: what was read, or what went wrong, whether that proves damage, and whether it lasts."""

    found: Any
    says: str = ""
    is_proof: bool = False
    is_lasting: bool = True


def on_all_hosts(read: Callable[[], Any]) -> tuple[Any, str]:
    """What this host read, or, where the step is damaged, what the hosts that found it so say; alike on all hosts.

    A read that fails for another reason is tried once more, and so is one that finds a file missing.

    Args:
      read: reads this host's part; waits for no other host.

    Raises:
      UnreadableError: on all hosts, where on any it failed for a reason that is no proof of damage.
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
    """What any host says is wrong, on every host; "" where none says anything. All hosts call it, in the same order."""
    answers = distributed.all_gather_text("checkpoints/agreed", says, timeout_seconds=SLOW_SECONDS)
    if len(set(answers)) == 1:
        return says
    return _together({host: answer for host, answer in enumerate(answers) if answer})


def _together(says: dict[int, str]) -> str:
    return "; ".join(f"host {host}: {text}" for host, text in says.items())


def _tried(read: Callable[[], Any]) -> _Try:
    """Keeps nothing of a failure but what it says."""
    try:
        return _Try(read())
    except Exception as error:  # of many types: whatever files, formats, buckets and devices make of it
        reason = _reason(error)
        is_proof, says = is_proof_of_damage(reason), description.said(reason)
        is_there = not isinstance(reason, FileNotFoundError) and not _NOT_THERE.search(str(reason))
        return _Try(None, says, is_proof, is_lasting=is_proof and is_there)


def _reason(error: BaseException) -> BaseException:
    """The first of a chain: libraries wrap it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def is_proof_of_damage(error: BaseException) -> bool:
    """Whether an error speaks of the step, and not of whoever reads it."""
    if isinstance(error, (DamagedError, DamagedStreamError)):
        return True
    return isinstance(error, _PROOFS) and not _OF_THE_READER.search(str(error))
