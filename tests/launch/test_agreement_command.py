"""The agreement command, with a model and a strategy from a file that is not ours."""

import sys

import pytest

from launch import agreement

MINE = """
import dataclasses

from models import transformer
from parallel.strategies import REPLICATED, Strategy


def build():
    return dataclasses.replace(transformer.preset("tiny"), vocab_size=100, dtype="float32")


def halves():
    table = {**REPLICATED, "mlp": "tensor"}
    return Strategy(name="halves", mesh_shape={"tensor": -1}, param_rules=table, activation_rules=table)
"""


@pytest.mark.slow
def test_a_model_and_a_strategy_of_ones_own(launch, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = launch(
        "agreement", "--model", "mine:build", "--strategy", "mine:halves@v4-8", "--steps", "2", "--float32-only"
    )
    row = next(line.split() for line in said.splitlines() if line.strip().startswith("halves"))
    assert row[1] == "v4-8"
    absolute = [float(cell) for cell in row[2:] if "e" in cell]
    assert len(absolute) == 4
    assert 0 < max(absolute) < 1e-4  # measured, not assumed: rounding, and nothing more


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "fdsp"], "no strategy fdsp; expected some of data_parallel, zero1, fsdp"),
        (["--strategy", "mine:halves"], "expected MODULE:FUNCTION@SLICE"),
        (["--model", "mine"], "'mine': expected MODULE:FUNCTION"),
    ],
)
def test_what_cannot_be_compared_is_said(launch, arguments, message):
    assert message in launch("agreement", *arguments, code=2)


@pytest.mark.slow
@pytest.mark.covers("R11")
@pytest.mark.simulated(4)
@pytest.mark.parametrize("processes", [2, 4])
def test_numbers_do_not_depend_on_the_number_of_processes(processes):
    """As `launch/run agreement --processes`, for all that it shows; tolerances of tests/parallel/test_agreement.py."""
    command = [sys.executable, "-m", "launch", "agreement", "--steps", "3"]
    found = agreement.measure_played(agreement.MODEL, agreement.EXAMPLES, steps=3, processes=processes, command=command)
    assert list(found) == list(agreement.EXAMPLES)
    for name, apart in found.items():
        assert apart["fresh"].absolute == 0, name
        assert 0 < apart["gradients"].absolute < 1e-6, name
        assert max(apart[part].absolute for part in ("losses", "params", "opt_state")) < 1e-5, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "3", "--only", "fsdp", "tensor"], "--processes 3: cannot share the chips of v4-32, v4-8"),
        (["--steps", "0"], "--steps 0: expected at least 1"),
    ],
)
def test_a_count_that_cannot_be_is_refused(launch, arguments, message):
    assert message in launch("agreement", *arguments, code=2)
