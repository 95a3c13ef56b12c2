"""A run directory belongs to one launch at a time; a run whose directory is gone ends with an error."""

import os
import re
import shutil
import subprocess

import pytest

from core.hosts import exit_codes
from core.training import run_lock
from launch import environment
from launch.check import preflight

SMALL = [
    "TASK = @synthetic.random_tokens()",
    "NUM_STREAMS = 4",
    "BATCH_SIZE = 4",
    "TOTAL_STEPS = 5000",
    "LENGTH = 16",
    "CHECKPOINT_INTERVAL = 1000",
    "EVAL_BATCHES = 0",
    "LOG_INTERVAL = 10",
    "PROMPT = ''",
    "transformer.Transformer.num_layers = 1",
    "transformer.Transformer.embed_dim = 16",
    "transformer.Transformer.mlp_dim = 32",
]
BINDINGS = [word for binding in SMALL for word in ("--gin", binding)]


@pytest.fixture
def going(launch_command, tmp_path):
    """A run behind its step 100, in `tmp_path / "run"`, and its command line."""
    words = ["train", "gin/quickstart.gin", "--slice", "v4-8", "--run-dir", str(tmp_path / "run"), *BINDINGS]
    command, env = launch_command(*words, slice_name="v4-8")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = subprocess.Popen(command, cwd=environment.WORKSPACE, env=env, **pipes)
    for line in running.stdout:
        if line.startswith("step    100/"):
            break
    yield running, words
    running.kill()
    running.wait()


@pytest.mark.slow  # tests/core/training/test_run_lock.py
def test_a_second_launch_is_refused_and_a_run_whose_directory_is_deleted_ends(going, launch, tmp_path):
    running, words = going
    said = launch(*words, slice_name="v4-8", code=exit_codes.USER_ERROR)
    assert re.search(rf"error: the run directory .* is in use by another launch: process {running.pid} on ", said)
    (tmp_path / "run").rename(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone", ignore_errors=True)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == exit_codes.RUN_DIRECTORY_LOST, said
    assert "run/lock.json is gone: the run directory was deleted, or its lock was removed to end this run" in said


def test_a_missing_login_of_weights_and_biases_ends_a_start_before_any_device_is_touched(launch, tmp_path, monkeypatch):
    (tmp_path / "wandb.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    words = ["train", "gin/quickstart.gin", "--slice", "v4-8", "--run-dir", str(tmp_path / "run"), *BINDINGS]
    project = ["--gin", "settings.Logging.wandb_project = 'renga'"]
    said = launch(*words, *project, slice_name="v4-8", code=exit_codes.USER_ERROR)
    assert "'renga': host 0 has no login of Weights & Biases: WANDB_API_KEY is not set" in said
    assert "devices" not in said
    assert not (tmp_path / "run" / "lock.json").exists()


def test_a_check_says_that_a_run_is_training_there(tmp_path):
    lock = run_lock.RunLock.acquire(str(tmp_path), say=print)
    (found,) = preflight.run_directory(str(tmp_path), None, "simulated")
    assert not found.ok
    assert "is in use by another launch: process" in found.detail
    lock.release()
    assert preflight.run_directory(str(tmp_path), None, "simulated")[0].ok


TWO_HOSTS = """
import os, sys
os.chdir({workspace!r})
os.environ |= {{
    "RENGA_SIMULATE": "v4-16",
    "JAX_COORDINATOR_ADDRESS": COORDINATOR,
    "JAX_PROCESS_INDEX": str(PROCESS),
    "JAX_PROCESS_COUNT": str(HOSTS),
}}
from core.hosts import distributed
from launch.__main__ import main
if PROCESS == 0:
    distributed._join = lambda *_, **__: print("JAX was started")
sys.exit(main(["train", "gin/quickstart.gin", "--slice", "v4-16", "--run-dir", {run_dir!r}]))
"""


@pytest.mark.slow
@pytest.mark.simulated(2)
def test_all_hosts_end_before_using_a_device_if_host_0_is_refused(run_hosts, tmp_path):
    lock = run_lock.RunLock.acquire(str(tmp_path / "run"), say=print)
    told = {"workspace": str(environment.WORKSPACE), "run_dir": str(tmp_path / "run")}
    zero, one = run_hosts(TWO_HOSTS.format(**told), hosts=2, timeout=120)
    lock.check()
    lock.release()
    assert (zero.returncode, one.returncode) == (exit_codes.USER_ERROR,) * 2, zero.output + one.output
    assert "is in use by another launch: process" in zero.output
    assert "JAX was started" not in zero.output
    assert re.search(r"host 0 \(127\.0\.0\.1\) ended with exit code 2: error: the run directory", one.output)
