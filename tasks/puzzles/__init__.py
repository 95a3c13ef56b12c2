"""Puzzle tasks (Sudoku, mazes, ARC): the constructors that a gin configuration names."""

from collections.abc import Sequence
from typing import cast

from tasks.puzzles.files import Cut
from tasks.puzzles.maze_sets import MazeSet
from tasks.puzzles.sudoku_sets import SudokuSet
from tasks.puzzles.task import Built, PuzzleTask, Stored
from tasks.puzzles.writing import check_numbers


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
    """Returns a task that reads puzzles from a folder.

    Args:
      directory: local or gs://, written by `launch/run make-dataset`. None: an error, which `problems` reports.
      length: S, tokens per puzzle; must equal the dataset's seq_len.
      vocab_size: number of tokens; must equal the dataset's.
      train_puzzles: use only the first training puzzles; None: all.
      train_copies: use only the first augmentations of each puzzle; None: all.
      epochs_per_iteration: epochs shuffled together; None: chosen automatically.
      eval_puzzles: held-out examples in an evaluation; None: all.
      eval_seed: seed that selects these examples.
    """
    check_numbers("puzzles", length=length, vocab_size=vocab_size, train_puzzles=train_puzzles)
    check_numbers("puzzles", epochs_per_iteration=epochs_per_iteration, eval_puzzles=eval_puzzles)
    check_numbers("puzzles", least=0, train_copies=train_copies, eval_seed=eval_seed)
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
    """Returns a task of generated Sudoku puzzles with one solution each.

    No held-out puzzle is a symmetric copy of a training puzzle.

    Args:
      size: rows and columns: 4, 6 or 9.
      num_train: training puzzles.
      num_test: held-out puzzles.
      num_aug: symmetric copies added to each training puzzle.
      clues: (minimum, maximum) of the number of clues aimed at; None: by size.
      seed: seed of the generator.
      directory: where the puzzles are built, or found; None: in the run directory.
      eval_puzzles: held-out puzzles in an evaluation; None: all.
    """
    check_numbers("puzzles", eval_puzzles=eval_puzzles)
    recipe = SudokuSet(
        size=size,
        num_train=num_train,
        num_test=num_test,
        num_aug=num_aug,
        clues=cast(tuple[int, int], tuple(clues)) if clues else None,
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
    """Returns a task of generated mazes, whose labels show a shortest path.

    No held-out maze is a rotated or mirrored training maze.

    Args:
      size: rows and columns, from 5 to 100.
      num_train: training mazes.
      num_test: held-out mazes.
      min_path: shortest paths have more steps than this; None: 110 for 30 x 30, proportional to the area.
      augment: whether to add the seven other orientations of every training maze.
      seed: seed of the generator.
      directory: where the mazes are built, or found; None: in the run directory.
      eval_puzzles: held-out mazes in an evaluation; None: all.
    """
    check_numbers("puzzles", eval_puzzles=eval_puzzles)
    recipe = MazeSet(size=size, num_train=num_train, num_test=num_test, min_path=min_path, augment=augment, seed=seed)
    source = Built(recipe, directory=directory)
    return PuzzleTask(source, recipe.seq_len, recipe.vocab_size, eval_puzzles=eval_puzzles)
