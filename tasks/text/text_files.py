"""Reads documents from files: the user's text, and Python's standard library.

If there are fewer files than streams, .jsonl files may be divided into ranges of lines, and .parquet files into row
groups.
"""

import dataclasses
import functools
import hashlib
import itertools
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from core import units
from core.errors import Problem, UserError
from core.files import paths
from tasks.text import content_hash, documents, text_formats
from tasks.text.document_streams import DocumentSource, Part, Parts
from tasks.text.documents import (
    VALIDATION_PERCENT,
    File,
    MalformedDocument,
    is_validation,
    list_files,
    pattern_problems,
    python_files,
    split_files,
)

_SMALLEST_RANGE_BYTES = 2**20  # smaller .jsonl files are not divided
_BLOCK_BYTES = 2**20
_FEW_FILES = 3  # a description names at most this many validation files
_FIRST_ROWS = 200  # rows of a .parquet file that are checked before a run

Take = Callable[..., bytes]  # the type of `Intake.take`


class FileSource(DocumentSource):
    """A source of files, whose endings say what a document is."""

    field = ""  # the JSON key, or the column, of the text

    def files(self, split: str) -> tuple[File, ...]:
        raise NotImplementedError

    def kept_split(self, split: str) -> str | None:
        """Returns `split` if a hash decides the split of each line or row; otherwise None."""
        return None

    def parts(self, split: str, num_streams: int) -> Parts:
        files, kept = self.files(split), self.kept_split(split)
        divides = len(files) < num_streams and kept != "validation"
        parts = [part for file in files for part in self._parts_of(file, num_streams if divides else 1, kept)]
        is_whole = not any(_has_many(file) for file in files)
        is_shared = len(parts) < num_streams or (kept == "validation" and not is_whole)
        return Parts(parts, is_shared, deals_chunks=is_whole)

    def _parts_of(self, file: File, num_streams: int, kept: str | None) -> list[Part]:
        take, kind = documents.intake_of(self).take, text_formats.kind(file.path)
        if kind == ".parquet":
            ranges = text_formats.row_groups(file.path, self.field) if num_streams > 1 else [(0, None)]
            return [_Rows(file, first, end, self.field, kept, take) for first, end in ranges]
        if kind == ".jsonl":
            whole = num_streams == 1 or text_formats.is_compressed(file.path)
            ranges = [(0, None)] if whole else _ranges(file, num_streams)
            return [_Lines(file, first, end, self.field, kept, take) for first, end in ranges]
        return [_WholeFile(file, take)]

    def fingerprint(self) -> str:
        listing = [
            (split, file.name, file.size_bytes) for split in ("train", "validation") for file in self.files(split)
        ]
        read = repr(listing) if self.field in ("", "text") else repr((listing, self.field))
        return hashlib.sha256(read.encode()).hexdigest()

    def content_hash(self) -> str:
        return content_hash.of_files(dict.fromkeys(f for split in ("train", "validation") for f in self.files(split)))


@dataclasses.dataclass(frozen=True)
class PythonLibrary(FileSource):
    """The .py files of Python's standard library, without its tests."""

    root: str

    @functools.cached_property
    def _all_files(self) -> tuple[File, ...]:
        return python_files(self.root)

    def files(self, split: str) -> tuple[File, ...]:
        wanted = split == "validation"
        return tuple(file for file in self._all_files if is_validation(file.name) == wanted)

    def problems(self) -> list[str]:
        counts = {split: len(self.files(split)) for split in ("train", "validation")}
        if all(counts.values()):
            return []
        return [
            f"the standard library at {self.root} has {sum(counts.values())} .py files, too few to split: "
            "use a Python whose library is not zipped, or text.files"
        ]

    def describe(self) -> str:
        train, validation = self.files("train"), self.files("validation")
        total_bytes = sum(file.size_bytes for file in (*train, *validation))
        return (
            f"text.python_source: {len(train)} + {len(validation)} files (train + validation), "
            f"{units.size(total_bytes)} of Python's standard library"
        )


