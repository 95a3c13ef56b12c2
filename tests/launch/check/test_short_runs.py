"""The short runs of a check at level slice: what they find, their report, and when it counts for STATUS.md."""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import pytest

from core import slices
from core.hosts import distributed
from launch import environment
from launch.check import short_runs
from launch.config import loader
from launch.findings import Finding, to_json
from models.decoder.attention import attention_check
from tests.lab import status


@pytest.fixture
def commands(monkeypatch):
    """The commands of the parts, each of which succeeds; `--level hosts` has one finding."""
    ran = []

    def run(argv):
        ran.append(list(argv))
        if argv[0] == "check" and "--json" in argv:
            name = "attention" if "attention" in argv else "clocks"
            pathlib.Path(argv[argv.index("--json") + 1]).write_text(to_json([Finding(name, True, "as it should")]))
        return 0, ""

    monkeypatch.setattr(short_runs, "_run", run)
    return ran


def arguments(run_dir, *, simulate):
    return argparse.Namespace(slice="v4-8", experiment="x.gin", gin=["A = 1"], run_dir=str(run_dir), simulate=simulate)


@pytest.mark.parametrize("simulate", [False, True])
def test_the_parts_are_commands_that_cover_rows_of_the_checklist(commands, tmp_path, simulate):
    found, is_shown = short_runs.check(arguments(tmp_path, simulate=simulate), slices.get("v4-8"))
    assert is_shown
    assert all(("--simulate" in argv) == simulate and "A = 1" in argv for argv in commands)
    strategies = short_runs.REHEARSED if simulate else {path.stem for path in short_runs.STRATEGIES.glob("*.gin")}
    names = {finding.name for finding in found}
    assert names == {"clocks", "all hosts", "attention", "speed", *(f"strategy {name}" for name in strategies)}
    report = json.loads((tmp_path / "check.json").read_text())
    assert (report["platform"], report["ok"]) == ("simulated" if simulate else "tpu", True)
    covered = {row for name in names for row in status.covered_by(name)}
    assert covered <= set(status.capabilities())
    assert simulate or covered >= {row for rows in status.VALIDATES.values() for row in rows}


def test_another_check_trains_a_new_run_that_is_logged_nowhere_else(commands, tmp_path):
    for _ in range(2):
        short_runs.check(arguments(tmp_path, simulate=True), slices.get("v4-8"))
        folder = pathlib.Path(commands[-1][commands[-1].index("--run-dir") + 1])
        folder.mkdir()
        (folder / "config.gin").write_text("")
    trained = [argv for argv in commands if "--steps" in argv]
    assert [argv[argv.index("--run-dir") + 1] for argv in trained] == [f"{tmp_path}/run1", f"{tmp_path}/run2"]
    bound = [argv[place + 1] for argv in trained for place, word in enumerate(argv) if word == "--gin"]
    experiment = loader.load("gin/quickstart.gin", bindings=[one for one in bound if one != "A = 1"]).build()
    assert (experiment.checkpointing.checkpoint_mirror, experiment.logging.wandb_project) == ("", "")
    assert experiment.logging.log_interval == 1


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """The check of attention, where another host's kernel is wrong, and what was compared on this one."""
    wrong, look, looked = Finding("attention", False, "0.5 apart"), attention_check.look, []

    def noted():
        looked.append(look())
        return looked[0]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention_check, "look", noted)
        patched.setattr(distributed, "all_gather_text", lambda _, own: [own, to_json([wrong])])
        where = arguments(tmp_path_factory.mktemp("attention"), simulate=True)
        return short_runs.attention(where, slices.get("v4-16")), looked[0]["compared"]


def test_the_attention_of_every_host_is_judged(judged):
    (found, is_shown), _ = judged
    assert is_shown
    assert [(one.name, one.ok, one.detail[:8]) for one in found] == [
        ("attention", True, "host 0: "),
        ("attention", False, "host 1: "),
    ]


def test_a_part_that_fails_leaves_its_last_lines():
    found = short_runs._judged("x", ["check", "v9-1", "x.gin"])
    assert not found.ok
    assert "unknown TPU slice 'v9-1'" in found.detail
    assert short_runs._judged("x", ["slices"]).ok


def test_a_part_that_does_not_end_in_time_has_failed(monkeypatch, capsys):
    monkeypatch.setattr(short_runs, "PART_SECONDS", 0.01)
    found = short_runs._judged("x", ["slices"])
    assert (found.ok, found.detail.splitlines()[0]) == (False, "not within 0.01 s")
    assert "check: x: failed" in capsys.readouterr().out


