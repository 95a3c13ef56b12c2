"""The puzzle task: the same batches on any hosts, exact positions, and evaluations with every puzzle once."""

import dataclasses
import pathlib
import shutil

import numpy as np
import pytest

from core import identity
from core.errors import UserError
from core.types import DataLayout
from tasks import puzzles, streams
from tasks.puzzles import files
from tasks.puzzles import task as task_module
from tasks.puzzles.maze_sets import MazeSet
from tasks.puzzles.order import InOrder


@pytest.fixture
def task(write_dataset):
    return puzzles.dataset(directory=write_dataset(), length=5, vocab_size=9)


@pytest.fixture
def several(make_split, task):
    """The task over puzzles of several examples."""
    task.source._splits["train"] = make_split([[3, 4], [5, 2], [6, 1]] * 4, seq_len=5)
    return task


def assert_equal(left, right):
    assert left.keys() == right.keys() == {"inputs", "labels", "puzzle_ids"}
    for key in left:
        assert left[key].dtype == right[key].dtype == np.int32
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)


def test_a_batch_is_what_the_files_hold(task, host_layouts):
    batches = task.train(host_layouts(8, 1)[0], seed=0)
    assert batches.spec == task.spec(8)
    assert {k: v.shape for k, v in task.spec(8).items()} == {"inputs": (8, 5), "labels": (8, 5), "puzzle_ids": (8,)}
    split = files.read_split(task.source.directory, "train")
    visits = next(task.train(host_layouts(20, 1)[0], seed=0))
    assert sorted(visits["inputs"][:, 0].tolist()) == sorted(split.inputs[:, 0].tolist())  # 20 rows: an epoch
    batch = next(batches)
    np.testing.assert_array_equal(batch["labels"][:, 0], -100)  # label 0 is not scored
    np.testing.assert_array_equal(batch["labels"][:, 1:], batch["inputs"][:, 1:])
    assert set(batch["puzzle_ids"].tolist()) <= {0, 1, 2}


@pytest.mark.covers("D02", "D15")
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("kind", ["task", "several"])
def test_any_number_of_hosts_sees_the_same_batches(request, kind, hosts, strided, host_layouts, global_batch):
    task = request.getfixturevalue(kind)
    layouts = host_layouts(8, hosts, strided)
    whole, parts = task.train(host_layouts(8, 1)[0], seed=3), [task.train(layout, seed=3) for layout in layouts]
    for _ in range(12):
        assert_equal(global_batch(layouts, [next(part) for part in parts]), next(whole))


@pytest.mark.covers("D15")
@pytest.mark.parametrize("kind", ["task", "several"])
def test_a_position_is_saved_once_and_continues_on_other_hosts(request, kind, host_layouts, global_batch):
    task = request.getfixturevalue(kind)
    layouts = host_layouts(8, 4, strided=True)
    parts = [task.train(layout, seed=3) for layout in layouts]
    for _ in range(7):
        assert [next(part) for part in parts]
    states = [part.state() for part in parts]
    assert [list(state) for state in states] == [[streams.stream_name(0)], [], [], []]
    continued = task.train(host_layouts(8, 1)[0], seed=3)
    continued.restore(states[0])
    for _ in range(5):
        assert_equal(next(continued), global_batch(layouts, [next(part) for part in parts]))


def test_a_position_of_other_data_is_refused(task, write_dataset, host_layouts):
    layout = host_layouts(8, 1)[0]
    state = task.train(layout, seed=3).state()
    with pytest.raises(ValueError, match="SEED = 4, was 3"):
        task.train(layout, seed=4).restore(state)
    other = puzzles.dataset(directory=write_dataset("other", train=21), length=5, vocab_size=9)
    with pytest.raises(ValueError, match="belongs to other data"):
        other.train(layout, seed=3).restore(state)
    with pytest.raises(ValueError, match="stream_00000"):
        task.train(layout, seed=3).restore({})


def test_an_evaluation_has_every_puzzle_once_and_unscored_padding(task, host_layouts, global_batch):
    for hosts in (1, 2):
        layouts = host_layouts(4, hosts)
        parts = [task.evaluation(layout) for layout in layouts]
        batches = [global_batch(layouts, rows) for rows in zip(*parts, strict=True)]
        assert len(batches) == 2
        whole = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
        split = files.read_split(task.source.directory, "test")
        np.testing.assert_array_equal(whole["inputs"][:7], split.inputs)
        np.testing.assert_array_equal(whole["puzzle_ids"][:7], split.puzzle_identifiers)
        assert whole["inputs"][7].tolist() == [0] * 5
        assert whole["labels"][7].tolist() == [-100] * 5
        assert whole["puzzle_ids"][7] == 0
        assert np.all(np.any(whole["labels"][:7] != -100, axis=1))
    assert task.evaluated_on() == "all 7 held-out puzzles"


