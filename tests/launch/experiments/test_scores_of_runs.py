"""Scores of whole runs equal those logged in training, also under another strategy and on several hosts."""

import json
import math
import shutil

import jax
import pytest

from core.checkpoints.store import Checkpoints
from launch.config import loader
from launch.hosts.cluster import Host
from launch.runs import prepared_run
from launch.session import Session

TRM = """
from __gin__ import dynamic_registration
from models import trm
from parallel import strategies
include 'gin/defaults.gin'
include 'gin/models/trm_attention.gin'
include 'gin/optimizers/trm.gin'
include 'gin/tasks/arc.gin'
STRATEGY = @strategies.data_parallel()
COMPUTE_DTYPE = 'float32'
BATCH_SIZE = 4
EVAL_BATCHES = 1
SLICE = 'v4-8'
WARMUP_STEPS = 1
TOTAL_STEPS = 2
EVAL_INTERVAL = 1
CHECKPOINT_INTERVAL = 1
trm.TRM.num_puzzles = 7
trm.TRM.embed_dim = 16
trm.TRM.num_heads = 1
trm.TRM.num_layers = 1
trm.TRM.h_cycles = 1
trm.TRM.l_cycles = 1
trm.TRM.prefix_length = 1
trm.TRM.halt_max_steps = 2
"""
TEXT = """
from __gin__ import dynamic_registration
from models.decoder import transformer
include 'gin/quickstart.gin'
SLICE = 'v4-8'
BATCH_SIZE = 8
LENGTH = 32
NUM_STREAMS = 4
EVAL_BATCHES = 1
transformer.Transformer.num_layers = 1
transformer.Transformer.embed_dim = 32
transformer.Transformer.mlp_dim = 64
transformer.Transformer.num_kv_heads = 4
"""


def written(run_dir, step):
    return json.loads((run_dir / "evaluation" / f"step_{step}.json").read_text())


def ready(run_dir, text, *, bindings=(), last_step=1):
    run_dir.mkdir()
    (run_dir / "experiment.gin").write_text(text)
    config = loader.load(str(run_dir / "experiment.gin"), bindings=bindings)
    (run_dir / "config.gin").write_text(config.text)
    told = {"config": config, "revision": "", "run_dir": str(run_dir), "host": Host(0, 1, True)}
    return prepared_run.prepare_run(config.build(), last_step=last_step, **told)


def fresh(run):
    """Saves what a run starts from; averages, where it has any, as twice the parameters."""
    state = run.program.init()
    if run.experiment.optimizer.averages:
        twice = jax.tree.map(lambda x: 2 * x, state.opt_state.average)
        state = state._replace(opt_state=state.opt_state._replace(average=twice))
    checkpoints = Checkpoints(run.checkpoint_dir, keep=1)
    checkpoints.save(1, state=state, data={}, meta=json.loads(json.dumps(run.meta)))
    checkpoints.close()


@pytest.mark.covers("T17")
@pytest.mark.slow
def test_the_means_are_those_of_training(command, dataset, one_host, tmp_path):
    run_dir = tmp_path / "run"
    run = ready(run_dir, TRM, bindings=[f"DATA = '{dataset[0]}'"], last_step=2)
    Session(run).run()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = {row["step"]: row for row in rows if "validation/loss" in row}
    code, said = command("evaluate", run_dir, "--all-steps")
    assert code == 0, said
    for step in (1, 2):
        found = written(run_dir, step)
        by_step = {f"exact_accuracy_step_{i:02d}": v for i, v in enumerate(found["by_step"]["exact_accuracy"], 1)}
        assert len(by_step) == 2
        theirs = {name.removeprefix("validation/"): v for name, v in logged[step].items() if "/" in name}
        assert {**found["means"], **by_step} == pytest.approx(theirs, rel=1e-6)
        assert (found["arc"]["tests"], found["scored"]) == (3, 4)
        assert found["evaluated_on"] == "the first 4 of 7 held-out puzzles"
    assert "exact_accuracy after each recursion step" in said
    assert found["means"]["loss"] != written(run_dir, 1)["means"]["loss"]


@pytest.mark.slow
def test_text_scores_alike_under_another_strategy(command, one_host, tmp_path):
    fresh(ready(tmp_path / "run", TEXT))
    found = {}
    for name in ("fsdp", "tensor"):
        swap = ["--gin", f"STRATEGY = @strategies.{name}()"]
        code, said = command("evaluate", tmp_path / "run", "--rows", "9", "--by-position", *swap)
        assert code == 0, said
        assert "loss by position in the document; tokens: 16, 16, 32, 64, 128, 256" in said
        assert "on the validation data, at most 16 rows" in said
        found[name] = written(tmp_path / "run", 1)
    assert {name: of["strategy"] for name, of in found.items()} == {"fsdp": "fsdp", "tensor": "tensor"}
    assert found["tensor"]["scored"] == found["fsdp"]["scored"] == 16 * 32
    assert found["tensor"]["means"] == pytest.approx(found["fsdp"]["means"], rel=1e-5)
    parts = {name: [own["loss"] for own in of["by_position"]] for name, of in found.items()}
    assert parts["tensor"] == pytest.approx(parts["fsdp"], rel=1e-5)
    whole = sum(own["loss"] * own["scored"] for own in found["fsdp"]["by_position"]) / (16 * 32)
    assert whole == pytest.approx(found["fsdp"]["means"]["loss"], rel=1e-6)
    assert found["tensor"]["means"]["loss"] == pytest.approx(math.log(259), rel=0.15)


@pytest.mark.slow
@pytest.mark.simulated(2)
def test_two_hosts_score_the_averaged_weights_of_a_recursion_alike(launch, dataset, one_host, tmp_path):
    fresh(ready(tmp_path / "one", TRM, bindings=[f"DATA = '{dataset[0]}'", "BATCH_SIZE = 8"]))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    where = ["--rows", "5", "--slice", "v4-16"]
    launch("evaluate", str(tmp_path / "one"), *where, slice_name="v4-16")
    launch("evaluate", str(tmp_path / "two"), *where, "--simulate")
    one, two = (written(tmp_path / name, 1) for name in ("one", "two"))
    assert one["evaluated_on"] == "5 of 7 held-out puzzles, drawn with seed 0"
    for part in ("means", "by_step"):
        flat, same = (jax.tree.leaves(of.pop(part)) for of in (one, two))
        assert flat == pytest.approx(same, rel=1e-5)
    assert one == two
