"""Reads documents from files: the user's own text, and Python's standard library.

A source is a frozen dataclass (patterns, field, splits). It reports its problems and its fingerprint without
TensorFlow. Files are shuffled by a permutation of their indices, keyed by the seed and the epoch, without a buffer.
"""

import dataclasses
import functools
import hashlib
import sysconfig
from collections.abc import Callable
from typing import Any

from core import paths, units
from core.errors import UserError
from tasks import documents, seqio_tasks
from tasks.documents import (
    VALIDATION_PERCENT,
    File,
    StreamSpec,
    is_json,
    is_validation,
    list_files,
    pattern_problems,
    python_files,
    split_files,
)
from tasks.seqio_tasks import SeqioCorpus, plain

_ENDLESS = 2**62


class FileCorpus(SeqioCorpus):
    """A corpus of files whose documents are whole files, or lines of JSON when `field` is a name."""

    def files(self, split: str) -> tuple[File, ...]:
        """Returns the files of a split, sorted by name. Raises UserError if there are none."""
        raise NotImplementedError

    def json_field(self, split: str) -> str | None:
        """Returns the JSON key that holds the text; None if each file is one document."""
        return None

    def line_split(self, split: str) -> str | None:
        """Returns the split whose lines are kept if both splits read the same files; None otherwise."""
        return None

    def documents(self, spec: StreamSpec, *, epochs: int | None = None) -> tuple[Any, bool]:
        """See `SeqioCorpus`.

        Files are sharded over streams if there are enough of them; otherwise training shards the lines of .jsonl, and
        in the remaining cases the caller shards chunks. The streams together read every document once per epoch.
        """
        tf, _ = seqio_tasks.modules()
        files, field, part = self.files(spec.split), self.json_field(spec.split), self.line_split(spec.split)
        numbers = tf.data.Dataset.range(_ENDLESS if epochs is None else epochs * len(files))
        # A file may contain none of the few validation lines, and a stream of that file alone would block forever.
        sharded = len(files) >= spec.num_streams and part != "validation"
        if sharded:
            numbers = numbers.shard(spec.num_streams, spec.index)
        texts = numbers.map(plain(_permuted([file.path for file in files], spec.seed)))
        if field is None:
            read = plain(seqio_tasks.reader(self, _of_file(documents.file_text)))
            texts = texts.map(plain(lambda path: read(path, tf.io.read_file(path))))
        else:
            lines = texts.flat_map(plain(functools.partial(_json_lines, part=part)))
            if not sharded and spec.seed is not None:
                lines, sharded = lines.shard(spec.num_streams, spec.index), True
            texts = lines.map(plain(seqio_tasks.reader(self, _of_file(functools.partial(documents.json_text, field)))))
        texts = texts.filter(plain(lambda text: tf.strings.length(text) > 0))
        return texts.map(plain(lambda text: {"text": text})), sharded

    def fingerprint(self) -> str:
        """See `Corpus`."""
        listing = [
            (split, file.name, file.size_bytes) for split in ("train", "validation") for file in self.files(split)
        ]
        return hashlib.sha256(repr(listing).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class PythonLibrary(FileCorpus):
    """The .py files of Python's standard library, without its tests."""

    root: str

    @functools.cached_property
    def _all_files(self) -> tuple[File, ...]:
        return python_files(self.root)

    def files(self, split: str) -> tuple[File, ...]:
        """See `FileCorpus`."""
        wanted = split == "validation"
        return tuple(file for file in self._all_files if is_validation(file.name) == wanted)

    def problems(self) -> list[str]:
        """See `Corpus`."""
        counts = {split: len(self.files(split)) for split in ("train", "validation")}
        if all(counts.values()):
            return []
        return [
            f"the standard library at {self.root} has {sum(counts.values())} .py files, too few to split: "
            "use a Python whose library is not zipped, or text.files"
        ]

    def describe(self) -> str:
        """See `Corpus`."""
        train, validation = self.files("train"), self.files("validation")
        total_bytes = sum(file.size_bytes for file in (*train, *validation))
        return (
            f"text.python_source: {len(train)} + {len(validation)} files (train + validation), "
            f"{units.size(total_bytes)} of Python's standard library"
        )


@dataclasses.dataclass(frozen=True)
class TextFiles(FileCorpus):
    """The user's own .txt files (a document each) or .jsonl files (a document a line)."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    field: str

    def named_files(self) -> tuple[str, ...]:
        """See `Corpus`."""
        return (*self.train, *self.validation)

    @functools.cached_property
    def _listed(self) -> dict[str, tuple[File, ...]]:
        train, validation = (_with_text(list_files(patterns)) for patterns in (self.train, self.validation))
        if self.validation:
            return {"train": train, "validation": validation}
        if is_json(train):
            return {"train": train, "validation": train}
        return dict(zip(("train", "validation"), split_files(train), strict=True))

    def files(self, split: str) -> tuple[File, ...]:
        """See `FileCorpus`."""
        files = self._listed[split]
        if not files:
            raise UserError(" ".join(self.problems()) or f"text.files: no {split} file")
        return files

    def json_field(self, split: str) -> str | None:
        """See `FileCorpus`."""
        return self.field if is_json(self.files(split)) else None

    def line_split(self, split: str) -> str | None:
        """See `FileCorpus`."""
        return split if not self.validation and is_json(self.files(split)) else None

    def problems(self) -> list[str]:
        """See `Corpus`. Files on gs:// are not looked up."""
        if not self.train:
            return [
                "DATA is not set: bind it to your text, e.g. --gin \"DATA = '/data/*.jsonl'\" (or gs://bucket/*.txt)"
            ]
        found = []
        for name, patterns in (("train", self.train), ("validation", self.validation)):
            local = [pattern for pattern in patterns if not paths.is_remote(pattern)]
            found += pattern_problems(f"text.files.{name}", local)
        if found:
            return found
        for name, patterns in (("train", self.train), ("validation", self.validation)):
            files = list_files(tuple(pattern for pattern in patterns if not paths.is_remote(pattern)))
            read_line = functools.partial(documents.json_text, self.field) if is_json(files) else None
            found += documents.first_problems(files, read_line=read_line, where=f"text.files.{name}")
        if not found and not any(map(paths.is_remote, self.train)) and not self._listed["validation"]:
            found.append(
                f"text.files.train: {len(self._listed['train'])} .txt file leaves none for validation; "
                "set text.files.validation, or use more files, or one .jsonl file with one document per line"
            )
        return found

    def describe(self) -> str:
        """See `Corpus`."""
        validation = ", ".join(self.validation) or f"{VALIDATION_PERCENT} % of it"
        return (
            f"text.files: train {', '.join(self.train) or '(DATA is not set)'}{self._size()}; validation {validation}"
        )

    def _size(self) -> str:
        """Returns, for local files, ` (2 files, 12,345 bytes)`: exact, because a resumed run compares it."""
        files = () if any(map(paths.is_remote, self.train)) else self._listed["train"]
        total = sum(file.size_bytes for file in files)
        return f" ({units.counted(len(files), 'file')}, {total:,} bytes)" if files else ""


def python_library() -> PythonLibrary:
    """Returns the standard library of the running interpreter."""
    return PythonLibrary(root=sysconfig.get_paths()["stdlib"])


def _with_text(files: tuple[File, ...]) -> tuple[File, ...]:
    return tuple(file for file in files if file.size_bytes or paths.is_remote(file.path))


def _of_file(read: Callable[..., bytes]) -> Callable[..., bytes]:
    """Wraps `read` to decode its first argument, a path, which TensorFlow passes as bytes."""
    return lambda path, *rest: read(path.decode(), *rest)


def _permuted(items: list[str], seed: int | None) -> Callable[[Any], Any]:
    """Returns a function from a running index to an item: a new permutation of all items in every epoch."""
    tf, _ = seqio_tasks.modules()
    count = len(items)

    def pick(number: Any) -> Any:
        index = number % count
        if seed is not None:
            key = tf.stack([tf.constant(seed, tf.int64), number // count])
            index = tf.random.experimental.index_shuffle(index, key, tf.constant(count - 1, tf.int64))
        return tf.gather(tf.constant(items), index)

    return pick


def _json_lines(path: Any, *, part: str | None) -> Any:
    """Returns a dataset of (path, line number, line) of a .jsonl file; `part` keeps one split's lines, by hash."""
    tf, _ = seqio_tasks.modules()
    lines = tf.data.TextLineDataset(path).enumerate(1)
    if part is not None:
        wanted = part == "validation"
        lines = lines.filter(
            plain(lambda _, line: (tf.strings.to_hash_bucket_fast(line, 100) < VALIDATION_PERCENT) == wanted)
        )
    return lines.map(plain(lambda number, line: (path, number, line)))
