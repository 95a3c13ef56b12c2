"""Reading a step on all hosts, and telling a step that is damaged from one that could not be read.

The one idea: damage must be proven. A checksum that differs, a file that is missing or bytes that do not decode speak
of the checkpoint; a full memory, a permission or a bucket that does not answer speak of the reader, and the same bytes
may be read by the next one. Only the first sort may put a step aside.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Callable
from typing import Any

from core import distributed
from core.checkpoints import description
from core.checkpoints.description import DamagedError
from core.checkpoints.streams import DamagedStreamError

SLOW_SECONDS = 3600  # for the slowest host: some have more to read than others, or a slower way to it
RETRY_SECONDS = 5.0  # before the one other try of a read that failed for no fault of the step

# What files and formats make of bytes that are wrong or missing: checksums, JSON, zarr, zstd.
_PROOFS = (
    DamagedError,
    DamagedStreamError,
    FileNotFoundError,
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    zlib.error,
)
# TensorStore raises ValueError for whatever befalls it, with its status in front. Local files that cannot be opened for
# want of descriptors are RESOURCE_EXHAUSTED, a disk's input or output error is UNKNOWN.
_OF_THE_READER = re.compile(
    r"\b(RESOURCE_EXHAUSTED|UNAVAILABLE|PERMISSION_DENIED|UNAUTHENTICATED|DEADLINE_EXCEEDED|ABORTED|CANCELLED|INTERNAL"
    r"|UNKNOWN)\b"
)


class UnreadableError(RuntimeError):
    """A step could not be read, which says nothing of what is in it."""


def on_all_hosts(read: Callable[[], Any]) -> tuple[Any, str]:
    """What this host read, or, where the step is damaged, what the hosts that found it so say; alike on all hosts.

    A read that fails for another reason is tried once more.

    Args:
      read: reads this host's part; waits for no other host.

    Raises:
      UnreadableError: on all hosts, where on any it failed for a reason that is no proof of damage.
    """
    found, says, is_proof = _tried(read)
    if says and not is_proof:
        print(f"reading a checkpoint failed, once more in {RETRY_SECONDS:g} s: {says}", flush=True)
        time.sleep(RETRY_SECONDS)
        found, says, is_proof = _tried(read)
    answer = json.dumps([says, is_proof])
    answers = distributed.all_gather_text("checkpoints/read", answer, timeout_seconds=SLOW_SECONDS)
    failed = [(host, *answer) for host, answer in enumerate(map(json.loads, answers)) if answer[0]]
    together = "; ".join(f"host {host}: {says}" for host, says, _ in failed)
    if not all(is_proof for *_, is_proof in failed):
        raise UnreadableError(together)
    return found, together


def _tried(read: Callable[[], Any]) -> tuple[Any, str, bool]:
    """What was read; what went wrong ("" for nothing), and whether that proves damage. Keeps nothing of a failure."""
    try:
        return read(), "", False
    except Exception as error:  # of many types: whatever files, formats, buckets and devices make of it
        reason = _reason(error)
        return None, description.said(reason), is_proof_of_damage(reason)


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
