"""Writes a puzzle dataset, whose arrays may be larger than memory."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from core.errors import check_integer
from tasks import whole_folder
from tasks.puzzles import files

BUILD = "build.json"  # file with the recipe's parameters, and statistics of the result
_HEADER_BYTES = 128  # fixed size, so that the header can be written last, when the number of rows is known


class ArrayFile:
    """A .npy file to which rows of shape `row` are appended; `rows` is their number so far."""

    def __init__(self, path: pathlib.Path, *, row: tuple[int, ...], dtype: type):
        self._stream = path.open("wb")
        self._row, self._dtype, self.rows = row, np.dtype(dtype), 0
        self._stream.write(b"\0" * _HEADER_BYTES)

    def append(self, values: np.ndarray) -> None:
        """Appends rows, an array [n, *row]."""
        values = np.ascontiguousarray(values, self._dtype)
        assert values.shape[1:] == self._row, (values.shape, self._row)
        self._stream.write(values.tobytes())
        self.rows += len(values)

    def close(self) -> None:
        """Writes the header and closes the file."""
        text = repr({"descr": self._dtype.str, "fortran_order": False, "shape": (self.rows, *self._row)}).encode()
        magic = np.lib.format.magic(1, 0)
        room = _HEADER_BYTES - len(magic) - 2
        self._stream.seek(0)
        self._stream.write(magic + room.to_bytes(2, "little") + text.ljust(room - 1) + b"\n")
        self._stream.close()


class SplitWriter:
    """Writes one split, group by group."""

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
          inputs, labels: [E, S] tokens.
          puzzle_sizes: number of examples of each puzzle; None: 1 each.
          identifiers: identifier of each puzzle; None: 0.
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
        """Closes the arrays and writes dataset.json."""
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
    """Writes the files of a dataset into an existing, empty folder, complete after `close`.

    Attributes:
      train, test: the writers of the splits.
      identifiers: names of puzzles by id; callers append to it.
      extra: further JSON values by file name.
    """

    def __init__(self, folder: pathlib.Path, *, vocab_size: int, seq_len: int):
        self._folder, self._vocab_size, self._seq_len = folder, vocab_size, seq_len
        self.train, self.test = (SplitWriter(folder / split, seq_len=seq_len) for split in files.SPLITS)
        self.identifiers = [files.BLANK]
        self.extra: dict[str, Any] = {}

    def close(self) -> None:
        """Closes the files, and writes identifiers.json, which marks a complete dataset, last."""
        for split in (self.train, self.test):
            split.close(vocab_size=self._vocab_size, seq_len=self._seq_len, num_identifiers=len(self.identifiers))
        for name, value in self.extra.items():
            (self._folder / name).write_text(files.as_json(value))
        (self._folder / files.IDENTIFIERS).write_text(json.dumps(self.identifiers) + "\n")


def check_numbers(where: str, *, least: int = 1, **numbers: int | None) -> None:
    """Raises UserError unless each number is None or an integer of at least `least`."""
    for name, value in numbers.items():
        if value is not None:
            check_integer(value, where=f"{where}: {name}", least=least)


@contextlib.contextmanager
def dataset(directory: str, *, vocab_size: int, seq_len: int, about: Mapping[str, Any]) -> Iterator[DatasetWriter]:
    """Yields a writer, whose files move to `directory` when the block ends without an error.

    Args:
      directory: must be empty or not exist.
      vocab_size: tokens are 0 to vocab_size - 1.
      seq_len: tokens per example.
      about: the kind and parameters of the dataset, for build.json.
    """
    with whole_folder.appearing(directory, last=files.IDENTIFIERS) as part:
        writer = DatasetWriter(part, vocab_size=vocab_size, seq_len=seq_len)
        writer.extra[BUILD] = dict(about)
        yield writer
        writer.close()
