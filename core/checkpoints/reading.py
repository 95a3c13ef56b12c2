"""Reads a step on all hosts, and distinguishes damaged checkpoints from failures to read them.

A wrong checksum, a missing file or bytes that cannot be decoded prove that the checkpoint is damaged. A lack of memory,
a missing permission or an unreachable bucket do not: a later attempt may succeed. Only proven damage may set a step
aside, and only after an older step was restored: if no step can be read, this revision or its libraries may be at
fault.

Arrays are read from the same files as by `arrays` and from no others, so that both agree on whether a step is intact.
Orbax's metadata of the tree and of shardings is not needed, because the checksummed description contains it; it may be
damaged or missing.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from core import distributed, paths  # isort: skip (paths decides how etils reaches buckets, before orbax imports it)
import jax
import numpy as np
import orbax.checkpoint as ocp

from core.checkpoints import description, leaves
from core.checkpoints.description import DamagedError

_PART = "state"  # subfolder of a step's folder
SLOW_SECONDS = 3600  # timeout for the slowest host: hosts may read different amounts at different speeds
RETRY_SECONDS = 5.0  # pause before the single retry of a read that may succeed later
_AHEAD_BYTES = 96 * 10**9  # limit on the host memory used for arrays that are read at the same time

# Exceptions that wrong or missing bytes cause in checksums, JSON, zarr and zstd.
_PROOFS = (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error)
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
    listed = _listed({host: says for host, (says, _) in failed.items()})
    if not all(is_proof for _, is_proof in failed.values()):
        raise UnreadableError(listed)
    return tried.found, listed


def agreed(says: str) -> str:
    """Returns the problems of all hosts as one text, on every host; "" without problems. All hosts must call it."""
    answers = distributed.all_gather_text("checkpoints/agreed", says, timeout_seconds=SLOW_SECONDS)
    if len(set(answers)) == 1:
        return says
    return _listed({host: answer for host, answer in enumerate(answers) if answer})


def _listed(says: Mapping[int, str]) -> str:
    return "; ".join(f"host {host}: {text}" for host, text in says.items())


def _tried(read: Callable[[], Any]) -> _Try:
    """Runs `read` and converts an exception to text, so that its traceback keeps nothing in memory."""
    try:
        return _Try(read())
    except Exception as error:  # files, formats, buckets and devices raise many types
        reason: BaseException = error
        while reason.__cause__ is not None:  # libraries wrap the first exception
            reason = reason.__cause__
        is_proof = is_proof_of_damage(reason)
        is_there = not isinstance(reason, FileNotFoundError) and not _NOT_THERE.search(str(reason))
        return _Try(None, description.said(reason), is_proof, is_lasting=is_proof and is_there)


def is_proof_of_damage(error: BaseException) -> bool:
    """Returns True if an error proves that the step is damaged, and not only that it could not be read."""
    if isinstance(error, DamagedError):
        return True
    return isinstance(error, _PROOFS) and not _OF_THE_READER.search(str(error))


def read_arrays(step_folder: paths.Path, abstract_state: Any) -> Any:
    """Returns a tree like `abstract_state` with the arrays of the same names; does not wait for other hosts.

    Args:
      step_folder: folder of a step.
      abstract_state: a tree of jax.ShapeDtypeStruct, each with the sharding to restore into.

    Raises:
      Exception: of many types, if files are damaged.
    """
    handler = ocp.type_handlers.ArrayHandler(array_metadata_store=None)
    context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
    wanted = leaves.by_name(abstract_state, joined_by=leaves.JOINED_BY)
    found: list[jax.Array] = []
    for names in _groups(wanted):
        infos = [
            ocp.type_handlers.ParamInfo(
                name=name, parent_dir=step_folder / _PART, is_ocdbt_checkpoint=True, ts_context=context
            )
            for name in names
        ]
        asked = [
            ocp.type_handlers.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
            for leaf in map(wanted.__getitem__, names)
        ]
        found += asyncio.run(handler.deserialize(infos, asked))
    return jax.tree.unflatten(jax.tree.structure(abstract_state), found)


def _groups(wanted: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the names, in order, in groups that fit into a host's memory on the way to its devices."""
    group: list[str] = []
    group_bytes = 0
    for name, leaf in wanted.items():
        own_bytes = math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        own_bytes *= len(leaf.sharding.addressable_devices)
        if group and group_bytes + own_bytes > _AHEAD_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += own_bytes
    if group:
        yield group
