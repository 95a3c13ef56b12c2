"""`launch/run report --compile` on a small experiment."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.covers("M18")
@pytest.mark.compiled("v4-8")
def test_the_report_says_what_is_sent_where(tmp_path):
    command = [
        sys.executable,
        "-m",
        "launch",
        "report",
        "v4-8",
        "gin/quickstart.gin",
        "--json",
        str(tmp_path / "r.json"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"COLUMNS": "140"})
    assert ran.returncode == 0, ran.stderr
    assert "million cycles" in ran.stdout
    assert "wire by mesh axes: " in ran.stdout
    assert "worth a look: " in ran.stdout
    read = json.loads((tmp_path / "r.json").read_text())
    assert read["slice"] == "v4-8"
    assert {row["network"] for row in read["traffic"]} == {"ICI"}
    assert list(read) == sorted(read)
