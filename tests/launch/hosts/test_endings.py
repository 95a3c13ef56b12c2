"""Ways in which runs of two hosts end: logs, exit codes and seconds.

CPU devices and gloo: how a TPU's collectives behave when a host is lost is not shown here.
"""

import re
import time

import pytest

from core.checkpoints import inspection, steps
from core.files import paths
from core.hosts import exit_codes
from launch import environment

# Trains until a hook of ours, on one host, at step 12, does what the test says.
RUN = """
import os, signal, sys, time
os.chdir({workspace!r})
os.environ |= {{
    "RENGA_SIMULATE": "v4-16",
    "JAX_COORDINATOR_ADDRESS": COORDINATOR,
    "JAX_PROCESS_INDEX": str(PROCESS),
    "JAX_PROCESS_COUNT": str(HOSTS),
    "JAX_COMPILATION_CACHE_DIR": {cache!r},
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}}
from core import optimizers, slices
from core.training.trainer import Hook
from launch.config import loader
from launch.runs import prepared_run
from launch.hosts import cluster
from launch.session import Session
from launch import settings
from models.decoder.transformer import Transformer
from tasks import synthetic
import dataclasses

class Fault(Hook):
    def before_step(self, step):
        if step == 12 and PROCESS == {host}:
            print("AT", time.time(), flush=True)
            self.happens()

    def happens(self):
        {fault}

fields = dict(
    model=Transformer(vocab_size=259, num_layers=1, embed_dim=16, mlp_dim=32, num_heads=2, num_kv_heads=2),
    task=synthetic.random_tokens(vocab_size=259, length=16, num_streams=8),
    batch_size=8, total_steps=100_000, eval_batches=0, checkpoint_interval=100_000, log_interval=1, prompt="",
    step_limit_seconds=4.0, compile_limit_seconds=200.0, replica_check_interval=5, {fields}
)
plain = loader.load("gin/quickstart.gin").build()
experiment = dataclasses.replace(plain, **settings.grouped(fields, plain))
host = cluster.join(slices.get("v4-16"), description="the same", limits=cluster.limits(experiment.health))
run = prepared_run.prepare_run(
    experiment, config="", revision="", run_dir={run_dir!r}, last_step=experiment.total_steps, host=host
)
Session(run, also=[Fault()]).run()
"""
LOST, HUNG, RAISED = exit_codes.PEER_LOST, exit_codes.HUNG, exit_codes.RAISED
LAST_SEEN = r"step \d+, (training|between steps|reading data)"


@pytest.fixture
def ends(run_hosts, tmp_path, kept_programs):
    """How both hosts ended, and the seconds from what happened on one of them to the last end."""

    def run(fault, *, host=1, fields=""):
        told = {"workspace": str(environment.WORKSPACE), "cache": kept_programs, "run_dir": str(tmp_path / "run")}
        results = run_hosts(RUN.format(fault=fault, host=host, fields=fields, **told), hosts=2, timeout=300)
        ended = time.time()
        began = [float(at) for r in results for at in re.findall(r"^AT (\S+)", r.output, re.M)]
        seconds = ended - min(began, default=ended)
        print(f"{seconds:.1f} s after {fault!r} on host {host}: exit codes {[r.returncode for r in results]}")
        return results, seconds

    return run


@pytest.mark.slow
@pytest.mark.simulated(2)
def test_a_killed_host_ends_the_run_and_is_named(ends):
    (zero, one), seconds = ends("os.kill(os.getpid(), signal.SIGKILL)")
    assert (zero.returncode, one.returncode) == (LOST, -9), zero.output[-3000:]
    assert re.search(rf"host 1 \(127\.0\.0\.1\) was lost: last seen at {LAST_SEEN}", zero.output)
    assert seconds < 10


