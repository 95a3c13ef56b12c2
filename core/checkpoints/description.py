"""What a checkpoint says of itself: what its run was, what is in every array, and a checksum over both.

The one idea: the description is sealed. Whoever reads it knows whether it is what was written, before believing
anything that it says of the arrays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from core import paths

PART = "meta"  # of a step's folder
_FILE = "metadata"
_CONTENT, _CHECKSUM = "content", "checksum"  # beside what the caller keeps there


class DamagedError(RuntimeError):
    """What is in a checkpoint is not what was saved."""


class Description(NamedTuple):
    """A description that is as it was written.

    Attributes:
      meta: what the caller kept.
      content: kind and number of every leaf, `{"params/w": ["float32[8, 6]", 2864434397]}`.
    """

    meta: dict[str, Any]
    content: dict[str, list]


def sealed(meta: Mapping[str, Any], content: Mapping[str, list]) -> dict[str, Any]:
    """A description with its own checksum, as it comes back from JSON."""
    plain = json.loads(json.dumps({**meta, _CONTENT: dict(content)}))
    return {**plain, _CHECKSUM: _checksum(plain)}


def read(step_folder: paths.Path) -> Description:
    """The description of a step. Raises DamagedError, and whatever a file that cannot be read makes."""
    meta = json.loads((step_folder / PART / _FILE).read_text())
    if meta.get(_CHECKSUM) != _checksum(meta) or _CONTENT not in meta:
        raise DamagedError("the description is not what was saved")
    return Description({k: v for k, v in meta.items() if k not in (_CONTENT, _CHECKSUM)}, meta[_CONTENT])


def _checksum(meta: Mapping[str, Any]) -> str:
    plain = {k: v for k, v in meta.items() if k != _CHECKSUM}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
