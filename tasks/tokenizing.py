"""Converts documents to ids in several processes, and writes them as a token cache (`tasks/token_cache.py`).

One process reads documents in order and writes ids in the same order; the others convert batches of about 1 MiB. About
every 8 million ids it writes what it has, and then `tokenizing.json`: the position in the sources, and the counts. So a
command that was interrupted continues from there. What was written after it is the same again, and is overwritten.
"""

import collections
import concurrent.futures
import concurrent.futures.process
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from core import paths, units
from core.errors import UserError
from core.types import can
from tasks import token_cache, vocabularies
from tasks.catalogue import Tfds
from tasks.decontamination import Excluded
from tasks.document_streams import with_end
from tasks.documents import MalformedDocument, is_validation
from tasks.huggingface import HuggingFace
from tasks.ids import EncodesBatches, Vocabulary
from tasks.text_files import TextFiles
from tasks.token_cache import COMPLETE, FORMAT, SPLITS, STARTED
from tasks.tokenizing_job import Job

_BATCH_BYTES, _BATCH_DOCUMENTS = 2**20, 4096
_COMMIT_TOKENS = token_cache.SHARD_TOKENS
_MOST_REPORTED = 10  # documents that are skipped and named


class MeasuresProgress(Protocol):
    """A reader that knows how much of its part it has read."""

    def fraction(self) -> float:
        """Returns the share of the part, 0 to 1."""


@dataclasses.dataclass
class Counts:
    """Progress of a job.

    Attributes:
      documents, tokens: written, by split.
      digest: CRC-32 of the checks of the documents, by split.
      skipped: malformed documents.
      blank: documents that contain only white space.
      excluded: documents for training that share text with an evaluation set.
      fraction: share of the bytes of the sources that were read.
    """

    documents: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    tokens: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    digest: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    skipped: int = 0
    blank: int = 0
    excluded: int = 0
    fraction: float = 0.0


class _Batch(NamedTuple):
    """Documents that are converted together; the rest describes the state after them."""

    texts: list[bytes]
    split: str | None  # None: by hash
    files: frozenset[str]  # that these documents are in
    position: tuple[int, Any]  # part, and offset in it
    skipped: int
    blank: int
    fraction: float


class _Converted(NamedTuple):
    """The ids of the documents of a batch that belong to one split."""

    ids: np.ndarray
    sizes: np.ndarray
    checks: np.ndarray


def run(
    job: Job, *, processes: int, say: Callable[[str], None], report: Callable[[Counts], None], check: Callable[[], None]
) -> Mapping[str, Any]:
    """Writes the cache, or the rest of it, and returns the content of its `cache.json`.

    Args:
      job: what to convert, and where to.
      processes: that convert.
      say: receives messages.
      report: receives the progress after every batch.
      check: raises an exception if another process has taken over the folder.

    Raises:
      UserError: the sources or the vocabulary cannot be read, or differ from those with which the cache was begun.
    """
    excluded = job.excluded()
    vocabulary, source, folder = vocabularies.named(job.vocabulary), job.source(), paths.resolve(job.out)
    is_lenient = job.skip_bad and isinstance(source, TextFiles)
    found = source.pattern_problems() if is_lenient else source.problems()
    if found := [*found, *vocabulary.problems()]:
        raise UserError("\n".join(dict.fromkeys(job.as_flags(problem) for problem in found)))
    files = _listed(source)
    dtype = "uint16" if vocabulary.size <= 2**16 else "uint32"
    made = {"name": job.vocabulary, "described": vocabulary.describe(), "hash": vocabulary.hash}
    begun = {"format": FORMAT, "vocabulary": made, "dtype": dtype, "field": job.field, "by_hash": not job.validation}
    begun["excluded"] = excluded.digest if excluded else ""
    if (done := _read(folder / COMPLETE)) is not None:
        _require_same(job.out, done, begun, files)
        say(f"{job.out} is complete")
        return done
    with _pool(job.vocabulary, excluded, processes) as pool:
        state = _read(folder / STARTED)
        if state is None:
            say(f"hashing {units.counted(len(files), 'file')}")
            hashes = pool.map(_digest, files)
            files = [entry | {"sha256": digest} for entry, digest in zip(files, hashes, strict=True)]
            state = {"counts": dataclasses.asdict(Counts()), "position": (0, None)}
        else:
            _require_same(job.out, state, begun, files)
            versions = {entry["path"]: entry["version"] for entry in files}
            files = [entry | {"version": versions[entry["path"]]} for entry in state["sources"]]
            say(f"continuing after {units.counted(sum(state['counts']['documents'].values()), 'document')}")
        progress = _Progress(folder, {**begun, "sources": files}, Counts(**state["counts"]), check)
        batches = _batches(job, source, files, tuple(state["position"]), say)
        for batch, converted, left_out in _in_order(pool, batches, most=2 * processes + 2):
            progress.add(batch, converted, left_out)
            report(progress.counts)
        progress.commit()
    counts = progress.counts
    left_out = {"skipped": counts.skipped, "blank": counts.blank, "left_out": counts.excluded}
    about = {**begun, "sources": files, **left_out} | {
        "splits": {
            name: {"documents": counts.documents[name], "tokens": counts.tokens[name], "digest": counts.digest[name]}
            for name in SPLITS
        },
    }
    paths.write_text_atomically(folder / COMPLETE, json.dumps(about, indent=1))
    (folder / STARTED).unlink(missing_ok=True)
    return about


