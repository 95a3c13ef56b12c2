"""The measurement of an accelerator: order, limits, interruption and going on; the page of a report; a rehearsal."""

import argparse
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from core.errors import UserError
from tests.lab import accelerator, accelerator_packages, accelerator_page
from tests.lab.__main__ import main
from tests.lab.on_accelerator import recorder, steps
from tests.lab.on_accelerator.recorder import Request
from tests.lab.on_accelerator.report import DONE, FAILED, FILE, TIMED_OUT, Report
from tests.lab.on_accelerator.steps import STEPS, Step

DEVICE = {
    "slice": "h100:1",
    "platform": "cuda",
    "date": "2026-12-01",
    "revision": "a" * 40,
    "versions": {"jax": "0.11.2"},
}
CHILD = """
import json, os, sys, time
figure = dict(what="speed", value=12.5, unit="m/s", beside="13", ok=None)
absent = dict(what="color", reason="it is dark")
open(sys.argv[3] + ".part", "w").write(json.dumps(dict(figures=[figure], absent=[absent])))
os.replace(sys.argv[3] + ".part", sys.argv[3])
{then}
"""


@pytest.fixture
def report(tmp_path):
    return Report.opened(tmp_path / "out", DEVICE, is_rehearsal=False)


@pytest.fixture
def request_(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "out").mkdir()
    return Request("h100:1", False, str(tmp_path / "work"), str(tmp_path / "out"))


@pytest.fixture
def child(tmp_path, monkeypatch):
    """`child(then)` makes every step a process that records a figure and then runs a line of Python."""

    def make(then):
        (tmp_path / "own_child.py").write_text(CHILD.format(then=then))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(accelerator, "_MODULE", "own_child")
        monkeypatch.setattr(accelerator, "_LOOK_SECONDS", 0.02)

    return make


def run_step(report, request_, *, seconds):
    with (Path(request_.out) / accelerator.LOG).open("a") as log:
        accelerator.run_step(report, request_, "facts", seconds=seconds, log=log)


def test_figures_of_a_step_are_written_and_shown(report, request_, child):
    child("")
    run_step(report, request_, seconds=60)
    again = Report.read(report._file)
    assert (again.status("facts"), again.shown_by("facts")) == (DONE, True)
    rows = again.rows(["facts", "training"])
    assert rows[0] == ["facts", "speed", "12.5 m/s", "13", ""]
    assert rows[1] == ["facts", "color", "not on this device", "it is dark", ""]
    assert rows[2][:3] == ["training", "all of it", "not begun"]


@pytest.mark.parametrize(
    ("then", "seconds", "status"),
    [("raise OSError('no driver')", 100, FAILED), ("time.sleep(200)", 4, TIMED_OUT)],
)
def test_a_step_that_fails_or_hangs_keeps_its_figures_and_says_why(report, request_, child, then, seconds, status):
    child(then)
    run_step(report, request_, seconds=seconds)
    found = report.steps["facts"]
    assert found["status"] == status
    assert [figure["what"] for figure in found["figures"]] == ["speed"]
    assert status == TIMED_OUT or found["error"].strip().endswith("OSError: no driver")
    assert not report.shown_by("facts")


def test_an_interruption_keeps_what_was_measured(report, request_, child):
    child("time.sleep(100)")

    def interrupt():
        while not report.figures("facts"):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt), accelerator._terminating():
        run_step(report, request_, seconds=60)
    thread.join()
    again = Report.read(report._file)
    assert again.status("facts") == "interrupted"
    assert [figure.what for figure in again.figures("facts")] == ["speed"]
    assert steps.order(again, ["facts", "training"]) == ["training", "facts"]


def test_steps_that_never_began_come_before_those_that_did_not_end():
    found = {"facts": DONE, "training": FAILED, "quickstart": TIMED_OUT}
    named = Report(None, DEVICE, is_rehearsal=False, steps={name: {"status": s} for name, s in found.items()})
    left = steps.order(named, list(STEPS))
    assert left[-2:] == ["quickstart", "training"]
    assert "facts" not in left
    assert left[0] == "agreement"


