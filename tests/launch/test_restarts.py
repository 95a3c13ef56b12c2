"""A simulated slice that loses a host restarts from its checkpoint, sends an alert and counts the loss."""

import json
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

from core.training import goodput
from launch import environment

pytestmark = pytest.mark.slow

SMALL = [
    "NUM_STREAMS = 4",
    "TOTAL_STEPS = 30",
    "WARMUP_STEPS = 3",
    "LENGTH = 64",
    "CHECKPOINT_INTERVAL = 8",
    "EVAL_INTERVAL = 30",
    "EVAL_BATCHES = 1",
    "LOG_INTERVAL = 1",
    "transformer.Transformer.num_layers = 2",
    "transformer.Transformer.embed_dim = 32",
    "transformer.Transformer.mlp_dim = 64",
    "PROMPT = ''",
]


def host_process(launcher, index):
    """The number of the launcher's child that plays host `index`."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == launcher and f"JAX_PROCESS_INDEX={index}".encode() in variables:
            return int(process.name)
    raise AssertionError(f"no host {index}")


def rows(run_dir):
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture(scope="module")
def restarted(launch_command, tmp_path_factory):
    """Host 1 is killed behind the checkpoint of step 8; (run directory, what the launcher said, alerts)."""
    folder = tmp_path_factory.mktemp("restarted")
    run_dir, told = folder / "run", folder / "told"
    bindings = [word for binding in SMALL for word in ("--gin", binding)]
    where = ["--simulate", "--restarts", "2", "--run-dir", str(run_dir)]
    command, env = launch_command("pod", "v4-16", "gin/quickstart.gin", *where, *bindings)
    env["RENGA_ALERT"] = f"cat >> {told}; echo >> {told}"
    launcher = subprocess.Popen(
        command, cwd=environment.WORKSPACE, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 180
        while not (run_dir / "metrics.jsonl").exists() or max((r["step"] for r in rows(run_dir)), default=0) < 10:
            assert time.monotonic() < deadline
            assert launcher.poll() is None
            time.sleep(0.02)
        os.kill(host_process(launcher.pid, 1), signal.SIGKILL)
        said, _ = launcher.communicate(timeout=240)
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(30)
    assert launcher.returncode == 0, said[-3000:]
    return run_dir, said, [json.loads(line) for line in told.read_text().splitlines()]


@pytest.mark.covers("C10")
@pytest.mark.simulated(2)
def test_a_run_that_lost_a_host_resumes_from_its_checkpoint(restarted):
    run_dir, said, _ = restarted
    assert "ended with exit code 137" in said
    assert "(restart 1 of at most 2 without a new checkpoint)" in said
    assert re.search(r"resumed from (8|16|24)", said)
    assert {row["step"] for row in rows(run_dir) if "loss" in row} == set(range(1, 31))


@pytest.mark.covers("O13")
@pytest.mark.simulated(2)
def test_its_goodput_counts_the_time_that_was_lost(restarted):
    run_dir, said, _ = restarted
    first, second = goodput.read(str(run_dir))
    assert (first.finished, second.finished) == (False, True)
    assert second.first_step in (8, 16, 24)
    assert first.last_step <= second.first_step
    shares = [row["goodput"] for row in rows(run_dir) if "goodput" in row]
    assert 0 < shares[-1] < 1
    assert "over 2 starts" in said


@pytest.mark.covers("O10")
@pytest.mark.simulated(2)
def test_one_alert_is_sent(restarted):
    run_dir, said, (alert,) = restarted
    assert (alert["run"], alert["kind"], alert["exit_code"]) == (str(run_dir), "killed", 137)
    assert alert["step"] >= 10
    assert "alert (killed) was sent" in said
    assert str(run_dir.parent / "told") not in said
