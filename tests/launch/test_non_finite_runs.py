"""Whole runs with a non-finite batch that is skipped or rolled back; later steps are as expected."""

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from core.training import hooks
from launch import settings
from launch.config import loader
from launch.hosts import cluster
from launch.hosts.cluster import Host
from launch.runs import prepared_run
from launch.session import Session
from models.decoder.transformer import Transformer
from parallel import strategies
from parallel.pipeline import schedules
from tasks import synthetic

PIPELINES = {
    name: lambda make=make: strategies.pipeline(schedule=make(num_microbatches=4))
    for name, make in (("one_f_one_b", schedules.one_f_one_b), ("gpipe", schedules.gpipe))
}
STRATEGIES = {"fsdp": strategies.fsdp, "data_parallel": strategies.data_parallel, **PIPELINES}


@dataclasses.dataclass(frozen=True)
class Spoilt:
    """Random tokens, of which some batches weigh their rows with NaN, and others never come."""

    task: Any
    bad: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()

    def __getattr__(self, name):
        return getattr(self.task, name)

    def train(self, layout, *, seed):
        return SpoiltBatches(self.task.train(layout, seed=seed), self.bad, self.missing)


class SpoiltBatches:
    def __init__(self, batches, bad, missing):
        self.batches, self.bad, self.missing, self.number = batches, bad, missing, 0

    def __next__(self):
        self.number += 1
        batch = dict(next(self.batches))
        if self.number in self.missing:
            return next(self)
        if self.number in self.bad:
            batch["weights"] = np.full_like(batch["weights"], math.nan)
        return batch

    def state(self):
        return self.batches.state()


def experiment(**fields):
    fields = {"strategy": strategies.fsdp(), "checkpoint_interval": 3, "total_steps": 9, **fields}
    task = synthetic.random_tokens(vocab_size=259, length=16, num_streams=16)
    layers = 4 if fields["strategy"].pipeline else 1
    model = Transformer(vocab_size=259, num_layers=layers, embed_dim=16, mlp_dim=32, num_heads=2, num_kv_heads=2)
    plain = loader.load("gin/quickstart.gin", slice_name="v4-32").build()
    common = {"model": model, "task": task, "batch_size": 16, "eval_batches": 0, "log_interval": 1, "prompt": ""}
    return dataclasses.replace(plain, **settings.grouped(common | fields, plain))


@pytest.fixture
def losses(tmp_path, kept_programs, monkeypatch):
    """Trains an experiment and gives the rows that it wrote, by step, the last of each."""

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", kept_programs)

    def run(name, made):
        run_dir = tmp_path / name
        told = {"config": "", "revision": "", "run_dir": str(run_dir), "last_step": made.total_steps}
        Session(prepared_run.prepare_run(made, host=Host(0, 1, True), **told)).run()
        rows = map(json.loads, pathlib.Path(run_dir, "metrics.jsonl").read_text().splitlines())
        by_step = {}
        for row in rows:
            by_step.setdefault(row["step"], {}).update(row)
        return by_step

    return run


@pytest.mark.slow  # tests/core/training/test_rolling_back.py is quick: the loop drops the bad batch and the next
@pytest.mark.covers("T10")
def test_after_a_roll_back_the_run_is_the_one_that_never_saw_those_batches(losses, capsys):
    task = experiment().task
    found = losses("spoilt", experiment(task=Spoilt(task, bad=(5,)), non_finite="roll_back"))
    said = capsys.readouterr().out
    assert "warning: step 5: loss = nan" in said
    assert "Back to the checkpoint of step 3, with the data after this." in said
    assert found[5]["rolled_back"] == 1.0
    # Step 5 is read when step 6 has been dispatched; the checkpoint is that of step 3.
    want = losses("without", experiment(task=Spoilt(task, missing=(4, 5, 6))))
    assert [found[n]["loss"] for n in range(1, 10)] == [want[n]["loss"] for n in range(1, 10)]


