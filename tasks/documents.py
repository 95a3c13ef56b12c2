"""Validates and counts the documents of every text source, without TensorFlow.

Every document passes through the `Intake` of its source, which counts the documents that are skipped. The same checks
run on the beginning of local files before a run starts.
"""

from __future__ import annotations

import codecs
import functools
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from core import units
from core.errors import UserError
from tasks.corpus import Corpus
from tasks.listing import File

_MOST_FILES = 32  # files that are checked before a run, spread evenly over the list
_MOST_BYTES = 2**20  # bytes checked per file
_MOST_PROBLEMS = 3
_REPORTED = tuple(10**n for n in range(12))  # what is skipped is reported at the 1st, 10th, 100th, ... document
_BLANK = "skipped because they contain only white space"


class Intake:
    """Validates and counts the documents of one source on this host; all streams of the source share it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._refused: UserError | None = None
        self._read = 0
        self._noted: Counter[str] = Counter()

    def take(self, read: Callable[..., bytes], *arguments: Any, **options: Any) -> bytes:
        """Reads a document with `read(*arguments, **options)`; blank documents are counted and reported.

        Returns:
          The text as UTF-8; empty if it holds only white space.

        Raises:
          UserError: from `read`, if the document is not valid text.
        """
        text = read(*arguments, **options)
        self.count(None if text else _BLANK)
        return text

    def count(self, note: str | None) -> None:
        """Counts a document that was read; `note` says what was done to it, such as `skipped because …`."""
        with self._lock:
            self._read += 1
            if note is None:
                return
            self._noted[note] += 1
            if self._noted[note] in _REPORTED:
                self._report(note)

    def refuse(self, error: UserError) -> None:
        """Stores the first error for `raise_refused`, for callers that cannot raise it themselves."""
        with self._lock:
            self._refused = self._refused or error

    def raise_refused(self) -> None:
        """Raises UserError if a document was refused since the last call."""
        with self._lock:
            refused, self._refused = self._refused, None
        if refused:
            raise UserError(f"{self._source}: {refused}") from refused

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
    """Returns the value of one line of JSON; None if it holds only white space.

    Args:
      path: the file, for messages.
      number: the line number, from 1.
      line: the line itself.

    Raises:
      UserError: the line is not JSON; the message names file and line.
    """
    if not line.strip():
        return None
    where = f"{path}:{number}"
    _require_utf8(line, where)
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from error


def json_text(field: str, path: str, number: int, line: bytes) -> bytes:
    """Returns the text of one JSON line as UTF-8; empty if it holds only white space.

    Args:
      field: the key of the text.
      path, number, line: as in `json_line`.

    Raises:
      UserError: the line is not JSON or has no text in `field`; the message names file and line.
    """
    if not line.strip():
        return b""
    where, record = f"{path}:{number}", json_line(path, number, line)
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{where}: no text in field {field!r}, found {_has(record, field)}; set text.files.field")
    return checked(encoded(text, where=where), where=where)


def file_text(path: str, content: bytes, *, is_cut: bool = False) -> bytes:
    """Returns the text of one file (or of its beginning) as UTF-8; empty if it holds only white space.

    Raises:
      UserError: the content is not text; the message names file and line.
    """
    return checked(content, where=path, is_cut=is_cut)


def checked(content: bytes, *, where: str, is_cut: bool = False) -> bytes:
    """Checks that a document is UTF-8 text and returns it; empty if it holds only white space.

    Args:
      content: the bytes of the document.
      where: names the document in messages.
      is_cut: `content` is only the beginning, possibly cut inside a character.

    Raises:
      UserError: the bytes are not UTF-8, or contain a NUL character.
    """
    _require_utf8(content, where, is_cut=is_cut)
    if (at := content.find(b"\0")) >= 0:
        raise UserError(f"{where}: a NUL character at byte {at}: the file is not text, or is damaged")
    return content if content.strip() else b""


def encoded(text: str, *, where: str) -> bytes:
    """Encodes text as UTF-8. Raises UserError for half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: half a surrogate pair ({text[error.start]!a}) at character {error.start + 1}, which is not text"
        ) from error


def first_problems(
    files: Sequence[File], *, read_line: Callable[[str, int, bytes], Any] | None, where: str
) -> list[str]:
    """Returns the problems found at the beginning of up to 32 local files.

    Args:
      files: files on a local disk.
      read_line: reads one line, given path, number and bytes; a false value is blank. None: each file is one document.
      where: the configuration setting that names the files, for messages.
    """
    step = max(1, -(-len(files) // _MOST_FILES))
    looked_at, found, has_text = files[::step][:_MOST_FILES], [], False
    for file in looked_at:
        try:
            for document in _first_documents(file, read_line):
                has_text |= bool(document)
        except UserError as error:
            found.append(f"{where}: {error}")
        except OSError as error:
            found.append(f"{where}: cannot read {file.path}: {error.strerror}")
        if len(found) == _MOST_PROBLEMS:
            break
    whole = len(looked_at) == len(files) and all(file.size_bytes <= _MOST_BYTES for file in files)
    if whole and files and not found and not has_text:
        found.append(f"{where}: {units.counted(len(files), 'file')} with only white space and no text")
    return found


def _first_documents(file: File, read_line: Callable[[str, int, bytes], Any] | None) -> Iterator[Any]:
    with Path(file.path).open("rb") as opened:
        content = opened.read(_MOST_BYTES)
    is_cut = len(content) < os.stat(file.path).st_size  # noqa: PTH116 (one call, beside the read)
    if read_line is None:
        yield file_text(file.path, content, is_cut=is_cut)
        return
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1] if is_cut else lines, start=1):
        yield read_line(file.path, number, line)


def _require_utf8(content: bytes, where: str, *, is_cut: bool = False) -> None:
    """Raises UserError for bytes that are not UTF-8. If `is_cut`, the last character may be incomplete."""
    try:
        codecs.utf_8_decode(content, "strict", not is_cut)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        at = "" if b"\n" not in content else f", in line {line}"
        raise UserError(
            f"{where}: not UTF-8 text (byte 0x{content[error.start]:02x} at {error.start}{at}); convert it, such as "
            "iconv -f latin1 -t utf-8"
        ) from error


def _has(record: object, field: str) -> str:
    if not isinstance(record, dict):
        return "null" if record is None else type(record).__name__
    if field in record:
        return f"{json.dumps(record[field])[:40]}"
    return str(sorted(record))
