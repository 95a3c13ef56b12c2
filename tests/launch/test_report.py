"""`launch/run report --compile` on a small experiment."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from core import slices
from core.errors import UserError
from launch import __main__ as cli
from launch.plan import compiled_report
from parallel import prediction
from parallel.compiled.compiling import OutOfHbmError
from parallel.planning import calibration, cost

MY_TABLES = """
from parallel.strategies import REPLICATED, Strategy


def halves():
    table = {**REPLICATED, "mlp": "tensor"}
    return Strategy(name="halves", mesh_shape={"tensor": -1}, param_rules=table, activation_rules=table)
"""


def test_strategies_are_found_from_every_folder(tmp_path, monkeypatch):
    here = compiled_report.strategy_files()
    monkeypatch.chdir(tmp_path)
    assert compiled_report.strategy_files() == here
    assert "gin/strategies/fsdp.gin" in here
    for choice in here:
        assert compiled_report.bindings_of(choice) == [f"include '{choice}'"]


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        # two tables of 128 columns with the state of AdamW: 48 GiB, or 12 per chip; then 192
        (["VOCAB_SIZE = 16777216", "STRATEGY = @strategies.data_parallel()"], "over all 4 of v4-8 the state is"),
        (["VOCAB_SIZE = 67108864"], "Take a larger slice: v4-8 has 4 chips"),
    ],
)
def test_a_model_that_does_not_fit_says_by_how_much_and_what_to_change(capsys, bindings, words):
    argv = ["report", "v4-8", "gin/quickstart.gin", *(word for one in bindings for word in ("--gin", one))]
    assert cli.main(argv) == 1
    said = capsys.readouterr().out
    assert words in said
    assert ("DOES NOT FIT" in said, "GiB too much" in said) == (True, True)


@pytest.mark.slow
@pytest.mark.covers("M18")
@pytest.mark.compiled("v4-16")
def test_the_report_lists_traffic_by_mesh_axis(tmp_path):
    command = [
        sys.executable,
        "-m",
        "launch",
        "report",
        "v4-16",
        "gin/quickstart.gin",
        "--json",
        str(tmp_path / "r.json"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"COLUMNS": "140"})
    assert ran.returncode == 0, ran.stderr
    assert "million cycles" in ran.stdout
    assert "wire by mesh axes: " in ran.stdout
    assert "\nfindings: " in ran.stdout
    read = json.loads((tmp_path / "r.json").read_text())
    recorded = json.loads(Path("tests/golden/quickstart.json").read_text())
    same = ("slice", "memory", "cycles", "wire_bytes_by_axes", "predicted", "versions")
    assert {part: read[part] for part in same} == {part: recorded[part] for part in same}
    assert {row["network"] for row in read["traffic"]} == {"ICI"}
    assert f"predicted: {prediction.line(recorded)}" in ran.stdout


def test_a_predicted_time_is_shown_with_its_parts_and_what_is_not_in_it(capsys):
    ici = cost.AxisTime(("fsdp",), "ICI", seconds=0.5, beside=0.3, wire_bytes=2**30)
    time = cost.StepTime(compute=2.0, kernels=0.25, traffic=(ici,), unpriced=("kernel mine x 3",))
    figures = {
        "predicted": cost.predicted(time, slices.get("v4-8"), 1e15),
        "memory": {"peak_bytes": 3 * 2**30},
        "versions": {"libtpu": "0.1"},
    }
    compiled_report._print_prediction(figures, time)
    first, *others = capsys.readouterr().out.strip().splitlines()
    low, high = calibration.interval(2.45)
    assert first.startswith(f"predicted: 2.45 s ({low:.3g} to {high:.3g} s) per step, 37 % MFU, 3 GiB (compiled by")
    assert others == [
        "  computation 2 s, kernels 250 ms, exposed traffic 200 ms",
        "  without an estimate: kernel mine x 3",
    ]


@pytest.mark.slow
@pytest.mark.compiled("v4-8")
def test_strategies_side_by_side(launch, tmp_path, monkeypatch):
    """Layouts that compile have figures, layouts that the slice cannot have a reason; users' own files are accepted."""
    (tmp_path / "my_tables.py").write_text(MY_TABLES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    mine = tmp_path / "mine.gin"
    mine.write_text(Path("gin/strategies/hsdp.gin").read_text().replace("data = 4", "data = 2"))
    choices = ["gin/strategies/fsdp.gin", str(mine), "gin/strategies/multislice.gin", "STRATEGY = @strategies.tensor()"]
    choices.append("import my_tables; STRATEGY = @my_tables.halves()")
    written = tmp_path / "all.json"
    said = launch("report", "v4-8", "gin/quickstart.gin", "--json", str(written), "--strategies", *choices)
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("| ")]
    compiled, refused = table[1:4], table[4:]
    assert {row[0]: row[1] for row in compiled} == {"fsdp": "fsdp 4", "hsdp": "data 2 x fsdp 2", "halves": "tensor 4"}
    assert [row[:2] for row in refused] == [["multislice", "refused"], ["STRATEGY = @strategies.tensor()", "refused"]]
    assert all(float(cell) > 0 for row in compiled for cell in row[2:7])
    assert [row[3] for row in compiled] == sorted((row[3] for row in compiled), key=float)
    assert "spans 2 slices, but v4-8 has 1" in said
    assert "kv_heads = 2 does not divide over tensor = 4" in said
    fsdp, hsdp, *refused, halves = json.loads(written.read_text())
    assert set(fsdp["wire_bytes_by_axes"]) == {"fsdp"}
    assert set(halves["wire_bytes_by_axes"]) == {"tensor"}
    assert set(hsdp["wire_bytes_by_axes"]) > {"fsdp"}
    assert ["problem" in row for row in refused] == [True, True]


