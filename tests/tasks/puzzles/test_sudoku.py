"""Sudoku: solver, generator, symmetries, and held-out puzzles without training copies."""

import gzip
import itertools
import json

import numpy as np
import pytest

from core.errors import UserError
from tasks.puzzles import files, sudoku_puzzles, sudoku_sets, sudoku_solver
from tasks.puzzles.sudoku_sets import SudokuSet, is_solved

# Arto Inkala, 2012; its solution is known.
HARD = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."
SOLVED = "812753649943682175675491283154237896369845721287169534521974368438526917796318452"
EASY = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"


def cells(text):
    return [0 if c == "." else int(c) for c in text]


def generated(size, count, seed=0):
    rng = np.random.default_rng(seed)
    return [sudoku_puzzles.generate(rng, size=size) for _ in range(count)]


def slow_solutions(grid, size):
    """All solutions by trying every digit in every blank; nothing shared with the solver."""
    rows, columns = sudoku_solver.BOXES[size]

    def fits(cell, digit):
        y, x = divmod(cell, size)
        for other, value in enumerate(grid):
            v, u = divmod(other, size)
            together = v == y or u == x or (v // rows, u // columns) == (y // rows, x // columns)
            if value == digit and together:
                return False
        return True

    if 0 not in grid:
        return [tuple(grid)]
    cell, found = grid.index(0), []
    for digit in range(1, size + 1):
        if fits(cell, digit):
            grid[cell] = digit
            found += slow_solutions(grid, size)
            grid[cell] = 0
    return found


def test_a_known_puzzle_has_its_known_solution():
    assert sudoku_solver.solve(cells(HARD), size=9)[0] == [cells(SOLVED)]


def test_the_rating_tells_hard_from_easy():
    assert sudoku_puzzles.rate(cells(EASY), size=9) == 0
    assert sudoku_puzzles.rate(cells(HARD), size=9) > 50


def test_the_solver_finds_every_solution_there_is():
    assert len(sudoku_solver.solve([0] * 16, size=4, at_most=1000)[0]) == 288
    rng = np.random.default_rng(0)
    for _ in range(30):
        grid = [int(d) if rng.random() < 0.3 else 0 for d in rng.integers(1, 5, 16)]
        grid = grid if slow_solutions([*grid], 4) or rng.random() < 0.5 else [0] * 12 + [1, 2, 3, 4]
        conflicts = any(
            grid[c] and grid[d] == grid[c]
            for unit in sudoku_solver.shape(4).units
            for c, d in itertools.combinations([i for i in range(16) if unit >> i & 1], 2)
        )
        expected = set() if conflicts else set(slow_solutions([*grid], 4))
        assert {tuple(s) for s in sudoku_solver.solve(grid, size=4, at_most=1000)[0]} == expected


@pytest.mark.parametrize(("size", "count"), [(4, 100), (6, 30), (9, 5)])
def test_a_generated_puzzle_has_one_solution(size, count):
    for puzzle in generated(size, count):
        solutions, backtracks = sudoku_solver.solve(puzzle.grid.tolist(), size=size, at_most=3)
        assert solutions == [puzzle.solution.tolist()]
        assert is_solved(puzzle.solution, size=size)
        assert puzzle.rating == backtracks
    assert len({p.grid.tobytes() for p in generated(size, count)}) > count * 0.7


def test_one_solution_is_found_by_other_means_too():
    for puzzle in generated(4, 40):
        assert slow_solutions(puzzle.grid.tolist(), 4) == [tuple(puzzle.solution.tolist())]


def test_the_number_of_clues_is_in_the_requested_range():
    rng = np.random.default_rng(0)
    counts = [np.count_nonzero(sudoku_puzzles.generate(rng, size=6, clues=(20, 22)).grid) for _ in range(30)]
    assert set(counts) == {20, 21, 22}


@pytest.mark.parametrize("size", [4, 6, 9])
def test_a_symmetry_keeps_a_puzzle_a_puzzle_with_one_solution(size):
    rng, images = np.random.default_rng(1), set()
    puzzle = generated(size, 1)[0]
    for _ in range(100):
        symmetry = sudoku_puzzles.random_symmetry(rng, size=size)
        grid, solution = symmetry(puzzle.grid), symmetry(puzzle.solution)
        assert is_solved(solution, size=size)
        assert sudoku_solver.solve(grid.tolist(), size=size)[0] == [solution.tolist()]
        images.add(grid.tobytes())
    assert len(images) > 95


def test_boxes_of_two_by_three_are_never_transposed():
    rng = np.random.default_rng(0)
    for _ in range(50):
        cells = sudoku_puzzles.random_symmetry(rng, size=6).cells.reshape(6, 6)
        assert all(len(set(row // 6)) == 1 for row in cells)  # a row comes from a row
    transposed = [len(set(sudoku_puzzles.random_symmetry(rng, size=9).cells[:9] // 9)) == 9 for _ in range(100)]
    assert 30 < sum(transposed) < 70


def canonical(grid):
    """The least of all images of a 4x4 puzzle: its class, by brute force."""
    lines = [
        [2 * a + i for a, flip in zip(bands, flips, strict=True) for i in ((1, 0) if flip else (0, 1))]
        for bands in ((0, 1), (1, 0))
        for flips in itertools.product((False, True), repeat=2)
    ]
    images = []
    for rows, columns in itertools.product(lines, lines):
        image = grid.reshape(4, 4)[rows][:, columns]
        for turned in (image, image.T):
            names = {0: 0}
            images.append(tuple(names.setdefault(d, len(names)) for d in turned.ravel().tolist()))
    return min(images)


def test_signatures_are_the_classes_of_4x4():
    puzzles = generated(4, 300)
    signatures = sudoku_puzzles.signatures(np.stack([p.grid for p in puzzles]), size=4).tolist()
    classes = [canonical(p.grid) for p in puzzles]
    assert len(set(zip(signatures, classes, strict=True))) == len(set(signatures)) == len(set(classes)) < 300


@pytest.mark.parametrize("size", [4, 6, 9])
def test_a_copy_has_the_signature_of_its_puzzle(size):
    rng = np.random.default_rng(2)
    grids = np.stack([p.grid for p in generated(size, 20)])
    copies = np.stack([sudoku_puzzles.random_symmetry(rng, size=size)(grid) for grid in grids])
    of_grids, of_copies = (sudoku_puzzles.signatures(g, size=size) for g in (grids, copies))
    np.testing.assert_array_equal(of_grids, of_copies)
    assert len(set(of_grids.tolist())) > 15
    changed = grids.copy()
    changed[np.arange(20), np.argmax(changed > 0, axis=1)] = 0  # one clue less is another puzzle
    assert not np.any(sudoku_puzzles.signatures(changed, size=size) == of_grids)


def test_no_held_out_puzzle_is_a_copy_of_a_training_puzzle(tmp_path):
    recipe = SudokuSet(size=4, num_train=150, num_test=60, num_aug=3)
    about = recipe.build(str(tmp_path / "set"))
    train, test = (files.read_split(str(tmp_path / "set"), split) for split in files.SPLITS)
    held_out = [canonical(tokens - 1) for tokens in test.inputs]
    assert len(set(held_out)) == 60
    assert not set(held_out) & {canonical(tokens - 1) for tokens in train.inputs}
    assert about["train"]["puzzles"] == 150
    assert about["train"]["rating"]["min"] >= 0


def test_the_bytes_of_a_set_match_its_description(tmp_path):
    recipe = SudokuSet(size=6, num_train=5, num_test=3, num_aug=4)
    steps = []
    recipe.build(str(tmp_path / "set"), report=lambda done, total: steps.append((done, total)))
    train, test = (files.read_split(str(tmp_path / "set"), split) for split in files.SPLITS)
    assert train.inputs.shape == (25, 36)
    assert test.inputs.shape == (3, 36)
    assert train.group_indices.tolist() == [0, 5, 10, 15, 20, 25]
    assert train.metadata.vocab_size == 8
    assert train.inputs.dtype == np.uint8
    for inputs, labels in zip(train.inputs, train.labels, strict=True):
        assert is_solved(labels - 1, size=6)
        given = inputs > 1
        np.testing.assert_array_equal(inputs[given], labels[given])
        assert inputs[~given].tolist() == [1] * np.count_nonzero(~given)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1] == (13, 13)


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    def built(name, seed):
        SudokuSet(size=4, num_train=10, num_test=5, num_aug=2, seed=seed).build(str(tmp_path / name))
        return {p.name + p.parent.name: p.read_bytes() for p in (tmp_path / name).glob("*/*.npy")}

    first = built("a", 7)
    assert first == built("b", 7)
    assert first["all__inputs.npytrain"] != built("c", 8)["all__inputs.npytrain"]


def test_a_grid_as_text():
    recipe = SudokuSet(size=6, num_train=1, num_test=1, num_aug=0)
    text = recipe.draw(np.arange(36) % 6 + 2)
    assert text.splitlines()[:4] == ["1 2 3  4 5 6", "1 2 3  4 5 6", "", "1 2 3  4 5 6"]
    assert recipe.draw(np.ones(36)).splitlines()[0] == ". . .  . . ."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 5}, "size is 5, expected one of 4, 6, 9"),
        ({"num_train": 0}, "num_train = 0: expected an integer of at least 1"),
        ({"num_test": 0}, "num_test = 0: expected an integer of at least 1"),
        ({"num_test": None}, "expected a number where puzzles are generated"),
        ({"num_aug": -1}, "num_aug = -1"),
        ({"clues": (9, 4)}, "clues 9 to 4"),
        ({"clues": (5,)}, r"clues \(5,\), expected two numbers, such as \(4, 8\)"),
        ({"csv": "folder"}, "size 4 with csv"),
        ({"size": 9, "csv": "folder", "clues": (20, 22)}, "clues with csv, whose puzzles are not generated"),
    ],
)
def test_impossible_sets_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        SudokuSet(**({"size": 4, "num_train": 1, "num_test": 1, "num_aug": 0} | change))


def test_more_puzzles_than_there_are_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sudoku_sets, "_FAILED_DRAWS", 1)
    recipe = SudokuSet(size=4, num_train=1, num_test=40, num_aug=0, clues=(4, 4), seed=1)
    with pytest.raises(ValueError, match=r"found \d+ held-out puzzles that are not symmetric copies"):
        SudokuSet(**{**vars(recipe), "min_rating": 1}).build(str(tmp_path / "set"))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def csv_folder(tmp_path):
    """A benchmark of 12 training and 4 held-out puzzles; training puzzle 0 is a copy of held-out puzzle 0."""
    puzzles = generated(9, 15, seed=4)
    symmetry = sudoku_puzzles.random_symmetry(np.random.default_rng(0), size=9)
    copy = puzzles[0]._replace(grid=symmetry(puzzles[0].grid), solution=symmetry(puzzles[0].solution))
    folder = tmp_path / "benchmark"
    folder.mkdir()
    for name, found in (("test", puzzles[:4]), ("train", [copy, *puzzles[4:]])):
        lines = ["source,question,answer,rating"]
        for number, puzzle in enumerate(found):
            question, answer = ("".join(map(str, grid.tolist())) for grid in (puzzle.grid, puzzle.solution))
            lines.append(f"made,{question.replace('0', '.')},{answer},{number}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def from_csv(folder, **change):
    return SudokuSet(**({"size": 9, "num_train": 11, "num_test": None, "num_aug": 0, "csv": str(folder)} | change))


def test_the_public_file_is_read_without_copies_of_held_out_puzzles(csv_folder, tmp_path):
    about = from_csv(csv_folder).build(str(tmp_path / "set"))
    train, test = (files.read_split(str(tmp_path / "set"), split) for split in files.SPLITS)
    assert (train.num_examples, test.num_examples) == (11, 4)
    assert about["train"]["rating"]["min"] == 1  # number 0 is the copy
    first = (csv_folder / "test.csv").read_text().splitlines()[1].split(",")
    np.testing.assert_array_equal(test.inputs[0] - 1, cells(first[1]))
    np.testing.assert_array_equal(test.labels[0] - 1, cells(first[2]))
    with pytest.raises(ValueError, match=r"has 11 puzzles .* requested 12"):
        from_csv(csv_folder, num_train=12).build(str(tmp_path / "other"))


def test_reading_the_public_file_reports_its_lines(csv_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sudoku_sets, "_LINES_PER_REPORT", 4)
    said = []
    recipe = from_csv(csv_folder, num_train=4)
    recipe.build(str(tmp_path / "set"), report=lambda done, total: said.append((done, total)))
    reading, writing_ = said[:-4], said[-4:]
    lines = [len((csv_folder / f"{name}.csv").read_text().splitlines()) for name in ("test", "train")]
    assert reading == [(n, None) for count in lines for n in 2 * list(range(4, count + 1, 4))]
    assert writing_ == [(n, 4) for n in (1, 2, 3, 4)]


def test_a_part_of_the_public_file_is_drawn_by_seed_and_rating(csv_folder, tmp_path):
    def ratings(name, **change):
        from_csv(csv_folder, num_train=4, num_test=2, **change).build(str(tmp_path / name))
        return json.loads((tmp_path / name / "build.json").read_text())["train"]["rating"], files.read_split(
            str(tmp_path / name), "train"
        ).inputs.tolist()

    assert ratings("a") == ratings("b")
    assert ratings("a2", seed=1)[1] != ratings("a3", seed=2)[1]
    from_csv(csv_folder, num_train=4, num_test=1, min_rating=3).build(str(tmp_path / "hard"))
    assert json.loads((tmp_path / "hard/build.json").read_text())["train"]["rating"]["min"] >= 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("source,question", "origin,puzzle", r"train.csv has columns .* expected source, question"),
        ("made,", "made,7", "question is '7.*expected 81 digits"),
        (",5\n", ",hard\n", "line 7: rating is 'hard'"),
    ],
)
def test_a_wrong_line_of_the_public_file_is_named(csv_folder, tmp_path, old, new, message):
    file = csv_folder / "train.csv"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        from_csv(csv_folder).build(str(tmp_path / "set"))


def test_a_wrong_answer_of_the_public_file_is_named(csv_folder, tmp_path):
    file = csv_folder / "train.csv"
    lines = file.read_text().splitlines()
    source, question, answer, rating = lines[5].split(",")
    lines[5] = ",".join((source, question, answer[1:] + answer[0], rating))
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="line 6: answer is not a solution of question"):
        from_csv(csv_folder).build(str(tmp_path / "set"))
    with pytest.raises(ValueError, match=r"train.csv and test.csv"):
        from_csv(tmp_path / "nowhere").build(str(tmp_path / "set"))


def test_a_file_in_place_of_its_folder_and_a_compressed_file_are_refused(csv_folder, tmp_path):
    with pytest.raises(UserError, match=r"test\.csv does not exist; csv names the folder"):
        from_csv(csv_folder / "test.csv").build(str(tmp_path / "set"))
    for file in csv_folder.glob("*.csv"):
        file.write_bytes(gzip.compress(file.read_bytes()))
    with pytest.raises(UserError, match=r"is not text in UTF-8 .* if it is compressed, unpack it first"):
        from_csv(csv_folder).build(str(tmp_path / "set"))
