"""Selects the examples of each batch: shuffled without end, or each example once in order.

The shuffled order is drawn in iterations. Iteration i (from 1) draws from Philox(seed + i): first `epochs` permutations
of the groups, then one puzzle for each visit of a group.

    Philox(seed + i)    groups  2 0 1 | 1 2 0     2 epochs of 3 groups
                        puzzles 7 1 4   3 8 0     one puzzle of each visited group

A puzzle with several examples (ARC) contributes as many of them as the batch has room for, without repetition, drawn
from a separate generator for each batch. Examples at the end of an iteration that do not fill a batch are dropped.

B: rows per batch.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from core.errors import UserError
from core.files import foreign_json
from tasks.puzzles.files import Split
from tasks.streams import read_position

FILLER = -1  # the example index of rows that only fill the last batch of an evaluation
_BATCHES_PER_ITERATION = 1000
_LONGEST_ORDER = 2**25  # limit on the visits per iteration, which are kept in memory


class Picked(NamedTuple):
    """The examples of one global batch.

    Attributes:
      examples: [B] indices into `inputs` and `labels`, or FILLER.
      puzzles: [B] the puzzle of each example.
    """

    examples: np.ndarray
    puzzles: np.ndarray


def epochs_per_iteration(split: Split, *, batch_size: int) -> int:
    """Returns enough epochs for 1,000 batches per iteration, unless memory limits it."""
    groups = len(split.group_indices) - 1
    enough = -(-_BATCHES_PER_ITERATION * batch_size // max(1, groups))
    return max(1, min(enough, _LONGEST_ORDER // max(1, groups)), -(-batch_size // max(1, groups)))


class Shuffled:
    """Yields shuffled global batches without end, for training."""

    def __init__(self, split: Split, *, batch_size: int, seed: int, epochs: int | None = None):
        """Starts at the first iteration.

        `epochs` is the number of permutations per iteration; None: `epochs_per_iteration`.
        """
        self._batch_size, self._seed = batch_size, seed
        self._groups, self._puzzles = np.array(split.group_indices), np.array(split.puzzle_indices)
        self._single = bool(np.all(np.diff(self._puzzles) == 1))
        self._epochs = epochs or epochs_per_iteration(split, batch_size=batch_size)
        self._num_groups = len(split.group_indices) - 1
        fewest = self._num_groups * self._epochs * int(np.diff(self._puzzles).min())
        if fewest < batch_size:
            raise UserError(
                f"{self._epochs} epochs of {self._num_groups} puzzles give no batch of {batch_size}: "
                f"set epochs_per_iteration to {-(-batch_size // max(1, self._num_groups))} or more, or leave it out"
            )
        self._start(1)

    def __next__(self) -> Picked:
        while (picked := self._pick()) is None:
            self._start(self._iteration + 1)
        return picked

    def state(self) -> bytes:
        """Returns the position."""
        generator = _plain(self._rng.bit_generator.state)
        return json.dumps({"iteration": self._iteration, "visit": self._visit, "generator": generator}).encode()

    def restore(self, state: bytes) -> None:
        """Moves to a saved position. Raises UserError for bytes that are not a position."""
        try:
            found = foreign_json.load_object(state, {"iteration": int, "visit": int, "generator": dict})
            self._start(found["iteration"])
            self._rng.bit_generator.state = _arrays(found["generator"])
            self._visit = found["visit"]
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(
                f"the saved position is not a position in a puzzle dataset ({error}); start in a new run directory"
            ) from error

    def _start(self, iteration: int) -> None:
        self._iteration, self._visit = iteration, 0
        self._rng: np.random.Generator = np.random.Generator(np.random.Philox(seed=self._seed + iteration))
        self._order = np.concatenate([self._rng.permutation(self._num_groups) for _ in range(self._epochs)])

    def _pick(self) -> Picked | None:
        return self._pick_single() if self._single else self._pick_several()

    def _pick_single(self) -> Picked | None:
        groups = self._order[self._visit : self._visit + self._batch_size]
        if len(groups) < self._batch_size:
            return None
        puzzles = self._rng.integers(self._groups[groups], self._groups[groups + 1])
        self._visit += self._batch_size
        return Picked(self._puzzles[puzzles], puzzles)

    def _pick_several(self) -> Picked | None:
        room, inner = self._batch_size, None
        examples, puzzles = [], []
        while room and self._visit < len(self._order):
            group = self._order[self._visit]
            puzzle = int(self._rng.integers(self._groups[group], self._groups[group + 1]))
            first, after = self._puzzles[puzzle], self._puzzles[puzzle + 1]
            inner = inner or np.random.default_rng((self._seed, self._iteration, self._visit))
            taken = first + inner.permutation(after - first)[:room]
            self._visit += 1
            examples.append(taken)
            puzzles.append(np.full(len(taken), puzzle))
            room -= len(taken)
        return None if room else Picked(np.concatenate(examples), np.concatenate(puzzles))


class InOrder:
    """Yields each selected example once, in ascending order; FILLER rows fill the last batch."""

    def __init__(self, split: Split, *, batch_size: int, subset: int | None = None, seed: int = 0):
        """Selects `subset` examples, drawn with `seed`; None: all."""
        count = split.num_examples
        chosen = np.arange(count)
        if subset is not None and subset < count:
            chosen = np.sort(np.random.default_rng(seed).permutation(count)[:subset])
        puzzles = np.searchsorted(split.puzzle_indices, chosen, side="right") - 1
        fill = -len(chosen) % batch_size
        self._examples = np.pad(chosen, (0, fill), constant_values=FILLER).reshape(-1, batch_size)
        self._puzzles = np.pad(puzzles, (0, fill)).reshape(-1, batch_size)
        self._next = 0

    def __next__(self) -> Picked:
        if self._next == len(self._examples):
            raise StopIteration
        self._next += 1
        return Picked(self._examples[self._next - 1], self._puzzles[self._next - 1])

    def state(self) -> bytes:
        """Returns the position."""
        return json.dumps({"batches": self._next}).encode()

    def restore(self, state: bytes) -> None:
        """Moves to a saved position. Raises UserError for bytes that are not a position."""
        self._next = read_position(state, batches=int)["batches"]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return {"uint64": [int(x) for x in value]}
    return value if isinstance(value, str) else int(value)


def _arrays(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"uint64"}:
        return np.asarray(value["uint64"], np.uint64)
    return {key: _arrays(inner) for key, inner in value.items()}
