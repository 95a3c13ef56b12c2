"""A cloud in a folder: gcloud_emulator.py as gcloud, and a small workspace to ship to it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from launch import environment

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent.parent
ON_HOSTS = tuple(f"launch/hosts/{name}" for name in ("on_host.sh", "host_output.py"))
ON_HOSTS += (
    "launch/terminal.py",
    "launch/environment.py",
    "core/files/bookkeeping.py",
    "core/errors.py",
    "core/files/foreign_json.py",
    "core/hosts/host_messages.py",
    "core/hosts/log_filters.py",
    "core/hosts/rendezvous.py",
    "core/hosts/tied_process.py",
    "core/units.py",
)  # what acts there, of what is shipped
SETTLES, SOONER = "settle_seconds=2\n", "settle_seconds=0.2\n"  # tests wait for what the run prints
SETUP = """#!/bin/bash
[ -e "$HOME/no_setup" ] && { echo no python >&2; exit 1; }
mkdir -p .venv
echo "$*" >"$HOME/set_up"
echo set up "$HOME"
"""
POD = """#!/bin/bash
trap 'echo saved; exit 0' TERM
echo "pod.sh got $*; token ${#HF_TOKEN}"
[ "$2" = bad.gin ] && exit 3
while :; do sleep 0.05; done
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """A folder that the stand-in plays a READY v4-16 in; what was started on its workers is stopped at the end."""
    folder = tmp_path / "cloud"
    folder.mkdir()
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "gcloud").write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "gcloud_emulator.py"} "$@"\n')
    (tools / "gcloud").chmod(0o755)
    tpu = {"name": "my-tpu", "zone": "us-central2-b", "type": "v4-16", "state": "READY", "workers": 2}
    (folder / "tpu.json").write_text(json.dumps(tpu))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("GCLOUD_EMULATOR", str(folder))
    for name in environment.SECRETS:
        monkeypatch.delenv(name, raising=False)
    yield folder
    for note in folder.glob("worker_*/.renga/process"):
        pid = int(note.read_text().split()[0])
        if pathlib.Path(f"/proc/{pid}").exists():
            os.killpg(pid, 9)


@pytest.fixture
def workspace(tmp_path):
    """A small git work tree with stand-ins for the scripts that would train."""
    folder = tmp_path / "workspace"
    assert SETTLES in (ROOT / "launch/hosts/on_host.sh").read_text()
    for name, text in {
        **{name: (ROOT / name).read_text().replace(SETTLES, SOONER) for name in ON_HOSTS},
        "launch/setup.sh": SETUP,
        "launch/pod.sh": POD,
        "gin/x.gin": "A = 1\n",
        "new file.py": "",
        ".gitignore": "data/\n",
        "data/large.bin": "x",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "launch", "gin"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    return folder