def _read(file: paths.Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}; remove {file.parent}, and start again") from error


# Sources


def _listed(source: TextFiles | Tfds | HuggingFace) -> list[dict[str, Any]]:
    """Returns path, size and version of each file; of a dataset, its name."""
    if not isinstance(source, TextFiles):
        return [{"path": source.describe(), "bytes": 0, "version": None}]
    files = {file.path: file.size_bytes for split in SPLITS for file in source.files(split)}
    return [{"path": path, "bytes": size, "version": paths.file_version(path)} for path, size in files.items()]


def _digest(entry: Mapping[str, Any]) -> str | None:
    """Returns the SHA-256 of a local file; an object's generation identifies its content."""
    if paths.is_remote(entry["path"]) or entry["version"] is None:
        return None
    with pathlib.Path(entry["path"]).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_same(out: str, saved: Mapping[str, Any], begun: Mapping[str, Any], files: Sequence[Any]) -> None:
    """Raises UserError if a cache was begun with other settings or sources."""
    if saved["vocabulary"]["hash"] != begun["vocabulary"]["hash"]:
        raise UserError(
            f"{out} was begun with {saved['vocabulary']['described']}, and --vocabulary is now "
            f"{begun['vocabulary']['described']}: give another --out, or remove it"
        )
    if saved["excluded"] != begun["excluded"]:
        raise UserError(
            f"{out} was begun with another --exclude, or other lengths of what it compares: give another --out"
        )
    for key in ("format", "dtype", "field", "by_hash"):
        if saved[key] != begun[key]:
            name = {"by_hash": "the split by hash (without --validation)", "field": "--field"}.get(key, key)
            raise UserError(f"{out} was begun with {name} = {saved[key]!r}, now {begun[key]!r}: give another --out")
    _require_unchanged(out, saved["sources"], files)