def test_an_evaluation_of_a_part_is_always_of_the_same_part(task, host_layouts):
    assert dataclasses.replace(task, eval_puzzles=3).evaluating(None) == task
    part = dataclasses.replace(task.evaluating(3), eval_seed=5)
    assert part.evaluated_on() == "3 of 7 held-out puzzles, drawn with seed 5"
    assert part.evaluated_on(4) == part.evaluated_on()
    assert part.evaluated_on(2) == "the first 2 of the 3 drawn with seed 5 of 7 held-out puzzles"
    assert task.evaluated_on(4) == "the first 4 of 7 held-out puzzles"
    assert dataclasses.replace(task, eval_puzzles=8192).evaluated_on(8) == "all 7 held-out puzzles"
    first, second = (next(part.evaluation(host_layouts(4, 1)[0])) for _ in range(2))
    assert_equal(first, second)
    chosen = next(InOrder(part.source.split("test"), batch_size=3, subset=3, seed=5)).examples
    np.testing.assert_array_equal(first["inputs"][:3], part.source.split("test").inputs[chosen])
    assert np.all(first["labels"][3] == -100)


def test_problems_of_the_data_are_reported_before_a_run(task, write_dataset, tmp_path):
    assert task.problems() == []
    assert "DATA is not set" in puzzles.dataset(directory=None, length=5, vocab_size=9).problems()[0]
    nowhere = puzzles.dataset(directory="nowhere", length=5, vocab_size=9)
    assert "no puzzles in 'nowhere'" in nowhere.problems()[0]
    assert nowhere.named_files() == ("nowhere",)
    longer = puzzles.dataset(directory=task.source.directory, length=81, vocab_size=11)
    assert [p.split(": ", 1)[1] for p in longer.problems()[:2]] == [
        "seq_len is 5, but the task's length is 81; set it to 5",
        "vocab_size is 9, but the task's vocab_size is 11; set it to 9",
    ]
    with pytest.raises(ValueError, match="set it to 9"):
        longer.prepare(str(tmp_path), is_host_zero=True)
    empty = puzzles.dataset(directory=write_dataset("empty", test=0), length=5, vocab_size=9)
    assert "has a split without puzzles" in empty.problems()[0]
    with pytest.raises(ValueError, match="has a split without puzzles"):
        empty.prepare(str(tmp_path), is_host_zero=True)
    assert puzzles.dataset(directory="gs://bucket/a", length=5, vocab_size=9).problems() == []  # not looked for
    damaged = pathlib.Path(task.source.directory) / "train/all__inputs.npy"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(ValueError, match="it is truncated"):
        task.prepare(str(tmp_path), is_host_zero=True)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"length": 81}, "seq_len is 5, but the task's length is 81; set it to 5"),
        ({"vocab_size": 11}, "vocab_size is 9, but the task's vocab_size is 11; set it to 9"),
        ({"train_puzzles": 21}, "20 training puzzles"),
    ],
)
def test_a_bucket_is_not_looked_at_before_a_run_and_held_against_the_task_when_it_starts(
    write_dataset, monkeypatch, tmp_path, asked, message
):
    directory = write_dataset("bucket")
    task = puzzles.dataset(**({"directory": directory, "length": 5, "vocab_size": 9} | asked))
    monkeypatch.setattr(task_module.paths, "is_remote", lambda path: "/bucket" in str(path))
    assert task.problems() == []
    with pytest.raises(ValueError, match=message):
        task.prepare(str(tmp_path), is_host_zero=True)


def small(**change):
    return puzzles.sudoku(**({"size": 4, "num_train": 12, "num_test": 5} | change))


def test_host_zero_builds_and_the_others_read(tmp_path, host_layouts, capsys):
    run_dir = str(tmp_path / "run")
    first, second = small(), small()
    assert first.problems() == []
    with pytest.raises(ValueError, match="host 0 builds them first"):
        second.prepare(run_dir, is_host_zero=False)
    first.prepare(run_dir, is_host_zero=True)
    assert "building puzzles: kind sudoku, size 4" in capsys.readouterr().out
    second.prepare(run_dir, is_host_zero=False)
    layout = host_layouts(4, 1)[0]
    assert_equal(next(first.train(layout, seed=0)), next(second.train(layout, seed=0)))
    assert first.fingerprint() == second.fingerprint()
    assert first.num_puzzles == 1
    first.prepare(run_dir, is_host_zero=True)
    assert "building" not in capsys.readouterr().out


