"""A dataset of mazes: generated, or the public benchmark's two CSV files.

The held-out mazes come first; a maze is left out where another is the same, turned or mirrored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from core import paths
from core.errors import UserError
from tasks.puzzles import benchmarks, mazes, symmetries, writing
from tasks.puzzles.mazes import CHARACTERS, OPEN, PATH, Maze

_DRAWS_PER_MAZE = 300
_TEST, _TRAIN = range(2)  # streams of random numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MazeSet:
    """What to build.

    Attributes:
      size: N.
      num_train, num_test: mazes, each of training a group; None: all of the CSV.
      min_path: steps that a generated shortest path must exceed; None: 110 of 30 x 30, in proportion to the area.
      augment: training mazes in all eight orientations.
      csv: folder with train.csv and test.csv (columns source, question, answer, rating); empty: generate.
      seed: of everything random.

    Raises:
      ValueError: a number out of range.
    """

    size: int = 30
    num_train: int | None = 1000
    num_test: int | None = 1000
    min_path: int | None = None
    augment: bool = True
    csv: str = ""
    seed: int = 0

    vocab_size = 1 + len(CHARACTERS)

    def __post_init__(self):
        wrong = [f"size {self.size}, expected 5 to 100"] if not 5 <= self.size <= 100 else []
        for name in ("num_train", "num_test", "min_path"):
            value = getattr(self, name)
            if value is not None and value < 1:
                wrong.append(f"{name} {value}, expected at least 1")
            if value is None and name != "min_path" and not self.csv:
                wrong.append(f"{name} None, expected a number where mazes are generated")
        if wrong:
            raise UserError("maze: " + "; ".join(wrong))

    @property
    def seq_len(self) -> int:
        """Cells."""
        return self.size**2

    @property
    def exceeds(self) -> int:
        """Steps that every generated path exceeds."""
        return self.size**2 * 110 // 900 if self.min_path is None else self.min_path

    def about(self) -> dict[str, Any]:
        """What was asked for, as JSON."""
        return {"kind": "maze", **dataclasses.asdict(self), "min_path": None if self.csv else self.exceeds}

    def build(self, directory: str, *, report: Callable[[int, int], None] = lambda done, total: None) -> Mapping:
        """Writes the dataset and returns what build.json says of it.

        Raises:
          ValueError: the directory is taken, a file is wrong, or there are not as many different mazes.
        """
        seen: set[bytes] = set()
        with writing.dataset(directory, vocab_size=self.vocab_size, seq_len=self.seq_len, about=self.about()) as out:
            for name, key, count in (("test", _TEST, self.num_test), ("train", _TRAIN, self.num_train)):
                found = self._from_csv(name, key, count, seen) if self.csv else self._generated(key, count, seen)
                orientations = symmetries.ORIENTATIONS if self.augment and key == _TRAIN else (0,)
                steps = []
                for maze in found:
                    steps.append(maze.steps)
                    getattr(out, name).add_group(_rows(maze.grid, orientations), _rows(maze.solved, orientations))
                    report(len(seen), (self.num_test or 0) + (self.num_train or 0) or len(seen))
                out.extra[writing.BUILD][name] = _summary(steps)
            out.extra[writing.BUILD]["held_out_by"] = "no two mazes are orientations of one another"
        return out.extra[writing.BUILD]

    def draw(self, tokens: np.ndarray) -> str:
        """A maze as text, framed."""
        rows = np.asarray(tokens).reshape(self.size, self.size).tolist()
        text = ["".join((" " + CHARACTERS)[t] for t in row) for row in rows]
        return "\n".join(["+" + "-" * self.size + "+", *(f"|{line}|" for line in text), "+" + "-" * self.size + "+"])

    def _generated(self, key: int, count: int, seen: set[bytes]) -> Iterator[Maze]:
        rng = np.random.default_rng((self.seed, key))
        for _ in range(count):
            drawn = (mazes.generate(rng, size=self.size, min_path=self.exceeds) for _ in range(_DRAWS_PER_MAZE))
            maze = next((maze for maze in drawn if maze is not None and _is_new(maze, seen)), None)
            if maze is None:
                raise UserError(
                    f"maze: after {len(seen):,} mazes of {self.size} x {self.size}, {_DRAWS_PER_MAZE} more had no new "
                    f"one with a shortest path above {self.exceeds} steps: ask for fewer mazes, a larger size or a "
                    "smaller min_path"
                )
            yield maze

    def _from_csv(self, name: str, key: int, count: int | None, seen: set[bytes]) -> list[Maze]:
        """`count` random mazes of a file in the file's order (all where None) that are not `seen`."""
        file = paths.resolve(self.csv) / f"{name}.csv"
        every = [_parsed(row, f"{file}, line {number}", self.size) for number, row in benchmarks.rows(file)]
        order = np.random.default_rng((self.seed, key)).permutation(len(every)) if count else np.arange(len(every))
        new = [place for place in order.tolist() if _is_new(every[place], seen)]
        if len(new) < (count or 1):
            raise UserError(
                f"{file} has {len(new)} mazes that are no copies of one another or of held-out ones; asked for "
                f"{count or 'all'}"
            )
        return [every[place] for place in sorted(new[:count])]


def _is_new(maze: Maze, seen: set[bytes]) -> bool:
    """Whether no orientation of it was seen; now it is."""
    before = len(seen)
    seen.add(symmetries.smallest(maze.grid))
    return len(seen) > before


def _parsed(row: benchmarks.Row, where: str, size: int) -> Maze:
    grids = []
    for name in ("question", "answer"):
        text = row[name] or ""
        if len(text) != size**2 or set(text) - set(CHARACTERS):
            raise UserError(f"{where}: {name} has {len(text)} characters, expected {size**2} of {CHARACTERS!r}")
        grids.append(np.asarray([CHARACTERS.index(c) + 1 for c in text], np.uint8).reshape(size, size))
    grid, solved = grids
    try:
        steps = mazes.solve(grid)[1]
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    changed = grid != solved
    is_path = np.all(grid[changed] == OPEN) and np.all(solved[changed] == PATH)
    if not is_path or np.count_nonzero(changed) != steps - 1 or mazes.solve(_only(grid, solved))[1] != steps:
        raise UserError(f"{where}: answer is not question with a shortest path of {steps} steps")
    return Maze(grid, solved, steps)


def _only(grid: np.ndarray, solved: np.ndarray) -> np.ndarray:
    """The maze with every open cell beside the path walled up."""
    return np.where((grid == OPEN) & (solved == OPEN), mazes.WALL, grid)


def _rows(grid: np.ndarray, orientations) -> np.ndarray:
    """[A, N * N]: a grid in each of A orientations."""
    return np.stack([symmetries.orient(grid, o).ravel() for o in orientations])


def _summary(steps: list[int]) -> dict[str, Any]:
    quantiles = {"min": 0, "median": 50, "p90": 90, "max": 100}
    return {"puzzles": len(steps), "path": {name: int(np.percentile(steps, q)) for name, q in quantiles.items()}}