@dataclasses.dataclass(frozen=True)
class TextFiles(FileSource):
    """The user's .txt files (one document each), .jsonl files (one per line) and .parquet files (one per row)."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    field: str

    def named_files(self) -> tuple[str, ...]:
        return (*self.train, *self.validation)

    @functools.cached_property
    def _listed(self) -> dict[str, tuple[File, ...]]:
        train, validation = (_with_text(list_files(patterns)) for patterns in (self.train, self.validation))
        if self.validation:
            return {"train": train, "validation": validation}
        shared = tuple(file for file in train if _has_many(file))
        apart = split_files(tuple(file for file in train if not _has_many(file)))
        return {split: tuple(sorted(shared + own)) for split, own in zip(("train", "validation"), apart, strict=True)}

    def files(self, split: str) -> tuple[File, ...]:
        files = self._listed[split]
        if not files:
            raise UserError(" ".join(self.problems()) or f"text.files: no {split} file")
        return files

    def kept_split(self, split: str) -> str | None:
        return None if self.validation else split

    def problems(self) -> list[str]:
        if not self.train:
            return [
                "DATA is not set: bind it to your text, e.g. --gin \"DATA = '/data/*.jsonl'\" (or gs://bucket/*.txt)"
            ]
        if found := self.pattern_problems():
            return found
        for name, patterns in (("train", self.train), ("validation", self.validation)):
            files = list_files(tuple(pattern for pattern in patterns if not paths.is_remote(pattern)))
            found += documents.first_problems(files, first=self._first_texts, where=f"text.files.{name}")
        if not found and not any(map(paths.is_remote, self.train)) and not self._listed["validation"]:
            found.append(
                Problem(
                    f"{len(self._listed['train'])} .txt file leaves none for validation",
                    setting="text.files.train",
                    fix="name files for validation (text.files.validation, --validation), or use more files, or one "
                    ".jsonl file with one document per line",
                )
            )
        return found

    def overlaps(self, *, remote: bool) -> list[Problem]:
        return documents.overlaps(self.train, self.validation, where="text.files.validation", remote=remote)

    def pattern_problems(self) -> list[str]:
        found: list[str] = []
        for name, patterns in (("train", self.train), ("validation", self.validation)):
            local = [pattern for pattern in patterns if not paths.is_remote(pattern)]
            found += pattern_problems(f"text.files.{name}", local)
        return found

    def _first_texts(self, file: File) -> Iterable[bytes]:
        kind = text_formats.kind(file.path)
        if kind == ".parquet":
            return _Rows.first_texts(file, self.field)
        if kind == ".jsonl":
            return documents.first_lines(functools.partial(documents.json_text, self.field), file)
        return documents.first_text(file)

    def describe(self) -> str:
        validation = ", ".join(self.validation) or self._held_out()
        return (
            f"text.files: train {', '.join(self.train) or '(DATA is not set)'}{self._size()}; validation {validation}"
        )

    def _held_out(self) -> str:
        listed = {} if any(map(paths.is_remote, self.train)) else self._listed
        whole = {split: [file.name for file in files if not _has_many(file)] for split, files in listed.items()}
        total, chosen = sum(map(len, whole.values())), whole.get("validation", [])
        if not chosen:
            return f"{VALIDATION_PERCENT} % of it"
        names = f" ({', '.join(chosen)})" if len(chosen) <= _FEW_FILES else ""
        lines = f" and {VALIDATION_PERCENT} % of the lines and rows" if any(map(_has_many, listed["train"])) else ""
        return f"{len(chosen):,} of {total:,} .txt files{names}{lines}, by hash (or set VALIDATION_DATA)"

    def _size(self) -> str:
        """Returns ` (2 files, 12,345 bytes)`, exact because a resumed run compares it; "" if files are remote."""
        files = () if any(map(paths.is_remote, self.train)) else self._listed["train"]
        total = sum(file.size_bytes for file in files)
        return f" ({units.counted(len(files), 'file')}, {total:,} bytes)" if files else ""


def python_library() -> PythonLibrary:
    """Returns the source of the running interpreter's standard library."""
    return PythonLibrary(root=sysconfig.get_paths()["stdlib"])


def _has_many(file: File) -> bool:
    return text_formats.kind(file.path) in (".jsonl", ".parquet")


def _with_text(files: tuple[File, ...]) -> tuple[File, ...]:
    """Returns the files without empty ones, but with tables and compressed files of 0 bytes, which are damaged."""

    def is_damaged(file: File) -> bool:
        return text_formats.is_compressed(file.path) or text_formats.kind(file.path) == ".parquet"

    return tuple(file for file in files if file.size_bytes or is_damaged(file))


