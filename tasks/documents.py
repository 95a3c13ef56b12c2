"""The text of a file or of a line of JSON, and what is wrong with it; without TensorFlow.

One set of rules serves the pipeline, which applies it to every document, and the check before a run, which applies it
to the first rows of local files.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from core import units
from tasks.listing import File

_MOST_FILES = 32  # that a check reads, spread over all of them
_MOST_BYTES = 2**20  # of each
_MOST_PROBLEMS = 3


def json_text(field: str, path: str, number: int, line: bytes) -> bytes:
    """The text of one line; empty for a blank line or white space alone.

    Raises:
      ValueError: names file and line, and what the line has instead.
    """
    if not line.strip():
        return b""
    where = f"{path}:{number}"
    _require_utf8(line, where)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{where}: no text in field {field!r}, it has {_has(record, field)}; set text.files.field")
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        at = f"character {error.start + 1} of field {field!r}"
        raise ValueError(f"{where}: half a surrogate pair ({text[error.start]!a}), which is no text: {at}") from error
    return _cleaned(content, where)


def file_text(path: str, content: bytes, *, is_cut: bool = False) -> bytes:
    """The text of one file, or of its beginning; empty for white space alone.

    Raises:
      ValueError: names file and line.
    """
    _require_utf8(content, path, is_cut=is_cut)
    return _cleaned(content, path)


def first_problems(files: Sequence[File], *, field: str | None, where: str) -> list[str]:
    """What the first rows of local files show.

    Args:
      files: on a disk.
      field: of a line of JSON that holds the text; None where a file is one document.
      where: the setting, for messages.
    """
    step = max(1, -(-len(files) // _MOST_FILES))
    looked_at, found, has_text = files[::step][:_MOST_FILES], [], False
    for file in looked_at:
        try:
            for text in _first_texts(file, field):
                has_text |= bool(text)
        except ValueError as error:
            found.append(f"{where}: {error}")
        except OSError as error:
            found.append(f"{where}: cannot read {file.path}: {error.strerror}")
        if len(found) == _MOST_PROBLEMS:
            break
    whole = len(looked_at) == len(files) and all(file.size_bytes <= _MOST_BYTES for file in files)
    if whole and files and not found and not has_text:
        found.append(f"{where}: {units.counted(len(files), 'file')} with white space alone, and no text")
    return found


def _first_texts(file: File, field: str | None) -> Iterator[bytes]:
    with Path(file.path).open("rb") as opened:
        content = opened.read(_MOST_BYTES)
    is_cut = len(content) < os.stat(file.path).st_size  # noqa: PTH116 (one call, beside the read)
    if field is None:
        yield file_text(file.path, content, is_cut=is_cut)
        return
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1] if is_cut else lines, start=1):
        yield json_text(field, file.path, number, line)


def _require_utf8(content: bytes, where: str, *, is_cut: bool = False) -> None:
    """Raises ValueError for other bytes; of a text that is cut, the last character may be."""
    try:
        codecs.utf_8_decode(content, "strict", not is_cut)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        at = "" if b"\n" not in content else f", in line {line}"
        raise ValueError(
            f"{where}: not UTF-8 text (byte 0x{content[error.start]:02x} at {error.start}{at}); convert it, such as "
            "iconv -f latin1 -t utf-8"
        ) from error


def _cleaned(content: bytes, where: str) -> bytes:
    if (at := content.find(b"\0")) >= 0:
        raise ValueError(f"{where}: a NUL character at byte {at} of the text: this is no text, or damaged")
    return content if content.strip() else b""


def _has(record: object, field: str) -> str:
    if not isinstance(record, dict):
        return "null" if record is None else type(record).__name__
    if field in record:
        return f"{json.dumps(record[field])[:40]} there"
    return str(sorted(record))