def _require_unchanged(out: str, before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> None:
    """Raises UserError, which names a file, if the sources differ; a copy of the same content is the same."""
    found, known = ({entry["path"]: entry for entry in entries} for entries in (now, before))
    changed = [f"{path} was added" for path in found.keys() - known.keys()]
    for path, entry in known.items():
        if path not in found:
            changed.append(f"{path} is gone")
        elif found[path]["bytes"] != entry["bytes"]:
            changed.append(f"{path} has {found[path]['bytes']:,} bytes, before {entry['bytes']:,}")
        elif _differs(entry, found[path]["version"]):
            changed.append(f"{path} has other content")
    if changed:
        raise UserError(
            f"the sources of {out} changed since it was begun: {'; '.join(sorted(changed)[:3])}"
            f"{f' and {len(changed) - 3} more' if len(changed) > 3 else ''}. Restore them, or give another --out"
        )


def _differs(entry: Mapping[str, Any], version: str) -> bool:
    """Returns whether a file has other content than recorded; a local one is hashed if it was written since."""
    return version != entry["version"] and (entry["sha256"] is None or _digest(entry) != entry["sha256"])


def _batches(
    job: Job,
    source: TextFiles | Tfds | HuggingFace,
    files: Sequence[Mapping[str, Any]],
    position: tuple[int, Any],
    say: Callable[[str], None],
) -> Iterator[_Batch]:
    """Reads the documents from a position on."""
    parts = [
        (split if job.validation else None, part)
        for split in (SPLITS if job.validation else ("train",))
        for part in source.parts(split, 1).parts
    ]
    bytes_of = {entry["path"]: entry["bytes"] for entry in files}
    names = [part.path if isinstance(source, TextFiles) else source.describe() for _, part in parts]
    sizes = [bytes_of[name] or 1 for name in names]
    texts: list[bytes] = []
    read: set[str] = set()
    size = skipped = blank = named = 0
    number, offset = position
    while number < len(parts):
        split, part = parts[number]
        reader = part.open(offset)
        is_end = False
        while not is_end:
            try:
                text = next(reader, None)
            except MalformedDocument as error:
                if not job.skip_bad:
                    raise UserError(
                        f"{job.as_flags(str(error))}. Correct it, or skip such documents with --skip-bad"
                    ) from error
                skipped, named = skipped + 1, named + 1
                if named <= _MOST_REPORTED:
                    say(f"skipped: {error}{' (further ones are only counted)' if named == _MOST_REPORTED else ''}")
                continue
            is_end = text is None
            if text:
                texts.append(text)
                read.add(names[number])
                size += len(text)
            elif not is_end:
                blank += 1
            closes = is_end and (number + 1 == len(parts) or parts[number + 1][0] != split)
            if closes or size >= _BATCH_BYTES or len(texts) >= _BATCH_DOCUMENTS:
                position = (number + 1, None) if is_end else (number, reader.offset())
                within = 1.0 if is_end else reader.fraction() if can(reader, MeasuresProgress) else 0.0
                fraction = (sum(sizes[:number]) + sizes[number] * within) / max(sum(sizes), 1)
                yield _Batch(texts, split, frozenset(read), position, skipped, blank, fraction)
                texts, read, size, skipped, blank = [], set(), 0, 0, 0
        number, offset = number + 1, None


# Converting


def _pool(vocabulary: str, excluded: Excluded | None, processes: int) -> concurrent.futures.ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of TensorStore
    return concurrent.futures.ProcessPoolExecutor(processes, context, _open, (vocabulary, excluded))


_vocabulary: Vocabulary  # of a process that converts
_excluded: Excluded | None


def _open(vocabulary: str, excluded: Excluded | None) -> None:
    """Prepares a process that converts; Ctrl-C reaches only the one that writes, with which this one ends."""
    global _vocabulary, _excluded
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _vocabulary, _excluded = vocabularies.named(vocabulary), excluded


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # it was killed: nobody takes what this process converts


def _convert(texts: list[bytes], split: str | None) -> tuple[dict[str, _Converted], int]:
    """Converts documents, in a process of the pool; also returns the number of those that are left out."""
    vocabulary, decoded = _vocabulary, [text.decode() for text in texts]
    splits = [split or ("validation" if is_validation(text) else "train") for text in texts]
    if _excluded:
        kept = [name != "train" or not _excluded.shares_text(text) for name, text in zip(splits, decoded, strict=True)]
        decoded, splits = list(itertools.compress(decoded, kept)), list(itertools.compress(splits, kept))
    if can(vocabulary, EncodesBatches):
        every = vocabulary.encode_batch(decoded)
    else:
        every = [vocabulary.encode(text) for text in decoded]
    dtype = np.uint16 if vocabulary.size <= 2**16 else np.uint32
    found: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
    for name, ids in zip(splits, every, strict=True):
        found[name].append(with_end(ids, vocabulary, where=vocabulary.describe).astype(dtype))
    converted = {
        name: _Converted(
            np.concatenate(arrays),
            np.array([len(ids) for ids in arrays], np.int64),
            np.array([zlib.crc32(ids) for ids in arrays], np.uint32),
        )
        for name, arrays in found.items()
        if arrays
    }
    return converted, len(texts) - len(decoded)


def _in_order(
    pool: concurrent.futures.ProcessPoolExecutor, batches: Iterator[_Batch], *, most: int
) -> Iterator[tuple[_Batch, dict[str, _Converted], int]]:
    """Yields each batch, its ids and the number of documents left out, in order.

    At most so many are converted or wait at a time.
    """
    waiting: collections.deque[tuple[_Batch, concurrent.futures.Future]] = collections.deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_convert, batch.texts, batch.split)))
            if len(waiting) == most:
                yield _finished(*waiting.popleft())
        while waiting:
            yield _finished(*waiting.popleft())
    except concurrent.futures.process.BrokenProcessPool as error:
        raise UserError(
            "a process that converts text ended, often for lack of memory: run the same command again with fewer "
            "--processes; it continues"
        ) from error
    finally:
        for _, future in waiting:
            future.cancel()


