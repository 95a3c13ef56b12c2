"""Runs with experiment, data, checkpoints, metrics and compiled programs in a bucket.

Against a stand-in on this machine (`tests/lab/gcs_server.py`), which knows no permissions: no credentials are tried.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess

import pytest

from launch import environment

PUZZLES = """
from __gin__ import dynamic_registration
from models import trm
from tasks import puzzles

include 'gin/trm/sudoku4.gin'

BATCH_SIZE = 16
TOTAL_STEPS = 12
WARMUP_STEPS = 10
CHECKPOINT_INTERVAL = 4
EVAL_INTERVAL = 6
EVAL_BATCHES = 1
LOG_INTERVAL = 1
puzzles.sudoku.num_train = 64
puzzles.sudoku.num_test = 16
puzzles.sudoku.directory = 'gs://bucket/sudoku4'
trm.TRM.embed_dim = 32
trm.TRM.num_layers = 1
trm.TRM.h_cycles = 2
trm.TRM.l_cycles = 2
"""
TOKENS = """
from __gin__ import dynamic_registration
from models.decoder import transformer
from tasks import synthetic

include 'gin/quickstart.gin'

TASK = @synthetic.random_tokens()
NUM_STREAMS = 4
TOTAL_STEPS = 12
WARMUP_STEPS = 3
LENGTH = 16
CHECKPOINT_INTERVAL = 3
KEEP_CHECKPOINTS = 4
EVAL_BATCHES = 0
LOG_INTERVAL = 1
PROMPT = ''
transformer.Transformer.num_layers = 1
transformer.Transformer.embed_dim = 32
transformer.Transformer.mlp_dim = 64
"""
PLACE = "gs://bucket/of_the_test_of_buckets/small.gin"


@pytest.fixture(scope="module")
def command(bucket, launch_command):
    """A command of ours that talks to the stand-in; programs are kept in the bucket, beside the run."""

    def build(*words):
        argv, env = launch_command(*words)
        del env["JAX_COMPILATION_CACHE_DIR"]
        return {"args": argv, "env": env | bucket.environment, "cwd": environment.WORKSPACE, "text": True}

    yield build
    shutil.rmtree(
        environment.WORKSPACE / "runs/of_the_test_of_buckets", ignore_errors=True
    )  # where logs of such a run go


@pytest.fixture(scope="module")
def pod(bucket, command):
    """Runs an experiment of a bucket to its end; gives what was printed."""

    def run(slice_name, text, *words, run_dir):
        bucket.write(PLACE, text.encode())
        started = command("pod", slice_name, PLACE, "--simulate", "--run-dir", run_dir, *words)
        done = subprocess.run(**started, capture_output=True, timeout=400)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run


def numbers(bucket, step, run_dir):
    """What is in every array of a checkpoint, as it says itself."""
    return json.loads(bucket.read(f"{run_dir}/checkpoints/{step}/meta/metadata"))["content"]


def metrics(bucket, run_dir):
    """What was learned at each step, the last line of each."""
    rows = [json.loads(line) for line in bucket.read(f"{run_dir}/metrics.jsonl").splitlines()]
    return {row["step"]: [row[k] for k in ("loss", "gradient_norm", "learning_rate")] for row in rows if "loss" in row}


@pytest.mark.slow
@pytest.mark.simulated(2)
@pytest.mark.covers("C03", "C06", "D14")
@pytest.mark.parametrize(("slice_name", "last"), [("v4-8", 0), ("v4-16", 1)], ids=["1 host", "2 hosts"])
def test_hosts_train_in_a_bucket_and_resume_from_the_newest_intact_step(bucket, pod, command, slice_name, last):
    """Of four checkpoints one was never finished, one is half removed and one damaged: what the last host wrote."""
    where = f"gs://bucket/runs/{slice_name}"
    said = pod(slice_name, TOKENS, run_dir=where)
    assert "fresh" in said
    want, lines, there = numbers(bucket, 12, where), metrics(bucket, where), bucket.list(f"{where}/")
    assert sorted(lines) == list(range(1, 13))
    assert any(re.match(r"tensorboard/events\.", name) for name in there)
    assert any(name.startswith("compiled/") for name in there)
    assert {name.split("/")[1] for name in there if name.startswith("checkpoints/")} == {"3", "6", "9", "12"}

    bucket.delete(f"{where}/checkpoints/12/commit_success.txt")
    bucket.delete(f"{where}/checkpoints/9/_CHECKPOINT_METADATA")
    name, _ = max(bucket.list(f"{where}/checkpoints/6/state/ocdbt.process_{last}/d/").items(), key=lambda item: item[1])
    damaged = f"{where}/checkpoints/6/state/ocdbt.process_{last}/d/{name}"
    content = bucket.read(damaged)
    bucket.write(damaged, content[: len(content) // 2])
    said = pod(slice_name, TOKENS, run_dir=where)
    assert re.search(r"checkpoint 6 is damaged \(.*\); it is damaged-6-\d+ now", said)
    assert "resumed from 3" in said
    assert re.search(r"compiled 0 programs and read [1-9]", said)
    assert numbers(bucket, 12, where) == want  # every bit of every array, the data's position beside them
    again = metrics(bucket, where)
    assert {step: again[step] for step in range(4, 13)} == {step: lines[step] for step in range(4, 13)}
    kept = {name.split("/")[1].split("-")[0] for name in bucket.list(f"{where}/") if name.startswith("checkpoints/")}
    assert kept == {"3", "6", "9", "12", "damaged", "incomplete"}

    verify = command("checkpoints", "verify", where, "--step", "12")
    done = subprocess.run(**verify, capture_output=True, timeout=100)  # one process, without the model
    assert "step 12: intact (" in done.stdout, done


@pytest.mark.slow
@pytest.mark.covers("C13")
def test_a_run_on_a_disk_continues_from_its_copy_in_a_bucket(bucket, pod, tmp_path):
    """On a machine that has nothing of it. One request in twenty is refused while it is copied."""
    place = "gs://bucket/runs/kept"
    text = TOKENS.replace("from models", "from launch import settings\nfrom models")
    text += f"settings.Checkpointing.checkpoint_mirror = '{place}'\n"
    bucket.errors(0.05)
    said = pod("v4-8", text, "--steps", "6", run_dir=str(tmp_path / "first"))
    bucket.errors(0.0)
    assert re.search(r"checkpoint 6: [\d.]+ KiB copied to gs://bucket/runs/kept/checkpoints and compared, in", said)
    copied = {name: name for name in bucket.list(f"{place}/checkpoints/6/") if name != "commit_success.txt"}
    assert len(copied) > 5
    for name in copied:
        local = (tmp_path / "first" / "checkpoints" / "6" / name).read_bytes()
        assert bucket.read(f"{place}/checkpoints/6/{name}") == local
    said = pod("v4-8", text, run_dir=str(tmp_path / "second"))
    assert f"checkpoint 6 was copied back from {place}" in said
    assert "resumed from 6" in said
    assert numbers(bucket, 12, place)


def process_of(host, *, run_dir):
    """The process that plays a host of a run."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
            said = (folder / "environ").read_text().split("\0")
        except OSError:  # it has just ended
            continue
        if "train" in words and run_dir in words and f"JAX_PROCESS_INDEX={host}" in said:
            return int(folder.name)
    raise AssertionError(f"no process plays host {host} of {run_dir}")


