"""`launch/run make-dataset`: builds puzzles, shows one, and refuses invalid requests."""

import json
import pathlib

import pytest

from core.hosts import exit_codes
from launch import __main__ as main
from launch.cli import make_dataset
from tasks.puzzles import files


def run(*argv):
    return main.main(["make-dataset", *map(str, argv)])


def test_sudoku_is_built_and_shown(tmp_path, capsys):
    out = tmp_path / "sudoku"
    assert run("sudoku", "--size", 4, "--train", 20, "--test", 8, "--augment", 2, "--out", out) == 0
    said = capsys.readouterr().out
    train = files.read_split(str(out), "train")
    assert train.inputs.shape == (60, 16)
    assert "the first training puzzle" in said
    assert "20 puzzles, 60 with variants, 60 examples; rating 0 to" in said
    assert "held out by: no training puzzle has the symmetry-invariant signature" in said
    assert f"DATA = '{out}', LENGTH = 16, VOCAB_SIZE = 6" in said
    puzzle, solution = said.split("the first training puzzle")[1].split("its solution")
    digits = [[c for c in text if c in ".1234"] for text in (puzzle, solution.split("train")[0])]
    assert digits[1][:16] == [str(t - 1) for t in train.labels[0]]
    assert digits[0][:16] == ["." if t == 1 else str(t - 1) for t in train.inputs[0]]


def test_the_same_line_builds_the_same_bytes(tmp_path, capsys):
    for name in ("a", "b"):
        assert run("maze", "--size", 7, "--train", 4, "--test", 3, "--seed", 5, "--out", tmp_path / name) == 0
    assert "+-------+" in capsys.readouterr().out
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / n).rglob("*.*")} for n in ("a", "b"))
    assert first == second
    assert run("maze", "--size", 7, "--train", 4, "--test", 3, "--seed", 6, "--out", tmp_path / "c") == 0
    assert (tmp_path / "c/train/all__inputs.npy").read_bytes() != (tmp_path / "a/train/all__inputs.npy").read_bytes()


def test_arc_is_built_from_a_folder_of_json(tmp_path, capsys):
    task = {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[3]]}]}
    for subset in ("training", "evaluation"):
        (tmp_path / f"arc-agi_{subset}_challenges.json").write_text(json.dumps({subset: task}))
        (tmp_path / f"arc-agi_{subset}_solutions.json").write_text(json.dumps({subset: [[[len(subset) % 3]]]}))
    out = tmp_path / "arc"
    assert run("arc", "--version", 1, "--augment", 3, "--source", tmp_path, "--out", out) == 0
    assert 'subsets: {"training": 1, "evaluation": 1}' in capsys.readouterr().out
    assert len(files.read_identifiers(str(out))) == 9
    assert json.loads((out / "test_puzzles.json").read_text())["evaluation"]["test"][0]["input"] == [[3]]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("sudoku", "--size", 5), "size is 5, expected one of 4, 6, 9"),
        (("sudoku", "--size", 4, "--train", 0), "num_train = 0: expected an integer of at least 1"),
        (("sudoku", "--size", 4, "--seed", -1), "--seed: -1: expected a whole number, at least 0"),
        (("sudoku", "--csv", "nowhere"), "train.csv and test.csv"),
        (("maze", "--size", 5, "--min-path", 50), "no new one with a shortest path above 50"),
        (("arc", "--version", 3), "version is 3, expected 1 or 2"),
        (("arc", "--source", "nowhere"), "has none of arc-agi_training_challenges.json"),
    ],
)
def test_invalid_datasets_are_refused_with_the_reason(tmp_path, capsys, argv, message):
    assert run(*argv, "--out", tmp_path / "out") == exit_codes.USER_ERROR
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_refused_before_anything_is_built(tmp_path, capsys):
    (tmp_path / "letter.txt").write_text("dear")
    assert run("sudoku", "--size", 9, "--train", 100_000, "--out", tmp_path) == exit_codes.USER_ERROR
    assert "exists and is not empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_the_parser_takes_the_examples():
    parser = main.parser(make_dataset, "launch/run make-dataset")
    for line in make_dataset.EXAMPLE.splitlines():
        _, _, kind, *_ = words = line.split()
        assert parser.parse_args(words[2:]).built == kind


def test_every_task_file_of_puzzles_binds_a_task_of_its_vocabulary():
    from launch import environment
    from launch.config import loader

    names = ("sudoku4", "sudoku6", "sudoku9", "maze", "arc", "sudoku_extreme")
    for name in names:
        assert (pathlib.Path(environment.WORKSPACE) / f"gin/tasks/{name}.gin").exists()
        config = loader.load("gin/quickstart.gin", bindings=[f"include 'gin/tasks/{name}.gin'"])
        experiment = config.build()
        assert experiment.task.vocab_size == experiment.model.vocab_size
        assert type(experiment.task).__name__ == "PuzzleTask"
