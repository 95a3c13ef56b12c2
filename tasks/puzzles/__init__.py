"""Puzzle tasks (Sudoku, mazes, ARC): the constructors that a gin configuration names.

puzzles.dataset(directory, …)     reads a folder written by `launch/run make-dataset`
puzzles.sudoku(size, …)           generates Sudoku puzzles before the first step
puzzles.maze(size, …)             generates mazes before the first step
"""

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
      directory: the folder, local or gs://, with train/ and test/. None is an error, which `problems` reports.
      length: S, tokens per puzzle; must equal the dataset's seq_len.
      vocab_size: number of tokens; must equal the dataset's.
      train_puzzles: use only the first `train_puzzles` training puzzles; None: all.
      train_copies: use only the first `train_copies` augmentations of each puzzle; 0: none. None: all.
      epochs_per_iteration: number of epochs that are shuffled together; examples at their end that do not fill a batch
        are dropped. None: enough epochs that at most 0.1% is dropped, as far as memory allows.
      eval_puzzles: number of held-out examples in an evaluation; None: all.
      eval_seed: seed that selects these examples, which are the same at every evaluation.

    Raises:
      UserError: a number is out of range.
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
      num_train: number of training puzzles.
      num_test: number of held-out puzzles.
      num_aug: symmetric copies added to each training puzzle.
      clues: (minimum, maximum) of the numbers of clues that the generator aims at; a puzzle has more if it would
        otherwise have several solutions. None: `sudoku_puzzles.CLUES` of the size.
      seed: seed of the generator; the same seed gives the same bytes.
      directory: where the first run writes the puzzles and later runs find them; None: in the run directory.
      eval_puzzles: number of held-out puzzles in an evaluation; None: all.

    Raises:
      UserError: a number is out of range.
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
      num_train: number of training mazes.
      num_test: number of held-out mazes.
      min_path: shortest paths have more steps than this; None: 110 for 30 x 30, otherwise proportional to the area.
      augment: whether to add the seven other orientations of every training maze.
      seed: seed of the generator; the same seed gives the same bytes.
      directory: where the first run writes the mazes and later runs find them; None: in the run directory.
      eval_puzzles: number of held-out mazes in an evaluation; None: all.

    Raises:
      UserError: a number is out of range.
    """
    check_numbers("puzzles", eval_puzzles=eval_puzzles)
    recipe = MazeSet(size=size, num_train=num_train, num_test=num_test, min_path=min_path, augment=augment, seed=seed)
    source = Built(recipe, directory=directory)
    return PuzzleTask(source, recipe.seq_len, recipe.vocab_size, eval_puzzles=eval_puzzles)
