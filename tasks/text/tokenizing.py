"""Converts documents to ids in several processes, and writes them as a token cache, in order."""

import collections
import concurrent.futures
import concurrent.futures.process
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import pathlib
import signal
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from typing import Any, cast

import numpy as np

from core import units
from core.errors import UserError
from core.files import foreign_json, paths
from core.types import can
from tasks.text import documents, near_duplicates, vocabularies
from tasks.text.decontamination import Excluded
from tasks.text.document_streams import MeasuresProgress, with_end
from tasks.text.documents import MalformedDocument
from tasks.text.hub_source import HuggingFace
from tasks.text.ids import EncodesBatches, Vocabulary
from tasks.text.near_duplicates import Seen
from tasks.text.text_files import TextFiles
from tasks.text.tfds_source import Tfds
from tasks.text.token_cache import COMPLETE, FORMAT, SPLITS, STARTED
from tasks.text.token_writer import SIGNATURES, Batch, Converted, Counts, Writer
from tasks.text.tokenizing_job import Job

_BATCH_BYTES, _BATCH_DOCUMENTS = 2**20, 4096
_MOST_REPORTED = 10  # at most this many skipped documents are named


def run(
    job: Job, *, processes: int, say: Callable[[str], None], report: Callable[[Counts], None], check: Callable[[], None]
) -> Mapping[str, Any]:
    """Writes the cache, or the missing part of it, and returns the content of its `cache.json`.

    Args:
      job: what to convert, and where to write it.
      processes: number of processes that convert.
      say: called with messages.
      report: called with the progress after every batch.
      check: raises an exception if another process has taken over the folder.
    """
    excluded = job.filters.excluded()
    filters = dataclasses.replace(job.filters, digest=excluded.digest if excluded else "")
    vocabulary, source = vocabularies.named(job.vocabulary), job.source()
    if found := [*job.problems(source), *job.vocabulary_problems(vocabulary)]:
        raise UserError("\n".join(dict.fromkeys(found)))

    def converted(files: Sequence[Mapping[str, Any]], position: Any) -> Generator[tuple[Batch, Converted]]:
        batches = _batches(job, source, files, tuple(position or (0, None)), say)
        with _pool(job.vocabulary, excluded, filters.near_duplicates is not None, processes) as pool:
            yield from _in_order(pool, batches, most=2 * processes + 2)

    return write(
        job.out,
        _description(job, vocabulary) | filters.described(),
        _listed(source),
        converted,
        require=lambda writer: _require_documents(job, writer),
        seen=filters.seen(),
        say=say,
        report=report,
        check=check,
    )


def write(
    out: str,
    begun: Mapping[str, Any],
    files: Sequence[Mapping[str, Any]],
    convert: Callable[[Sequence[Mapping[str, Any]], Any], Generator[tuple[Batch, Converted]]],
    *,
    require: Callable[[Writer], None],
    seen: Seen | None = None,
    quiet: bool = False,
    say: Callable[[str], None],
    report: Callable[[Counts], None],
    check: Callable[[], None],
) -> Mapping[str, Any]:
    """Writes a cache, or the missing part of it, and returns the content of its `cache.json`.

    Args:
      out: the folder of the cache.
      begun: settings that must be the same when a command continues a cache.
      files: the path, size in bytes and version of each source.
      convert: called with `files` and a position (None: the start); yields converted batches.
      require: raises UserError if too little was written.
      seen: finds near duplicates; None: they are kept.
      quiet: whether to send fewer messages.
      say, report, check: as in `run`.
    """
    folder = paths.resolve(out)
    if (done := _read(folder / COMPLETE)) is not None:
        _require_same(out, done, begun, files)
        _remove_state(folder)
        if not quiet:
            say(f"{out} is complete")
        return done
    state = _read(folder / STARTED) or {"counts": dataclasses.asdict(Counts()), "position": None}
    files = _begun_with(out, state, begun, files, say=(lambda text: None) if quiet else say)
    if "sources" in state:
        say(f"continuing after {units.counted(Counts(**state['counts']).total('documents'), 'document')}")

    def verify(read: Set[str]) -> None:
        check()
        _require_unchanged_while_read(files, read)

    described = {**begun, "sources": files}
    writer = Writer(folder, described, Counts(**state["counts"]), position=state["position"], seen=seen, check=verify)
    try:
        with contextlib.closing(convert(files, state["position"])) as batches:
            for batch, converted in batches:
                writer.add(batch, converted)
                report(writer.counts)
    except UserError:  # about a document, which the user will correct
        if not writer.has_written:
            writer.discard()
        raise
    require(writer)
    writer.commit()
    about = {**described, "left_out": writer.counts.left_out, "splits": writer.counts.splits}
    paths.write_text_atomically(folder / COMPLETE, json.dumps(about, indent=1))
    _remove_state(folder)
    return about


