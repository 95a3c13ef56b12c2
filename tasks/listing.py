"""Lists the files that match a pattern, and splits them into training and validation.

A file has a name that is the same on every machine. Order, split and fingerprint are computed from names and sizes
alone, so that all hosts agree whatever order their file systems list files in.
"""

from __future__ import annotations

import glob
import os
import pathlib
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from core import paths

VALIDATION_PERCENT = 5
_LARGEST_PYTHON_FILE_BYTES = 2**20
_LARGEST_DOCUMENT_BYTES = 256 * 2**20
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


class File(NamedTuple):
    """A text file.

    Attributes:
      name: identifies the file, the same on every machine.
      path: where this machine finds it.
      size_bytes: its size; 0 for a gs:// file, whose size is not looked up.
    """

    name: str
    path: str
    size_bytes: int


def is_validation(name: str) -> bool:
    """Returns True for the 5 % of file names that belong to validation, chosen by hash."""
    return int(sha256(name.encode()).hexdigest()[:8], 16) % 100 < VALIDATION_PERCENT


def list_files(patterns: tuple[str, ...]) -> tuple[File, ...]:
    """Returns the files that match any pattern, sorted by name: the path relative to their common folder."""
    found = sorted({path for pattern in patterns for path in _glob(pattern)})
    if not found:
        return ()
    common = os.path.commonpath([os.path.dirname(path) for path in found])  # noqa: PTH120 (gs:// is text here)
    return tuple(
        File(path[len(common) :].lstrip("/"), path, 0 if paths.is_remote(path) else pathlib.Path(path).stat().st_size)
        for path in found
    )


def _glob(pattern: str) -> list[str]:
    if paths.is_remote(pattern):
        bucket, _, rest = pattern.removeprefix("gs://").partition("/")
        return [os.fspath(path) for path in paths.resolve(f"gs://{bucket}").glob(rest)]
    absolute = os.fspath(paths.resolve(pattern))
    return [path for path in glob.glob(absolute, recursive=True) if pathlib.Path(path).is_file()]  # noqa: PTH207


def is_json(files: tuple[File, ...]) -> bool:
    """Returns True if these are .jsonl files."""
    return bool(files) and files[0].path.endswith(".jsonl")


def validation_names(names: Iterable[str]) -> set[str]:
    """Returns the names that belong to validation: of two or more different ones, at least one."""
    names = set(names)
    chosen = {name for name in names if is_validation(name)}
    return chosen if chosen or len(names) < 2 else {min(names, key=lambda name: sha256(name.encode()).hexdigest())}


def split_files(files: tuple[File, ...]) -> tuple[tuple[File, ...], tuple[File, ...]]:
    """Splits files into training and validation by name; two or more files give at least one of each."""
    chosen = validation_names(file.name for file in files)
    return tuple(f for f in files if f.name not in chosen), tuple(f for f in files if f.name in chosen)


def pattern_problems(where: str, patterns: list[str], *, kinds: Sequence[str] = (".txt", ".jsonl")) -> list[str]:
    """Returns the problems of local file patterns, each with its fix.

    Args:
      where: the setting that names them.
      patterns: patterns of local files, or names.
      kinds: the endings that can be read.
    """
    found = []
    for pattern in patterns:
        files = list_files((pattern,))
        found_kinds = sorted({pathlib.Path(file.path).suffix for file in files})
        if paths.resolve(pattern).is_dir():
            found.append(f"{where}: {pattern!r} is a folder; name its files, such as {pattern.rstrip('/')}/*{kinds[0]}")
        elif not files:
            found.append(f"{where}: no file matches {pattern!r} (in {pathlib.Path.cwd()})")
        elif found_kinds not in [[kind] for kind in kinds]:
            expected = " or only ".join(kinds)
            found.append(f"{where}: {pattern!r} matches files {_endings(found_kinds)}, expected only {expected}")
        elif not any(file.size_bytes for file in files):
            found.append(f"{where}: all {len(files)} files that match {pattern!r} are empty")
        large = [f.path for f in files if f.path.endswith(".txt") and f.size_bytes > _LARGEST_DOCUMENT_BYTES]
        if large:
            found.append(f"{where}: {large[0]} is one document of over 256 MiB; split it, or write .jsonl")
    return found


def _endings(kinds: list[str]) -> str:
    ending = [f"ending in {', '.join(filter(None, kinds))}"] if any(kinds) else []
    return " and ".join([*ending, *(["without an ending"] if "" in kinds else [])])


def python_files(root: str) -> tuple[File, ...]:
    """Returns the .py files below a folder that are readable UTF-8 text, sorted by name."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _NOT_SOURCE)
        for name in names:
            path = pathlib.Path(folder, name)
            if name.endswith(".py") and (size := _readable_bytes(path)):
                found.append(File(path.relative_to(root).as_posix(), str(path), size))
    return tuple(sorted(found))


def _readable_bytes(path: pathlib.Path) -> int:
    """Returns the size of a UTF-8 text file; 0 if it is unreadable, not text, or over 1 MiB."""
    try:
        if path.stat().st_size > _LARGEST_PYTHON_FILE_BYTES:
            return 0
        return len(path.read_text(encoding="utf-8").encode())
    except (OSError, UnicodeDecodeError):
        return 0
