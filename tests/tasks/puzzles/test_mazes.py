"""Mazes: shortest paths in the specified order, and eight orientations of each."""

import itertools

import numpy as np
import pytest

from tasks.puzzles import files, mazes, symmetries
from tasks.puzzles.maze_sets import MazeSet
from tasks.puzzles.mazes import GOAL, OPEN, PATH, START, WALL


def tokens(*lines):
    return np.asarray([[mazes.CHARACTERS.index(c) + 1 for c in line] for line in lines], np.uint8)


@pytest.mark.parametrize(
    ("asked", "solved"),
    [
        # Down comes before right, so the path that leaves S downwards is found first.
        (("S  ", "   ", "  G"), ("S  ", "o  ", "ooG")),
        # Down and left before right and up, also behind a wall.
        (("  S", " # ", "G  "), ("  S", " #o", "Goo")),
        (("G  ", "## ", "S  "), ("Goo", "##o", "Soo")),
        (("SG",), ("SG",)),
    ],
)
def test_the_path_is_the_one_that_the_order_finds(asked, solved):
    np.testing.assert_array_equal(mazes.solve(tokens(*asked))[0], tokens(*solved))


def distances(is_open, start):
    """Shortest steps by relaxing every cell until nothing changes."""
    steps = np.where(is_open, np.inf, np.nan)
    steps[start] = 0
    while True:
        around = np.pad(steps, 1, constant_values=np.nan)
        nearest = np.fmin.reduce([around[:-2, 1:-1], around[2:, 1:-1], around[1:-1, :-2], around[1:-1, 2:]])
        better = np.where(is_open, np.fmin(steps, nearest + 1), np.nan)
        if np.array_equal(better, steps, equal_nan=True):
            return steps
        steps = better


def test_the_least_length_of_paths_is_proportional_to_the_area_unless_given():
    assert [MazeSet(size=size).exceeds for size in (30, 15, 6)] == [110, 27, 4]
    assert MazeSet(size=30, min_path=7).exceeds == 7


@pytest.mark.parametrize(("size", "min_path"), [(30, 110), (9, 12), (6, 5)])
def test_a_generated_maze_has_a_long_shortest_path(size, min_path):
    rng = np.random.default_rng(0)
    found = [m for m in (mazes.generate(rng, size=size, min_path=min_path) for _ in range(30)) if m][:5]
    assert len(found) == 5
    for maze in found:
        start, goal = (tuple(np.argwhere(maze.grid == token)[0]) for token in (START, GOAL))
        assert maze.steps == distances(maze.grid != WALL, start)[goal] > min_path
        assert np.count_nonzero(maze.solved == PATH) == maze.steps - 1
        changed = maze.grid != maze.solved
        assert set(maze.grid[changed]) == {OPEN}
        around = np.pad(np.isin(maze.solved, (PATH, START, GOAL)), 1)
        neighbors = [around[:-2, 1:-1], around[2:, 1:-1], around[1:-1, :-2], around[1:-1, 2:]]
        assert np.all(np.sum(neighbors, axis=0)[maze.solved == PATH] == 2)  # shortest: it touches itself nowhere


def test_some_mazes_have_several_ways():
    rng = np.random.default_rng(1)
    found = list(itertools.islice(filter(None, (mazes.generate(rng, size=15, min_path=5) for _ in range(60))), 20))
    corridors = [np.count_nonzero(m.grid != WALL) for m in found]
    edges = [
        np.count_nonzero((m.grid != WALL)[1:] & (m.grid != WALL)[:-1])
        + np.count_nonzero((m.grid != WALL)[:, 1:] & (m.grid != WALL)[:, :-1])
        for m in found
    ]
    assert sum(e > c - 1 for e, c in zip(edges, corridors, strict=True)) > 10  # more edges than a tree has


@pytest.mark.parametrize(
    ("lines", "message"),
    [(("S S", " G "), "has 2 S and 1 G"), (("S#G",), "no path connects S at"), (("   ",), "has 0 S and 0 G")],
)
def test_invalid_mazes_are_refused(lines, message):
    with pytest.raises(ValueError, match=message):
        mazes.solve(tokens(*lines))


def test_a_set_has_the_described_mazes(tmp_path):
    recipe = MazeSet(size=7, num_train=6, num_test=4, min_path=8)
    about = recipe.build(str(tmp_path / "set"))
    train, test = (files.read_split(str(tmp_path / "set"), split) for split in files.SPLITS)
    assert train.inputs.shape == (48, 49)
    assert test.inputs.shape == (4, 49)
    assert train.metadata.total_groups == 6
    for inputs, labels in zip(train.inputs.reshape(-1, 7, 7), train.labels.reshape(-1, 7, 7), strict=True):
        assert np.count_nonzero(labels == PATH) == mazes.solve(inputs)[1] - 1 >= 8
    names = [symmetries.smallest(grid) for grid in (*train.inputs.reshape(-1, 7, 7), *test.inputs.reshape(-1, 7, 7))]
    assert len(set(names)) == 10
    assert about["train"]["path"]["min"] > 8
    assert len(recipe.draw(train.inputs[0]).splitlines()) == 9


