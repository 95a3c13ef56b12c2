"""Builds a dataset of mazes, generated or from the two CSV files of the public benchmark (Maze-Hard).

The held-out mazes are chosen first. A maze is left out if it is a rotation or reflection of an earlier one.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from core.errors import UserError
from core.files import paths
from tasks.puzzles import benchmarks, mazes, symmetries, writing
from tasks.puzzles.mazes import CHARACTERS, OPEN, PATH, Maze

_DRAWS_PER_MAZE = 300
_TEST, _TRAIN = range(2)  # keys of streams of random numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MazeSet:
    """The parameters of a dataset of mazes.

    Attributes:
      size: N, rows and columns, from 5 to 100.
      num_train: training mazes; None: all different ones of the CSV file.
      num_test: held-out mazes; None: all different ones of the CSV file.
      min_path: generated shortest paths have more steps than this; None: 110 for 30 x 30, proportional to the area.
      augment: whether training mazes appear in all eight orientations.
      csv: folder with train.csv and test.csv; "": mazes are generated.
      seed: seed of all random choices.
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
        writing.check_numbers("maze", num_train=self.num_train, num_test=self.num_test, min_path=self.min_path)
        writing.check_numbers("maze", least=0, seed=self.seed)
        if not 5 <= self.size <= 100:
            raise UserError(f"maze: size {self.size}, expected 5 to 100")
        if self.csv and self.min_path is not None:
            raise UserError("maze: min_path applies to generated mazes, and csv reads mazes: leave one of them out")
        if not self.csv and None in (self.num_train, self.num_test):
            raise UserError(
                "maze: num_train or num_test is None; set both, or give csv to read mazes instead of generating them"
            )

    @property
    def seq_len(self) -> int:
        """Number of cells, N * N."""
        return self.size**2

    @property
    def exceeds(self) -> int:
        """Generated shortest paths have more steps than this."""
        return self.size**2 * 110 // 900 if self.min_path is None else self.min_path

    def about(self) -> dict[str, Any]:
        """Returns the kind and parameters of the dataset, as JSON values."""
        return {"kind": "maze", **dataclasses.asdict(self), "min_path": None if self.csv else self.exceeds}

    def build(self, directory: str, *, report: Callable[[int, int], None] = lambda done, total: None) -> Mapping:
        """Writes the dataset into an empty or new folder; returns the content of build.json.

        Raises UserError if there are too few different mazes.
        """
        seen: set[bytes] = set()
        done = 0
        with writing.dataset(directory, vocab_size=self.vocab_size, seq_len=self.seq_len, about=self.about()) as out:
            wanted = (("test", _TEST, self.num_test), ("train", _TRAIN, self.num_train))
            sets: list[Iterable[Maze]]
            if self.csv:
                read = [self._from_csv(name, key, count, seen) for name, key, count in wanted]
                sets, total = [*read], sum(map(len, read))
            else:
                sets = [self._generated(key, count, seen) for _, key, count in wanted]
                total = (self.num_test or 0) + (self.num_train or 0)
            for (name, key, _), found in zip(wanted, sets, strict=True):
                orientations = symmetries.ORIENTATIONS if self.augment and key == _TRAIN else (0,)
                steps = []
                for maze in found:
                    steps.append(maze.steps)
                    done += 1
                    getattr(out, name).add_group(_rows(maze.grid, orientations), _rows(maze.solved, orientations))
                    report(done, total)
                out.extra[writing.BUILD][name] = _summary(steps)
            out.extra[writing.BUILD]["held_out_by"] = "no two mazes are orientations of one another"
        return out.extra[writing.BUILD]

    def draw(self, tokens: np.ndarray) -> str:
        """Renders tokens [N * N] as text with a border."""
        rows = np.asarray(tokens).reshape(self.size, self.size).tolist()
        text = ["".join((" " + CHARACTERS)[t] for t in row) for row in rows]
        return "\n".join(["+" + "-" * self.size + "+", *(f"|{line}|" for line in text), "+" + "-" * self.size + "+"])

    def _generated(self, key: int, count: int | None, seen: set[bytes]) -> Iterator[Maze]:
        assert count is not None
        rng = np.random.default_rng((self.seed, key))
        for _ in range(count):
            drawn = (mazes.generate(rng, size=self.size, min_path=self.exceeds) for _ in range(_DRAWS_PER_MAZE))
            maze = next((maze for maze in drawn if maze is not None and _is_new(maze, seen)), None)
            if maze is None:
                raise UserError(
                    f"maze: after {len(seen):,} mazes of {self.size} x {self.size}, {_DRAWS_PER_MAZE} more had no new "
                    f"one with a shortest path above {self.exceeds} steps: request fewer mazes, a larger size or a "
                    "smaller min_path"
                )
            yield maze

    def _from_csv(self, name: str, key: int, count: int | None, seen: set[bytes]) -> list[Maze]:
        file = paths.resolve(self.csv) / f"{name}.csv"
        every = [_parsed(row, f"{file}, line {number}", self.size) for number, row in benchmarks.rows(file)]
        order = np.random.default_rng((self.seed, key)).permutation(len(every)) if count else np.arange(len(every))
        new = [place for place in order.tolist() if _is_new(every[place], seen)]
        if len(new) < (count or 1):
            raise UserError(
                f"{file} has {len(new)} mazes that are not copies of one another or of held-out ones; requested "
                f"{count or 'all'}"
            )
        return [every[place] for place in sorted(new[:count])]


def _is_new(maze: Maze, seen: set[bytes]) -> bool:
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
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    changed = grid != solved
    is_path = np.all(grid[changed] == OPEN) and np.all(solved[changed] == PATH)
    if not is_path or np.count_nonzero(changed) != steps - 1 or mazes.solve(_only(grid, solved))[1] != steps:
        raise UserError(f"{where}: answer is not question with a shortest path of {steps} steps")
    return Maze(grid, solved, steps)


def _only(grid: np.ndarray, solved: np.ndarray) -> np.ndarray:
    """Replaces open cells that are not on the path by walls."""
    return np.where((grid == OPEN) & (solved == OPEN), mazes.WALL, grid)


def _rows(grid: np.ndarray, orientations) -> np.ndarray:
    """Returns a grid in each of A orientations, [A, N * N]."""
    return np.stack([symmetries.orient(grid, o).ravel() for o in orientations])


def _summary(steps: list[int]) -> dict[str, Any]:
    quantiles = {"min": 0, "median": 50, "p90": 90, "max": 100}
    return {"puzzles": len(steps), "path": {name: int(np.percentile(steps, q)) for name, q in quantiles.items()}}
