"""Puzzles on disk: the directory that TRM's own tools write and read, checked when it is opened.

    DIR/identifiers.json                     names of puzzles by id; 0 is "<blank>". Written last: no dataset without it
    DIR/{train,test}/dataset.json            `Metadata`
    DIR/{train,test}/all__inputs.npy, all__labels.npy            [E, S] tokens, E examples of S tokens
    DIR/{train,test}/all__puzzle_indices.npy  [P + 1]            puzzle p has examples [p] to [p + 1]
    DIR/{train,test}/all__group_indices.npy   [G + 1]            group g has puzzles [g] to [g + 1]
    DIR/{train,test}/all__puzzle_identifiers.npy  [P]            its row in a model's table of puzzles

A group is a puzzle with its augmentations; a puzzle has one example or (ARC) several. The one idea: a reader believes
nothing; what does not hold together is named with its file, since a model trains on any numbers without complaint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from core import paths
from core.errors import UserError

SPLITS = ("train", "test")
SET = "all"
BLANK = "<blank>"
ARRAYS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
IDENTIFIERS, METADATA = "identifiers.json", "dataset.json"
_CHECKED_AT_ONCE = 2**16  # examples
_FINGERPRINT_EXAMPLES = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata:
    """dataset.json.

    Attributes:
      pad_id: fills the rows that complete the last batch of an evaluation.
      ignore_label_id: label that is not scored; None where all are.
      blank_identifier_id: puzzle identifier of such rows.
      vocab_size: tokens are below it.
      seq_len: S.
      num_puzzle_identifiers: rows of the model's table of puzzles.
      total_groups: G.
      mean_puzzle_examples: E / P.
      total_puzzles: P (TRM's own tool puts G here for Sudoku and mazes; nothing may depend on it).
      sets: always one, "all".
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
    """The arrays of one split and what they mean."""

    inputs: np.ndarray
    labels: np.ndarray
    puzzle_identifiers: np.ndarray
    puzzle_indices: np.ndarray
    group_indices: np.ndarray
    metadata: Metadata

    @property
    def num_examples(self) -> int:
        """E."""
        return len(self.inputs)


def total_steps(metadata: Metadata, *, epochs: int, batch_size: int) -> int:
    """Optimizer steps of a recipe that counts in epochs, an epoch being one visit to every group.

    50,000 epochs over 1,000 puzzles in batches of 768 are 65,104 steps, whatever the number of augmentations.
    """
    return int(epochs * metadata.total_groups * metadata.mean_puzzle_examples / batch_size)


def is_dataset(directory: str) -> bool:
    """Whether a complete dataset is there."""
    return (paths.resolve(directory) / IDENTIFIERS).exists()


def read_metadata(directory: str, split: str) -> Metadata:
    """dataset.json of one split.

    Raises:
      ValueError: there is no complete dataset, or the file lacks something.
    """
    root = paths.resolve(directory)
    if not (root / IDENTIFIERS).exists():
        part = "is missing, so it was not written to its end" if root.exists() else "and the folder itself are missing"
        raise UserError(f"no puzzles in {str(directory)!r}: {IDENTIFIERS} {part}. Build them: launch/run build --help")
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
        raise UserError(f"{file} has sets {found['sets']}, expected [{SET!r}]: several sets in one folder are not read")
    kept = {name: found[name] for name in names if name in found}
    return Metadata(**{**kept, "sets": (SET,)})


def read_identifiers(directory: str) -> list[str]:
    """Names of puzzles by id."""
    return json.loads((paths.resolve(directory) / IDENTIFIERS).read_text())


def read_split(directory: str, split: str) -> Split:
    """One split, its arrays mapped from disk (in memory where they are in a bucket), every rule of the format checked.

    Raises:
      ValueError: what does not hold, with its file.
    """
    metadata = read_metadata(directory, split)
    folder = paths.resolve(directory) / split
    arrays = {name: _read_array(folder / f"{SET}__{name}.npy") for name in ARRAYS}
    found = Split(**arrays, metadata=metadata)
    _check_offsets(found, folder)
    _check_identifiers(found, folder)
    _check_tokens(found, folder)
    return found


def read_group_indices(directory: str, split: str) -> np.ndarray:
    """[G + 1] alone: where each group's puzzles begin. Raises ValueError for a file that is missing or damaged."""
    return _read_array(paths.resolve(directory) / split / f"{SET}__group_indices.npy")


def read_first(directory: str, split: str) -> tuple[np.ndarray, np.ndarray, int]:
    """The first example's tokens and labels, [S] each, and how many examples there are; nothing else is read."""
    folder, rows = paths.resolve(directory) / split, []
    for name in ("inputs", "labels"):
        file = folder / f"{SET}__{name}.npy"
        with file.open("rb") as stream:
            dims, _, dtype = _read_header(file, stream)
            rows.append(np.frombuffer(stream.read(dims[1] * dtype.itemsize), dtype))
    return *rows, dims[0]


class Cut(NamedTuple):
    """A part of a split: the first puzzles, and the first variants of each.

    A build with the same seed that asks for less is the beginning of one that asks for more, so one large dataset
    serves experiments that need parts of it.

    Attributes:
      puzzles: groups; None: all.
      copies: variants of each beside the puzzle itself; None: all.
    """

    puzzles: int | None = None
    copies: int | None = None

    def require(self, group_indices: np.ndarray, *, directory: str) -> None:
        """Raises ValueError where the split of these groups ([G + 1]) has less than is asked for."""
        groups = len(group_indices) - 1
        sizes = np.diff(np.asarray(group_indices, np.int64))[: self.puzzles]
        copies = int(sizes.min()) - 1 if groups else 0
        if (self.puzzles or 0) <= groups and (self.copies or 0) <= copies:
            return
        raise UserError(
            f"{directory!r} has {groups:,} training puzzles with at least {copies:,} copies of each; asked for "
            f"{'all' if self.puzzles is None else f'{self.puzzles:,}'} with "
            f"{'all' if self.copies is None else f'{self.copies:,}'}. Build a larger one, or ask for fewer"
        )

    def of(self, split: Split) -> Split:
        """The part, its arrays copied where it is no beginning of them."""
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
    """first[0] … after[0] - 1, first[1] … after[1] - 1, …"""
    sizes = after - first
    return np.repeat(first - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes) + np.arange(sizes.sum())


def fingerprint(splits: Iterable[Split]) -> str:
    """A hash of the metadata, the offsets, and 1,000 examples spread over each split."""
    digest = hashlib.sha256()
    for found in splits:
        digest.update(json.dumps(dataclasses.asdict(found.metadata), sort_keys=True).encode())
        stride = max(1, found.num_examples // _FINGERPRINT_EXAMPLES)
        spread = (found.inputs[::stride], found.labels[::stride])
        for array in (*spread, found.puzzle_identifiers, found.puzzle_indices, found.group_indices):
            digest.update(np.ascontiguousarray(array, np.int64).tobytes())
    return digest.hexdigest()


def _read_array(file: paths.Path) -> np.ndarray:
    if not file.exists():
        raise UserError(f"{file} is missing; build the dataset anew")
    with file.open("rb") as stream:
        dims, fortran, dtype = _read_header(file, stream)
        header_bytes = stream.tell()
    expected = header_bytes + int(np.prod(dims)) * dtype.itemsize
    if (actual := file.stat().length) != expected:
        raise UserError(
            f"{file} has {actual:,} bytes, expected {expected:,} for {dims} {dtype}: it is "
            f"{'truncated' if actual < expected else 'damaged'}; build the dataset anew"
        )
    if not np.issubdtype(dtype, np.integer) or fortran:
        raise UserError(f"{file} has dtype {dtype}{' in column order' * fortran}, expected integers in row order")
    if paths.is_remote(file):
        return np.load(io.BytesIO(file.read_bytes()))
    return np.load(str(file), mmap_mode="r") if np.prod(dims) else np.zeros(dims, dtype)


def _read_header(file: paths.Path, stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether in column order, and dtype; the stream then stands at the first number."""
    try:
        version = np.lib.format.read_magic(stream)
        reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        return reader(stream)
    except (ValueError, KeyError) as error:
        raise UserError(f"{file} is no .npy file: {error}") from error


def _check_offsets(split: Split, folder: paths.Path) -> None:
    examples, puzzles = len(split.inputs), len(split.puzzle_identifiers)
    for name, last in (("puzzle_indices", examples), ("group_indices", puzzles)):
        offsets = getattr(split, name)
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != last:
            ends = f"{offsets.ravel()[:1]} to {offsets.ravel()[-1:]}"
            raise UserError(f"{folder}/{SET}__{name}.npy runs from {ends}, expected from 0 to {last}")
        if np.any(np.diff(offsets) < 1):
            raise UserError(f"{folder}/{SET}__{name}.npy does not rise at entry {np.argmax(np.diff(offsets) < 1) + 1}")
    if len(split.puzzle_indices) != puzzles + 1:
        raise UserError(
            f"{folder}: {puzzles} puzzle_identifiers and {len(split.puzzle_indices)} puzzle_indices, expected one more"
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
    """JSON of a file of the dataset: the same bytes for the same value."""
    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
    return json.dumps(plain, indent=1, sort_keys=isinstance(plain, Mapping)) + "\n"
