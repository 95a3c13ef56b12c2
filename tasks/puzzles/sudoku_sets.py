"""Builds a Sudoku dataset, generated or from the two CSV files of the public benchmark (Sudoku-Extreme).

No training puzzle has the signature (`sudoku_puzzles.signatures`) of a held-out puzzle.

Tokens: 0 padding (never used), 1 blank, digit + 1.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from core.errors import UserError
from core.files import paths
from tasks.puzzles import benchmarks, sudoku_puzzles, writing
from tasks.puzzles.sudoku_puzzles import CLUES, Puzzle
from tasks.puzzles.sudoku_solver import shape

Report = Callable[[int, int | None], None]  # steps done and in total: puzzles, groups or CSV lines
_LINES_PER_REPORT = 1000
_FAILED_DRAWS = 3  # consecutive failed draws, per puzzle found, after which the generator gives up
_SIGNED_AT_ONCE = 4096
_TEST, _TRAIN, _AUGMENT = range(3)  # keys of streams of random numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class SudokuSet:
    """The parameters of a Sudoku dataset.

    Attributes:
      size: 4, 6 or 9.
      num_train: training puzzles.
      num_test: held-out puzzles; None: all of the CSV file with a sufficient rating.
      num_aug: symmetric copies added to each training puzzle.
      clues: minimum and maximum of the number of clues aimed at; None: by size.
      csv: folder with train.csv and test.csv; "": puzzles are generated.
      min_rating: puzzles with a lower difficulty are left out.
      seed: seed of all random choices.
    """

    size: int
    num_train: int
    num_test: int | None
    num_aug: int
    clues: tuple[int, int] | None = None
    csv: str = ""
    min_rating: int = 0
    seed: int = 0

    def __post_init__(self):
        cells = shape(self.size).cells
        if self.clues is not None and len(self.clues) != 2:
            raise UserError(f"sudoku: clues {self.clues}, expected two numbers, such as {CLUES[self.size]}")
        low, high = self.clues or CLUES[self.size]
        writing.check_numbers("sudoku", num_train=self.num_train, num_test=self.num_test)
        writing.check_numbers("sudoku", least=0, num_aug=self.num_aug, seed=self.seed)
        wrong = [f"clues {low} to {high}, expected 0 to {cells} in order"] if not 0 <= low <= high <= cells else []
        if not self.csv and self.num_test is None:
            wrong.append("num_test None, expected a number where puzzles are generated")
        if self.csv and self.size != 9:
            wrong.append(f"size {self.size} with csv, whose puzzles are of size 9")
        if self.csv and self.clues is not None:
            wrong.append("clues with csv, whose puzzles are not generated; leave one of them out")
        if wrong:
            raise UserError("sudoku: " + "; ".join(wrong))

    @property
    def vocab_size(self) -> int:
        """Number of tokens: padding, blank and the digits."""
        return self.size + 2

    @property
    def seq_len(self) -> int:
        """Number of cells, size * size."""
        return self.size**2

    def about(self) -> dict[str, Any]:
        """Returns the kind and parameters of the dataset, as JSON values."""
        clues = None if self.csv else list(self.clues or CLUES[self.size])
        return {"kind": "sudoku", **dataclasses.asdict(self), "clues": clues}

    def build(self, directory: str, *, report: Report = lambda done, total: None) -> Mapping[str, Any]:
        """Writes the dataset into an empty or new folder; returns the content of build.json.

        `report` is called with the steps done and their total, which is None while CSV files are read.

        Raises UserError if there are too few different puzzles.
        """
        with writing.dataset(directory, vocab_size=self.vocab_size, seq_len=self.seq_len, about=self.about()) as out:
            found = 0 if self.csv else (self.num_test or 0) + self.num_train
            steps = found + self.num_train
            test, train = self._puzzles(lambda done: report(done, None if self.csv else steps))
            for puzzle in test:
                out.test.add_group(puzzle.grid[None] + 1, puzzle.solution[None] + 1)
            for number, puzzle in enumerate(train):
                grids, solutions = self._group(puzzle, number)
                out.train.add_group(grids + 1, solutions + 1)
                report(found + number + 1, steps)
            out.extra[writing.BUILD] |= {"train": _summary(train), "test": _summary(test), **_HELD_OUT}
        return out.extra[writing.BUILD]

    def draw(self, tokens: np.ndarray) -> str:
        """Renders tokens [C] as text: digits, and dots for blanks."""
        rows, columns = shape(self.size).box
        lines = []
        for y, row in enumerate(np.asarray(tokens).reshape(self.size, self.size).tolist()):
            cells = ["." if t <= 1 else str(t - 1) for t in row]
            boxes = [" ".join(cells[x : x + columns]) for x in range(0, self.size, columns)]
            lines += [""] * (y > 0 and y % rows == 0) + ["  ".join(boxes)]
        return "\n".join(lines)

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *key))

    def _group(self, puzzle: Puzzle, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the grids and the solutions of a puzzle and its copies, each [1 + num_aug, C]."""
        rng = self._rng(_AUGMENT, number)
        copies = [sudoku_puzzles.random_symmetry(rng, size=self.size) for _ in range(self.num_aug)]
        grids = [puzzle.grid, *(symmetry(puzzle.grid) for symmetry in copies)]
        solutions = [puzzle.solution, *(symmetry(puzzle.solution) for symmetry in copies)]
        return np.stack(grids), np.stack(solutions)

    def _puzzles(self, report: Callable[[int], None]) -> tuple[list[Puzzle], list[Puzzle]]:
        if self.csv:
            test = self._from_csv("test", self.num_test, taken=np.zeros(0, np.uint64), report=report)
            return test, self._from_csv("train", self.num_train, taken=_signed(test, self.size), report=report)
        test = self._generated(self._rng(_TEST), self.num_test or 0, taken=set(), report=report)
        taken = set(_signed(test, self.size).tolist())
        train_rng, held_out = self._rng(_TRAIN), len(test)
        return test, self._generated(train_rng, self.num_train, taken=taken, report=lambda n: report(held_out + n))

    def _generated(
        self, rng: np.random.Generator, count: int, *, taken: set[int], report: Callable[[int], None]
    ) -> list[Puzzle]:
        """Returns `count` puzzles with signatures not in `taken`; if that is empty, with different signatures."""
        found: dict[Any, Puzzle] = {}
        is_test, failed = not taken, 0
        while failed < _FAILED_DRAWS * (100 + len(found)):
            puzzle = sudoku_puzzles.generate(rng, size=self.size, clues=self.clues)
            signature = int(sudoku_puzzles.signatures(puzzle.grid[None], size=self.size)[0])
            key = signature if is_test else puzzle.grid.tobytes()
            if puzzle.rating < self.min_rating or signature in taken or key in found:
                failed += 1
                continue
            found[key], failed = puzzle, 0
            report(len(found))
            if len(found) == count:
                return list(found.values())
        what = (
            "held-out puzzles that are not symmetric copies of one another"
            if is_test
            else "training puzzles that are not copies of one another"
        )
        raise UserError(
            f"sudoku: found {len(found):,} {what}{' or of held-out ones' * (not is_test)}, of "
            f"{self.size} x {self.size} with a rating of at least {self.min_rating}, then {failed:,} draws gave no "
            f"other; requested {count:,}. Request fewer, other clues, or a lower rating"
        )

    def _from_csv(
        self, split: str, count: int | None, *, taken: np.ndarray, report: Callable[[int], None]
    ) -> list[Puzzle]:
        file = paths.resolve(self.csv) / f"{split}.csv"

        def lines() -> Iterator[tuple[int, benchmarks.Row]]:
            for number, row in benchmarks.rows(file):
                if number % _LINES_PER_REPORT == 0:
                    report(number)
                yield number, row

        fits = [number for number, row in lines() if benchmarks.rating(row, file, number) >= self.min_rating]
        order = self._rng(_TEST if split == "test" else _TRAIN).permutation(len(fits)) if count else range(len(fits))
        wanted = {fits[i]: place for place, i in enumerate(order[: 2 * count + 100] if count else order)}
        rows = ((wanted[n], _parsed(row, file, n)) for n, row in lines() if n in wanted)
        puzzles = [puzzle for _, puzzle in sorted(rows, key=lambda pair: pair[0])]
        new = ~np.isin(_signed(puzzles, self.size), taken)
        chosen = [puzzle for puzzle, is_new in zip(puzzles, new, strict=True) if is_new][:count]
        if len(chosen) < (count or 1):
            raise UserError(
                f"{file} has {len(chosen)} puzzles with a rating of at least {self.min_rating} that are not copies of "
                f"held-out ones; requested {count or 'all'}"
            )
        return chosen


