"""The output of `--explain` for layouts that fit and that do not."""

import pathlib
import types

import pytest

from launch.plan import explain, search
from parallel.compiled import compiling
from parallel.compiled.compiling import OutOfHbmError
from parallel.compiled.hlo import executions, program
from parallel.planning.cost import AxisTime, StepTime
from parallel.planning.roofline import roofline

TEXT = (pathlib.Path(__file__).parents[2] / "parallel/compiled/fixtures/loop_over_layers.hlo").read_text()


@pytest.mark.parametrize("choice", ["fsdp", "gin/nothing_here.gin"])
def test_an_unknown_choice_is_refused(choice):
    with pytest.raises(ValueError, match="--explain"):
        explain.explain("gin/quickstart.gin", choice, slice_name="v4-8", bindings=[])


def test_traffic_and_operations_are_printed(capsys):
    run = executions.walk(program.parse(TEXT))
    time = StepTime(0.8, 0.1, (AxisTime(("data", "fsdp"), "DCN", 0.25, 0.125, 3 * 2**29),), ("kernel mine x 7",))
    found = types.SimpleNamespace(costs=types.SimpleNamespace(total_cycles=80))
    explain._print_operations(run, found, time, clock=1e9)
    explain._print_axis_times(time)
    said = capsys.readouterr().out
    assert "0.8 s of computation as estimated by the compiler, 0.1 s of kernels" in said
    assert "100.0%" in said  # two fusions of 10 cycles, four times
    assert "without an estimate: kernel mine x 7" in said
    assert "| data fsdp | DCN     |     1.50 |    0.25 |      0.125 |" in said


@pytest.fixture(scope="module")
def on_its_chips(question):
    return question.experiment.bind(compiling.devices_of(question.slice))


def test_a_roofline_names_the_limit(question, capsys):
    time = StepTime(2.0, 0.1, (AxisTime(("fsdp",), "ICI", 0.5, 0.0, 1),), ())
    run = [e._replace(times=10**12) for e in executions.walk(program.parse(TEXT))]
    chip = question.slice.chip
    explain._print_roofline(question, roofline(time, product_flops=1e12, executed=run, chip=chip))
    said = capsys.readouterr().out
    assert "limited by HBM: a step takes 2.1 s with all traffic hidden, 2.6 s with none" in said
    assert "| ICI links" in said
    assert "DCN" not in said
    explain._print_roofline(question, roofline(time, product_flops=1e12, executed=[], chip=chip))
    assert "limited by computation" in capsys.readouterr().out
    fast = StepTime(question.experiment.flops_per_step / (1.25 * question.slice.peak_flops), 0.0, (), ())
    explain._print_roofline(question, roofline(fast, product_flops=1.0, executed=[], chip=chip))
    assert "MFU 125.0 %" in capsys.readouterr().out  # of the bfloat16 peak, as with products in int8


def test_a_layout_that_does_not_fit_is_shown_with_allocations_and_alternatives(
    question, options, on_its_chips, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(search, "options", lambda asked: options if asked is question else pytest.fail("another"))
    error = OutOfHbmError("too much", needed="40.25GiB", present="30.75GiB")
    error.__cause__ = RuntimeError("…\n  1. Size: 12.50G\n     Shape: bf16[4,5]{1,0}\n     Allocation type: HLO temp\n")
    explain._print_misfit(question, on_its_chips, error, tmp_path)
    said = capsys.readouterr().out
    assert "needs 40.25GiB of 30.75GiB per chip, 9.50 GiB too much" in said
    assert "| 12.50 | HLO temp | bf16[4,5] HLO temp |" in said
    assert "by arithmetic: " in said
    near = said.partition("nearest that may fit")[2].splitlines()[1:]
    assert len(near) == 2 * explain.NEAREST
    assert all(line.endswith(" GiB") for line in near[::2])
    error.__cause__ = RuntimeError("a message without a list")
    explain._print_misfit(question, on_its_chips, error, tmp_path)  # nor has the compiler written any files
    assert "largest allocations" not in capsys.readouterr().out
