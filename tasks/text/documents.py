"""The interface of sources of documents, lists of text files, and checks of documents."""

import codecs
import functools
import itertools
import json
import os
import pathlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from core import units
from core.errors import Problem, UserError
from core.files import paths
from tasks.streams import Stream
from tasks.text import text_formats
from tasks.text.ids import Vocabulary

VALIDATION_PERCENT = 5
_LARGEST_PYTHON_FILE_BYTES = 2**20
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
_MOST_FILES = 32  # files that are checked before a run, spread evenly over the list
_MOST_BYTES = 2**20  # bytes checked per file
_MOST_PROBLEMS = 3
_REPORTED = tuple(10**n for n in range(12))  # skipped documents are reported at the 1st, 10th, 100th, …
_BLANK = "skipped because they contain only white space"


class File(NamedTuple):
    """A text file.

    Attributes:
      name: the same on every machine.
      path: where this machine finds the file.
      size_bytes: its size.
      checksum: that of an object in a bucket; "" for local files.
    """

    name: str
    path: str
    size_bytes: int
    checksum: str = ""


def is_validation(name: str | bytes) -> bool:
    """Returns whether a file name (or a line) belongs to validation: about 5%, by hash."""
    content = name if isinstance(name, bytes) else name.encode()
    return int.from_bytes(sha256(content).digest()[:4]) % 100 < VALIDATION_PERCENT


def validation_names(names: Iterable[str]) -> set[str]:
    """Returns the names that belong to validation: of two or more, some but not all; of fewer, none."""
    names = set(names)
    if len(names) < 2:
        return set()
    chosen = {name for name in names if is_validation(name)}
    if 0 < len(chosen) < len(names):
        return chosen
    first = min(names, key=lambda name: sha256(name.encode()).hexdigest())
    return {first} if not chosen else chosen - {first}


def list_files(patterns: tuple[str, ...]) -> tuple[File, ...]:
    """Returns the files that match any pattern, sorted by path."""
    found = {path: about for pattern in patterns for path, about in paths.listed(pattern).items()}
    names = names_below(found)
    return tuple(File(names[path], path, *about) for path, about in sorted(found.items()))


def names_below(files: Collection[str]) -> dict[str, str]:
    """Returns the part of each path below the common folder of all, the same on every machine."""
    if not files:
        return {}
    folders = [path.split("/")[:-1] for path in files]  # gs://bucket/a has an empty part, which `commonpath` drops
    common = itertools.takewhile(lambda parts: parts[0] == parts[1], zip(min(folders), max(folders), strict=False))
    first = len("/".join(part for part, _ in common))
    return {path: path[first:].lstrip("/") for path in files}


def overlaps(train: Sequence[str], validation: Sequence[str], *, where: str, remote: bool) -> list[Problem]:
    """Returns the problems of files that are for training and for validation, however their paths are written.

    Args:
      train, validation: patterns, as the user wrote them.
      where: the setting of the patterns for validation.
      remote: whether objects in buckets are compared, too; otherwise no bucket is listed.
    """

    def listed(pattern: str) -> dict[str, str]:
        names = paths.listed(pattern) if remote or not paths.is_remote(pattern) else ()
        return {name if paths.is_remote(name) else os.path.realpath(name): name for name in names}

    trained = {file for pattern in train for file in listed(pattern)} if validation else set()
    found = []
    for pattern in validation:
        if both := [name for file, name in listed(pattern).items() if file in trained]:
            names = ", ".join(units.shortened(sorted(both), most=_MOST_PROBLEMS))
            said = f"{pattern!r} matches {units.counted(len(both), 'file')} of the training data ({names})"
            fix = (
                "move them where no pattern for training finds them, or name no files for validation, so that a part "
                "of the training data is held out"
            )
            found.append(Problem(said, setting=where, file=pattern, expected="files for validation alone", fix=fix))
    return found


def split_overlaps(train: str, validation: str, *, where: str) -> list[Problem]:
    """Returns the problem of splits of a dataset that share examples, such as `train` and `train[:5%]`.

    `where` is the setting of the split for validation. Two different slices of a split are not compared.
    """
    trained, held_out = ([one.strip().partition("[")[::2] for one in split.split("+")] for split in (train, validation))
    if not any(a == b and (x == y or "" in (x, y)) for a, x in trained for b, y in held_out):
        return []
    fix = "name other splits or slices, or hold out a part by hash with launch/run tokenize, without --validation"
    said = f"{validation!r} has examples of the training split {train!r}"
    return [Problem(said, setting=where, expected="a split for validation alone", fix=fix)]


def split_files(files: tuple[File, ...]) -> tuple[tuple[File, ...], tuple[File, ...]]:
    """Splits files by name into training and validation."""
    chosen = validation_names(file.name for file in files)
    return tuple(f for f in files if f.name not in chosen), tuple(f for f in files if f.name in chosen)


