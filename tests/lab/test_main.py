"""`python -m tests.lab` ends like `python -m launch`: quietly without a reader, and at once after a failure."""

import os
import runpy
import sys

import pytest

from core.errors import UserError
from launch import __main__ as cli
from launch import environment, terminal
from tests.lab import lm_eval_scores, transformers_peer
from tests.lab.__main__ import main


def test_a_command_whose_reader_goes_away_ends_quietly(monkeypatch):
    def breaks(*args, **kwargs):
        raise BrokenPipeError

    monkeypatch.setattr(cli, "run_command", breaks)
    monkeypatch.setattr(terminal, "is_reader_gone", lambda: True)
    assert main(["status"]) == 141


@pytest.mark.part("all")
def test_a_failed_command_does_not_wait_at_the_exit_barrier_of_jax(monkeypatch):
    def ends(code):
        raise SystemExit(f"at once with {code}")

    monkeypatch.setattr(os, "_exit", ends)
    monkeypatch.setattr(sys, "argv", ["tests.lab", "no such command"])
    with pytest.raises(SystemExit, match="at once with 2"):
        runpy.run_path(str(environment.WORKSPACE / "tests/lab/__main__.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--turns 0", "--turns: 0: expected a whole number, at least 1"),
        ("--python python3", "--python compares a published model with transformers: give its --folder, too"),
        ("--only prompts", "--only prompts needs --folder, too"),
        ("--only transformers", "--only transformers needs --folder and --python, too"),
        ("--folder gin", "--folder gin: expected the folder of a published model, with config.json"),
    ],
)
def test_generation_refuses_wrong_arguments(words, message, capsys):
    assert main(["generation", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--folder gin --python python3", "--folder gin: expected the folder of a published model, with config.json"),
        ("--folder {folder} --python no-such-python", "--python no-such-python: there is no such program"),
        ("--folder {folder} --python {python}", "lm_eval ended with exit code 3"),
    ],
)
def test_scores_of_lm_eval_refuse_wrong_arguments(words, message, capsys, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(lm_eval_scores, "_here", lambda folder: {})
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    folder = environment.WORKSPACE / "tests/models/fixtures/families/llama3"
    assert main(["lm_eval_scores", *words.format(folder=folder, python=python).split()]) == 2
    assert message in capsys.readouterr().err


def test_scores_of_lm_eval_are_compared_one_by_one():
    names = sorted(path.stem for path in lm_eval_scores.TASKS.glob("*.yaml"))
    here = {f"renga_{name}": {"acc": 0.5, "acc_stderr": 0.1, "perplexity": 1.5} for name in names}
    there = {task: {"acc": 0.5, "perplexity": 1.5 * (1 + 1e-5)} for task in here}
    assert {(row[0], row[-1]) for row in lm_eval_scores.compare(here, there)} == {(task, "yes") for task in here}
    there["renga_sums"]["acc"] = 0.5 + 1e-3
    rows = lm_eval_scores.compare(here, there)
    assert [row[:2] for row in rows if row[-1] == "no"] == [["renga_sums", "acc"]]
    del there["renga_prose"]["perplexity"]
    with pytest.raises(UserError, match=r"renga_prose has the scores \['acc', 'perplexity'\] here, and \['acc'\]"):
        lm_eval_scores.compare(here, there)


def test_an_environment_without_transformers_is_named(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match=r"--python .*/python: transformers ended with exit code 3"):
        transformers_peer.Peer(str(python), "folder", "float32")