def test_a_named_folder_is_built_once_and_never_mistaken(tmp_path):
    folder = str(tmp_path / "puzzles")
    task = small(directory=folder)
    task.prepare(str(tmp_path / "run"), is_host_zero=True)
    assert small(directory=folder).problems() == []
    other = small(directory=folder, num_train=13)
    assert "num_train: saved 12, now 13" in other.problems()[0]
    with pytest.raises(ValueError, match="holds other puzzles"):
        other.prepare(str(tmp_path / "run"), is_host_zero=True)
    shutil.rmtree(tmp_path / "puzzles/test")
    with pytest.raises(ValueError, match="cannot read"):
        small(directory=folder).prepare(str(tmp_path / "run"), is_host_zero=True)


def test_mazes_that_a_run_builds(tmp_path, host_layouts):
    task = puzzles.maze(size=6, num_train=4, num_test=3)
    assert (task.length, task.vocab_size) == (36, 6)
    task.prepare(str(tmp_path), is_host_zero=True)
    batch = next(task.train(host_layouts(4, 1)[0], seed=0))
    assert batch["labels"].max() == 5
    assert "kind maze" in task.describe()


def test_preparing_a_task_does_not_change_its_identity(tmp_path, task):
    built = small(num_train=2, num_test=2)
    for each in (built, task):
        before = identity.text(each)
        each.prepare(str(tmp_path), is_host_zero=True)
        assert identity.text(each) == before
    assert identity.text(small(num_train=3, num_test=2)) != identity.text(built)


def test_puzzles_that_a_stopped_start_left_incomplete_are_built_again(tmp_path):
    """An upload to a bucket ends with the file that marks a complete folder."""
    task = puzzles.maze(size=6, num_train=4, num_test=3)
    task.prepare(str(tmp_path / "whole"), is_host_zero=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut/puzzles" / files.IDENTIFIERS).unlink()
    (tmp_path / "cut/puzzles/left_over").write_text("of another build")
    puzzles.maze(size=6, num_train=4, num_test=3).prepare(str(tmp_path / "cut"), is_host_zero=True)
    left, right = ({file.name for file in (tmp_path / name).rglob("*")} for name in ("whole", "cut"))
    assert left == right
    named = puzzles.maze(size=6, num_train=4, num_test=3, directory=str(tmp_path / "cut/puzzles"))
    (tmp_path / "cut/puzzles" / files.IDENTIFIERS).unlink()
    with pytest.raises(UserError, match="exists and is not empty"):
        named.prepare(str(tmp_path / "cut"), is_host_zero=True)  # a folder of the user is not removed


def test_a_rehearsal_is_small_and_needs_no_files(tmp_path, task, host_layouts):
    assert task.rehearsal().source is task.source  # it is there
    absent = puzzles.dataset(directory=None, length=81, vocab_size=11).rehearsal()
    every = task_module.Built(MazeSet(size=6, num_train=None, num_test=None, csv="never-read")).rehearsal()
    assert (every.recipe.num_train, every.recipe.num_test) == (8, 8)
    few = small(num_train=10_000, num_test=10_000, directory="never-made").rehearsal()
    large = puzzles.dataset(directory=None, length=81, vocab_size=300, epochs_per_iteration=1).rehearsal()
    for number, rehearsal in enumerate((absent, few, large)):
        assert rehearsal.problems() == []
        rehearsal.prepare(str(tmp_path / str(number)), is_host_zero=True)
        batch = next(rehearsal.train(host_layouts(16, 1)[0], seed=0))
        assert batch["inputs"].shape == (16, rehearsal.length)
        assert batch["inputs"].max() < rehearsal.vocab_size
        assert len(list(rehearsal.evaluation(host_layouts(4, 1)[0]))) == 2
    assert not pathlib.Path("never-made").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: puzzles.dataset(directory="a", length=0, vocab_size=9), "length = 0"),
        (lambda: puzzles.dataset(directory="a", length=5, vocab_size=9, eval_puzzles=0), "eval_puzzles = 0"),
        (lambda: puzzles.dataset(directory="a", length=5, vocab_size=9, train_copies=-1), "train_copies = -1: .* 0"),
        (lambda: puzzles.dataset(directory="a", length=5, vocab_size=9, eval_seed=-1), "eval_seed = -1: .* 0"),
        (lambda: puzzles.sudoku(seed=-1), "seed = -1: expected an integer of at least 0"),
        (lambda: puzzles.maze(seed="x"), "seed = 'x': expected an integer of at least 0"),
        (lambda: puzzles.sudoku(size=7), "size is 7"),
        (lambda: puzzles.sudoku(num_train="many"), "num_train = 'many'"),
        (lambda: puzzles.maze(size=2), "size 2, expected 5 to 100"),
    ],
)
def test_constructors_refuse_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_row_on_two_hosts_is_saved_once(task):
    rows = (0, 1, 2, 3)
    owner, other = task.train(DataLayout(4, rows, rows), seed=0), task.train(DataLayout(4, rows, ()), seed=0)
    assert (len(owner.state()), other.state()) == (1, {})
    assert_equal(next(owner), next(other))