def test_the_same_seed_gives_the_same_bytes_and_no_orientations_where_not_asked_for(tmp_path):
    def built(name, **change):
        MazeSet(**({"size": 6, "num_train": 3, "num_test": 2} | change)).build(str(tmp_path / name))
        return (tmp_path / name / "train/all__labels.npy").read_bytes()

    assert built("a") == built("b") != built("c", seed=1)
    built("d", augment=False)
    assert files.read_split(str(tmp_path / "d"), "train").num_examples == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 3}, "size 3, expected 5 to 100"),
        ({"num_test": 0}, "num_test = 0"),
        ({"min_path": 0}, "min_path = 0"),
        ({"csv": "folder", "min_path": 9}, "min_path applies to generated mazes, and csv reads mazes"),
    ],
)
def test_impossible_sets_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MazeSet(**change)


def test_paths_longer_than_there_are_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no new one with a shortest path above 40 steps: request fewer mazes"):
        MazeSet(size=5, num_train=1, num_test=1, min_path=40).build(str(tmp_path / "set"))


def test_orientations_are_eight_and_can_be_undone():
    grid = np.arange(12).reshape(3, 4)
    images = [symmetries.orient(grid, o) for o in symmetries.ORIENTATIONS]
    assert len({(image.shape, image.tobytes()) for image in images}) == 8
    for orientation, image in enumerate(images):
        np.testing.assert_array_equal(symmetries.restore(image, orientation), grid)
    assert len({symmetries.smallest(image) for image in images}) == 1


def as_text(grid):
    return "".join(mazes.CHARACTERS[t - 1] for t in grid.ravel())


@pytest.fixture
def csv_folder(tmp_path):
    """A benchmark of 5 training and 3 held-out mazes of 6 x 6; training maze 0 is held-out maze 0, turned."""
    rng = np.random.default_rng(3)
    found = list(itertools.islice(filter(None, (mazes.generate(rng, size=6, min_path=5) for _ in range(99))), 7))
    turned = found[0]._replace(grid=np.rot90(found[0].grid), solved=np.rot90(found[0].solved))
    folder = tmp_path / "benchmark"
    folder.mkdir()
    for name, part in (("test", found[:3]), ("train", [turned, *found[3:]])):
        lines = [f"made,{as_text(maze.grid)},{as_text(maze.solved)},{maze.steps}" for maze in part]
        (folder / f"{name}.csv").write_text("\n".join(["source,question,answer,rating", *lines]) + "\n")
    return folder


def from_csv(folder, **change):
    return MazeSet(**({"size": 6, "num_train": None, "num_test": None, "csv": str(folder)} | change))


def test_the_public_file_is_read_without_copies_of_held_out_mazes(csv_folder, tmp_path):
    about = from_csv(csv_folder).build(str(tmp_path / "set"))
    train, test = (files.read_split(str(tmp_path / "set"), split) for split in files.SPLITS)
    assert (train.num_examples, test.num_examples) == (4 * 8, 3)
    assert about["train"]["puzzles"] == 4
    line = (csv_folder / "test.csv").read_text().splitlines()[2].split(",")
    assert [as_text(test.inputs[1]), as_text(test.labels[1])] == line[1:3]
    reports: list[tuple[int, int]] = []
    part = from_csv(csv_folder, num_train=2, num_test=1)
    part.build(str(tmp_path / "part"), report=lambda done, total: reports.append((done, total)))
    assert reports == [(1, 3), (2, 3), (3, 3)]
    assert files.read_split(str(tmp_path / "part"), "train").metadata.total_groups == 2
    with pytest.raises(ValueError, match=r"has 4 mazes that are not copies .* requested 5"):
        from_csv(csv_folder, num_train=5).build(str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda question, answer: (question[1:], answer), "question has 35 characters, expected 36"),
        (lambda question, answer: (question, answer.replace("o", "x")), "answer has 36 characters, expected 36 of"),
        (lambda question, answer: (question.replace("S", " "), answer), "a maze has 0 S and 1 G"),
        (lambda question, answer: (question, answer.replace("o", " ", 1)), "is not question with a shortest path"),
        (lambda question, answer: (question, answer.replace("#", "o", 1)), "is not question with a shortest path"),
    ],
)
def test_a_wrong_line_of_the_public_file_is_named(csv_folder, tmp_path, change, message):
    file = csv_folder / "train.csv"
    lines = file.read_text().splitlines()
    source, question, answer, rating = lines[3].split(",")
    lines[3] = ",".join((source, *change(question, answer), rating))
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message) as raised:
        from_csv(csv_folder).build(str(tmp_path / "set"))
    assert "train.csv, line 4" in str(raised.value)
