"""ARC: encoding and decoding grids, variants and their names, and the training and held-out sets."""

import json

import numpy as np
import pytest

from tasks.puzzles import arc_grids, arc_sets, files
from tasks.puzzles.arc_grids import Variant
from tasks.puzzles.arc_sets import ArcSet


def grids(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 10, rng.integers(1, 31, 2), dtype=np.uint8) for _ in range(count)]


def test_a_frame_shows_where_a_grid_ends():
    tokens = arc_grids.frame(np.asarray([[0, 9, 3], [1, 1, 1]]), at=(1, 2)).reshape(30, 30)
    expected = np.zeros((30, 30), int)
    expected[1:3, 2:5] = [[2, 11, 5], [3, 3, 3]]
    expected[3, 2:5] = 1
    expected[1:3, 5] = 1
    np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("shape", [(1, 1), (30, 30), (30, 4), (5, 30), (7, 3)])
def test_crop_undoes_frame(shape):
    grid = np.random.default_rng(0).integers(0, 10, shape)
    np.testing.assert_array_equal(arc_grids.crop(arc_grids.frame(grid)), grid)


def test_crop_returns_the_largest_rectangle_of_an_invalid_grid():
    tokens = np.zeros((30, 30), int)
    assert arc_grids.crop(tokens.ravel()).shape == (0, 0)
    tokens[0, :5] = tokens[1, :4] = tokens[2, :1] = 7
    np.testing.assert_array_equal(arc_grids.crop(tokens.ravel()), np.full((2, 4), 5))
    tokens[0, 2] = arc_grids.END  # cuts every row behind it
    np.testing.assert_array_equal(arc_grids.crop(tokens.ravel()), np.full((2, 2), 5))
    tokens[0, 0] = arc_grids.END
    assert arc_grids.crop(tokens.ravel()).shape == (0, 0)


def test_an_offset_keeps_every_grid_inside():
    rng = np.random.default_rng(0)
    found = {arc_grids.offset(rng, np.zeros((29, 5)), np.zeros((2, 28))) for _ in range(200)}
    assert found == {(y, x) for y in range(2) for x in range(3)}


@pytest.mark.parametrize("orientation", range(8))
def test_a_variant_can_be_undone_and_named(orientation):
    rng = np.random.default_rng(orientation)
    for grid in grids(10, seed=orientation):
        variant = arc_grids.random_variant(rng)._replace(orientation=orientation)
        np.testing.assert_array_equal(variant.undo(variant.apply(grid)), grid)
        assert np.array_equal(variant.apply(grid) == 0, variant.apply((grid != 0).astype(int)) == 0)  # 0 stays
        assert arc_grids.parse(variant.name("abc")) == ("abc", variant)


def test_names_of_variants():
    assert Variant().name("007bbfb7") == "007bbfb7"
    assert Variant(3, (0, 7, 6, 8, 3, 1, 4, 9, 5, 2)).name("007bbfb7") == "007bbfb7|||t3|||0768314952"
    for wrong in ("a|||t8|||0123456789", "a|||t1|||0123456788", "a|||t1"):
        with pytest.raises(ValueError, match="is not an ARC identifier"):
            arc_grids.parse(wrong)


@pytest.mark.parametrize("grid", [[], [[1, 2], [3]], [[10]], [[-1]], [[0.5]], [[0] * 31], "text"])
def test_invalid_grids_are_refused(grid):
    with pytest.raises(ValueError, match="here is not a grid"):
        arc_grids.check(grid, where="here")


def task(*sizes, tests=1, seed=0):
    """JSON of a task with `sizes` demonstrations' sides, and the outputs of its tests."""
    rng = np.random.default_rng(seed)

    def grid(side):
        return rng.integers(0, 10, (side, side + 1)).tolist()

    train = [{"input": grid(side), "output": grid(side)} for side in sizes]
    return {"train": train, "test": [{"input": grid(4)} for _ in range(tests)]}, [grid(4) for _ in range(tests)]


@pytest.fixture
def source(tmp_path):
    """JSON files of every subset of version 1: three, two and one task; training has a copy of an evaluation task."""
    folder = tmp_path / "json"
    folder.mkdir()
    evaluation = {"e1": task(3, 4, tests=2, seed=1), "e2": task(5, 5, 5, seed=2)}
    subsets = {
        "training": {"t1": task(3, 3, seed=3), "t2": task(6, seed=4), "t3": evaluation["e2"]},
        "evaluation": evaluation,
        "concept": {"c1": task(2, 2, tests=3, seed=5)},
    }
    for subset, tasks in subsets.items():
        for part, number in (("challenges", 0), ("solutions", 1)):
            content = {name: parts[number] for name, parts in tasks.items()}
            (folder / f"arc-agi_{subset}_{part}.json").write_text(json.dumps(content))
    return folder


def built(source, out, **change):
    recipe = ArcSet(**({"version": 1, "num_aug": 6, "source": str(source)} | change))
    about = recipe.build(str(out))
    return about, *(files.read_split(str(out), split) for split in files.SPLITS), files.read_identifiers(str(out))


