"""What a checkpoint says of itself: what its run was, what is in every array, and a checksum over both.

The one idea: the description is sealed. Whoever reads it knows whether it is what was written, before believing
anything that it says of the arrays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from core import paths

PART = "meta"  # of a step's folder
_FILE = "metadata"
_CONTENT, _STREAMS, _CHECKSUM = "content", "streams", "checksum"  # beside what the caller keeps there


class DamagedError(RuntimeError):
    """What is in a checkpoint is not what was saved."""


class Description(NamedTuple):
    """A description that is as it was written.

    Attributes:
      meta: what the caller kept.
      content: kind and number of every leaf, `{"params/w": ["float32[8, 6]", 2864434397]}`.
      streams: the names of all hosts' positions in the data.
    """

    meta: dict[str, Any]
    content: dict[str, list]
    streams: list[str]

    def missing(self, streams: Iterable[str]) -> str:
        """What is wrong with the positions that were found; "" where it is all of them."""
        gone = sorted(set(self.streams) - set(streams))
        return f"of {len(self.streams)} positions in the data {', '.join(gone)} are missing" if gone else ""


def sealed(meta: Mapping[str, Any], content: Mapping[str, list], streams: Iterable[str]) -> dict[str, Any]:
    """A description with its own checksum, as it comes back from JSON."""
    plain = json.loads(json.dumps({**meta, _CONTENT: dict(content), _STREAMS: sorted(streams)}))
    return {**plain, _CHECKSUM: _checksum(plain)}


def read(step_folder: paths.Path) -> Description:
    """The description of a step. Raises DamagedError, and whatever a file that cannot be read makes."""
    meta = json.loads((step_folder / PART / _FILE).read_text())
    if meta.get(_CHECKSUM) != _checksum(meta) or not {_CONTENT, _STREAMS} <= meta.keys():
        raise DamagedError("the description is not what was saved")
    own = {k: v for k, v in meta.items() if k not in (_CONTENT, _STREAMS, _CHECKSUM)}
    return Description(own, meta[_CONTENT], meta[_STREAMS])


def _checksum(meta: Mapping[str, Any]) -> str:
    plain = {k: v for k, v in meta.items() if k != _CHECKSUM}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def said(error: BaseException) -> str:
    """The first line of what an error says, which may be hundreds long; of a long line where it begins and ends."""
    line = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}: {line if len(line) < 500 else f'{line[:200]} … {line[-250:]}'}"