@pytest.mark.slow
@pytest.mark.simulated(2)
def test_an_exception_on_one_host_is_reported_by_the_other(ends):
    (zero, one), seconds = ends('raise OverflowError("only here")')
    assert (zero.returncode, one.returncode) == (LOST, RAISED), zero.output[-3000:] + one.output[-3000:]
    assert "Traceback" in one.output
    assert re.search(rf"host 1 \(127\.0\.0\.1\) raised OverflowError: only here \(at {LAST_SEEN}\)", zero.output)
    assert re.search(r"no checkpoint of step 11 was saved, which needs all hosts: .*: host 0 did not come", one.output)
    assert seconds < 20


@pytest.mark.slow
@pytest.mark.simulated(2)
@pytest.mark.covers("C11")
def test_an_exception_on_all_hosts_saves_a_checkpoint_and_is_not_hidden(ends, tmp_path):
    results, seconds = ends('raise OverflowError("everywhere")', host="PROCESS")
    for result in results:
        assert result.returncode == RAISED, result.output[-3000:]
        assert "OverflowError: everywhere" in result.output
        assert "then, in Save" not in result.output
    assert "step 11: saved a checkpoint after OverflowError" in results[0].output
    folder = paths.resolve(tmp_path / "run" / "checkpoints")
    assert steps.complete(folder) == [11]
    assert not inspection.verify(folder / "11").damaged
    assert seconds < 20


@pytest.mark.slow  # tests/core/hosts has quick tests of hangs
@pytest.mark.simulated(2)
@pytest.mark.covers("X08")
def test_a_hung_host_is_named_and_both_logs_have_its_stack(ends):
    (zero, one), seconds = ends("time.sleep(3600)")
    assert (zero.returncode, one.returncode) == (LOST, HUNG), zero.output[-3000:] + one.output[-3000:]
    for output in (zero.output, one.output):
        assert re.search(r"host 1 \(127\.0\.0\.1\) has been at step 12, between steps for \d+ s \(limit 4 s\)", output)
        assert "in happens" in output
    assert seconds < 4 + 15


@pytest.mark.slow
@pytest.mark.simulated(2)
def test_without_host_0_the_others_end_too(ends):
    (zero, one), seconds = ends("os.kill(os.getpid(), signal.SIGKILL)", host=0)
    assert (zero.returncode, one.returncode) == (-9, LOST), one.output[-3000:]
    assert re.search(rf"host 0 \(127\.0\.0\.1\) was lost: last seen at {LAST_SEEN}", one.output)
    assert seconds < 10


@pytest.mark.slow
@pytest.mark.simulated(2)
@pytest.mark.covers("X07")
def test_a_host_that_learns_at_another_rate_is_named(ends):
    rate = "optimizer=optimizers.adamw(learning_rate=optimizers.constant(1e-3 * (1 + PROCESS)))"
    (zero, one), _ = ends("pass", fields=rate)
    assert (zero.returncode, one.returncode) == (exit_codes.DIVERGED,) * 2, zero.output[-3000:]
    for output in (zero.output, one.output):
        assert "after step 5, hosts 0, 1 disagree, and none is in the majority:" in output
        assert "params/" in output


@pytest.mark.slow
@pytest.mark.simulated(2)
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_leaves_its_loop_is_named(ends, host):
    results, seconds = ends("sys.exit(0)", host=host)
    assert results[1 - host].returncode == LOST, results[1 - host].output[-3000:]
    assert (
        f"host {host} (127.0.0.1) ended its training loop at step 12 while others were still in theirs"
        in results[1 - host].output
    )
    assert seconds < 30


@pytest.mark.slow
@pytest.mark.simulated(2)
def test_a_frozen_host_is_named(ends):
    fault = "os.fork() or (time.sleep(40), os.kill(os.getppid(), signal.SIGCONT), os._exit(0)); "
    (zero, one), seconds = ends(fault + "os.kill(os.getpid(), signal.SIGSTOP)")
    assert zero.returncode == LOST, zero.output[-3000:]
    assert one.returncode in (HUNG, -6), one.output[-3000:]  # awake again, it ends, or JAX ends it
    assert re.search(rf"host 1 \(127\.0\.0\.1\) has been silent for \d+ s: last seen at {LAST_SEEN}", zero.output)
    assert seconds < 50