@pytest.mark.parametrize(("needed", "cell"), [("40.25GiB", "40.25"), ("1.50TiB", "1,536.00"), ("512.00MiB", "0.5")])
def test_a_strategy_that_does_not_fit_has_its_need_in_place_of_a_peak(monkeypatch, capsys, needed, cell):
    def too_large(program):
        raise OutOfHbmError("too much", needed=needed, present="30.75GiB")

    monkeypatch.setattr(compiled_report.analysis, "analyze", too_large)
    choices = ["gin/strategies/data_parallel.gin"]
    found = list(compiled_report.compile_strategies("gin/quickstart.gin", choices, bindings=[], slice_name="v4-8"))
    compiled_report.show_strategies(found, slice_name="v4-8")
    said = capsys.readouterr().out
    (row,) = [line.split("|")[1:] for line in said.splitlines() if line.startswith("| data_parallel")]
    assert row[3].strip() == f"{cell}, too much"
    assert f"data_parallel: does not fit: needs {needed} of 30.75GiB" in said


def test_a_strategy_on_which_the_compiler_fails_does_not_end_the_comparison(monkeypatch, capsys):
    def failing(program):
        raise jax.errors.JaxRuntimeError("INTERNAL: no luck\nmore")

    monkeypatch.setattr(compiled_report.analysis, "analyze", failing)
    choices = ["gin/strategies/fsdp.gin", "gin/strategies/hsdp.gin"]
    found = list(compiled_report.compile_strategies("gin/quickstart.gin", choices, bindings=[], slice_name="v4-8"))
    compiled_report.show_strategies(found, slice_name="v4-8")
    said = capsys.readouterr().out
    assert "fsdp: the compiler failed: INTERNAL: no luck\n" in said
    assert "hsdp: the compiler failed: INTERNAL: no luck\n" in said


def test_strategies_are_compared_for_one_phase(monkeypatch, capsys):
    def too_large(program):
        raise OutOfHbmError("too much", needed="40.25GiB", present="30.75GiB")

    monkeypatch.setattr(compiled_report.analysis, "analyze", too_large)
    where = {"choices": ["gin/strategies/fsdp.gin"], "slice_name": "v4-16"}
    list(compiled_report.compile_strategies("gin/quickstart_phases.gin", **where, bindings=[]))
    assert 'note: this is phase 1 of 2; --gin "PHASE = N" chooses another' in capsys.readouterr().out
    second = ["PHASE = 2"]
    (found,) = compiled_report.compile_strategies("gin/quickstart_phases.gin", **where, bindings=second)
    assert {field.shape for field in found.program.spec.values()} == {(8, 256)}
    assert capsys.readouterr().out == ""
    own = ["from parallel import strategies", "long/experiment.Phase.strategy = @strategies.data_parallel()"]
    with pytest.raises(UserError, match="the phase sets strategy itself, so no other can be bound"):
        list(compiled_report.compile_strategies("gin/quickstart_phases.gin", **where, bindings=[*second, *own]))
    layers = [*second, "long/experiment.Phase.accum_steps = 2"]
    assert list(compiled_report.compile_strategies("gin/quickstart_phases.gin", **where, bindings=layers))


@pytest.mark.slow  # the test above is quick
@pytest.mark.compiled("v4-8")
def test_a_strategy_that_does_not_fit_has_a_row_with_its_need(launch):
    choice = "gin/strategies/data_parallel.gin"
    said = launch("report", "v4-8", "gin/quickstart.gin", "--gin", "BATCH_SIZE = 262144", "--strategies", choice)
    (row,) = [line.split("|")[1:] for line in said.splitlines() if line.startswith("| data_parallel")]
    (needed,) = re.findall(r"data_parallel: does not fit: needs ([\d.]+)GiB of 30.75GiB", said)
    assert float(needed) > 30.75
    assert row[3].strip() == f"{float(needed):,.2f}, too much"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--strategies", "fsdp.gin"],
            "--strategies fsdp.gin: no such file; the workspace has gin/strategies/context",
        ),
        (["--gin", "BATCH_SIZ = 3", "--strategies"], "did you mean 'BATCH_SIZE'?"),
        (["--json", "no/such/folder/x.json"], "no/such/folder; create it first"),
        (["--compile", "--strategies"], "give only one of them"),
    ],
)
def test_wrong_options_are_refused_at_once(arguments, message, capsys):
    command = ["v4-8", "gin/quickstart.gin", *arguments]
    assert cli.run_command("launch.plan.compiled_report", command, program="launch/run report") == 2
    assert message in capsys.readouterr().err


def test_the_phases_of_an_experiment_are_named_and_equal_tables_printed_once(capsys):
    assert cli.main(["report", "v4-16", "gin/quickstart_phases.gin"]) == 0
    said = capsys.readouterr().out
    first, second = said.split("phase 2 of 2, steps 151 to 200: fsdp, 8 rows x 256 tokens")
    assert "phase 1 of 2, steps 1 to 150: fsdp, 16 rows x 128 tokens" in first
    assert ["memory: state" in part for part in (first, second)] == [True, True]
    assert ("DOES NOT FIT" in said, "GiB too much" in said) == (False, False)
    assert "params/" in first
    assert "arrays: as in the phase before" in second
    assert "params/" not in second
