"""An adapter is trained on files, and its gates are compared from the directory of its run."""

import csv
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from core.hosts import exit_codes
from launch import __main__ as main
from launch.config import loader
from launch.experiments import gates
from models.ttt import evaluation

SMALL = (
    "transformer.Transformer.num_layers = 1",
    "transformer.Transformer.embed_dim = 16",
    "transformer.Transformer.mlp_dim = 16",
    "transformer.Transformer.num_heads = 2",
    "HEAD_DIM = 8",
    "CHUNK = 16",
    "LENGTH = 32",
    "BATCH_SIZE = 4",
    "TOTAL_STEPS = 2",
    "WARMUP_STEPS = 0",
    "EVAL_BATCHES = 1",
    "EVAL_INTERVAL = 2",
    "CHECKPOINT_INTERVAL = 1",
    "INIT_FROM = ''",
)


@pytest.fixture
def bindings(tmp_path):
    for package in range(30):
        file = tmp_path / "code" / f"package{package}" / "a.py"
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"x{i} = {i * package}\n" for i in range(9)))
    own = f"DATA = '{tmp_path}/code/**/*.py'"
    return [word for text in (*SMALL, own) for word in ("--gin", text)]


@pytest.mark.slow
@pytest.mark.covers("N05", "N06")
def test_gates_are_compared_and_a_run_continues_with_the_state_of_its_gate(launch, tmp_path, bindings):
    run = str(tmp_path / "run")
    gate = ("--gin", "adapter.adapted.gate = @gates.Reconstruction()", "--gin", "from models.ttt import gates")
    trained = ("train", "gin/ponder/quick.gin", "--slice", "v5e-1", "--run-dir", run, *bindings, *gate)
    launch(*trained, "--steps", "1", slice_name="v5e-1")
    said = launch(*trained, slice_name="v5e-1")
    assert "resumed from 1" in said
    assert re.search("frozen      checksum [0-9a-f]{8}, at the start of this process and now", said)
    asked = ("--gates", "skip,update,random,oracle,greedy,reconstruction", "--controls", "no_learning,resets,shuffled")
    said = launch("evaluate", run, *asked, "--rows", "8", "--label", "own")
    found = json.loads((tmp_path / "run/evaluation/gates_own.json").read_text())
    assert list(found["gates"]) == ["skip", "update", "random", "oracle", "greedy", "reconstruction"]
    skip, update = found["gates"]["skip"], found["gates"]["update"]
    assert (skip["update_rate"], skip["cost"], update["update_rate"], update["cost"]) == (0, 1, 1, 3)
    assert math.isclose(skip["loss"] - update["loss"], update["gain"])
    assert skip["gflops"] < update["gflops"]
    assert "update better than resets" in said
    rows = list(csv.DictReader((tmp_path / "run/evaluation/chunks_own.csv").open()))
    assert {row["skip"] for row in rows} == {"0"}
    total = sum(float(row["loss_update"]) for row in rows) / sum(float(row["tokens"]) for row in rows)
    assert math.isclose(total, update["loss"], rel_tol=1e-6)
    again = ("evaluate", run, "--gates", "update", "--rows", "8", "--against", f"{run}/evaluation/chunks_own.csv")
    assert "+0.0000 nats a token, 95 % [+0.0000, +0.0000]" in launch(*again)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gates", "recall"), "no gate 'recall'"),
        (("--gates", "skip", "--budget", "3.5"), "expected a number from 1 to 3"),
        (("--gates", "skip", "--controls", "x"), "expected some of no_learning, resets, offset, shuffled"),
        (("--controls", "resets"), "--controls belongs to --gates"),
    ],
)
def test_unknown_gates_and_budgets_are_refused_before_a_run_is_read(capsys, options, words):
    assert main.main(["evaluate", "no_such_run", *options]) == exit_codes.USER_ERROR
    assert words in " ".join(capsys.readouterr().err.split())


