"""`launch/run evaluate --humaneval`: samples of a model, and wrong arguments."""

import json

import pytest

from launch import __main__ as command
from launch import loaded_model
from launch.experiments import humaneval as command_of
from tasks.code import humaneval

PROBLEMS = [
    {
        "task_id": "T/0",
        "prompt": "def add(a, b):\n",
        "test": "def check(f):\n    assert f(1, 2) == 3",
        "entry_point": "add",
    },
    {"task_id": "T/1", "prompt": "def one():\n", "test": "def check(f):\n    assert f() == 1", "entry_point": "one"},
]


class Scripted:
    """A model whose samples are given."""

    def __init__(self, texts):
        self.texts, self.asked = texts, {}
        self.model = type("Model", (), {"generator": type("Generator", (), {"max_positions": None}), "where": "here"})

    def continued(self, prompts, **options):
        self.asked = options
        return self.texts


def test_every_sample_is_run_and_counted(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text("\n".join(map(json.dumps, PROBLEMS)) + "\n")
    problems = humaneval.read(str(file))
    assert [p.name for p in humaneval.read(str(file), most=1)] == ["T/0"]
    right, wrong = "    return a + b", "    return a - b"
    texts = [right, *[wrong] * 9, *["    return 1"] * 10]
    model = Scripted(texts)
    found = command_of.solve(problems, model, samples=10, temperature=0.7)
    assert found["pass_at"] == {1: pytest.approx((0.1 + 1) / 2), 10: 1.0}
    assert [s["passed"] for s in found["samples"]] == [True] + [False] * 9 + [True] * 10
    assert found["samples"][1] == {"task_id": "T/0", "completion": wrong, "passed": False, "why": "AssertionError"}
    assert model.asked["sampling"].temperature == 0.7


def test_wrong_arguments_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(loaded_model, "load", None)
    file, bad, empty = tmp_path / "problems.jsonl", tmp_path / "bad.jsonl", tmp_path / "empty.jsonl"
    file.write_text(json.dumps(PROBLEMS[0]))
    bad.write_text(json.dumps(PROBLEMS[0]) + '\n{"task_id": "T/1", "prompt": 3}\n')
    empty.write_text("\n")
    for arguments, message in {
        (file,): "give --allow-code to run them",
        (tmp_path / "none.jsonl", "--allow-code"): "no such file",
        (bad, "--allow-code"): "line 2: prompt, test, entry_point is missing or no text",
        (empty, "--allow-code"): "has no problems",
        (file, "--allow-code", "--lm-eval", "arc_easy"): "give one of --lm-eval, --humaneval at a time",
        (file, "--allow-code", "--lm-eval-path", tmp_path): "--lm-eval-path belongs to --lm-eval",
        (file, "--allow-code", "--temperature", "0.5"): "one sample is greedy: give --samples, too",
    }.items():
        assert command.main(["evaluate", "smollm2", "--humaneval", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
    assert command.main(["evaluate", "smollm2", "--allow-code"]) == 2
    assert "--allow-code belongs to --humaneval" in capsys.readouterr().err
