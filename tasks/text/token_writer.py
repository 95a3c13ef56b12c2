"""Writes a token cache, and beside it the position from which an interrupted command continues.

What was converted is gathered until it is about one shard, and written; then `tokenizing.json` is, with the position in
the sources and the counts. What an interrupted process wrote after that is the same again, and is overwritten.
"""

import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import numpy as np

from core import units
from core.files import paths
from tasks.text import near_duplicates, token_cache
from tasks.text.near_duplicates import Seen
from tasks.text.token_cache import SPLITS, STARTED

_SECONDS = 10.0  # between two lines of progress

_COMMIT_TOKENS = token_cache.SHARD_TOKENS
SIGNATURES = "signatures"  # of the documents that others are compared with; removed from a complete cache
_AMOUNTS = ("documents", "tokens", "bytes")
FILTERED = ("shares_text", "near_duplicate")  # why documents are left out
REASONS = ("malformed", "blank", *FILTERED)


class Batch(NamedTuple):
    """Documents that are converted together; the rest describes the state after them."""

    texts: list[bytes]
    split: str | None  # None: by hash
    files: frozenset[str]  # that these documents are in
    position: Any  # from which to continue, as JSON
    malformed: int
    blank: int
    fraction: float


class Converted(NamedTuple):
    """The documents of a batch, N, in their order.

    Attributes:
      ids: ids of all documents.
      sizes: number of ids of each, int64[N].
      text_bytes: size of each as UTF-8, int64[N].
      checks: CRC-32 of the ids of each, uint32[N].
      is_validation: the split of each, bool[N].
      shares_text: whether each is left out because it shares text with an evaluation set, bool[N].
      signatures: signature of each document, uint32[N, HASHES]; None if near duplicates are kept.
      prompts: ids of each that have weight 0, int32[N]; None if all are learned.
    """

    ids: np.ndarray
    sizes: np.ndarray
    text_bytes: np.ndarray
    checks: np.ndarray
    is_validation: np.ndarray
    shares_text: np.ndarray
    signatures: np.ndarray | None = None
    prompts: np.ndarray | None = None


@dataclasses.dataclass
class Counts:
    """Progress of a job.

    Attributes:
      splits: documents, tokens and bytes of text that are written, and CRC-32 of the checks of the documents, by split.
      left_out: documents that are left out, with their tokens and bytes, by reason; of malformed and blank ones the
        number alone.
      fraction: share of the bytes of the sources that were read.
    """

    splits: dict[str, dict[str, Any]] = dataclasses.field(
        default_factory=lambda: {name: dict.fromkeys((*_AMOUNTS, "digest"), 0) for name in SPLITS}
    )
    left_out: dict[str, dict[str, int]] = dataclasses.field(
        default_factory=lambda: {name: dict.fromkeys(_AMOUNTS, 0) for name in REASONS}
    )
    fraction: float = 0.0

    def total(self, amount: str) -> int:
        """Returns the documents, tokens or bytes of both splits."""
        return sum(split[amount] for split in self.splits.values())


