"""Records of compiled candidates: one small JSON object for each program.

The key of a record is a hash of the program's identity and of the versions of jax, jaxlib and libtpu; in a user's
cache, also of Renga's sources.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from core import versions
from core.files import paths
from core.slices import GIB
from parallel.planning.cost import StepTime

WORKSPACE = Path(__file__).resolve().parent.parent.parent
COMMITTED = WORKSPACE / "launch" / "plan" / "compiled"
_FORMAT = 2  # of a record; another number makes all existing records unknown
_SOURCE_FOLDERS = ("core", "models", "parallel")
# Folders and modules that only read programs, choose among them, or run beside one.
_UNRELATED = {"checkpoints", "health", "training", "agreement", "arithmetic", "bookkeeping", "calibration"}
_UNRELATED |= {"candidate_metrics", "candidates", "errors", "hbm_allocations", "library_noise", "lints"}
_UNRELATED |= {"first_difference", "host_memory", "metrics", "model_trace", "prediction", "recording", "records"}
_UNRELATED |= {"rendezvous", "report", "roofline", "generation", "supervise"}
_UNRELATED |= {"compiled_records", "selection", "sharded_state", "units", "versions"}
_UNRELATED |= {"decoding", "generation_cost", "sampling"}

COMPILED, TOO_MUCH, REFUSED, FAILED = "compiled", "too much HBM", "refused", "failed"


@dataclasses.dataclass(frozen=True)
class Record:
    """The result of compiling one candidate.

    Attributes:
      status: COMPILED, TOO_MUCH, REFUSED, or FAILED (never stored).
      needed_bytes: HBM of a chip at the peak, or what the compiler says is needed if it does not fit; else 0.
      needed_is_bound: whether a compiled step may need less than `needed_bytes`.
      state_bytes: state and batch, included in `needed_bytes`.
      time: time of a step; None unless the status is COMPILED.
      made_with: versions, digests of sources and program, git revision.
      is_committed: whether it is a committed record, not one of a user's cache.
    """

    status: str
    reason: str = ""
    needed_bytes: float = 0.0
    needed_is_bound: bool = False
    state_bytes: float = 0.0
    time: StepTime | None = None
    compile_seconds: float = 0.0
    warnings: Sequence[str] = ()
    made_with: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_committed: bool = False

    def within(self, usable_bytes: float) -> Record:
        """Returns the record, with status TOO_MUCH if it needs more than `usable_bytes`."""
        if self.status != COMPILED or self.needed_bytes <= usable_bytes:
            return self
        reason = f"needs {self.needed_bytes / GIB:.2f}GiB of {usable_bytes / GIB:.2f}GiB, though it compiled"
        return dataclasses.replace(self, status=TOO_MUCH, reason=reason, time=None)

    def as_json(self) -> dict[str, Any]:
        """Returns the record as JSON values, without `is_committed`, and without `needed_is_bound` if it is False."""
        plain = vars(self) | {"warnings": list(self.warnings), "time": self.time and self.time.as_json()}
        del plain["is_committed"]
        return plain if self.needed_is_bound else {k: v for k, v in plain.items() if k != "needed_is_bound"}


def from_json(plain: Mapping[str, Any], *, is_committed: bool = False) -> Record:
    """Converts the result of `Record.as_json` back to a record."""
    time = StepTime.from_json(plain["time"]) if plain["time"] else None
    return Record(**{**plain, "time": time, "warnings": tuple(plain["warnings"])}, is_committed=is_committed)


@functools.cache
def sources_digest() -> str:
    """Returns a digest of the source files that can affect a program or its record."""
    digest = hashlib.sha256()
    for path in sorted(p for folder in _SOURCE_FOLDERS for p in (WORKSPACE / folder).rglob("*.py")):
        if not _UNRELATED & {path.stem, path.parent.name}:
            digest.update(path.relative_to(WORKSPACE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def record_key(text: str, *, sources: str = "") -> str:
    """Returns the key of a record, for the installed versions of jax, jaxlib and libtpu.

    `text` is the program's identity; `sources` is `sources_digest()`, or "" for committed records.
    """
    installed = json.dumps(versions.installed(versions.COMPILER), sort_keys=True)
    return hashlib.sha256("\n".join([str(_FORMAT), text, installed, sources]).encode()).hexdigest()[:24]


def committed(folder: Path = COMMITTED) -> dict[str, Any]:
    """Returns the committed records of plans, as JSON values, by `record_key`."""
    return {k: v for file in sorted(folder.glob("*.json")) for k, v in json.loads(file.read_text())["records"].items()}


class Store:
    """Looks up records: first those of this user, then the committed ones.

    Attributes:
      folder: the user's cache, by default `$XDG_CACHE_HOME/renga/plans` or `~/.cache/renga/plans`.
    """

    def __init__(self, folder: Path | None = None):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = folder or home / "renga" / "plans"
        self._committed = committed(COMMITTED)
        self._unreadable: set[Path] = set()

    def find(self, text: str) -> Record | None:
        """Returns the record of the program with this identity, or None."""
        mine = self._read(self.path(text))
        if mine is not None:
            return mine
        plain = self._committed.get(record_key(text))
        return from_json(plain, is_committed=True) if plain else None

    def path(self, text: str) -> Path:
        """Returns the file of a program's record in the user's cache."""
        return self.folder / f"{record_key(text, sources=sources_digest())}.json"

    def _read(self, file: Path) -> Record | None:
        try:
            return from_json(json.loads(file.read_text()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if file not in self._unreadable:
                self._unreadable.add(file)
                cause = f"{type(error).__name__}: {error}"
                print(f"warning: {file} is not a valid record ({cause}); treated as missing", file=sys.stderr)
            return None


def text_of(plain: Mapping[str, Any]) -> str:
    """Returns the text of a record's file: JSON with sorted keys."""
    return json.dumps(plain, indent=1, sort_keys=True) + "\n"


def write(path: Path, plain: Mapping[str, Any]) -> None:
    """Writes a record atomically: a reader sees the old file or the new one."""
    paths.write_text_atomically(path, text_of(plain))


def commit(path: Path, found: Iterable[tuple[str, Record]]) -> None:
    """Writes records to a file to be committed, which is replaced, without FAILED ones.

    `found` has pairs of a program's identity and its record.
    """
    kept = ((text, record) for text, record in found if record.status != FAILED)
    write(path, {"records": {record_key(text): record.as_json() for text, record in kept}})
