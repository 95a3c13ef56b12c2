"""Grids to complete: Sudoku, mazes, ARC. The constructors that a configuration names.

puzzles.dataset(directory, …)     a folder of puzzles, as `launch/run build` makes it
puzzles.sudoku(size, …)           Sudoku that the run generates first
puzzles.maze(size, …)             mazes that the run generates first
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.checks import check_integer
from tasks.puzzles.files import Cut
from tasks.puzzles.maze_sets import MazeSet
from tasks.puzzles.sudoku_sets import SudokuSet
from tasks.puzzles.task import Built, PuzzleTask, Stored


def dataset(
    *,
    directory: str | None,
    length: int,
    vocab_size: int,
    train_puzzles: int | None = None,
    train_copies: int | None = None,
    epochs_per_iteration: int | None = None,
    eval_puzzles: int | None = None,
    eval_seed: int = 0,
) -> PuzzleTask:
    """Puzzles from a folder, local or gs://.

    Args:
      directory: with train/ and test/; None is told by `problems`.
      length: tokens of a puzzle, S; must be the dataset's seq_len.
      vocab_size: must be the dataset's.
      train_puzzles: take the first so many of the folder's training puzzles; None: all.
      train_copies: take the first so many variants of each beside itself; None: all.
      epochs_per_iteration: permutations of the puzzles drawn at a time; what fills no batch at their end is dropped.
        None: so many that this is a thousandth at most.
      eval_puzzles: held-out examples that an evaluation takes; None: all.
      eval_seed: draws those, once and for all.

    Raises:
      ValueError: a number out of range.
    """
    _check(length=length, vocab_size=vocab_size, epochs_per_iteration=epochs_per_iteration, eval_puzzles=eval_puzzles)
    _check(train_puzzles=train_puzzles)
    _check(least=0, train_copies=train_copies, eval_seed=eval_seed)
    source = Stored(directory or "", cut=Cut(train_puzzles, train_copies))
    return PuzzleTask(source, length, vocab_size, epochs_per_iteration, eval_puzzles, eval_seed)


def sudoku(
    *,
    size: int = 4,
    num_train: int = 1000,
    num_test: int = 256,
    num_aug: int = 0,
    clues: Sequence[int] | None = None,
    seed: int = 0,
    directory: str | None = None,
    eval_puzzles: int | None = None,
) -> PuzzleTask:
    """Generated Sudoku, each with one solution; no held-out puzzle is a symmetric copy of a training puzzle.

    Args:
      size: 4, 6 or 9.
      num_train, num_test: puzzles.
      num_aug: symmetric copies of each training puzzle beside itself.
      clues: fewest and most.
      seed: of the puzzles; the same seed gives the same bytes.
      directory: where they are built at the first run, and found by the next; None: in the run directory.
      eval_puzzles: held-out puzzles that an evaluation takes; None: all.

    Raises:
      ValueError: a number out of range.
    """
    _check(num_train=num_train, num_test=num_test, eval_puzzles=eval_puzzles)
    _check(least=0, num_aug=num_aug, seed=seed)
    recipe = SudokuSet(
        size=size,
        num_train=num_train,
        num_test=num_test,
        num_aug=num_aug,
        clues=tuple(clues) if clues else None,
        seed=seed,
    )
    source = Built(recipe, directory=directory)
    return PuzzleTask(source, recipe.seq_len, recipe.vocab_size, eval_puzzles=eval_puzzles)


def maze(
    *,
    size: int = 30,
    num_train: int = 1000,
    num_test: int = 1000,
    min_path: int | None = None,
    augment: bool = True,
    seed: int = 0,
    directory: str | None = None,
    eval_puzzles: int | None = None,
) -> PuzzleTask:
    """Generated mazes with their shortest path; no held-out maze is a turned or mirrored training maze.

    Args:
      size: rows and columns.
      num_train, num_test: mazes.
      min_path: steps that the shortest path must exceed; None: 110 of 30 x 30, in proportion to the area.
      augment: every training maze in its eight orientations.
      seed: of the mazes; the same seed gives the same bytes.
      directory: where they are built at the first run, and found by the next; None: in the run directory.
      eval_puzzles: held-out mazes that an evaluation takes; None: all.

    Raises:
      ValueError: a number out of range.
    """
    _check(num_train=num_train, num_test=num_test, eval_puzzles=eval_puzzles)
    _check(least=0, seed=seed, min_path=min_path)
    recipe = MazeSet(size=size, num_train=num_train, num_test=num_test, min_path=min_path, augment=augment, seed=seed)
    source = Built(recipe, directory=directory)
    return PuzzleTask(source, recipe.seq_len, recipe.vocab_size, eval_puzzles=eval_puzzles)


def _check(*, least: int = 1, **numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None:
            check_integer(value, where=f"puzzles: {name}", least=least)