class Progress:
    """Prints a line of progress every 10 s."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._start, self._last = say, time.monotonic(), time.monotonic()
        self._before: tuple[int, float] | None = None  # tokens and fraction when this command began

    def __call__(self, counts: Counts) -> None:
        now, tokens = time.monotonic(), counts.total("tokens")
        if self._before is None:
            self._before, self._start = (tokens, counts.fraction), now
        if now - self._last < _SECONDS:
            return
        self._last = now
        rate = (tokens - self._before[0]) / max(now - self._start, 1e-3)
        done = counts.fraction - self._before[1]
        left = (1 - counts.fraction) * (now - self._start) / done if done > 0 else None
        self._say(
            f"{counts.fraction:6.1%}  {counts.total('documents'):,} documents  {tokens:,} tokens  "
            f"{rate:,.0f} tokens/s  ETA {units.clock(left) if left is not None else '–'}"
        )


class Writer:
    """Writes a cache, and after it the position up to which it is written.

    Attributes:
      counts: counts of what was added.
      has_written: whether documents are written.
    """

    def __init__(
        self,
        folder: paths.Path,
        about: Mapping[str, Any],
        counts: Counts,
        *,
        seen: Seen | None,
        check: Callable[[Set[str]], None],
    ) -> None:
        """Opens the arrays of a cache, or creates them.

        Args:
          folder: folder of the cache.
          about: the description of the cache, without counts.
          counts: counts of what is written already.
          seen: finds near duplicates; documents that are written already are added to it. None keeps all documents.
          check: called with the names of the files that were read before what they gave is written; raises an exception
            if they changed.
        """
        self._folder, self._about, self._check, self.counts, self._seen = folder, about, check, counts, seen
        self._position: Any = None
        self._read: set[str] = set()  # files whose documents are not written yet
        self._converted = 0  # ids since the last commit, also of documents that are left out
        self.has_written = bool(counts.total("documents"))
        if not self.has_written:
            self._save(None)  # before the arrays: what is in the folder is then ours
        self._splits = {
            name: {
                kind: _Array(
                    folder / name,
                    kind,
                    dtype,
                    written=counts.splits[name]["tokens" if kind == "tokens" else "documents"],
                )
                for kind, dtype in token_cache.array_dtypes(about).items()
            }
            for name in SPLITS
        }
        self._signatures = None
        if seen:
            documents = counts.total("documents") if about["by_hash"] else counts.splits["train"]["documents"]
            written = documents * near_duplicates.HASHES
            self._signatures = _Array(folder, SIGNATURES, "uint32", written=written)
            seen.add(self._signatures.read().reshape(-1, near_duplicates.HASHES))

    def add(self, batch: Batch, converted: Converted) -> None:
        """Adds the documents of a batch without those left out, and writes once there are enough."""
        counts, self._position = self.counts, batch.position
        self._read |= batch.files
        counts.fraction = batch.fraction
        counts.left_out["malformed"]["documents"] += batch.malformed
        counts.left_out["blank"]["documents"] += batch.blank
        repeats = np.zeros(len(converted.sizes), bool)
        if self._seen and self._signatures and batch.split != "validation":
            assert converted.signatures is not None
            compared = np.flatnonzero(~converted.shares_text)
            repeats[compared] = self._seen.repeats(converted.signatures[compared])
            self._signatures.add(converted.signatures[~repeats & ~converted.shares_text].ravel())
        for reason, chosen in {"shares_text": converted.shares_text, "near_duplicate": repeats}.items():
            _count(counts.left_out[reason], converted, chosen)
        kept = ~converted.shares_text & ~repeats
        for name, arrays in self._splits.items():
            self._add_to(counts.splits[name], arrays, converted, kept & (converted.is_validation == (name != "train")))
        self._converted += len(converted.ids)
        if self._converted >= _COMMIT_TOKENS:
            self.commit()

    def _add_to(
        self, counts: dict[str, int], arrays: Mapping[str, "_Array"], converted: Converted, chosen: np.ndarray
    ) -> None:
        checks, ends = converted.checks[chosen], counts["tokens"] + np.cumsum(converted.sizes[chosen])
        arrays["tokens"].add(converted.ids[np.repeat(chosen, converted.sizes)])
        arrays["ends"].add(ends)
        arrays["checks"].add(checks)
        if converted.prompts is not None:
            arrays["prompts"].add(converted.prompts[chosen])
        counts["digest"] = zlib.crc32(checks, counts["digest"])
        _count(counts, converted, chosen)

    def commit(self) -> None:
        """Writes what was added. Raises UserError if a file was changed meanwhile, and what `check` raises."""
        self._check(self._read)
        for array in [array for arrays in self._splits.values() for array in arrays.values()]:
            array.write()
        if self._signatures:
            self._signatures.write()
        if self._position is not None:
            self._save(self._position)
        self._read, self._converted, self.has_written = set(), 0, True

    def discard(self) -> None:
        """Removes what was written; if that is interrupted, another command begins anew."""
        self.counts = Counts()
        self._save(None)
        for name in (*SPLITS, SIGNATURES):
            if (arrays := self._folder / name).exists():
                arrays.rmtree()
        (self._folder / STARTED).unlink()

    def _save(self, position: Any) -> None:
        state = {**self._about, "counts": dataclasses.asdict(self.counts), "position": position}
        paths.write_text_atomically(self._folder / STARTED, json.dumps(state))


def _count(counts: dict[str, int], converted: Converted, chosen: np.ndarray) -> None:
    """Adds documents to counts."""
    found = (chosen.sum(), converted.sizes[chosen].sum(), converted.text_bytes[chosen].sum())
    for name, value in zip(_AMOUNTS, found, strict=True):
        counts[name] += int(value)


class _Array:
    """An array at whose end values are added; what was added is written by `write`."""

    def __init__(self, folder: paths.Path, name: str, dtype: str, *, written: int) -> None:
        """Opens an array, or creates it; `written` values are kept, and those after them overwritten."""
        self._array = token_cache.array(folder, name, dtype, writes=True, is_new=not written)
        self._written = written
        self._added: list[np.ndarray] = []

    def read(self) -> np.ndarray:
        """Returns the values that are written."""
        return self._array[: self._written].read().result()

    def add(self, values: np.ndarray) -> None:
        """Adds values at the end."""
        self._added.append(values)

    def write(self) -> None:
        """Writes what was added, and cuts off what an interrupted process wrote after it."""
        begin, self._written = self._written, self._written + sum(map(len, self._added))
        self._array = self._array.resize(exclusive_max=[self._written]).result()
        if self._written > begin:
            self._array[begin : self._written].write(np.concatenate(self._added)).result()
        self._added = []
