"""An adapter is trained on files, and its gates are compared from the directory of its run."""

import csv
import json
import math
import re

import pytest

from core.hosts import exit_codes
from launch import __main__ as main

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