@pytest.mark.slow
def test_a_run_that_is_no_number_wherever_it_goes_ends(losses):
    task = experiment().task
    with pytest.raises(hooks.NonFiniteLossError, match="got no further than step 5"):
        losses("spoilt", experiment(task=Spoilt(task, bad=tuple(range(5, 99))), non_finite="roll_back"))


@pytest.mark.covers("T10")
def test_a_run_continues_after_a_skipped_batch(losses, capsys, monkeypatch):
    chips = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda: chips)
    task = Spoilt(experiment().task, bad=(4, 5))
    found = losses("spoilt", experiment(task=task, non_finite="skip", slice="v4-8", checkpoint_interval=9))
    assert [n for n, row in found.items() if row.get("skipped_updates")] == [4, 5]
    assert [n for n, row in found.items() if row.get("loss") == "nan"] == [4, 5]
    assert "warning: step 4: loss = nan, gradient_norm = nan; its update is left out" in capsys.readouterr().out
    assert all(isinstance(found[n]["loss"], float) for n in (3, 6, 9))


@pytest.mark.parametrize(
    "name",
    ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "fsdp")],
)
def test_under_every_strategy_a_skipped_step_keeps_the_state(name):
    made = experiment(strategy=STRATEGIES[name](), non_finite="skip")
    program = made.bind(jax.devices())
    batches = made.task.train(program.partitioner.data_layout(16), seed=0)
    good = dict(next(batches))
    bad = good | {"weights": np.where(np.arange(16)[:, None] == 11, np.float32(np.nan), good["weights"])}  # one row
    state, metrics = program.train_step(program.init(), program.put(good))
    assert metrics["skipped_updates"] == 0
    before = jax.device_get(state)
    state, metrics = program.train_step(state, program.put(bad))
    assert metrics["skipped_updates"] == 1
    after = jax.device_get(state)
    assert (before.step, after.step) == (1, 2)
    jax.tree.map(np.testing.assert_array_equal, after._replace(step=0), before._replace(step=0))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"non_finite": "ignore"}, "non_finite = 'ignore': expected one of 'stop', 'skip', 'roll_back'"),
        ({"step_limit_seconds": 0}, "step_limit_seconds = 0: expected a finite number above 0"),
        ({"compile_limit_seconds": math.inf}, "compile_limit_seconds = inf: expected a finite number"),
        ({"heartbeat_timeout_seconds": -1.0}, "heartbeat_timeout_seconds = -1.0: expected a finite number above 0"),
        ({"save_limit_seconds": math.inf}, "save_limit_seconds = inf: expected a finite number above 0"),
        ({"watchdog": "look"}, "watchdog = 'look': expected one of 'end', 'report'"),
        ({"step_limit_seconds": 7200.0}, "step_limit_seconds = 7200.0 is above compile_limit_seconds = 3600.0"),
        ({"replica_check_interval": -1}, "replica_check_interval = -1: expected an integer of at least 0"),
    ],
)
def test_invalid_settings_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        experiment(**fields)


def test_a_tpu_has_other_limits_than_a_rehearsal_and_settings_win(monkeypatch):
    monkeypatch.delenv("RENGA_SIMULATE", raising=False)
    on_tpu = cluster.limits(experiment().health)
    assert (on_tpu.silent_seconds, on_tpu.apart_seconds, on_tpu.reports_only) == (120.0, 600.0, False)
    own = experiment(
        heartbeat_timeout_seconds=30.0, apart_limit_seconds=40.0, save_limit_seconds=5000.0, watchdog="report"
    )
    assert cluster.limits(own.health)._asdict() == on_tpu._asdict() | {
        "silent_seconds": 30.0,
        "apart_seconds": 40.0,
        "reports_only": True,
    }
    monkeypatch.setenv("RENGA_SIMULATE", "v4-8")
    rehearsed = cluster.limits(experiment().health)
    assert (rehearsed.silent_seconds, rehearsed.apart_seconds) == (20.0, 120.0)
