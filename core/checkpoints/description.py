"""Checkpoint metadata: step, run, fingerprints of all arrays and data positions, and a checksum of the metadata.

The checksum is verified before the metadata is used. Comparison with the metadata also detects arrays and data
positions of another step, which are intact by themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from core import paths, units
from core.checkpoints import streams

PART = "meta"  # subfolder of a step's folder
_FILE = "metadata"
_STEP, _CONTENT, _STREAMS, _CHECKSUM = "step", "content", "streams", "checksum"  # keys added to the caller's


class DamagedError(RuntimeError):
    """The content of a checkpoint differs from what was saved."""


class Description(NamedTuple):
    """Metadata with a verified checksum.

    Attributes:
      meta: the caller's metadata.
      content: dtype, shape and fingerprint of every leaf, `{"params/w": ["float32[8, 6]", 2864434397]}`.
      streams: the SHA-256 of the data position of each stream, of all hosts. None in checkpoints of earlier revisions,
        which recorded only the names.
    """

    meta: dict[str, Any]
    content: dict[str, list]
    streams: dict[str, str | None]

    @property
    def seals_positions(self) -> bool:
        """Returns whether the metadata has digests of data positions, which detect those of another step or stream."""
        return None not in self.streams.values()

    def positions(self, found: Mapping[str, bytes]) -> dict[str, bytes]:
        """Selects the data positions that were saved with this step from those that were found.

        Raises:
          FileNotFoundError: positions are missing.
          DamagedError: positions belong to another step or stream.
        """
        if gone := sorted(self.streams.keys() - found.keys()):
            raise FileNotFoundError(f"of {len(self.streams)} positions in the data {', '.join(gone)} are missing")
        own = {name: found[name] for name in self.streams}
        wrong = [name for name, said in self.streams.items() if said not in (None, streams.digest(own[name]))]
        if wrong:
            listed = ", ".join(units.shortened(wrong, most=3))
            raise DamagedError(
                f"{len(wrong)} of {len(self.streams)} positions in the data are of another step or stream: {listed}"
            )
        return own


def sealed(
    meta: Mapping[str, Any], *, step: int, content: Mapping[str, list], streams: Mapping[str, str]
) -> dict[str, Any]:
    """Returns metadata with its checksum, converted to JSON types.

    Args:
      meta: the caller's metadata.
      step: the step that is saved.
      content: dtype, shape and fingerprint of every leaf.
      streams: digests of the data positions of all hosts, by stream.
    """
    plain = json.loads(json.dumps({**meta, _STEP: step, _CONTENT: dict(content), _STREAMS: dict(streams)}))
    return {**plain, _CHECKSUM: _checksum(plain)}


def read(step_folder: paths.Path) -> Description:
    """Reads the metadata of a step, saved by this revision or an earlier one.

    Raises:
      DamagedError: the checksum is wrong, or the metadata belongs to another step than the folder's name.
      Exception: of many types, if the file cannot be read.
    """
    meta = json.loads((step_folder / PART / _FILE).read_text())
    if meta.get(_CHECKSUM) != _checksum(meta) or not {_CONTENT, _STREAMS} <= meta.keys():
        raise DamagedError("the description is not what was saved")
    if str(step := meta.get(_STEP, step_folder.name)) != step_folder.name and step_folder.name.isdecimal():
        raise DamagedError(f"the description belongs to step {step}")
    own = {k: v for k, v in meta.items() if k not in (_STEP, _CONTENT, _STREAMS, _CHECKSUM)}
    said = meta[_STREAMS] if isinstance(meta[_STREAMS], dict) else dict.fromkeys(meta[_STREAMS])
    return Description(own, meta[_CONTENT], said)


def _checksum(meta: Mapping[str, Any]) -> str:
    plain = {k: v for k, v in meta.items() if k != _CHECKSUM}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def said(error: BaseException) -> str:
    """Returns type and first line of an error's message; of a long line the beginning and the end."""
    line = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}: {line if len(line) < 500 else f'{line[:200]} … {line[-250:]}'}"
