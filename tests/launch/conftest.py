"""Runs commands of ours as a user would, each in a process of its own."""

import os
import subprocess
import sys

import pytest

from launch import environment

ROOT = environment.WORKSPACE


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """What one run compiled the next need not."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="session")
def launch(cache):
    """`launch("train", …, slice_name="v4-16")` runs a command of ours to its end; one process plays the whole slice."""

    def run(*arguments, slice_name=None, code=0):
        env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        env |= {"RENGA_SIMULATE": slice_name} if slice_name else {}
        command = [sys.executable, "-m", "launch", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + (done.stderr if code else "")

    return run
