"""Writes a token cache, with the position from which an interrupted command continues.

Documents are collected until they fill about one shard, and then written. `tokenizing.json` is written after them, with
the position in the sources and the counts.
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

_SECONDS = 10.0  # seconds between two lines of progress

_COMMIT_TOKENS = token_cache.SHARD_TOKENS
SIGNATURES = "signatures"  # the array of signatures to compare with; removed from a complete cache
_AMOUNTS = ("documents", "tokens", "bytes")
FILTERED = ("shares_text", "near_duplicate")  # reasons why documents are left out
REASONS = ("malformed", "blank", *FILTERED)


class Batch(NamedTuple):
    """Documents that are converted together, and the state of reading after them.

    Attributes:
      texts: the documents as UTF-8.
      split: their split; None: the split of each is chosen by hash.
      files: the files that contain them.
      position: the position after them, as JSON values.
      malformed, blank: numbers of such documents left out since the batch before.
      fraction: share of the sources that was read, 0 to 1.
    """

    texts: list[bytes]
    split: str | None  # None: each document's split is chosen by hash
    files: frozenset[str]  # the files that contain these documents
    position: Any  # the position after these documents, as JSON values
    malformed: int
    blank: int
    fraction: float


class Converted(NamedTuple):
    """The N converted documents of a batch, in order.

    Attributes:
      ids: the ids of all documents, concatenated.
      sizes: number of ids of each document, int64 [N].
      text_bytes: size of each document as UTF-8, int64 [N]; 0: not known.
      checks: CRC-32 of the ids of each document, uint32 [N].
      is_validation: whether each document belongs to validation, bool [N].
      shares_text: whether each document shares text with an evaluation set, bool [N].
      signatures: the signature of each document, uint32 [N, HASHES]; None if near duplicates are not looked for.
      prompts: number of ids of each document with weight 0, int32 [N]; None if all ids have weight 1.
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
    """The progress of writing a cache.

    Attributes:
      splits: by split, the numbers of kept documents, tokens and bytes of text, and the CRC-32 of the checks.
      left_out: by reason, the numbers of documents, tokens and bytes that are left out.
      fraction: share of the sources that was read, 0 to 1.
    """

    splits: dict[str, dict[str, Any]] = dataclasses.field(
        default_factory=lambda: {name: dict.fromkeys((*_AMOUNTS, "digest"), 0) for name in SPLITS}
    )
    left_out: dict[str, dict[str, int]] = dataclasses.field(
        default_factory=lambda: {name: dict.fromkeys(_AMOUNTS, 0) for name in REASONS}
    )
    fraction: float = 0.0

    def total(self, amount: str) -> int:
        """Returns the number of documents, tokens or bytes (`amount`) of both splits."""
        return sum(split[amount] for split in self.splits.values())


class Progress:
    """Passes a line of progress to `say` at most every 10 s."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._start, self._last = say, time.monotonic(), time.monotonic()
        self._before: tuple[int, float] | None = None  # tokens and fraction at the start of this command

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
    """Writes a cache, then the position up to which it is written.

    Attributes:
      counts: counts of the added documents.
      has_written: whether documents were written, by this or an earlier command.
    """

    def __init__(
        self,
        folder: paths.Path,
        about: Mapping[str, Any],
        counts: Counts,
        *,
        position: Any,
        seen: Seen | None,
        check: Callable[[Set[str]], None],
    ) -> None:
        """Opens or creates the arrays.

        Args:
          folder: of the cache.
          about: what the cache is made of.
          counts: of what was converted before `position`.
          position: from which the conversion continues; None: the start.
          seen: finds near duplicates; None: they are kept.
          check: raises if one of the named files changed.
        """
        self._folder, self._about, self._check, self.counts, self._seen = folder, about, check, counts, seen
        self._position: Any = None
        self._read: set[str] = set()  # files whose documents are not written yet
        self._converted = 0  # ids since the last commit, including those of left-out documents
        self.has_written = bool(counts.total("documents"))
        if not self.has_written:
            self._save(position)  # first, so that later contents of the folder are known to be from this command
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
        """Adds the documents of a batch except those left out; writes when there are enough."""
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
        """Writes what was added, and the position."""
        self._check(self._read)
        for array in [array for arrays in self._splits.values() for array in arrays.values()]:
            array.write()
        if self._signatures:
            self._signatures.write()
        if self._position is not None:
            self._save(self._position)
        self._read, self._converted, self.has_written = set(), 0, True

    def discard(self) -> None:
        """Removes everything written."""
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
    found = (chosen.sum(), converted.sizes[chosen].sum(), converted.text_bytes[chosen].sum())
    for name, value in zip(_AMOUNTS, found, strict=True):
        counts[name] += int(value)


class _Array:
    def __init__(self, folder: paths.Path, name: str, dtype: str, *, written: int) -> None:
        """Opens or creates an array; the first `written` values are kept, later ones are overwritten."""
        self._array = token_cache.array(folder, name, dtype, writes=True, is_new=not written)
        self._written = written
        self._added: list[np.ndarray] = []

    def read(self) -> np.ndarray:
        return self._array[: self._written].read().result()

    def add(self, values: np.ndarray) -> None:
        self._added.append(values)

    def write(self) -> None:
        """Writes the appended values, and cuts off what an interrupted process wrote after them."""
        begin, self._written = self._written, self._written + sum(map(len, self._added))
        self._array = self._array.resize(exclusive_max=[self._written]).result()
        if self._written > begin:
            self._array[begin : self._written].write(np.concatenate(self._added)).result()
        self._added = []
