"""Writes a dataset whole or not at all.

The one idea: everything is written to a folder beside the target (for a bucket: on the local disk) and appears at once
by renaming; in a bucket, which renames nothing, the file that makes a folder a dataset is uploaded last. Arrays grow on
disk group by group, so that a set may be larger than memory, and the same examples give the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from core import paths
from core.errors import UserError
from tasks.puzzles import files

BUILD = "build.json"  # what was asked for, and what came of it
_HEADER_BYTES = 128  # always as long, so that it can be written once the number of rows is known


class ArrayFile:
    """A .npy file that grows by rows."""

    def __init__(self, path: pathlib.Path, *, row: tuple[int, ...], dtype: type):
        self._stream = path.open("wb")
        self._row, self._dtype, self.rows = row, np.dtype(dtype), 0
        self._stream.write(b"\0" * _HEADER_BYTES)

    def append(self, values: np.ndarray) -> None:
        """Adds rows."""
        values = np.ascontiguousarray(values, self._dtype)
        assert values.shape[1:] == self._row, (values.shape, self._row)
        self._stream.write(values.tobytes())
        self.rows += len(values)

    def close(self) -> None:
        """Writes the header."""
        text = repr({"descr": self._dtype.str, "fortran_order": False, "shape": (self.rows, *self._row)}).encode()
        magic = np.lib.format.magic(1, 0)
        room = _HEADER_BYTES - len(magic) - 2
        self._stream.seek(0)
        self._stream.write(magic + room.to_bytes(2, "little") + text.ljust(room - 1) + b"\n")
        self._stream.close()


class SplitWriter:
    """One split, group by group."""

    def __init__(self, folder: pathlib.Path, *, seq_len: int):
        folder.mkdir()
        self._folder = folder
        rows = {"inputs": (seq_len,), "labels": (seq_len,)}
        dtypes = {"inputs": np.uint8, "labels": np.uint8, "puzzle_identifiers": np.int32}
        self._arrays = {
            name: ArrayFile(
                folder / f"{files.SET}__{name}.npy", row=rows.get(name, ()), dtype=dtypes.get(name, np.int64)
            )
            for name in files.ARRAYS
        }
        for name in ("puzzle_indices", "group_indices"):
            self._arrays[name].append(np.zeros(1))

    def add_group(
        self,
        inputs: np.ndarray,
        labels: np.ndarray,
        *,
        puzzle_sizes: Sequence[int] | None = None,
        identifiers: Sequence[int] | None = None,
    ) -> None:
        """Adds a puzzle with its augmentations.

        Args:
          inputs: [E, S] tokens.
          labels: [E, S] tokens.
          puzzle_sizes: examples of each puzzle; one each where not given.
          identifiers: of each puzzle; 0 where not given.
        """
        sizes = np.ones(len(inputs), np.int64) if puzzle_sizes is None else np.asarray(puzzle_sizes)
        assert sizes.sum() == len(inputs) == len(labels)
        ids = np.zeros(len(sizes), np.int32) if identifiers is None else np.asarray(identifiers)
        first = self._arrays["inputs"].rows
        self._arrays["inputs"].append(inputs)
        self._arrays["labels"].append(labels)
        self._arrays["puzzle_identifiers"].append(ids)
        self._arrays["puzzle_indices"].append(first + np.cumsum(sizes))
        self._arrays["group_indices"].append(np.asarray([self._arrays["puzzle_identifiers"].rows]))

    def close(self, *, vocab_size: int, seq_len: int, num_identifiers: int) -> None:
        """Finishes the arrays and writes what they are."""
        for array in self._arrays.values():
            array.close()
        examples, puzzles = self._arrays["inputs"].rows, self._arrays["puzzle_identifiers"].rows
        metadata = files.Metadata(
            vocab_size=vocab_size,
            seq_len=seq_len,
            num_puzzle_identifiers=num_identifiers,
            total_groups=self._arrays["group_indices"].rows - 1,
            mean_puzzle_examples=examples / max(1, puzzles),
            total_puzzles=puzzles,
        )
        (self._folder / files.METADATA).write_text(files.as_json(metadata))


class DatasetWriter:
    """A dataset in the making.

    Attributes:
      train, test: the splits.
      identifiers: names of puzzles by id; append to it.
      extra: further JSON files by name.
    """

    def __init__(self, folder: pathlib.Path, *, vocab_size: int, seq_len: int):
        self._folder, self._vocab_size, self._seq_len = folder, vocab_size, seq_len
        self.train, self.test = (SplitWriter(folder / split, seq_len=seq_len) for split in files.SPLITS)
        self.identifiers = [files.BLANK]
        self.extra: dict[str, Any] = {}

    def close(self) -> None:
        """Finishes every file."""
        for split in (self.train, self.test):
            split.close(vocab_size=self._vocab_size, seq_len=self._seq_len, num_identifiers=len(self.identifiers))
        for name, value in self.extra.items():
            (self._folder / name).write_text(files.as_json(value))
        (self._folder / files.IDENTIFIERS).write_text(json.dumps(self.identifiers) + "\n")


def check_free(directory: str) -> None:
    """Raises ValueError where a dataset cannot be written: something is there, or nothing can be."""
    target = paths.resolve(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "a dataset" if files.is_dataset(directory) else "something else"
        raise UserError(f"{str(directory)!r} exists and holds {what}: name a new folder, or remove it first")
    paths.check_writable(target)


@contextlib.contextmanager
def dataset(directory: str, *, vocab_size: int, seq_len: int, about: Mapping[str, Any]) -> Iterator[DatasetWriter]:
    """Gives a writer; what it wrote appears in `directory` when the block ends, and nothing where it raises.

    Args:
      directory: local or gs://; must not hold anything.
      vocab_size: tokens are below it.
      seq_len: tokens of an example.
      about: what was asked for; kept as build.json.

    Raises:
      ValueError: the directory holds something, or cannot be written.
    """
    check_free(directory)
    target = paths.resolve(directory)
    remote = paths.is_remote(target)
    beside = pathlib.Path(tempfile.gettempdir()) if remote else pathlib.Path(target.parent)
    beside.mkdir(parents=True, exist_ok=True)
    part = beside / f".{target.name}.{uuid.uuid4().hex}"
    part.mkdir()
    try:
        writer = DatasetWriter(part, vocab_size=vocab_size, seq_len=seq_len)
        writer.extra[BUILD] = dict(about)
        yield writer
        writer.close()
        if remote:
            _upload(part, target)
        else:
            _appear(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _appear(part: pathlib.Path, target: paths.Path) -> None:
    try:
        part.rename(target)  # Onto an empty folder too.
    except OSError as error:
        raise UserError(f"{target} was free when building began and is not now ({error}): name another") from error


def _upload(folder: pathlib.Path, target: paths.Path) -> None:
    every = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    for name in sorted(every, key=lambda p: p.as_posix() == files.IDENTIFIERS):
        paths.copy_file(folder / name, to=target / name.as_posix())