def test_a_step_has_its_own_limit_and_begins_only_with_time_for_it(report, request_, monkeypatch, capsys):
    limits = {}

    def note(report, request, name, *, seconds, log):
        limits[name] = round(seconds)
        report.update(name, status=DONE, seconds=0)

    monkeypatch.setattr(accelerator, "run_step", note)
    monkeypatch.setattr(
        accelerator, "STEPS", {"a": Step("", 30, 5, ""), "b": Step("", 500, 200, ""), "c": Step("", 500, 9, "")}
    )
    accelerator.measure(report, request_, ["a", "b", "c"], ends=time.monotonic() + 100)
    assert limits == {"a": 30, "c": 100}
    assert "b: 100 s are left, and it needs 200" in capsys.readouterr().out


def test_the_report_of_another_device_or_of_a_rehearsal_is_not_continued(report, tmp_path):
    report.save()
    Report.opened(tmp_path / "out", DEVICE, is_rehearsal=False)
    for device, is_rehearsal in ((DEVICE | {"slice": "h200:1"}, False), (DEVICE, True)):
        with pytest.raises(UserError, match="give another --out"):
            Report.opened(tmp_path / "out", device, is_rehearsal=is_rehearsal)
    (tmp_path / "out" / FILE).write_text("[]")
    with pytest.raises(UserError, match="is not a report"):
        Report.read(tmp_path / "out" / FILE)


def test_wrong_arguments_and_a_machine_without_accelerator_are_errors(tmp_path, capsys):
    out = ("--out", str(tmp_path / "out"))
    for words, said in [
        ([], "JAX finds no accelerator on this machine"),
        (["--model", str(tmp_path)], "expected the folder of a published model"),
        (["--python", "no-such-python"], "there is no such program"),
        (["--minutes", "0"], "expected a number above 0"),
    ]:
        assert main(["accelerator", *words, *out]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def shown(report, name, *figures):
    report.steps[name] = {"status": DONE, "figures": [recorder.Figure(*f)._asdict() for f in figures], "absent": []}


def test_a_report_becomes_a_page_and_fills_the_column_of_the_status(report, tmp_path):
    shown(report, "training", ("tokens/s", 61234.5), ("MFU", 44.0, "%", "goal 45 %", False))
    shown(report, "transformers", ("tokens/s", 50000.0))
    shown(report, "sudoku", ("puzzles solved", 99.6, "%", "goal | 99 %", True))
    page = accelerator_page.add(report, tmp_path / "docs").read_text()
    assert "| sudoku | puzzles solved | 99.6 % | goal / 99 % | yes |" in page
    assert "* **Recorded:** 2026-12-01, at revision aaaaaaaa" in page
    index = accelerator_page.listed(accelerator_page.reports(tmp_path / "docs"))
    assert "| [h100-1-2026-12-01](h100-1-2026-12-01.md) | 61,234 | 44.0 | 1.22 |" in index
    assert accelerator_page.ran(tmp_path / "docs") == {"N12": "h100:1, 2026-12-01"}  # a check of training failed


def test_a_rehearsal_becomes_no_page(tmp_path):
    rehearsed = Report.opened(tmp_path / "out", DEVICE | {"platform": "cpu", "slice": "cpu:1"}, is_rehearsal=True)
    rehearsed.save()
    with pytest.raises(UserError, match="rehearsal on a CPU"):
        accelerator_page.add(rehearsed, tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


def test_the_list_of_accelerators_is_current():
    made = accelerator_page.listed(accelerator_page.reports())
    assert (accelerator_page.FOLDER / "index.md").read_text() == made, "run: tests/run.sh lab accelerator_page"


def test_rows_that_steps_show_are_in_the_checklist():
    from tests.lab import status

    assert {row for step in STEPS.values() for row in step.shows} <= status.capabilities().keys()


def test_packages_are_those_that_runs_need_without_jax():
    found = accelerator_packages.needed(accelerator_packages.ROOTS, python_version="3.12")
    assert {"dm-haiku", "gin-config", "jmp", "optax", "orbax-checkpoint", "tensorboardx"} <= found.keys()
    assert not {"jax", "jaxlib", "numpy", "tensorflow"} & found.keys()
    with pytest.raises(UserError, match="expected some of"):
        accelerator_packages.run(argparse.Namespace(folder=None, python_version="3.12", only=["tensorflow"]))