def test_who_is_trained_on_what(source, tmp_path):
    about, train, test, names = built(source, tmp_path / "set", num_aug=0)
    assert about["subsets"] == {"training": 3, "evaluation": 2, "concept": 1}
    assert about["left_out_because_held_out"] == ["t3"]
    assert names == ["<blank>", "t1", "t2", "e1", "e2", "c1"]
    assert np.diff(train.puzzle_indices).tolist() == [3, 2, 2, 3, 5]  # tests are shown but those of evaluation
    assert np.diff(test.puzzle_indices).tolist() == [2, 1]
    assert test.puzzle_identifiers.tolist() == [3, 4]
    assert train.metadata.mean_puzzle_examples == 3.0
    held_out = {labels.tobytes() for labels in test.labels}
    assert not held_out & {arc_grids.frame(arc_grids.crop(labels)).tobytes() for labels in train.labels}
    assert len(built(source, tmp_path / "copies", num_aug=0, keep_copies=True)[3]) == 7


def test_every_variant_is_a_puzzle_that_can_be_turned_back(source, tmp_path):
    _, train, test, names = built(source, tmp_path / "set")
    assert train.metadata.total_groups == 5
    assert np.diff(train.group_indices).tolist() == [7] * 5
    assert len(names) == 36
    assert test.metadata.num_puzzle_identifiers == 36
    puzzles = json.loads((tmp_path / "set/test_puzzles.json").read_text())
    for puzzle, identifier in enumerate(test.puzzle_identifiers):
        name, variant = arc_grids.parse(names[identifier])
        for number, row in enumerate(range(test.puzzle_indices[puzzle], test.puzzle_indices[puzzle + 1])):
            expected = puzzles[name]["test"][number]
            np.testing.assert_array_equal(variant.undo(arc_grids.crop(test.inputs[row])), expected["input"])
            np.testing.assert_array_equal(variant.undo(arc_grids.crop(test.labels[row])), expected["output"])


def test_one_training_example_of_a_puzzle_stays_in_the_corner_and_pairs_move_together(source, tmp_path):
    _, train, _, _ = built(source, tmp_path / "set", num_aug=20)
    moved = 0
    for first, last in zip(train.puzzle_indices[:-1], train.puzzle_indices[1:], strict=True):
        corners = [tuple(np.argwhere(tokens.reshape(30, 30) >= 2).min(0)) for tokens in train.inputs[first:last]]
        assert (0, 0) in corners
        moved += sum(corner != (0, 0) for corner in corners)
        outputs = [tuple(np.argwhere(tokens.reshape(30, 30) >= 2).min(0)) for tokens in train.labels[first:last]]
        assert corners == outputs
    assert moved > len(train.inputs) / 3


def test_a_puzzle_with_few_variants_has_few(source, tmp_path):
    black = {"train": [{"input": [[0]], "output": [[0, 0]]}], "test": [{"input": [[0, 0, 0]]}]}
    (source / "arc-agi_concept_challenges.json").write_text(json.dumps({"c1": black}))
    (source / "arc-agi_concept_solutions.json").write_text(json.dumps({"c1": [[[0]]]}))
    _, train, _, _ = built(source, tmp_path / "set", num_aug=10)
    assert np.diff(train.group_indices).tolist()[-1] == 2  # lying and standing


def test_the_same_seed_gives_the_same_bytes(source, tmp_path):
    first, same, other = (
        built(source, tmp_path / name, seed=seed)[1].inputs.tobytes() for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == same != other


def test_wrong_sources_are_refused(source, tmp_path):
    (source / "arc-agi_concept_solutions.json").write_text(json.dumps({"c1": []}))
    with pytest.raises(ValueError, match=r"concept_challenges.json, c1: expected train and test pairs"):
        arc_sets.read(1, str(source))
    (source / "arc-agi_concept_solutions.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read"):
        arc_sets.read(1, str(source))
    with pytest.raises(ValueError, match=r"has none of arc-agi_training2_challenges.json"):
        arc_sets.read(2, str(tmp_path))
    with pytest.raises(ValueError, match="version is 3"):
        ArcSet(version=3)


def test_the_package_holds_both_versions(tmp_path):
    about, train, test, _ = built("", tmp_path / "one", num_aug=0, keep_copies=True)
    assert about["subsets"] == {"training": 400, "evaluation": 400}
    assert (train.num_examples, train.metadata.total_groups) == (3081, 800)
    assert (test.num_examples, test.metadata.total_puzzles) == (419, 400)
    second = arc_sets.read(2)
    assert {name: len(found) for name, found in second.items()} == {"training2": 1000, "evaluation2": 120}
    assert sum(len(p.test) for p in second["evaluation2"]) == 172
    shown = sum(len(p.train) + len(p.test) for p in second["training2"]) + sum(
        len(p.train) for p in second["evaluation2"]
    )
    assert shown == 4666  # with "concept", which the package lacks: 4,666 + 907 = 5,573 (test_files: 725,651 steps)
