"""A recursive run that is interrupted in the middle of its puzzles resumes bit for bit."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from core.checkpoints.store import Checkpoints
from launch.config import loader
from launch.hosts.cluster import Host
from launch.runs import prepared_run
from launch.session import Session

SMALL = (
    "BATCH_SIZE = 16",
    "TOTAL_STEPS = 40",
    "WARMUP_STEPS = 30",  # the rate still changes where the run stops
    "CHECKPOINT_INTERVAL = 20",
    "EVAL_INTERVAL = 20",
    "EVAL_BATCHES = 1",
    "LOG_INTERVAL = 1",
    "puzzles.sudoku.num_train = 64",
    "puzzles.sudoku.num_test = 16",
    "puzzles.sudoku.num_aug = 3",
    "trm.TRM.embed_dim = 32",
    "trm.TRM.num_layers = 1",
    "trm.TRM.h_cycles = 2",
    "trm.TRM.l_cycles = 2",
    "trm.TRM.halt_bias = 0.5",  # rows halt as exploration lets them, each at a step of its own
    "trm.TRM.exploration = 0.5",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """40 steps, ready to start."""
    folder = tmp_path_factory.mktemp("runs")
    data = f"puzzles.sudoku.directory = '{folder / 'data'}'"
    config = loader.load("gin/trm/sudoku4.gin", bindings=(*SMALL, data), slice_name="v5e-1")
    return prepared_run.prepare_run(
        config.build(),
        config=config,
        revision="",
        run_dir=str(folder / "straight"),
        last_step=40,
        host=Host(0, 1, True),
    )


def left_behind(run, step):
    checkpoints = Checkpoints(run.checkpoint_dir, keep=3, read_only=True)
    state, position, _ = checkpoints.restore(step, run.program.abstract_state)
    checkpoints.close()
    return jax.device_get(state), dict(position)


def lines(run, *, after):
    """What a run wrote, without what a clock said, what was compiled, and what saving and being down cost."""
    rows = map(json.loads, pathlib.Path(run.run_dir, "metrics.jsonl").read_text().splitlines())
    measured = ("compile/", "checkpoint/", "goodput", "hosts/")
    rows = [row for row in rows if row["step"] > after and not any(k.startswith(measured) for k in row)]
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def differs(one, other):
    return any(np.any(a != b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.slow  # test_every_task_resumes.py has a quick run
@pytest.mark.covers("C06", "N12")
def test_a_recursive_run_resumes_to_the_last_bit(run, tmp_path):
    resumed = dataclasses.replace(run, run_dir=str(tmp_path / "resumed"))
    Session(run).run()
    Session(dataclasses.replace(resumed, last_step=20)).run()
    halfway, position = left_behind(resumed, 20)
    assert len(np.unique(halfway.carry.steps)) > 2  # rows are in the middle of their puzzles
    assert 0 < np.sum(halfway.carry.halted) < 16
    Session(resumed).run()
    (want, want_position), (got, got_position) = left_behind(run, 40), left_behind(resumed, 40)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got_position == want_position != position
    assert lines(resumed, after=20) == lines(run, after=20)
    assert len(lines(run, after=20)) == 21  # 20 steps and an evaluation
    steps = [row for row in lines(run, after=0) if "loss" in row]
    assert all(("steps" in row) == (row["halted"] > 0) for row in steps)  # no row halted: no mean, and no zero
    assert min(row["steps"] for row in steps if "steps" in row) >= 1
    kept = got.opt_state.average, got.params["~"]["puzzle_table"], got.carry.states.z_h, got.carry.data
    before = (
        halfway.opt_state.average,
        halfway.params["~"]["puzzle_table"],
        halfway.carry.states.z_h,
        halfway.carry.data,
    )
    assert all(differs(a, b) for a, b in zip(kept, before, strict=True))  # and none of it stood still