def _begun_with(
    out: str,
    state: Mapping[str, Any],
    begun: Mapping[str, Any],
    files: Sequence[Mapping[str, Any]],
    *,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    if "sources" in state:
        _require_same(out, state, begun, files)
        known, found = _matched(state["sources"], files)
        return [{**entry, "sha256": known[key]["sha256"]} for key, entry in found.items()]
    say(f"hashing {units.counted(len(files), 'file')}")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [{**entry, "sha256": digest} for entry, digest in zip(files, pool.map(_digest, files), strict=True)]


def _description(job: Job, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "vocabulary": {"name": job.vocabulary, "described": vocabulary.describe(), "hash": vocabulary.hash},
        "dtype": "uint16" if vocabulary.size <= 2**16 else "uint32",
        "field": job.field,
        "by_hash": not job.validation,
    }


def _require_documents(job: Job, writer: Writer) -> None:
    """Raises UserError, after removing what was written, if a split has no document."""
    counts = writer.counts
    if all(counts.splits[name]["documents"] for name in SPLITS):
        return
    writer.discard()
    lacking = "validation" if counts.splits["train"]["documents"] else "training"
    found = [f"{each['documents']:,} {reason}" for reason, each in counts.left_out.items() if each["documents"]]
    left_out = f" (left out: {', '.join(found).replace('_', ' ')})" if found else ""
    if total := 0 if job.validation else counts.total("documents"):
        raise UserError(
            f"--data: no document for {lacking} among {units.counted(total, 'document')}{left_out}, of which "
            f"{documents.VALIDATION_PERCENT} % are for validation, by the hash of their text: give --validation, or "
            "more documents"
        )
    flag = "--data" if lacking == "training" else "--validation"
    raise UserError(f"{flag}: no document for {lacking}{left_out}: give other sources")


def _remove_state(folder: paths.Path) -> None:
    (folder / STARTED).unlink(missing_ok=True)
    if (signatures := folder / SIGNATURES).exists():
        signatures.rmtree()


def _read(file: paths.Path) -> dict[str, Any] | None:
    try:
        return foreign_json.load_object(file.read_bytes())
    except FileNotFoundError:
        return None
    except foreign_json.MalformedError as error:
        raise UserError(f"{file} is damaged: {error}; remove {file.parent}, and start again") from error


# Sources


def _listed(source: TextFiles | Tfds | HuggingFace) -> list[dict[str, Any]]:
    if not isinstance(source, TextFiles):
        return [{"path": source.describe(), "bytes": 0, "version": None}]
    found = listing({file.path: file.size_bytes for split in SPLITS for file in source.files(split)})
    if not source.validation:
        return found  # one file may be in both splits
    held_out = {file.path for file in source.files("validation")}
    return [{**entry, "split": "validation" if entry["path"] in held_out else "train"} for entry in found]


def listing(sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns the path, size in bytes and version of each file, given sizes by path."""
    return [{"path": path, "bytes": size, "version": paths.file_version(path)} for path, size in sizes.items()]


def _digest(entry: Mapping[str, Any]) -> str | None:
    if paths.is_remote(entry["path"]) or entry["version"] is None:
        return None
    with pathlib.Path(entry["path"]).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_same(out: str, saved: Mapping[str, Any], begun: Mapping[str, Any], files: Sequence[Any]) -> None:
    if saved.get("seqio") != begun.get("seqio"):
        before, now = (found.get("seqio") or {} for found in (saved, begun))
        differ = [f"{key} {before.get(key)}, now {value}" for key, value in now.items() if before.get(key) != value]
        what = ", ".join(differ) or "a seqio task"
        raise UserError(f"{out} was begun with {what}: remove it, or give another folder")
    if saved["format"] != begun["format"]:
        raise UserError(
            f"{out} was begun by another version of this command (format {saved['format']}, now {begun['format']}): "
            "give another --out"
        )
    if saved["vocabulary"]["hash"] != begun["vocabulary"]["hash"]:
        raise UserError(
            f"{out} was begun with {saved['vocabulary']['described']}, and --vocabulary is now "
            f"{begun['vocabulary']['described']}: give another --out, or remove it"
        )
    names = {"dtype": "dtype", "field": "--field", "by_hash": "the split by hash (without --validation)"}
    for key, name in names.items():
        if saved[key] != begun[key]:
            raise UserError(f"{out} was begun with {name} = {saved[key]!r}, now {begun[key]!r}: give another --out")
    require_same_filters(out, saved, begun)
    _require_unchanged(out, saved["sources"], files)


def require_same_filters(out: str, saved: Mapping[str, Any], begun: Mapping[str, Any]) -> None:
    """Raises UserError if the descriptions `saved` and `begun` have different filters."""
    if saved["excluded"] != begun["excluded"]:
        raise UserError(
            f"{out} was begun with another --exclude, or other lengths of what it compares: give another --out"
        )
    before, now = (found["near_duplicates"] or {} for found in (saved, begun))
    if before != now:
        told = [f"--deduplicate {one['similarity']:g}" if one else "no --deduplicate" for one in (before, now)]
        how = "" if told[0] != told[1] else ", compared in another way by another version of this command"
        raise UserError(f"{out} was begun with {told[0]}{how}, now {told[1]}: give another --out")


def _require_unchanged(out: str, before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> None:
    """Raises UserError if the sources differ.

    A local file written again with the same content is no difference, nor is another folder of all files.
    """
    known, found = _matched(before, now)
    changed = [f"{path} was added" for path in found.keys() - known.keys()]
    for key, entry in known.items():
        if key not in found:
            changed.append(f"{key} is gone")
            continue
        path, size, version = (found[key][name] for name in ("path", "bytes", "version"))
        split = found[key].get("split")
        if "split" in entry and entry["split"] != split:
            changed.append(f"{path} is in {split} now, before in {entry['split']}")
        elif size != entry["bytes"]:
            changed.append(f"{path} has {size:,} bytes, before {entry['bytes']:,}")
        elif _differs({**entry, "path": path}, version):
            changed.append(f"{path} has other content")
    if changed:
        raise UserError(
            f"the sources of {out} changed since it was begun: {'; '.join(sorted(changed)[:3])}"
            f"{f' and {len(changed) - 3} more' if len(changed) > 3 else ''}. Restore them, or give another --out"
        )


def _matched(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> list[dict[str, Mapping[str, Any]]]:
    """Returns both lists of sources by path or, if only the folder of all files is another, by path below it."""
    by_path = [{entry["path"]: entry for entry in entries} for entries in (before, now)]
    if by_path[0].keys() == by_path[1].keys() or any(entry["version"] is None for entry in (*before, *now)):
        return by_path
    names = [documents.names_below(found) for found in by_path]
    by_name = [{name[path]: entry for path, entry in found.items()} for name, found in zip(names, by_path, strict=True)]
    return by_name if by_name[0].keys() == by_name[1].keys() else by_path


def _differs(entry: Mapping[str, Any], version: str) -> bool:
    """Returns whether a file's content differs from the record; a local file is hashed if it was written since."""
    return version != entry["version"] and (entry["sha256"] is None or _digest(entry) != entry["sha256"])


def _require_unchanged_while_read(files: Sequence[Mapping[str, Any]], read: Set[str]) -> None:
    for entry in files:
        is_file = entry["path"] in read and entry["version"] is not None
        if is_file and _differs(entry, paths.file_version(entry["path"])):
            raise UserError(
                f"{entry['path']} was changed while it was read: restore it, and run the same command again, which "
                "continues; or give another --out"
            )


def _batches(
    job: Job,
    source: TextFiles | Tfds | HuggingFace,
    files: Sequence[Mapping[str, Any]],
    position: tuple[int, Any],
    say: Callable[[str], None],
) -> Iterator[Batch]:
    """Yields batches of documents from a position on: (index of a part, offset in it; None: its start)."""
    parts = [
        (split if job.validation else None, part)
        for split in (SPLITS if job.validation else ("train",))
        for part in source.parts(split, 1).parts
    ]
    bytes_of = {entry["path"]: entry["bytes"] for entry in files}
    names = [cast(Any, part).path if isinstance(source, TextFiles) else source.describe() for _, part in parts]
    sizes = [bytes_of[name] or 1 for name in names]
    texts: list[bytes] = []
    read: set[str] = set()
    size = malformed = blank = named = 0
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
                    raise UserError(f"{error}. Correct it, or skip such documents with --skip-bad") from error
                malformed, named = malformed + 1, named + 1
                if named <= _MOST_REPORTED:
                    last = " (further ones are only counted)" if named == _MOST_REPORTED else ""
                    say(f"skipped: {error}{last}")
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
                yield Batch(texts, split, frozenset(read), position, malformed, blank, fraction)
                texts, read, size, malformed, blank = [], set(), 0, 0, 0
        number, offset = number + 1, None


# Converting


def _pool(
    vocabulary: str, excluded: Excluded | None, signs: bool, processes: int
) -> concurrent.futures.ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")  # a fork would break the threads of TensorStore
    return concurrent.futures.ProcessPoolExecutor(processes, context, _open, (vocabulary, excluded, signs))


_vocabulary: Vocabulary  # globals of a converting process
_excluded: Excluded | None
_signs: bool  # whether to compute signatures


def _open(vocabulary: str, excluded: Excluded | None, signs: bool) -> None:
    global _vocabulary, _excluded, _signs
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _vocabulary, _excluded, _signs = vocabularies.named(vocabulary), excluded, signs


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # the parent was killed, so nobody uses the results


def _convert(texts: list[bytes], split: str | None) -> Converted:
    vocabulary, decoded = _vocabulary, [text.decode() for text in texts]
    is_validation = [split == "validation" if split else documents.is_validation(text) for text in texts]
    if can(vocabulary, EncodesBatches):
        every = vocabulary.encode_batch(decoded)
    else:
        every = [vocabulary.encode(text) for text in decoded]
    dtype = np.uint16 if vocabulary.size <= 2**16 else np.uint32
    arrays = [with_end(ids, vocabulary, where=vocabulary.describe).astype(dtype) for ids in every]
    shares_text = [
        _excluded is not None and not held_out and _excluded.shares_text(text)
        for held_out, text in zip(is_validation, decoded, strict=True)
    ]
    return Converted(
        ids=np.concatenate([np.empty(0, dtype), *arrays]),
        sizes=np.array([len(ids) for ids in arrays], np.int64),
        text_bytes=np.array([len(text) for text in texts], np.int64),
        checks=np.array([zlib.crc32(ids.data) for ids in arrays], np.uint32),
        is_validation=np.array(is_validation, bool),
        shares_text=np.array(shares_text, bool),
        signatures=near_duplicates.signatures(decoded) if _signs and split != "validation" else None,
    )


def _in_order(
    pool: concurrent.futures.ProcessPoolExecutor, batches: Iterator[Batch], *, most: int
) -> Iterator[tuple[Batch, Converted]]:
    """Yields batches with their converted documents, in order; at most `most` are in progress or waiting."""
    waiting: collections.deque[tuple[Batch, concurrent.futures.Future]] = collections.deque()
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


def _finished(batch: Batch, future: concurrent.futures.Future) -> tuple[Batch, Converted]:
    try:
        return batch, future.result()
    except UserError as error:
        raise UserError(
            f"in a document of {', '.join(units.shortened(sorted(batch.files), most=3))}: {error}"
        ) from error