def pattern_problems(where: str, patterns: list[str], *, kinds: Sequence[str] = text_formats.KINDS) -> list[Problem]:
    """Returns the problems of patterns of local files, which the setting `where` names."""
    found = []
    for pattern in patterns:
        files = list_files((pattern,))
        wrong = sorted({text_formats.kind(file.path) for file in files} - set(kinds))
        if paths.resolve(pattern).is_dir():
            fix = f"name its files, such as {pattern.rstrip('/')}/*{kinds[0]}"
            found.append(Problem(f"{pattern!r} is a folder", setting=where, file=pattern, fix=fix))
        elif not files:
            said = f"no file matches {pattern!r} (in {pathlib.Path.cwd()})"
            found.append(Problem(said, setting=where, file=pattern))
        elif wrong:
            expected = f"{', '.join(kinds)} (text also compressed: {', '.join(text_formats.COMPRESSIONS)})"
            said = f"{pattern!r} matches files {_endings(wrong)}"
            found.append(Problem(said, setting=where, file=pattern, expected=expected))
        elif not any(file.size_bytes for file in files):
            are = "files that match {} are" if len(files) > 1 else "file that matches {} is"
            found.append(Problem(f"{len(files)} {are.format(repr(pattern))} empty", setting=where, file=pattern))
        large = [
            f.path for f in files if f.path.endswith(".txt") and f.size_bytes > text_formats.LARGEST_DOCUMENT_BYTES
        ]
        if large:
            said = f"{large[0]} is one document of over 256 MiB"
            found.append(Problem(said, setting=where, file=large[0], fix="split it, or write .jsonl"))
    return found


def _endings(kinds: list[str]) -> str:
    ending = [f"ending in {', '.join(filter(None, kinds))}"] if any(kinds) else []
    return " and ".join([*ending, *(["without an ending"] if "" in kinds else [])])


def python_files(root: str) -> tuple[File, ...]:
    """Returns the .py files below a folder, except large and empty files, tests and installed packages."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _NOT_SOURCE)
        for name in names:
            path = pathlib.Path(folder, name)
            if name.endswith(".py") and (size := _readable_bytes(path)):
                found.append(File(path.relative_to(root).as_posix(), str(path), size))
    return tuple(sorted(found))


def _readable_bytes(path: pathlib.Path) -> int:
    try:
        if path.stat().st_size > _LARGEST_PYTHON_FILE_BYTES:
            return 0
        content = path.read_bytes()
        content.decode()
        return len(content)
    except (OSError, UnicodeDecodeError):
        return 0


class StreamSpec(NamedTuple):
    """Describes one stream of one split.

    Attributes:
      split: "train" or "validation".
      index, num_streams: this is stream `index` of `num_streams`.
      rows: R, rows per element of the stream.
      length: T, tokens per row.
      seed: shuffles the documents; None: they are read in order.
      vocabulary: converts text to ids; None if only texts are read.
      once: whether the stream ends after it has read its documents once.
    """

    split: str
    index: int  # type: ignore[assignment]  # hides tuple.index
    num_streams: int
    rows: int
    length: int
    seed: int | None
    vocabulary: Vocabulary | None
    once: bool = False


class Corpus(Protocol):
    """A source of documents, as a task uses it."""

    def open_stream(self, spec: StreamSpec) -> Stream:
        """Opens one stream at its start."""

    def sample_texts(self) -> Iterator[str]:
        """Yields training documents in a fixed order, each at most once."""

    def problems(self) -> list[str]:
        """Returns the problems that can be found before a run."""

    def named_files(self) -> tuple[str, ...]:
        """Returns file patterns and folders as the user wrote them."""

    def describe(self) -> str:
        """Returns a short description for the run summary."""

    def fingerprint(self) -> str:
        """Returns a hash, equal on all hosts that read the same documents in the same order."""


class HoldsOut(Protocol):
    """A `Corpus` for which the user names both training and validation data."""

    def overlaps(self, *, remote: bool) -> list[Problem]:
        """Returns the problems of data that are in both splits.

        `remote`: whether to open what is not a local file, too: buckets, and splits of prepared or published datasets.

        Raises UserError if such a split does not exist.
        """


class PacksItsOwnWay(Protocol):
    """A `Corpus` with a version of its own of how rows are packed."""

    @property
    def packing(self) -> int:
        """Version of how rows are packed; a position that was saved with another version is refused."""


class HashesContent(Protocol):
    """A `Corpus` of files."""

    def content_hash(self) -> str:
        """Returns a hash of the content of the files."""


class FillsCache(Protocol):
    """A `Corpus` that is read from a token cache."""

    def fill(self) -> None:
        """Writes the cache if it does not exist. Raises UserError if that fails."""


class TriesExamples(Protocol):
    """A `Corpus` whose examples the user's code makes."""

    def example_problems(self, length: int) -> list[str]:
        """Makes the first examples of each source for rows of `length` tokens; returns their problems."""


class MalformedDocument(UserError):
    """Raised for an invalid document; the documents after it can be read."""