_HELD_OUT = {
    "held_out_by": "no training puzzle has the symmetry-invariant signature of a held-out one",
    "rating_is": "backtracks until the solution is found and proved the only one (of a CSV: its own column)",
}


def _signed(puzzles: list[Puzzle], size: int) -> np.ndarray:
    parts = [puzzles[i : i + _SIGNED_AT_ONCE] for i in range(0, len(puzzles), _SIGNED_AT_ONCE)]
    signed = [sudoku_puzzles.signatures(np.stack([p.grid for p in part]), size=size) for part in parts]
    return np.concatenate([np.zeros(0, np.uint64), *signed])


def _summary(puzzles: list[Puzzle]) -> dict[str, Any]:
    ratings = np.asarray([p.rating for p in puzzles])
    clues = np.asarray([np.count_nonzero(p.grid) for p in puzzles])
    quantiles = {"min": 0, "median": 50, "p90": 90, "max": 100}
    return {
        "puzzles": len(puzzles),
        "rating": {name: int(np.percentile(ratings, q)) for name, q in quantiles.items()},
        "clues": {name: int(np.percentile(clues, q)) for name, q in quantiles.items()},
    }


def _parsed(row: Mapping[str, str], file: paths.Path, number: int) -> Puzzle:
    question, answer = (row["question"] or "").replace(".", "0"), row["answer"] or ""
    for name, text in (("question", question), ("answer", answer)):
        if len(text) != 81 or not text.isascii() or not text.isdecimal():
            raise UserError(f"{file}, line {number}: {name} is {text!r}, expected 81 digits ('.' or 0 for blank)")
    grid, solution = (np.frombuffer(text.encode(), np.uint8) - ord("0") for text in (question, answer))
    if not is_solved(solution, size=9) or np.any((grid > 0) & (grid != solution)):
        raise UserError(f"{file}, line {number}: answer is not a solution of question")
    return Puzzle(grid, solution, benchmarks.rating(row, file, number))


def is_solved(grid: np.ndarray, *, size: int) -> bool:
    """Returns whether every row, column and box of a grid [C] has every digit once."""
    cells = np.asarray(grid)
    units = ([c for c in range(size**2) if unit >> c & 1] for unit in shape(size).units)
    return all(sorted(cells[unit].tolist()) == list(range(1, size + 1)) for unit in units)