def test_a_strategy_is_a_note_only_if_its_layout_does_not_fit(tmp_path):
    """A mistake in the configuration is a failure; it is none of the layout."""
    given = argparse.Namespace(
        slice="v4-16", experiment="gin/quickstart.gin", gin=[], run_dir=str(tmp_path / "run"), simulate=False
    )
    found = short_runs._strategy(given, "multislice")
    assert (found.ok, found.is_note) == (True, True)
    given.gin = ["nothing.here = 3"]
    assert not short_runs._strategy(given, "multislice").ok


@pytest.mark.parametrize(
    ("failed", "is_note"),
    [([("layout", None)], True), ([("layout", None), ("layout", 2)], True), ([("layout", None), ("data", 2)], False)],
)
def test_a_layout_that_does_not_fit_in_any_phase_is_a_note(monkeypatch, failed, is_note):
    found = [Finding(name, False, "does not divide", phase=phase) for name, phase in failed]
    monkeypatch.setattr(
        short_runs, "_check", lambda *_, **__: (found, Finding("strategy tensor", False, "exit code 2"))
    )
    assert short_runs._strategy(argparse.Namespace(run_dir="run"), "tensor").is_note == is_note


def test_measurements_are_read_from_the_run_directory(bucket):
    bucket.write("gs://bucket/v/run/metrics.jsonl", b'{"step": 1}\n{"step": 2, "step_seconds": 0.5, "loss": 3.0}\n')
    ask = "from launch.check import short_runs; print(short_runs.measured('gs://bucket/v/run'))"
    there = {"env": {**os.environ, **bucket.environment}, "cwd": environment.WORKSPACE}
    said = subprocess.run([sys.executable, "-c", ask], **there, stdout=subprocess.PIPE, text=True, check=True)
    assert said.stdout == "{'step': 2, 'step_seconds': 0.5}\n"


@pytest.mark.covers("T08")
def test_the_kernel_and_the_plain_form_agree_here(judged):
    (found,) = (one for one in judged[1] if one["dtype"] == "float32")
    assert set(found["apart"]) == {"output", "d query", "d key", "d value"}
    assert 0 < max(found["apart"].values()) < found["tolerance"] == 2e-5


def test_a_kernel_that_is_wrong_is_found(monkeypatch):
    plain = attention_check.attention.plain
    monkeypatch.setattr(attention_check.attention, "splash_attention", lambda q, k, v, s, **_: 1.01 * plain(q, k, v, s))
    found = attention_check.look()
    assert not found["ok"]
    assert (found["platform"], found["kernel"]) == ("cpu", "interpreted: this is no TPU")


@pytest.mark.covers("E07")
def test_only_a_report_of_a_tpu_fills_the_last_column(tmp_path):
    found = [Finding("strategy fsdp", True, "9 s"), Finding("strategy tensor", False, "exit code 1")]
    found += [Finding("strategy zero1", True, "does not fit", is_note=True)]
    parts = json.loads(to_json(found))
    for name, platform, date in (
        ("a", "tpu", "2026-05-01"),
        ("b", "simulated", "2026-06-01"),
        ("c", "cpu", "2026-06-01"),
    ):
        report = {"platform": platform, "slice": "v4-32", "date": date, "findings": parts}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    ran = status.ran_on_tpu(tmp_path)
    assert ran == dict.fromkeys(("M07", "C02", "C06"), "v4-32, 2026-05-01")
    test = status.Marked("tests/x.py::t", ("M07", "M09"), 0, ())
    page = status.render({"M07": "one", "M09": "two"}, [test], ran)
    assert "| M07 | one | yes |  |  | v4-32, 2026-05-01 | x.py |" in page
    assert "| M09 | two | yes |  |  | never | x.py |" in page
    assert "1 ran on an accelerator" in page
    assert status.ran_on_tpu(tmp_path / "none") == {}


@pytest.mark.slow
@pytest.mark.covers("X02")
@pytest.mark.simulated(2)
def test_a_rehearsal_writes_a_report_that_claims_nothing(launch, tmp_path):
    where = ("v4-16", "gin/quickstart.gin", "--check", "slice", "--simulate", "--run-dir", str(tmp_path))
    said = launch("pod", *where, timeout=900)
    report = json.loads((tmp_path / "check.json").read_text())
    assert said.rstrip().endswith("READY")
    assert (report["platform"], report["ok"]) == ("simulated", True)
    names = {row["name"] for row in report["findings"]}
    assert names >= {"hosts", "clocks", "axis fsdp", "attention", "strategy fsdp", "strategy fsdp_tensor", "speed"}
    assert report["measured"]["step_seconds"] > 0