class Intake:
    """Counts the documents of one source on this host, and reports skipped ones."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._read = 0
        self._noted: Counter[str] = Counter()

    def take(self, read: Callable[..., bytes], *arguments: Any, **options: Any) -> bytes:
        """Reads a document with `read(*arguments, **options)`, counts it, and returns it."""
        text = read(*arguments, **options)
        self.count(None if text else _BLANK)
        return text

    def count(self, note: str | None) -> None:
        """Counts a document that was read; `note` says how it was treated, None: as usual."""
        with self._lock:
            self._read += 1
            if note is None:
                return
            self._noted[note] += 1
            if self._noted[note] in _REPORTED:
                self._report(note)

    def _report(self, note: str) -> None:
        print(
            f"{self._source}: {note}: {self._noted[note]:,} of "
            f"{units.counted(self._read, 'document')} read so far on this host",
            file=sys.stderr,
            flush=True,
        )


@functools.cache
def intake_of(corpus: Corpus) -> Intake:
    """Returns the intake of a source, the same one at every call."""
    return Intake(corpus.describe())


def json_line(path: str, number: int, line: bytes) -> Any:
    """Returns the value of a line of JSON, None if it is blank. Raises MalformedDocument if it is not JSON."""
    if not line.strip():
        return None
    where = f"{path}:{number}"
    _require_utf8(line, where)
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedDocument(f"{where}: not JSON ({error})") from error


def json_text(field: str, path: str, number: int, line: bytes) -> bytes:
    """Returns the text of one JSON line as UTF-8; b"" if it is only white space.

    Args:
      field: the key of the text.
      path, number: the file and the line number, for messages.
      line: the line.

    Raises:
      MalformedDocument: the line is not JSON, or `field` has no valid text.
    """
    if not line.strip():
        return b""
    where, record = f"{path}:{number}", json_line(path, number, line)
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise MalformedDocument(
            f"{where}: no text in field {field!r}, found {_has(record, field)}; name the field that has it "
            "(text.files.field, --field)"
        )
    return checked(encoded(text, where=where), where=where)


def file_text(path: str, content: bytes, *, is_cut: bool = False) -> bytes:
    """Returns the text of one file as UTF-8; b"" if it is only white space."""
    return checked(content, where=path, is_cut=is_cut)


def checked(content: bytes, *, where: str, is_cut: bool = False) -> bytes:
    """Checks that a document is UTF-8 text and returns it; b"" if it is only white space.

    `is_cut`: whether `content` is only the beginning, possibly cut inside a character.

    Raises MalformedDocument if it is not UTF-8 or has a NUL character.
    """
    _require_utf8(content, where, is_cut=is_cut)
    if (at := content.find(b"\0")) >= 0:
        raise MalformedDocument(f"{where}: a NUL character at byte {at}: the file is not text, or is damaged")
    return content if content.strip() else b""


def encoded(text: str, *, where: str) -> bytes:
    """Encodes text as UTF-8. Raises MalformedDocument if it has half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise MalformedDocument(
            f"{where}: half a surrogate pair ({text[error.start]!a}) at character {error.start + 1}, which is not text"
        ) from error


def first_problems(files: Sequence[File], *, first: Callable[[File], Iterable[Any]], where: str) -> list[Problem]:
    """Returns up to three problems, found at the beginning of up to 32 local files.

    `first` reads the first documents of a file.
    """
    step = max(1, -(-len(files) // _MOST_FILES))
    looked_at, found, has_text = files[::step][:_MOST_FILES], [], False
    for file in looked_at:
        try:
            for document in first(file):
                has_text |= bool(document)
        except UserError as error:
            found.append(Problem(str(error), setting=where, file=file.path))
        if len(found) == _MOST_PROBLEMS:
            break
    whole = len(looked_at) == len(files) and all(
        file.size_bytes <= _MOST_BYTES and not text_formats.is_compressed(file.path) for file in files
    )
    if whole and files and not found and not has_text:
        found.append(Problem(f"{units.counted(len(files), 'file')} with only white space and no text", setting=where))
    return found


def first_lines(read_line: Callable[[str, int, bytes], Any], file: File) -> Iterator[Any]:
    """Yields `read_line(path, line number, line)` of each whole line in a file's first MiB."""
    content, is_cut = _beginning(file)
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1] if is_cut else lines, start=1):
        yield read_line(file.path, number, line)


def first_text(file: File) -> Iterator[bytes]:
    """Yields the first MiB of a file that is one document, checked."""
    content, is_cut = _beginning(file)
    yield file_text(file.path, content, is_cut=is_cut)


def _beginning(file: File) -> tuple[bytes, bool]:
    with text_formats.opened(file.path) as stream, text_formats.reading(file.path):
        return stream.read(_MOST_BYTES), bool(stream.read(1))


def _require_utf8(content: bytes, where: str, *, is_cut: bool = False) -> None:
    try:
        codecs.utf_8_decode(content, "strict", not is_cut)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        at = "" if b"\n" not in content else f", in line {line}"
        is_utf16 = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        raise MalformedDocument(
            f"{where}: not UTF-8 text (byte 0x{content[error.start]:02x} at {error.start}{at}); convert it, such as "
            f"iconv -f {'utf-16' if is_utf16 else 'latin1'} -t utf-8"
        ) from error


def _has(record: object, field: str) -> str:
    if not isinstance(record, dict):
        return "null" if record is None else type(record).__name__
    if field in record:
        return f"{json.dumps(record[field])[:40]}"
    return str(sorted(record))