@pytest.mark.slow
@pytest.mark.simulated(2)
@pytest.mark.covers("C03", "C06", "C09", "D14")
def test_a_killed_host_and_refused_requests_change_no_bit_and_another_slice_resumes(bucket, pod, command):
    """Recursion on puzzles of a bucket. One request in twenty is answered with 503, from the first to the last."""
    before = bucket.errors(0.05)
    pod("v4-16", PUZZLES, run_dir="gs://bucket/runs/undisturbed")
    assert {name.split("/")[0] for name in bucket.list("gs://bucket/sudoku4/")} >= {"train", "test"}
    run_dir = "gs://bucket/runs/killed"
    started = command("pod", "v4-16", PLACE, "--simulate", "--run-dir", run_dir)
    running = subprocess.Popen(**started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for line in running.stdout:
        if re.match(r"step +9/", line):
            os.kill(process_of(1, run_dir=run_dir), signal.SIGKILL)
            break
    assert running.communicate(timeout=120)[0] is not None
    assert running.returncode != 0
    assert re.search("resumed from [48]", pod("v4-16", PUZZLES, run_dir=run_dir))
    assert numbers(bucket, 12, run_dir) == numbers(bucket, 12, "gs://bucket/runs/undisturbed")
    said = pod("v4-8", PUZZLES, "--gin", "TOTAL_STEPS = 14", run_dir=run_dir)
    assert "v4-8: 4 chips on 1 host" in said
    assert "resumed from 12" in said
    assert sorted(metrics(bucket, run_dir)) == list(range(1, 15))
    after = bucket.errors(0.0)
    assert after["refused"] - before["refused"] > 0.02 * (after["answered"] - before["answered"]) > 10