def _ranges(file: File, num_streams: int) -> list[tuple[int, int]]:
    count = max(1, min(4 * num_streams, file.size_bytes // _SMALLEST_RANGE_BYTES))
    borders = [file.size_bytes * number // count for number in range(count + 1)]
    return list(itertools.pairwise(borders))


@dataclasses.dataclass(frozen=True)
class _WholeFile:
    file: File
    take: Take

    @property
    def path(self) -> str:
        return self.file.path

    def open(self, offset: Any) -> "_WholeFileReader":
        return _WholeFileReader(self, offset or 0)


class _WholeFileReader:
    def __init__(self, part: _WholeFile, offset: int) -> None:
        self._part, self._offset = part, offset

    def offset(self) -> int:
        return self._offset  # 0 before the document, 1 after it

    def __next__(self) -> bytes:
        if self._offset:
            raise StopIteration
        self._offset = 1
        path, most = self._part.path, text_formats.LARGEST_DOCUMENT_BYTES
        with text_formats.opened(path) as file, text_formats.reading(path):
            content = file.read(most + 1)
            _require_unchanged(self._part.file, file.size())
        if len(content) > most:
            raise MalformedDocument(f"{path}: one document of over {units.size(most)}; split it, or write .jsonl")
        return self._part.take(documents.file_text, path, content)


@dataclasses.dataclass(frozen=True)
class _Range:
    """A range of a file: of bytes, for the lines of .jsonl that begin in it; or of rows of .parquet."""

    file: File
    start: int
    end: int | None
    field: str
    kept: str | None
    take: Take

    @property
    def path(self) -> str:
        return self.file.path


class _Lines(_Range):
    def open(self, offset: Any) -> "_LinesReader":
        return _LinesReader(self, offset)


class _LinesReader:
    """Reads lines; an offset is a byte offset in the decompressed file."""

    def __init__(self, part: _Lines, offset: int | None) -> None:
        self._part = part
        self._file = text_formats.opened(part.path)
        _require_unchanged(part.file, self._file.size())
        self._number: int | None = 0  # number of lines before the next one; None until needed
        self._at = part.start if offset is None else offset
        if text_formats.is_compressed(part.path):
            self._at, begin = 0, self._at
            while self._at < begin and self._line():
                pass
            self._require_at(begin)
        elif self._at:
            self._number = None
            begins = int(offset is None)  # a line that begins before the range belongs to another part
            self._file.seek(self._at - begins)
            self._at += len(self._file.readline()) - 1 if begins else 0

    def _require_at(self, begin: int) -> None:
        if self._at != begin:
            found = f"has {self._at} bytes" if self._at < begin else "has no line that begins there"
            raise text_formats.UnreadableFile(
                f"{self._part.path}: reading continues at byte {begin} of the decompressed text, which {found}; it was "
                "replaced after the position was saved: restore it"
            )

    def offset(self) -> int:
        return self._at

    def fraction(self) -> float:
        return self._file.fraction()

    def __next__(self) -> bytes:
        part = self._part
        while part.end is None or self._at < part.end:
            line = self._line()
            if not line:
                break
            text = line.removesuffix(b"\n").removesuffix(b"\r")
            if part.kept is None or (part.kept == "validation") == is_validation(text):
                return self._text(text, self._at - len(line))
        _require_unchanged(part.file, self._file.size())
        self._file.close()
        raise StopIteration

    def _line(self) -> bytes:
        most = text_formats.LARGEST_DOCUMENT_BYTES
        where = f"{self._part.path} after line {self._number}" if self._number else self._part.path
        with text_formats.reading(where):
            line = self._file.readline(most + 1)
        if len(line) > most:
            raise text_formats.UnreadableFile(f"{where}: over {units.size(most)} without the end of a line")
        self._at += len(line)
        if self._number is not None and line:
            self._number += 1
        return line

    def _text(self, line: bytes, start: int) -> bytes:
        part = self._part
        try:
            return part.take(documents.json_text, part.field, part.path, self._number or 0, line)
        except MalformedDocument:
            if self._number is not None:
                raise
            self._number = _line_number(part.path, start)  # counts the lines before it only for the message
            return part.take(documents.json_text, part.field, part.path, self._number, line)


def _require_unchanged(file: File, size_bytes: int) -> None:
    if size_bytes != file.size_bytes:
        raise text_formats.UnreadableFile(
            f"{file.path} has {size_bytes:,} bytes, and had {file.size_bytes:,} when the run began: restore it, or "
            "start a new run with the changed text"
        )


def _line_number(path: str, offset: int) -> int:
    with text_formats.opened(path) as file, text_formats.reading(path):
        sizes = itertools.chain(itertools.repeat(_BLOCK_BYTES, offset // _BLOCK_BYTES), [offset % _BLOCK_BYTES])
        return 1 + sum(file.read(size).count(b"\n") for size in sizes)


class _Rows(_Range):
    def open(self, offset: Any) -> "_RowsReader":
        return _RowsReader(self, self.start if offset is None else offset)

    @classmethod
    def first_texts(cls, file: File, field: str) -> Iterator[bytes]:
        reader = cls(file, 0, _FIRST_ROWS, field, None, lambda read, **options: read(**options)).open(None)
        while (text := next(reader, None)) is not None:
            yield text


class _RowsReader:
    def __init__(self, part: _Rows, offset: int) -> None:
        self._part, self._at = part, offset
        rows = text_formats.Rows(part.path, part.field)
        _require_unchanged(part.file, rows.size_bytes)
        self._end = rows.groups[-1] if part.end is None else min(part.end, rows.groups[-1])
        self._values = rows.read(offset, self._end)

    def offset(self) -> int:
        return self._at

    def fraction(self) -> float:
        return self._at / max(self._end, 1)

    def __next__(self) -> bytes:
        part = self._part
        for value in self._values:
            self._at += 1
            if part.kept is None or value is None or (part.kept == "validation") == is_validation(value):
                return part.take(self._checked, value=value, where=f"{part.path}, row {self._at}")
        raise StopIteration

    def _checked(self, value: bytes | None, where: str) -> bytes:
        if value is None:
            raise MalformedDocument(f"{where}: null in column {self._part.field!r}, expected text")
        return documents.checked(value, where=where)
