"""Writes files into a temporary folder, and moves them to the target when they are complete.

A bucket has no atomic rename, so there the file that marks a complete folder is uploaded last.
"""

import contextlib
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator

from core.errors import UserError
from core.files import paths


def check_free(directory: str) -> None:
    """Raises UserError if `directory` is a file, is not empty, or cannot be written."""
    target = paths.resolve(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{str(directory)!r} exists and is not empty: name a new folder, or remove it first")
    paths.check_writable(target)


def remove(directory: str) -> None:
    """Removes a folder of the run and its files, if it exists."""
    target = paths.resolve(directory)
    if target.exists():
        target.rmtree()


@contextlib.contextmanager
def appearing(directory: str, *, last: str) -> Iterator[pathlib.Path]:
    """Yields a local folder whose files move to `directory` when the block ends without an error.

    `last` names the file that marks a complete folder.
    """
    check_free(directory)
    target = paths.resolve(directory)
    remote = paths.is_remote(target)
    beside = pathlib.Path(tempfile.gettempdir()) if remote else pathlib.Path(target.parent)
    beside.mkdir(parents=True, exist_ok=True)
    part = beside / f".{target.name}.{uuid.uuid4().hex}"
    part.mkdir()
    try:
        yield part
        if remote:
            _upload(part, target, last)
        else:
            _appear(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _appear(part: pathlib.Path, target: paths.Path) -> None:
    try:
        part.rename(target)  # also replaces an empty folder
    except OSError as error:
        raise UserError(
            f"{target} was empty when building began and is not now ({error}): name another directory"
        ) from error


def _upload(folder: pathlib.Path, target: paths.Path, last: str) -> None:
    every = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    for name in sorted(every, key=lambda p: p.as_posix() == last):
        paths.copy_file(folder / name, to=target / name.as_posix())