def test_gates_are_not_compared_on_losses_that_depend_on_earlier_decisions(monkeypatch, capsys, bindings):
    given = [word for word in bindings if word != "--gin"]
    config = loader.load("gin/ponder/quick.gin", bindings=[*given, "CARRY = 'document'"], slice_name="v5e-1")
    found = gates.saved_run.SavedRun("run", config, step=1)
    monkeypatch.setattr(gates.saved_run, "read_step", lambda *_, **__: found)
    monkeypatch.setattr(gates.loaded_model, "choose_devices", lambda *_, **__: None)
    assert main.main(["evaluate", "run", "--gates", "skip,update,loss,oracle"]) == exit_codes.USER_ERROR
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "--gates loss,oracle: with CARRY = 'document', the loss of a chunk depends on decisions about earlier ones"
        in said
    )
    assert "expected some of skip, update" in said


CHUNKS = evaluation.Chunks(
    document=np.array([0, 0, 1]),
    place=np.array([0, 1, 0]),
    tokens=np.array([2.0, 4.0, 5.0]),
    loss_skip=np.array([2.0, 6.0, 10.0]),
    loss_update=np.array([1.0, 2.0, 10.0]),
    initial=np.array([7.0, 8.0, 9.0]),
    step_0=np.array([3.0, 4.0, 2.5]),
    step_1=np.array([2.0, 2.0, 2.0]),
)


def test_the_table_of_chunks_has_the_decisions_and_thresholds_of_every_gate():
    decided = {
        "fixed": evaluation.Decided(np.array([True, False, True]), None),
        "moving": evaluation.Decided(np.array([False, True, True]), np.array([0.5, 0.25, 0.125])),
    }
    report = SimpleNamespace(chunks=CHUNKS, losses={"shuffled": np.array([1.5, 3.0, 4.5])}, decided=decided)
    rows = list(csv.DictReader(gates._Report._csv(report).splitlines()))
    assert rows[0].keys() == {*CHUNKS._fields, "advantage", "loss_shuffled", "fixed", "moving", "threshold_moving"}
    for name, values in (*CHUNKS._asdict().items(), ("advantage", [0.5, 1.0, 0.0]), ("loss_shuffled", [1.5, 3.0, 4.5])):
        assert [float(row[name]) for row in rows] == list(values)
    assert [[int(row[name]) for row in rows] for name in decided] == [[1, 0, 1], [0, 1, 1]]
    assert [float(row["threshold_moving"]) for row in rows] == [0.5, 0.25, 0.125]


def test_gates_differences_and_correlations_are_printed(capsys):
    row = {name: 0.125 for name in (*gates._COLUMNS, "gain_low", "gain_high", "gflops")}
    row |= {"gain": 0.75, "milliseconds": math.nan}
    report = SimpleNamespace(
        chunks=CHUNKS,
        rows={"fixed": row},
        differences={"fixed against skip": (0.25, -0.125, 0.5)},
        _correlations=lambda: gates._Report._correlations(SimpleNamespace(chunks=CHUNKS)),
    )
    gates._Report.show(report)
    said = capsys.readouterr().out
    assert "3 chunks of 2 documents, 11 tokens" in said
    assert re.search(r"fixed .*\+0\.7500 \[\+0\.1250, \+0\.1250\] +0\.12 +-", said)
    assert "fixed against skip: +0.2500 nats a token, 95 % [-0.1250, +0.5000]" in said
    for name, signal in (("loss of the base", [1, 1.5, 2]), ("reconstruction loss", [3, 4, 2.5])):
        expected = np.corrcoef(signal, [0.5, 1.0, 0.0])[0, 1]
        assert f"correlation of {name} and advantage: {expected:+.3f}" in said


def test_figures_that_a_gate_does_not_have_are_null(tmp_path):
    report = SimpleNamespace(
        rows={"oracle": {"loss": 0.5, "recovery": math.nan, "milliseconds": math.nan}},
        differences={"a": (0.25, -0.125, 0.5), "b": (math.nan, math.inf, 0.5)},
        _correlations=dict,
        _csv=lambda: "",
    )
    gates._Report.write(report, tmp_path, "", {"budget": 2.0})
    text = (tmp_path / "gates.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["gates"] == {"oracle": {"loss": 0.5, "recovery": None, "milliseconds": None}}
    assert found["differences"] == {"a": [0.25, -0.125, 0.5], "b": [None, None, 0.5]}
