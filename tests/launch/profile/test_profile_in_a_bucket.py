"""A profile that is asked of a run whose directory is in a bucket."""

import re
import subprocess
import sys

import pytest

from core.training import run_lock
from launch.environment import WORKSPACE as ROOT

LOOP = """
import time
from core.training import profiling
profiling._BUCKET_SECONDS = 0.5  # between looks, so that the test is quick
requests = profiling.Requests("gs://bucket/run", last_step=100_000)
for step in range(100_000):
    time.sleep(0.02)
    if window := requests.asked(step):
        print("traced", window, flush=True)
        requests.done()
"""


@pytest.mark.slow
@pytest.mark.covers("O01")
def test_a_run_in_a_bucket_is_reached_through_the_bucket(bucket, launch_command):
    """The run's side, without training, and the command, as two processes that share only the bucket."""
    bucket.write("gs://bucket/run/config.gin", b"")
    bucket.write(f"gs://bucket/run/{run_lock.FILE}", b"")
    command, environment = launch_command("pod", "profile", "gs://bucket/run", "--steps", "2")
    environment |= bucket.environment | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-c", LOOP], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(2):  # the second finds what the first left
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            first, last = map(int, re.search(r"traces? steps (\d+) to (\d+)", done.stdout).groups())
            assert run.stdout.readline() == f"traced Window(first_step={first}, last_step={last})\n"
            assert f"profile     gs://bucket/run/tensorboard/plugins/profile/step_{first}\n" in done.stdout
            assert "/profile_request.json" not in bucket.list("gs://bucket/run")
    finally:
        run.kill()
        run.wait()
