"""Checkpoint metadata: the step, what its run was, the content of every array and stream, and a checksum over it all.

The checksum is verified before anything else in the metadata is used. Arrays and positions in the data that belong to
another step are found by comparing them with the metadata, even though each of them is intact by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from core import listing, paths
from core.checkpoints import streams

PART = "meta"  # of a step's folder
_FILE = "metadata"
_STEP, _CONTENT, _STREAMS, _CHECKSUM = "step", "content", "streams", "checksum"  # beside what the caller keeps there


class DamagedError(RuntimeError):
    """What is in a checkpoint is not what was saved."""


class Description(NamedTuple):
    """Metadata whose checksum is right.

    Attributes:
      meta: what the caller kept.
      content: kind and number of every leaf, `{"params/w": ["float32[8, 6]", 2864434397]}`.
      streams: the SHA-256 of each position in the data, of all hosts, by stream. None in checkpoints of earlier
        revisions, which recorded the names alone.
    """

    meta: dict[str, Any]
    content: dict[str, list]
    streams: dict[str, str | None]

    @property
    def seals_positions(self) -> bool:
        """Whether a position of another step or stream would be noticed."""
        return None not in self.streams.values()

    def positions(self, found: Mapping[str, bytes]) -> dict[str, bytes]:
        """The positions that were saved with this step, out of those that were found.

        Raises:
          FileNotFoundError: some are missing.
          DamagedError: some are of another step or stream.
        """
        if gone := sorted(self.streams.keys() - found.keys()):
            raise FileNotFoundError(f"of {len(self.streams)} positions in the data {', '.join(gone)} are missing")
        own = {name: found[name] for name in self.streams}
        wrong = [name for name, said in self.streams.items() if said not in (None, streams.digest(own[name]))]
        if wrong:
            listed = ", ".join(listing.shortened(wrong, most=3))
            raise DamagedError(
                f"{len(wrong)} of {len(self.streams)} positions in the data are of another step or stream: {listed}"
            )
        return own


def sealed(
    meta: Mapping[str, Any], *, step: int, content: Mapping[str, list], streams: Mapping[str, str]
) -> dict[str, Any]:
    """Metadata with its own checksum, as it comes back from JSON.

    Args:
      meta: what the caller keeps.
      step: that is saved.
      content: of every leaf.
      streams: the digest of every host's positions, by stream.
    """
    plain = json.loads(json.dumps({**meta, _STEP: step, _CONTENT: dict(content), _STREAMS: dict(streams)}))
    return {**plain, _CHECKSUM: _checksum(plain)}


def read(step_folder: paths.Path) -> Description:
    """The metadata of a step, of this revision or an earlier one.

    Raises:
      DamagedError: its checksum is wrong, or it is of another step than the folder is named after.
      Exception: of many types, whatever a file that cannot be read makes.
    """
    meta = json.loads((step_folder / PART / _FILE).read_text())
    if meta.get(_CHECKSUM) != _checksum(meta) or not {_CONTENT, _STREAMS} <= meta.keys():
        raise DamagedError("the description is not what was saved")
    if str(step := meta.get(_STEP, step_folder.name)) != step_folder.name and step_folder.name.isdecimal():
        raise DamagedError(f"the description is that of step {step}")
    own = {k: v for k, v in meta.items() if k not in (_STEP, _CONTENT, _STREAMS, _CHECKSUM)}
    said = meta[_STREAMS] if isinstance(meta[_STREAMS], dict) else dict.fromkeys(meta[_STREAMS])
    return Description(own, meta[_CONTENT], said)


def _checksum(meta: Mapping[str, Any]) -> str:
    plain = {k: v for k, v in meta.items() if k != _CHECKSUM}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def said(error: BaseException) -> str:
    """The first line of what an error says, which may be hundreds long; of a long line where it begins and ends."""
    line = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}: {line if len(line) < 500 else f'{line[:200]} … {line[-250:]}'}"
