"""The library without the launcher runs as it stands."""

import os
import re
import subprocess
import sys

import pytest

from launch import environment


@pytest.mark.slow
@pytest.mark.covers("E08")
def test_the_minimal_example_runs():
    source = (environment.WORKSPACE / "launch" / "minimal_example.py").read_text()
    assert len(source.splitlines()) <= 80
    ran = subprocess.run(
        [sys.executable, "-m", "launch.minimal_example"],
        cwd=environment.WORKSPACE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert "mesh {'stage': 1, 'data': 1, 'fsdp': 4, 'sequence': 1, 'tensor': 1}" in ran.stdout
    losses = [float(x) for x in re.findall(r"step \d+  loss ([\d.]+)", ran.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]  # no knowledge is to be had beyond ln 63 = 4.143, but the start is above it
    assert float(re.search(r"validation: .*loss ([\d.]+)", ran.stdout)[1]) == pytest.approx(4.2, abs=0.2)
    assert re.search(r"then [\d.]+ s: [\d,]+ tokens/s", ran.stdout)
