"""TensorBoard with the profile plugin over files of several hosts: its answers over HTTP."""

import gzip
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import pytest

from core.hosts import distributed, exit_codes
from core.training import metrics, profiling
from launch import __main__ as cli
from launch import environment


@pytest.fixture
def served(tmp_path, monkeypatch):
    """`served(path)` is what TensorBoard answers, over a run with four hosts' profiles of one session."""
    run_dir = str(tmp_path / "first")
    monkeypatch.setattr(distributed, "process_count", lambda: 4)
    for process in range(4):
        monkeypatch.setattr(distributed, "process_index", lambda process=process: process)
        trace = profiling.Trace(run_dir, 20)
        jax.jit(lambda x: x @ x)(jnp.ones((32, 32))).block_until_ready()
        trace.stop()
    writers = metrics.open_writers(run_dir, is_host_zero=True)
    writers.scalars(1, {"hosts/step_seconds/host_3": 0.5})
    writers.close()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "launch", "tensorboard", run_dir, "--port", str(port)]
    running = subprocess.Popen(command, cwd=environment.WORKSPACE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def get(path):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/{path}") as reply:
            body = reply.read()
        return json.loads(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)

    deadline = time.monotonic() + 120
    while True:
        assert running.poll() is None, running.stdout.read().decode()
        assert time.monotonic() < deadline
        try:
            if get("plugin/profile/runs") and get("plugin/scalars/tags"):
                break
        except urllib.error.URLError:
            pass
        time.sleep(0.5)
    yield get
    running.terminate()
    running.communicate()


@pytest.mark.slow
@pytest.mark.covers("O12")
def test_tensorboard_opens_our_dashboard(served):
    shown = served("plugin/custom_scalars/layout")["category"]
    assert {
        category["title"]: {chart["title"]: chart["multiline"]["tag"] for chart in category["chart"]}
        for category in shown
    } == metrics.DASHBOARD


@pytest.mark.slow
@pytest.mark.covers("O01", "O06")
def test_tensorboard_finds_every_host_in_one_session(served):
    (run,) = served("plugin/scalars/tags")
    assert run == "first"  # the name of its directory
    assert served("plugin/profile/runs") == ["step_20"]
    hosts = served("plugin/profile/hosts?run=step_20&tag=trace_viewer%40")
    names = [f"{socket.gethostname()}-p{process}of4" for process in range(4)]
    assert [host["hostname"] for host in hosts] == names
    trace = served(f"plugin/profile/data?run=step_20&tag=trace_viewer%40&hosts={','.join(names)}")
    shown = {event["args"]["name"] for event in trace["traceEvents"] if event.get("name") == "process_name"}
    assert all(any(name in process for process in shown) for name in names), shown
    assert "hosts/step_seconds/host_3" in served("plugin/scalars/tags")[run]


@pytest.mark.parametrize(
    ("folder", "says"), [("no_such_run", "there is no folder"), ("run", "contains no event files")]
)
def test_a_folder_that_would_be_an_empty_page_is_refused(tmp_path, monkeypatch, capsys, folder, says):
    (tmp_path / "run/tensorboard").mkdir(parents=True)
    (tmp_path / "run/tensorboard/notes.txt").touch()
    monkeypatch.setattr(subprocess, "Popen", None)
    assert cli.main(["tensorboard", str(tmp_path / folder)]) == exit_codes.USER_ERROR
    assert says in capsys.readouterr().err
