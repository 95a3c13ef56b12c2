"""`launch/run agreement --model MODULE:FUNCTION`: a model with a carry, dropout and two losses; wrong input."""

import hashlib
import json
import sys

import pytest

from launch import __main__ as cli
from launch import environment
from parallel.verify.agreement import EXAMPLES

OUTSIDE = environment.WORKSPACE / "tests" / "outside"
MINE = """
import dataclasses
import haiku as hk
import jax
import jax.numpy as jnp
from models.haiku_model import HaikuModel
from core.types import LossOutput
from reader import Reader, Walks


class Constant(Reader):
    def init(self, rng, batch):
        return super().init(jax.random.key(3), batch)


class Unnamed(HaikuModel):
    def sums(self, batch, *, is_training):
        return LossOutput(jnp.sum(hk.Linear(3)(batch["distance"])), jnp.float32(1), {})


class Old(Reader):
    def loss(self, params, carry, rng, batch):
        return super().loss(params, carry, rng, batch, is_training=True)


def sized(size): return Reader(), Walks()
def broken(): return 1 / 0
def text(): return "model"
def old(): return Old(), Walks()
def alone(): return Unnamed()
def uncalled(): return Reader, Walks()
def constant(): return Constant(), Walks()
def unnamed(): return Unnamed(), Walks()
def taskless(): return Reader(), "walks"
"""


@pytest.fixture
def agreement(monkeypatch, capsys, tmp_path):
    """Runs the command in a folder with the module `mine_wrong`; gives its exit code and what it said."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(OUTSIDE)])
    monkeypatch.setenv("PYTHONPATH", f"{environment.WORKSPACE}:{OUTSIDE}")  # of --processes; launch/run sets it
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_wrong.py").write_text(MINE)
    (tmp_path / "mine_folder").mkdir()
    (tmp_path / "mine_failing.py").write_text("import reader\nraise KeyError('x')\n")

    def run(*arguments):
        code = cli.main(["agreement", *arguments])
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    yield run
    for name in ("mine_wrong", "mine_failing", "mine_folder"):
        sys.modules.pop(name, None)


def test_a_report_of_a_recurrent_model_with_a_carry_dropout_and_two_losses(agreement, tmp_path):
    arguments = ["--only", "tensor", "--float32-only", "--steps", "2", "--json", "report.json"]
    code, said = agreement("--model", "reader:build", *arguments)
    assert code == 0, said
    assert "draws random bits in init, training" in said
    assert "| strategy | slice | gradients | losses | params | opt_state | metrics | carry | counts |" in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["agrees"]
    assert (report["seed"], report["steps"]) == (0, 2)
    assert report["draws_random_bits"] == {"init": True, "training": True, "evaluation": False}
    assert report["batch"] == {name: f"{kind}[16, 8]" for name, kind in BATCH.items()}
    assert set(report["versions"]) == {"jax", "jaxlib", "dm-haiku", "optax", "python"}
    (tensor,) = report["compared"]
    assert (tensor["slice"], tensor["mesh"]) == ("v4-8", "tensor 4")
    found = tensor["float32"]
    assert 0 < found["gradients"]["ulp"] <= found["gradients"]["tolerance_ulp"]  # it was another computation
    assert 0 < found["gradients"]["relative"] < 1e-5
    for part in ("metrics", "carry"):
        assert 0 <= found[part]["ulp"] <= found[part]["tolerance_ulp"]  # equal on some processors
    assert (found["counts"]["leaf"], found["counts"]["tolerance_ulp"]) == ("['carry']['carry']['batches']", None)
    assert report["modules"] == {"reader": hashlib.sha256((OUTSIDE / "reader.py").read_bytes()).hexdigest()[:16]}
    assert (report["optimizer"], report["devices"]) == ("AdamW with epsilon 1e-4", "16 cpu devices of one process")


def test_a_model_may_start_from_the_same_parameters_for_every_seed(agreement, tmp_path):
    """No strategy of those asked for can hold it, so that nothing is trained."""
    arguments = ["--model", "mine_wrong:constant", "--only", "pipeline", "--json", "report.json", "--processes", "2"]
    code, said = agreement(*arguments)
    assert code == 1, said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["draws_random_bits"] == {"init": False, "training": True, "evaluation": False}
    assert report["devices"] == "16 cpu devices of one process or 2 processes"
    assert set(report["modules"]) == {"mine_wrong", "reader"}


BATCH = {"inputs": "int32", "targets": "int32", "distance": "float32"}


@pytest.mark.slow
@pytest.mark.covers("E09")
def test_every_strategy_that_can_shard_it_agrees(agreement, tmp_path):
    code, said = agreement("--model", "reader:build", "--steps", "3", "--float32-only", "--json", "report.json")
    assert code == 0, said
    report = json.loads((tmp_path / "report.json").read_text())
    assert {row["strategy"] for row in report["compared"]} == {
        n for n, e in EXAMPLES.items() if not e.strategy.pipeline
    }
    assert {row["strategy"] for row in report["refused"]} == {n for n, e in EXAMPLES.items() if e.strategy.pipeline}


@pytest.mark.slow
@pytest.mark.simulated(2)
def test_a_model_of_ones_own_agrees_over_processes(agreement):
    code, said = agreement(
        "--model", "reader:build", "--only", "fsdp", "--float32-only", "--steps", "2", "--processes", "2"
    )
    assert code == 0, said
    assert "params, 2 processes" in said


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nothing", "--model: nothing: expected transformer, "),
        ("mine_absent:build", "there is no module mine_absent in "),
        ("mine_failing:build", "importing mine_failing failed: KeyError: 'x' (mine_failing.py:2)"),
        ("mine_wrong:build", "mine_wrong.py has no function 'build'; it has sized, broken"),
        ("mine_wrong:sized", "needs size; expected a function that takes no arguments"),
        ("sys:nothing", "--model sys:nothing: the module sys has no function 'nothing'; it has no functions"),
        ("mine_folder:build", "the module mine_folder has no function 'build'"),
        ("builtins:dict", "dict'>; expected a function, written in Python, that takes no arguments"),
        ("mine_wrong:broken", "failed: ZeroDivisionError: division by zero (mine_wrong.py:"),
        ("mine_wrong:text", "returns as its model a value of type str, which lacks init"),
        ("mine_wrong:uncalled", "returns as its model the class Reader, not an object of it"),
        ("mine_wrong:taskless", "returns as its task a value of type str, which lacks num_streams"),
        (
            "mine_wrong:old",
            "returns as its model a value of type Old, which lacks loss(params, carry, rng, batch, *, is_training)",
        ),
        ("mine_wrong:alone", "returns Unnamed without a task, and it has no vocab_size"),
        ("mine_wrong:unnamed", "parameters without named axes: linear/b [3], linear/w [8, 3]"),
    ],
)
def test_what_is_no_model_is_refused(agreement, model, said):
    code, found = agreement("--model", model, "--only", "tensor", "--steps", "1")
    assert code == 2, found
    assert said in found
