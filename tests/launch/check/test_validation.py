"""The validation report of a slice: its parts, their results, and when it counts for STATUS.md."""

import json
import os
import subprocess
import sys

import pytest

from launch import environment
from launch.check import validation
from launch.check.validation import Part
from models.decoder.attention import attention_check
from tests.lab import status


def test_the_parts_are_commands_that_cover_rows_of_the_checklist(tmp_path):
    real = validation.parts("v4-32", "x.gin", run_dir="gs://b/v", simulated=False, folder=tmp_path)
    played = validation.parts("v4-32", "x.gin", run_dir="r", simulated=True, folder=tmp_path)
    strategies = {path.stem for path in validation.STRATEGIES.glob("*.gin")}
    assert {part.name for part in real} >= {f"strategy {name}" for name in strategies}
    assert [part.name for part in played] == [
        "doctor",
        "attention",
        "strategy fsdp",
        "strategy fsdp_tensor",
        "predicted and measured",
    ]
    assert not any("--simulate" in part.argv for part in real)
    assert all("--simulate" in part.argv for part in played)
    covered = {row for part in real for row in status.covered_by(part.name)}
    assert covered <= set(status.capabilities())
    assert covered >= {row for rows in status.VALIDATES.values() for row in rows}


@pytest.mark.parametrize(
    ("part", "verdict"),
    [
        (Part("x", ("slices",)), "ok"),
        (Part("x", ("doctor", "v9-1", "x.gin")), "failed"),
        (Part("x", ("doctor", "v9-1", "x.gin"), ("check", "v9-1", "x.gin")), "failed"),  # what fails is no layout
    ],
)
def test_a_part_that_fails_leaves_its_last_lines_and_the_others(part, verdict):
    found = validation.perform(part)
    assert found["verdict"] == verdict
    assert ("said" in found) == (verdict != "ok")
    assert verdict == "ok" or "unknown TPU slice 'v9-1'" in "".join(found["said"])


def test_a_strategy_is_refused_only_if_its_layout_does_not_fit(tmp_path, monkeypatch):
    parts = validation.parts("v4-16", "gin/quickstart.gin", run_dir=str(tmp_path), simulated=False, folder=tmp_path)
    (part,) = [part for part in parts if part.name == "strategy multislice"]
    found = validation.perform(part)
    assert found["verdict"] == "refused"
    assert any(line.startswith("FAIL  layout") for line in found["said"])
    missing = part._replace(argv=("slices", "--wrong"), check=(*part.check, "--gin", "nothing.here = 3"))
    assert validation.perform(missing)["verdict"] == "failed"  # its check names the configuration


def test_measurements_are_read_from_the_run_directory(bucket):
    bucket.write("gs://bucket/v/run/metrics.jsonl", b'{"step": 1}\n{"step": 2, "step_seconds": 0.5, "loss": 3.0}\n')
    ask = "from launch.check import validation; print(validation.measured('gs://bucket/v'))"
    there = {"env": {**os.environ, **bucket.environment}, "cwd": environment.WORKSPACE}
    said = subprocess.run([sys.executable, "-c", ask], **there, stdout=subprocess.PIPE, text=True, check=True)
    assert said.stdout == "{'step': 2, 'step_seconds': 0.5}\n"


@pytest.mark.covers("T08")
def test_the_kernel_and_the_plain_form_agree_here():
    found = attention_check.compare(dtype="float32", interpret=True)
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
    parts = [{"name": "strategy fsdp", "verdict": "ok"}, {"name": "strategy tensor", "verdict": "failed"}]
    for name, platform, date in (
        ("a", "tpu", "2026-05-01"),
        ("b", "simulated", "2026-06-01"),
        ("c", "cpu", "2026-06-01"),
    ):
        report = {"platform": platform, "slice": "v4-32", "date": date, "parts": parts}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    ran = status.ran_on_tpu(tmp_path)
    assert ran == dict.fromkeys(("M07", "C02", "C06"), "v4-32, 2026-05-01")
    test = status.Marked("tests/x.py::t", ("M07", "M09"), 0, ())
    page = status.render({"M07": "one", "M09": "two"}, [test], ran)
    assert "| M07 | one | yes |  |  | v4-32, 2026-05-01 | x.py |" in page
    assert "| M09 | two | yes |  |  | never | x.py |" in page
    assert "1 ran on a TPU" in page
    assert status.ran_on_tpu(tmp_path / "none") == {}


@pytest.mark.slow
@pytest.mark.covers("X02")
@pytest.mark.simulated(2)
def test_a_rehearsal_writes_a_report_that_claims_nothing(launch, tmp_path):
    said = launch("pod", "v4-16", "validate", "--simulate", "--run-dir", str(tmp_path), timeout=900)
    report = json.loads((tmp_path / "validate.json").read_text())
    assert f"PASS  {tmp_path}/validate.json" in said
    assert report["platform"] == "simulated"
    assert [part["verdict"] for part in report["parts"]] == ["ok"] * 5
    assert {row["name"] for row in report["doctor"]} >= {"hosts", "clocks", "axis fsdp"}
    assert report["measured"]["step_seconds"] > 0
