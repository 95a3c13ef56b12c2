"""Reads documents from files: the user's own text, and Python's standard library.

A source is a frozen dataclass (patterns, field, splits). A .txt file is one document and one part; a .jsonl file has a
document on each line, and is divided into ranges of lines if there are fewer files than streams.
"""

import dataclasses
import functools
import hashlib
import itertools
import sysconfig
from collections.abc import Callable
from typing import Any

from core import paths, units
from core.errors import UserError
from tasks import documents
from tasks.document_streams import DocumentSource, Parts
from tasks.documents import (
    VALIDATION_PERCENT,
    File,
    is_json,
    is_validation,
    list_files,
    pattern_problems,
    python_files,
    split_files,
)

_SMALLEST_RANGE_BYTES = 2**20  # smaller .jsonl files are not divided
_BLOCK_BYTES = 2**20

Take = Callable[..., bytes]  # an Intake's `take`


class FileSource(DocumentSource):
    """A source of files whose documents are whole files, or lines of JSON when `json_field` is a name."""

    def files(self, split: str) -> tuple[File, ...]:
        """Returns the files of a split, sorted by name. Raises UserError if there are none."""
        raise NotImplementedError

    def json_field(self, split: str) -> str | None:
        """Returns the JSON key that holds the text; None if each file is one document."""
        return None

    def line_split(self, split: str) -> str | None:
        """Returns the split whose lines are kept if both splits read the same files; None otherwise."""
        return None

    def parts(self, split: str, num_streams: int) -> Parts:
        """See `DocumentSource`. The few validation lines of .jsonl files are shared, as some file may have none."""
        files, field, kept = self.files(split), self.json_field(split), self.line_split(split)
        take = documents.intake_of(self).take
        if field is None:
            whole = [_WholeFile(file.path, take) for file in files]
            return Parts(whole, is_shared=len(files) < num_streams, deals_chunks=True)
        ranges = [(file.path, 0, None) for file in files]
        if len(files) < num_streams and kept != "validation":
            ranges = [found for file in files for found in _ranges(file, num_streams)]
        parts = [_Lines(*found, field, kept, take) for found in ranges]
        return Parts(parts, is_shared=len(parts) < num_streams or kept == "validation")

    def fingerprint(self) -> str:
        """See `Corpus`."""
        listing = [
            (split, file.name, file.size_bytes) for split in ("train", "validation") for file in self.files(split)
        ]
        return hashlib.sha256(repr(listing).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class PythonLibrary(FileSource):
    """The .py files of Python's standard library, without its tests."""

    root: str

    @functools.cached_property
    def _all_files(self) -> tuple[File, ...]:
        return python_files(self.root)

    def files(self, split: str) -> tuple[File, ...]:
        """See `FileSource`."""
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
class TextFiles(FileSource):
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
        """See `FileSource`."""
        files = self._listed[split]
        if not files:
            raise UserError(" ".join(self.problems()) or f"text.files: no {split} file")
        return files

    def json_field(self, split: str) -> str | None:
        """See `FileSource`."""
        return self.field if is_json(self.files(split)) else None

    def line_split(self, split: str) -> str | None:
        """See `FileSource`."""
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
    return tuple(file for file in files if file.size_bytes)


def _ranges(file: File, num_streams: int) -> list[tuple[str, int, int]]:
    """Divides a file into up to 4 ranges of bytes per stream, none smaller than 1 MiB: (path, start, end)."""
    count = max(1, min(4 * num_streams, file.size_bytes // _SMALLEST_RANGE_BYTES))
    borders = [file.size_bytes * number // count for number in range(count + 1)]
    return [(file.path, start, end) for start, end in itertools.pairwise(borders)]


@dataclasses.dataclass(frozen=True)
class _WholeFile:
    """The part of a file that is one document."""

    path: str
    take: Take

    def open(self, offset: Any) -> "_WholeFileReader":
        return _WholeFileReader(self, offset or 0)


class _WholeFileReader:
    def __init__(self, part: _WholeFile, offset: int) -> None:
        self._part, self._offset = part, offset

    def offset(self) -> int:
        return self._offset  # 1 after the document

    def __next__(self) -> bytes:
        if self._offset:
            raise StopIteration
        self._offset = 1
        return self._part.take(documents.file_text, self._part.path, _read(self._part.path))


@dataclasses.dataclass(frozen=True)
class _Lines:
    """The part of a .jsonl file whose lines begin in a range of bytes.

    Attributes:
      path: the file.
      start, end: the range; end None: to the end of the file.
      field: the JSON key of the text.
      kept: the split whose lines are kept, chosen by hash; None: all.
      take: counts and checks the documents.
    """

    path: str
    start: int
    end: int | None
    field: str
    kept: str | None
    take: Take

    def open(self, offset: Any) -> "_LinesReader":
        return _LinesReader(self, offset)


class _LinesReader:
    """Reads lines; its offset is that of a byte in the file."""

    def __init__(self, part: _Lines, offset: int | None) -> None:
        self._part = part
        self._file = _opened(part.path)
        if offset is None and part.start:
            self._file.seek(part.start - 1)
            self._at = (
                part.start - 1 + len(self._file.readline())
            )  # the line that begins before belongs to another part
        else:
            self._at = part.start if offset is None else offset
            self._file.seek(self._at)

    def offset(self) -> int:
        return self._at

    def __next__(self) -> bytes:
        part = self._part
        while part.end is None or self._at < part.end:
            start, line = self._at, _reading(self._part.path, self._file.readline)
            if not line:
                break
            self._at += len(line)
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if part.kept is None or (part.kept == "validation") == is_validation(line):
                return self._text(line, start)
        self._file.close()
        raise StopIteration

    def _text(self, line: bytes, start: int) -> bytes:
        part = self._part
        try:
            return part.take(documents.json_text, part.field, part.path, 0, line)
        except UserError:  # only now count the lines before it, for the message
            return part.take(documents.json_text, part.field, part.path, _line_number(part.path, start), line)


def _line_number(path: str, offset: int) -> int:
    """Returns the number of the line that begins at an offset, from 1."""
    with _opened(path) as file:
        sizes = itertools.chain(itertools.repeat(_BLOCK_BYTES, offset // _BLOCK_BYTES), [offset % _BLOCK_BYTES])
        return 1 + sum(file.read(size).count(b"\n") for size in sizes)


def _opened(path: str) -> Any:
    return _reading(path, lambda: paths.resolve(path).open("rb"))


def _read(path: str) -> bytes:
    with _opened(path) as file:
        return _reading(path, file.read)


def _reading(path: str, read: Callable[[], Any]) -> Any:
    """Returns what `read` does. Raises UserError, which names the file, if the system refuses."""
    try:
        return read()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
