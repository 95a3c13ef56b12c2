"""Alerts of failed runs: by a command and over HTTP, once, soon, and without showing the address."""

import http.server
import json
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from core.hosts import activity, exit_codes, failure_diagnosis, heartbeat
from launch import environment
from launch.hosts import alerts

pytestmark = pytest.mark.covers("O10")


@pytest.fixture
def told(tmp_path, monkeypatch):
    """RENGA_ALERT is a command that keeps what it gets; gives all of it."""
    file = tmp_path / "told.jsonl"
    monkeypatch.setenv("RENGA_ALERT", f"cat >> {file}; echo >> {file}")
    return lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def fail(host, error, *, step=0):
    activity.at(activity.TRAINING, step=step)
    with pytest.raises(type(error)), alerts.noting(host):
        raise error


def test_an_exception_is_reported_with_its_message_host_and_step(told, tmp_path, capsys):
    with alerts.watching(str(tmp_path)) as report:
        fail(2, RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3 GiB"), step=7)
        fail(0, RuntimeError("Connection closed by peer"))
        report(exit_codes.RAISED)
    (alert,) = told()
    assert {k: alert[k] for k in ("run", "host", "kind", "step", "exit_code")} == {
        "run": str(tmp_path),
        "host": 2,
        "kind": "out of memory",
        "step": 7,
        "exit_code": 13,
    }
    assert "allocate 3 GiB" in alert["message"]
    said = "".join(capsys.readouterr())
    assert "alert (out of memory) was sent" in said
    assert "told.jsonl" not in said  # it may hold a secret


@pytest.mark.parametrize(
    ("code", "kind"),
    [(14, "stall"), (15, "host lost"), (16, "hosts differ"), (17, "loss not finite"), (137, "killed"), (134, "crash")],
)
def test_killed_processes_cause_alerts(told, tmp_path, code, kind):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 41}\n')
    with alerts.watching(str(tmp_path)) as report:
        report(code)
    (alert,) = told()
    assert (alert["kind"], alert["step"], alert["message"]) == (kind, 41, exit_codes.ending(code).meaning)


@pytest.mark.parametrize("code", [exit_codes.DONE, exit_codes.USER_ERROR, exit_codes.PREEMPTED, exit_codes.INTERRUPTED])
def test_intended_endings_send_no_alert(told, tmp_path, code):
    with alerts.watching(str(tmp_path)) as report:
        report(code)
    assert told() == []


def test_the_parent_of_another_host_leaves_it_to_that_of_host_0(told, tmp_path):
    with alerts.watching(str(tmp_path), host=1) as report:
        fail(1, RuntimeError("on host 1"))
        report(exit_codes.RAISED)
    assert told() == []
    with alerts.watching(str(tmp_path), host=0) as report:
        report(exit_codes.PEER_LOST)
    assert [alert["kind"] for alert in told()] == ["host lost"]


# A process that the watch of the hosts ends: for a step that lasts, or for what it raised itself.
STUCK = """
import time
from core.hosts import failure_diagnosis, heartbeat, activity
from launch.hosts import alerts
with alerts.noting(0):
    heartbeat.start(None, limits=failure_diagnosis.Limits(step_seconds=0.5, slow_seconds=0.5))
    activity.at(activity.TRAINING, step=17)
    time.sleep(60)
"""


def test_alerts_contain_the_common_verdict_of_the_hosts(told, tmp_path):
    with alerts.watching(str(tmp_path)) as report:
        done = subprocess.run([sys.executable, "-c", STUCK], cwd=environment.WORKSPACE, timeout=60, check=False)
        notes = list(pathlib.Path(environment.read("RENGA_NOTES")).iterdir())
        assert [note.name for note in notes] == ["verdict_0.json"]
        (notes[0].parent / "raised_3.json").write_text('{"host": 3, "mes')  # cut off, when its process was killed
        report(done.returncode)
    (alert,) = told()
    assert {k: alert[k] for k in ("host", "kind", "step", "exit_code")} == {
        "host": 0,
        "kind": "stall",
        "step": 17,
        "exit_code": exit_codes.HUNG,
    }
    assert "at step 17, training" in alert["message"]


@pytest.mark.parametrize(("raised_on", "says"), [(2, "KeyError: 'wide'"), (0, "host 2 raised KeyError")])
def test_alerts_contain_the_exception_of_the_host_that_the_verdict_names(told, tmp_path, raised_on, says):
    with alerts.watching(str(tmp_path)) as report:
        fail(raised_on, KeyError("wide"))
        heartbeat._on_verdict(failure_diagnosis.Verdict((2,), "host 2 raised KeyError", exit_codes.RAISED))
        report(exit_codes.RAISED)
    (alert,) = told()
    assert (alert["host"], alert["message"]) == (2, says)


def test_a_web_address_gets_the_same(tmp_path, monkeypatch, capsys):
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("RENGA_ALERT", f"http://127.0.0.1:{server.server_port}/secret")
        with alerts.watching(str(tmp_path)) as report:
            report(exit_codes.HUNG)
        server.shutdown()
    ((path, alert),) = got
    assert (path, alert["kind"]) == ("/secret", "stall")
    assert "secret" not in "".join(capsys.readouterr())


def test_a_slow_alert_command_does_not_delay_the_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(alerts, "SEND_SECONDS", 0.5)
    monkeypatch.setenv("RENGA_ALERT", "sleep 60")
    started = time.monotonic()
    with alerts.watching(str(tmp_path)) as report:
        report(exit_codes.HUNG)
    assert time.monotonic() - started < 10
    assert "alert (stall) could not be sent (not within 0.5 s)" in capsys.readouterr().err
    monkeypatch.setenv("RENGA_ALERT", "exit 3")
    with alerts.watching(str(tmp_path)) as report:
        report(exit_codes.HUNG)
    assert "could not be sent (exit code 3)" in capsys.readouterr().err


def test_an_address_that_anybody_could_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RENGA_ALERT", "http://example.com/secret")
    with pytest.raises(ValueError, match="https://") as error, alerts.watching(str(tmp_path)):
        raise AssertionError
    assert "secret" not in str(error.value)


def test_without_the_variable_nothing_is_watched(tmp_path, monkeypatch):
    monkeypatch.delenv("RENGA_ALERT", raising=False)
    with alerts.watching(str(tmp_path)) as report, alerts.noting(0):
        report(exit_codes.HUNG)
    assert environment.read("RENGA_NOTES") is None
