"""Files as sources of documents: the user's own text, and Python's standard library.

A source is a frozen description (patterns, field, splits). It says what is wrong with it, and whether two hosts have
the same files, without TensorFlow. What is shuffled are the numbers of files, by a permutation keyed with the seed and
the epoch, so order costs no memory and no buffer.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sysconfig
from collections.abc import Callable
from typing import Any

from core import paths, units
from core.errors import UserError
from tasks import documents, readers
from tasks.corpus import StreamSpec
from tasks.listing import (
    VALIDATION_PERCENT,
    File,
    is_json,
    is_validation,
    list_files,
    pattern_problems,
    python_files,
    split_files,
)
from tasks.readers import plain
from tasks.seqio_tasks import SeqioCorpus

_ENDLESS = 2**62


class FileCorpus(SeqioCorpus):
    """A corpus of files whose documents are whole files, or lines of JSON when `field` is a name."""

    def files(self, split: str) -> tuple[File, ...]:
        """The files of a split, sorted by name. Raises ValueError if there are none."""
        raise NotImplementedError

    def json_field(self, split: str) -> str | None:
        """The field of a JSON line that holds the text; None where a file is one document."""
        return None

    def line_split(self, split: str) -> str | None:
        """The part of the lines to keep, where lines of the same files are divided into splits."""
        return None

    def documents(self, spec: StreamSpec, *, epochs: int | None = None) -> tuple[Any, bool]:
        """See `SeqioCorpus`.

        Files are dealt to streams where there are enough of them; else training deals lines of JSON; else the caller
        deals chunks. Either way the streams together have every document once an epoch.
        """
        tf, _ = readers.modules()
        files, field, part = self.files(spec.split), self.json_field(spec.split), self.line_split(spec.split)
        numbers = tf.data.Dataset.range(_ENDLESS if epochs is None else epochs * len(files))
        # A file may have none of the few lines of validation: a stream of that file alone would wait for ever.
        dealt = len(files) >= spec.num_streams and part != "validation"
        if dealt:
            numbers = numbers.shard(spec.num_streams, spec.index)
        texts = numbers.map(plain(_permuted([file.path for file in files], spec.seed)))
        if field is None:
            read = plain(readers.reader(self, _of_file(documents.file_text)))
            texts = texts.map(plain(lambda path: read(path, tf.io.read_file(path))))
        else:
            lines = texts.flat_map(plain(functools.partial(_json_lines, part=part)))
            if not dealt and spec.seed is not None:
                lines, dealt = lines.shard(spec.num_streams, spec.index), True
            texts = lines.map(plain(readers.reader(self, _of_file(functools.partial(documents.json_text, field)))))
        texts = texts.filter(plain(lambda text: tf.strings.length(text) > 0))
        return texts.map(plain(lambda text: {"text": text})), dealt

    def fingerprint(self) -> str:
        """See `Corpus`."""
        listing = [
            (split, file.name, file.size_bytes) for split in ("train", "validation") for file in self.files(split)
        ]
        return hashlib.sha256(repr(listing).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class PythonLibrary(FileCorpus):
    """The .py files of a Python's own standard library, without its tests."""

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
        """See `Corpus`. What is on gs:// is not looked for."""
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
            field = self.field if is_json(files) else None
            found += documents.first_problems(files, field=field, where=f"text.files.{name}")
        if not found and not any(map(paths.is_remote, self.train)) and not self._listed["validation"]:
            found.append(
                f"text.files.train: {len(self._listed['train'])} .txt file leaves none for validation; "
                "give text.files.validation, or more files, or one .jsonl with a document a line"
            )
        return found

    def describe(self) -> str:
        """See `Corpus`."""
        validation = ", ".join(self.validation) or f"{VALIDATION_PERCENT} % of it"
        return (
            f"text.files: train {', '.join(self.train) or '(DATA is not set)'}{self._size()}; validation {validation}"
        )

    def _size(self) -> str:
        """` (2 files, 12,345 bytes)` of training files on a disk, exact, for a resumed run compares it; else empty."""
        files = () if any(map(paths.is_remote, self.train)) else self._listed["train"]
        total = sum(file.size_bytes for file in files)
        return f" ({units.counted(len(files), 'file')}, {total:,} bytes)" if files else ""


def python_library() -> PythonLibrary:
    """The standard library of the running interpreter."""
    return PythonLibrary(root=sysconfig.get_paths()["stdlib"])


def _with_text(files: tuple[File, ...]) -> tuple[File, ...]:
    return tuple(file for file in files if file.size_bytes or paths.is_remote(file.path))


def _of_file(read: Callable[..., bytes]) -> Callable[..., bytes]:
    """`read` with its first argument, a path, as TensorFlow hands it over: in bytes."""
    return lambda path, *rest: read(path.decode(), *rest)


def _permuted(items: list[str], seed: int | None) -> Callable[[Any], Any]:
    """From the number of a document since the start to its name: a permutation of all names in every epoch."""
    tf, _ = readers.modules()
    count = len(items)

    def pick(number: Any) -> Any:
        index = number % count
        if seed is not None:
            key = tf.stack([tf.constant(seed, tf.int64), number // count])
            index = tf.random.experimental.index_shuffle(index, key, tf.constant(count - 1, tf.int64))
        return tf.gather(tf.constant(items), index)

    return pick


def _json_lines(path: Any, *, part: str | None) -> Any:
    """(path, line number, line) of a .jsonl file; of one part of the lines, chosen by hash, where a part is given."""
    tf, _ = readers.modules()
    lines = tf.data.TextLineDataset(path).enumerate(1)
    if part is not None:
        wanted = part == "validation"
        lines = lines.filter(
            plain(lambda _, line: (tf.strings.to_hash_bucket_fast(line, 100) < VALIDATION_PERCENT) == wanted)
        )
    return lines.map(plain(lambda number, line: (path, number, line)))
