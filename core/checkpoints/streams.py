"""Saves the position of each data stream in a checkpoint: one file per stream, written by the host that owns it.

Every file starts with the SHA-256 of the rest. The checkpoint's metadata records the same digest by stream
(`core.checkpoints.description`), so that an intact file of another step or stream is refused too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import urllib.parse
from collections.abc import Mapping
from typing import Any

from core import paths  # isort: skip (paths decides how etils reaches buckets, before orbax imports it)
import orbax.checkpoint as ocp

SUFFIX = ".bin"
_DIGEST_BYTES = 32


class DamagedStreamError(RuntimeError):
    """The content of a stream's file differs from what was written."""


class StreamsHandler(ocp.AsyncCheckpointHandler):
    """An Orbax handler that writes the streams of this host, one file each, and reads those of all hosts."""

    async def async_save(self, directory: Any, args: StreamsSave) -> list[ocp.future.Future]:
        """Starts writing; Orbax may create the folder only after this returns."""
        return [ocp.future.CommitFutureAwaitingContractedSignals(self._write(directory, args.streams), name="streams")]

    async def _write(self, directory: Any, streams: Mapping[str, bytes]) -> None:
        for name, position in streams.items():
            file = directory / (urllib.parse.quote(name, safe="") + SUFFIX)
            file.write_bytes(_digest(position) + position)

    def save(self, directory: Any, args: StreamsSave) -> None:
        """Is required by the interface but not used: `Checkpoints` always saves in the background."""
        raise NotImplementedError("streams are saved by async_save")

    def restore(self, directory: Any, args: StreamsRestore | None = None) -> dict[str, bytes]:
        """Returns all streams of the step, by name. Raises DamagedStreamError if one is damaged."""
        del args
        files = sorted(directory.glob(f"*{SUFFIX}")) if directory.exists() else []
        return {urllib.parse.unquote(file.name.removesuffix(SUFFIX)): _read(file) for file in files}

    def metadata(self, directory: Any) -> None:
        """Returns None: streams have no metadata of their own."""


@ocp.args.register_with_handler(StreamsHandler, for_save=True)
@dataclasses.dataclass
class StreamsSave(ocp.args.CheckpointArgs):
    """The arguments of a save: the positions of this host's streams, by name."""

    streams: Mapping[str, bytes]


@ocp.args.register_with_handler(StreamsHandler, for_restore=True)
@dataclasses.dataclass
class StreamsRestore(ocp.args.CheckpointArgs):
    """The arguments of a restore: none. Orbax requires both kinds to be registered."""


def digest(position: bytes) -> str:
    """Returns the digest of a position that the metadata of a checkpoint records."""
    return _digest(position).hex()


def _digest(position: bytes) -> bytes:
    return hashlib.sha256(position).digest()


def _read(file: paths.Path) -> bytes:
    content = file.read_bytes()
    said, position = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if _digest(position) != said:
        raise DamagedStreamError(f"the position in {file.name} is damaged: its content is not what was written")
    return position
