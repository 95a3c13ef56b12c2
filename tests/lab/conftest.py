"""Runs the lab's commands as a developer would, each in its own process."""

import os
import subprocess
import sys

import pytest

from launch import environment


@pytest.fixture
def lab(tmp_path):
    """`lab("failures", …, code=0)` returns the output of a command, with errors if a failure is expected."""

    def run(*arguments, code=0, timeout=300):
        command = [sys.executable, "-m", "tests.lab", *map(str, arguments)]
        env = {**os.environ, "COLUMNS": "1000"}  # an error is one line
        done = subprocess.run(
            command, cwd=environment.WORKSPACE, env=env, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + (done.stderr if code else "")

    return run
