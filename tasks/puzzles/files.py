"""Reads and validates puzzle datasets on disk, in the format of the tools of TRM (Tiny Recursive Model).

    DIR/identifiers.json                     names of puzzles by id; 0 is "<blank>". Marks a complete dataset
    DIR/{train,test}/dataset.json            `Metadata`
    DIR/{train,test}/all__inputs.npy, all__labels.npy            [E, S] tokens, E examples of S tokens
    DIR/{train,test}/all__puzzle_indices.npy  [P + 1]            puzzle p has examples [p] to [p + 1]
    DIR/{train,test}/all__group_indices.npy   [G + 1]            group g has puzzles [g] to [g + 1]
    DIR/{train,test}/all__puzzle_identifiers.npy  [P]            row of puzzle p in a model's puzzle embedding table

A group is a puzzle with its augmentations; a puzzle has one example or (ARC) several.
"""

import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from core.batches import fingerprint_of
from core.errors import UserError
from core.files import paths

SPLITS = ("train", "test")
SET = "all"
BLANK = "<blank>"
ARRAYS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
IDENTIFIERS, METADATA = "identifiers.json", "dataset.json"
_CHECKED_AT_ONCE = 2**16  # number of examples that are hashed
_FINGERPRINT_EXAMPLES = 1000
_UNEVEN = 7919  # a prime, so that steps between examples are no multiples of the examples of a puzzle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata:
    """The content of dataset.json.

    Attributes:
      pad_id: token of the rows that fill the last batch of an evaluation.
      ignore_label_id: label that is not scored; None if all labels are scored.
      blank_identifier_id: puzzle identifier of the rows that fill the last batch.
      vocab_size: tokens are 0 to vocab_size - 1.
      seq_len: S, tokens per example.
      num_puzzle_identifiers: rows of the model's puzzle embedding table.
      total_groups: G.
      mean_puzzle_examples: E / P.
      total_puzzles: P; TRM's tools write G for Sudoku and mazes.
      sets: one, "all".
    """

    pad_id: int = 0
    ignore_label_id: int | None = 0
    blank_identifier_id: int = 0
    vocab_size: int
    seq_len: int
    num_puzzle_identifiers: int
    total_groups: int
    mean_puzzle_examples: float
    total_puzzles: int
    sets: tuple[str, ...] = (SET,)


class Split(NamedTuple):
    """The arrays of one split, as the module describes them, and its metadata."""

    inputs: np.ndarray
    labels: np.ndarray
    puzzle_identifiers: np.ndarray
    puzzle_indices: np.ndarray
    group_indices: np.ndarray
    metadata: Metadata

    @property
    def num_examples(self) -> int:
        """Number of examples, E."""
        return len(self.inputs)


def total_steps(metadata: Metadata, *, epochs: int, batch_size: int) -> int:
    """Converts epochs, each of which visits every group once, to optimizer steps."""
    return int(epochs * metadata.total_groups * metadata.mean_puzzle_examples / batch_size)


def is_dataset(directory: str) -> bool:
    """Returns whether the folder has a complete dataset."""
    return (paths.resolve(directory) / IDENTIFIERS).exists()


def read_metadata(directory: str, split: str) -> Metadata:
    """Reads dataset.json of one split. Raises UserError if the dataset is incomplete."""
    root = paths.resolve(directory)
    if not (root / IDENTIFIERS).exists():
        part = "is missing, so the dataset is incomplete" if root.exists() else "and the folder itself are missing"
        raise UserError(
            f"no puzzles in {str(directory)!r}: {IDENTIFIERS} {part}. Build them: launch/run make-dataset --help"
        )
    file = root / split / METADATA
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    names = [f.name for f in dataclasses.fields(Metadata)]
    required = [f.name for f in dataclasses.fields(Metadata) if f.default is dataclasses.MISSING]
    missing = [name for name in required if not isinstance(found, dict) or found.get(name) is None]
    if missing:
        raise UserError(f"{file} lacks {', '.join(missing)}; expected {', '.join(names)}")
    if list(found.get("sets", [SET])) != [SET]:
        raise UserError(
            f"{file} has sets {found['sets']}, expected [{SET!r}]: several sets in one folder are not supported"
        )
    kept = {name: found[name] for name in names if name in found}
    return Metadata(**{**kept, "sets": (SET,)})


def read_identifiers(directory: str) -> list[str]:
    """Returns the names of puzzles, indexed by id."""
    return json.loads((paths.resolve(directory) / IDENTIFIERS).read_text())


