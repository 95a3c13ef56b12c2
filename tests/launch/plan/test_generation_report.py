"""`plan --generate`: memory and predicted speed of generation, as compiled for a slice."""

import json

import pytest

from core.errors import UserError
from launch.plan import generation_report
from parallel.compiled.compiling import OutOfHbmError

TENSOR = ("STRATEGY = @strategies.mesh3d()", "strategies.mesh3d.tensor = 2")


@pytest.mark.slow
@pytest.mark.covers("N13")
@pytest.mark.compiled("v4-8")
def test_a_plan_of_generation(launch, tmp_path):
    words = [word for binding in TENSOR for word in ("--gin", binding)]
    words += ["--batch-size", "8", "--json", str(tmp_path / "r.json")]
    said = launch("plan", "v4-8", "gin/quickstart.gin", "--generate", *words)
    assert "generation of 8 rows of up to 128 positions under mesh3d (fsdp 2 x tensor 2),\ncompiled for v4-8" in said
    assert f"written: {tmp_path / 'r.json'}" in said
    [read] = json.loads((tmp_path / "r.json").read_text())
    # 2 layers of keys and values: 4 of 8 rows, 1 of 2 heads of 32, 128 positions, float32
    assert read["cache_bytes"] == 2 * 2 * 4 * 1 * 32 * 128 * 4
    slow, fast = read["predicted_tokens_per_second"]
    assert 0 < slow <= fast <= 8 / (read["param_bytes"] / 1.2e12)


def test_other_batch_sizes_are_compiled_if_one_does_not_fit(monkeypatch, capsys):
    def cost(bound, *, rows, slots, chunk):
        raise OutOfHbmError("too much", needed=f"{rows}.00GiB", present="30.75GiB")

    monkeypatch.setattr(generation_report.generation_cost, "generation_cost", cost)
    where = {"slice_name": "v4-8", "bindings": TENSOR}
    found = generation_report.predict("gin/quickstart.gin", **where, batch_sizes=[64, 512])
    assert [one["rows"] for one in found] == [64, 512]
    assert found[1]["problem"] == "does not fit: needs 512.00GiB of 30.75GiB"
    assert "generation of 512 rows: does not fit" in capsys.readouterr().out


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="--generate: 9 rows do not divide over 2 parts of the slice"):
        generation_report.predict("gin/quickstart.gin", slice_name="v4-8", bindings=TENSOR, batch_sizes=[8, 9])
