"""The minimal example runs as it is."""

import ast
import os
import re
import subprocess
import sys

import pytest

from launch import environment


def code_lines(text):
    """Lines with code, without docstrings, comments and imports."""
    tree = ast.parse(text)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    documented = [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef))]
    left_out = {
        line
        for node in [*imports, *(n.body[0] for n in documented)]
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = enumerate(text.splitlines(), start=1)
    return [line for n, line in lines if n not in left_out and line.strip() and not line.strip().startswith("#")]


def test_it_is_short():
    assert len(code_lines((environment.WORKSPACE / "examples" / "minimal.py").read_text())) <= 50


def test_it_says_how_it_is_run(tmp_path):
    command = [sys.executable, environment.WORKSPACE / "examples" / "minimal.py", "--help"]
    ran = subprocess.run(command, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "JAX_PLATFORMS=cpu .venv/bin/python examples/minimal.py [RUN]" in ran.stdout


@pytest.mark.slow
@pytest.mark.covers("E08")
def test_the_minimal_example_runs_and_loads_a_finished_run(launch, tmp_path):
    run = str(tmp_path / "run")
    launch("train", "gin/quickstart.gin", "--slice", "v4-8", "--run-dir", run, "--steps", "2", slice_name="v4-8")
    ran = subprocess.run(
        [sys.executable, environment.WORKSPACE / "examples" / "minimal.py", run],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    first, learned, started, tuned = (float(x) for x in re.findall(r"step \d+  loss ([\d.]+)", ran.stdout))
    assert learned < first
    assert started < first  # from the saved parameters
    assert tuned < first
    trained, _, text = ran.stdout.partition("validation: ")
    assert float(re.match(r"\{'loss': ([\d.]+)", text)[1]) < first
    assert "step 20" in trained
    assert len(text.splitlines()) > 1  # what the run continues