def _finished(batch: _Batch, future: concurrent.futures.Future) -> tuple[_Batch, dict[str, _Converted], int]:
    """Returns a batch, its ids and the number of documents left out.

    Raises:
      UserError: the vocabulary refuses a document; names the files.
    """
    try:
        return batch, *future.result()
    except UserError as error:
        raise UserError(
            f"in a document of {', '.join(units.shortened(sorted(batch.files), most=3))}: {error}"
        ) from error


class _Progress:
    """Writes a cache, and after it the position up to which it is written.

    Attributes:
      counts: of what was added.
    """

    def __init__(self, folder: paths.Path, about: Mapping[str, Any], counts: Counts, check: Callable[[], None]) -> None:
        self._folder, self._about, self._check, self.counts = folder, about, check, counts
        self._position: tuple[int, Any] | None = None
        self._read: set[str] = set()  # files whose documents are not written yet
        if not any(counts.documents.values()):
            self._save((0, None))  # before the arrays: what is in the folder is then ours
        self._writers = {
            name: _Writer(folder / name, about["dtype"], counts.tokens[name], counts.documents[name]) for name in SPLITS
        }

    def add(self, batch: _Batch, converted: Mapping[str, _Converted], left_out: int) -> None:
        """Adds the documents of a batch without those left out, and writes once there are enough."""
        counts, self._position = self.counts, batch.position
        self._read |= batch.files
        for name, found in converted.items():
            self._writers[name].add(found)
            counts.digest[name] = zlib.crc32(found.checks, counts.digest[name])
            counts.tokens[name] += len(found.ids)
            counts.documents[name] += len(found.sizes)
        counts.skipped += batch.skipped
        counts.blank += batch.blank
        counts.excluded += left_out
        counts.fraction = batch.fraction
        if sum(writer.waiting for writer in self._writers.values()) >= _COMMIT_TOKENS:
            self.commit()

    def commit(self) -> None:
        """Writes what was added. Raises UserError if a file was changed meanwhile, and what `check` raises."""
        self._check()
        for entry in self._about["sources"]:
            is_file = entry["path"] in self._read and entry["version"] is not None
            if is_file and _differs(entry, paths.file_version(entry["path"])):
                raise UserError(
                    f"{entry['path']} was changed while it was read: restore it, and run the same command again, which "
                    "continues; or give another --out"
                )
        for writer in self._writers.values():
            writer.write()
        if self._position is not None:
            self._save(self._position)
        self._read = set()

    def _save(self, position: tuple[int, Any]) -> None:
        state = {**self._about, "counts": dataclasses.asdict(self.counts), "position": position}
        paths.write_text_atomically(self._folder / STARTED, json.dumps(state))


class _Writer:
    """Writes the arrays of one split; what was added is written by `write`.

    Attributes:
      tokens, documents: numbers that are written.
      waiting: ids that are not.
    """

    def __init__(self, folder: paths.Path, dtype: str, tokens: int, documents: int) -> None:
        kinds = {"tokens": dtype, "ends": "int64", "checks": "uint32"}
        self._arrays = {
            name: token_cache.array(folder, name, kind, writes=True, is_new=not documents)
            for name, kind in kinds.items()
        }
        self.tokens, self.documents, self.waiting = tokens, documents, 0
        self._added: list[_Converted] = []

    def add(self, found: _Converted) -> None:
        """Adds documents."""
        self._added.append(found)
        self.waiting += len(found.ids)

    def write(self) -> None:
        """Writes what was added, and cuts off what an interrupted process wrote after it."""
        begins = {"tokens": self.tokens, "ends": self.documents, "checks": self.documents}
        values: dict[str, np.ndarray] = {}
        if self._added:
            sizes = np.concatenate([found.sizes for found in self._added])
            values = {
                "tokens": np.concatenate([found.ids for found in self._added]),
                "ends": self.tokens + np.cumsum(sizes),
                "checks": np.concatenate([found.checks for found in self._added]),
            }
            self.tokens += len(values["tokens"])
            self.documents += len(sizes)
        for name, array in self._arrays.items():
            end = begins[name] + len(values.get(name, ()))
            self._arrays[name] = array = array.resize(exclusive_max=[end]).result()
            if self._added:
                array[begins[name] : end].write(values[name]).result()
        self._added, self.waiting = [], 0