def read_split(directory: str, split: str) -> Split:
    """Reads one split. Raises UserError if its files are damaged or do not agree."""
    metadata = read_metadata(directory, split)
    folder = paths.resolve(directory) / split
    arrays = {name: _read_array(folder / f"{SET}__{name}.npy") for name in ARRAYS}
    found = Split(**arrays, metadata=metadata)
    _check_offsets(found, folder)
    _check_identifiers(found, folder)
    _check_tokens(found, folder)
    return found


def read_group_indices(directory: str, split: str) -> np.ndarray:
    """Reads only group_indices [G + 1] of a split."""
    return _read_array(paths.resolve(directory) / split / f"{SET}__group_indices.npy")


def read_first(directory: str, split: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the first example's tokens and labels, [S] each, and the number of examples."""
    folder, rows = paths.resolve(directory) / split, []
    for name in ("inputs", "labels"):
        file = folder / f"{SET}__{name}.npy"
        with file.open("rb") as stream:
            dims, _, dtype = _read_header(file, stream)
            rows.append(np.frombuffer(stream.read(dims[1] * dtype.itemsize), dtype))
    return rows[0], rows[1], dims[0]


class Cut(NamedTuple):
    """Selects the first puzzles of a split, and the first augmentations of each.

    Attributes:
      puzzles: number of groups; None: all.
      copies: augmentations of each puzzle; None: all.
    """

    puzzles: int | None = None
    copies: int | None = None

    def require(self, group_indices: np.ndarray, *, directory: str) -> None:
        """Raises UserError if a split with these group_indices [G + 1] is smaller than the selection."""
        groups = len(group_indices) - 1
        sizes = np.diff(np.asarray(group_indices, np.int64))[: self.puzzles]
        copies = int(sizes.min()) - 1 if groups else 0
        if (self.puzzles or 0) <= groups and (self.copies or 0) <= copies:
            return
        raise UserError(
            f"{directory!r} has {groups:,} training puzzles with at least {copies:,} copies of each; requested "
            f"{'all' if self.puzzles is None else f'{self.puzzles:,}'} with "
            f"{'all' if self.copies is None else f'{self.copies:,}'}. Build a larger dataset, or request fewer"
        )

    def of(self, split: Split) -> Split:
        """Returns the selected part of a split."""
        if self == Cut():
            return split
        first, after = (np.asarray(a, np.int64) for a in (split.group_indices[:-1], split.group_indices[1:]))
        first, after = first[: self.puzzles], after[: self.puzzles]
        if self.copies is not None:
            after = np.minimum(after, first + 1 + self.copies)
        puzzles = _ranges(first, after)
        offsets = np.asarray(split.puzzle_indices, np.int64)
        rows = _ranges(offsets[puzzles], offsets[puzzles + 1])
        sizes = offsets[puzzles + 1] - offsets[puzzles]
        metadata = dataclasses.replace(
            split.metadata,
            total_groups=len(first),
            total_puzzles=len(puzzles),
            mean_puzzle_examples=len(rows) / len(puzzles),
        )
        taken = slice(len(rows)) if rows[-1] == len(rows) - 1 else rows
        return Split(
            split.inputs[taken],
            split.labels[taken],
            split.puzzle_identifiers[puzzles],
            np.concatenate([[0], np.cumsum(sizes)]),
            np.concatenate([[0], np.cumsum(after - first)]),
            metadata,
        )


def _ranges(first: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns the concatenation of the ranges first[i] … after[i] - 1."""
    sizes = after - first
    return np.repeat(first - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes) + np.arange(sizes.sum())


def fingerprint(splits: Iterable[Split]) -> str:
    """Returns hashes of the metadata, the index arrays, and some of the examples (`core.batches.fingerprint_of`).

    The first is of examples in equal steps, which are the originals alone if the copies of each fit between two steps.
    """
    digest, content = hashlib.sha256(), hashlib.sha256()
    for found in splits:
        digest.update(json.dumps(dataclasses.asdict(found.metadata), sort_keys=True).encode())
        stride = max(1, found.num_examples // _FINGERPRINT_EXAMPLES)
        spread = (found.inputs[::stride], found.labels[::stride])
        for array in (*spread, found.puzzle_identifiers, found.puzzle_indices, found.group_indices):
            digest.update(np.ascontiguousarray(array, np.int64).tobytes())
        numbers, count = np.arange(_FINGERPRINT_EXAMPLES), max(found.num_examples, 1)
        uneven = np.unique((numbers * count // _FINGERPRINT_EXAMPLES + numbers * _UNEVEN) % count)
        for array in (found.inputs, found.labels):
            content.update(np.ascontiguousarray(array[uneven] if len(array) else array, np.int64).tobytes())
    return fingerprint_of(digest.hexdigest(), f"examples:{content.hexdigest()}")


def _read_array(file: paths.Path) -> np.ndarray:
    if not file.exists():
        raise UserError(f"{file} is missing; build the dataset again")
    with file.open("rb") as stream:
        dims, fortran, dtype = _read_header(file, stream)
        header_bytes = stream.tell()
    expected = header_bytes + int(np.prod(dims)) * dtype.itemsize
    if (actual := file.stat().length) != expected:
        raise UserError(
            f"{file} has {actual:,} bytes, expected {expected:,} for {dims} {dtype}: it is "
            f"{'truncated' if actual < expected else 'damaged'}; build the dataset again"
        )
    if not np.issubdtype(dtype, np.integer) or fortran:
        raise UserError(f"{file} has dtype {dtype}{' in column order' * fortran}, expected integers in row order")
    if paths.is_remote(file):
        return np.load(io.BytesIO(file.read_bytes()))
    return np.load(str(file), mmap_mode="r") if np.prod(dims) else np.zeros(dims, dtype)


def _read_header(file: paths.Path, stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Returns shape, whether the array is in column order, and dtype; leaves the stream at the first value."""
    try:
        version = np.lib.format.read_magic(stream)
        reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        return reader(stream)
    except (ValueError, KeyError) as error:
        raise UserError(f"{file} is not a .npy file: {error}") from error


_AGAIN = "make the dataset again with launch/run make-dataset"


def _check_offsets(split: Split, folder: paths.Path) -> None:
    examples, puzzles = len(split.inputs), len(split.puzzle_identifiers)
    for name, last in (("puzzle_indices", examples), ("group_indices", puzzles)):
        offsets = getattr(split, name)
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != last:
            ends = f"{offsets.ravel()[:1]} to {offsets.ravel()[-1:]}"
            raise UserError(f"{folder}/{SET}__{name}.npy runs from {ends}, expected from 0 to {last}; {_AGAIN}")
        if np.any(np.diff(offsets) < 1):
            at = np.argmax(np.diff(offsets) < 1) + 1
            raise UserError(f"{folder}/{SET}__{name}.npy does not increase at entry {at}: offsets must; {_AGAIN}")
    if len(split.puzzle_indices) != puzzles + 1:
        raise UserError(
            f"{folder} has {len(split.puzzle_indices)} puzzle_indices, expected {puzzles + 1}: one more than "
            f"puzzle_identifiers; {_AGAIN}"
        )
    if split.metadata.total_groups != len(split.group_indices) - 1:
        raise UserError(
            f"{folder}/{METADATA} has total_groups {split.metadata.total_groups}, "
            f"but group_indices has {len(split.group_indices) - 1}"
        )


def _check_identifiers(split: Split, folder: paths.Path) -> None:
    below = split.metadata.num_puzzle_identifiers
    wrong = (split.puzzle_identifiers < 0) | (split.puzzle_identifiers >= below)
    if np.any(wrong):
        at = int(np.argmax(wrong))
        raise UserError(
            f"{folder}/{SET}__puzzle_identifiers.npy has {split.puzzle_identifiers[at]} at puzzle {at}, "
            f"expected ids below num_puzzle_identifiers {below}"
        )


def _check_tokens(split: Split, folder: paths.Path) -> None:
    meta = split.metadata
    for name in ("inputs", "labels"):
        array = getattr(split, name)
        if array.shape != (len(split.inputs), meta.seq_len):
            raise UserError(
                f"{folder}/{SET}__{name}.npy has shape {array.shape}, expected ({len(split.inputs)}, {meta.seq_len}): "
                f"{METADATA} says seq_len {meta.seq_len}"
            )
        for start in range(0, len(array), _CHECKED_AT_ONCE):
            part = array[start : start + _CHECKED_AT_ONCE]
            if part.size and not 0 <= part.min() <= part.max() < meta.vocab_size:
                wrong = (part < 0) | (part >= meta.vocab_size)
                row, column = np.argwhere(wrong)[0]
                raise UserError(
                    f"{folder}/{SET}__{name}.npy has token {part[row, column]} in example {start + row}, "
                    f"place {column}; expected below vocab_size {meta.vocab_size}"
                )


def as_json(value: Any) -> str:
    """Returns a mapping, dataclass or other value as indented JSON with a final newline."""
    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    return json.dumps(plain, indent=1, sort_keys=isinstance(plain, Mapping)) + "\n"
