"""`tests/run.sh lab bench --recursion` measures step, peak and profile; the speed of this machine is not tested."""

import pytest

from models.trm import TRM
from tests.lab import recursion
from tests.lab.__main__ import main


@pytest.mark.slow
def test_a_step_is_timed_beside_the_peak_and_profiled():
    speed = recursion.measure("mlp", width=16, times=2)
    assert speed.flops == TRM(vocab_size=11, mixer="mlp", embed_dim=16).flops_per_row(81) * 8
    assert 0 < speed.share.cpu < 1
    assert sum(speed.profile.values()) == pytest.approx(1)
    assert min(speed.profile[recursion.PRODUCTS], speed.profile[recursion.REST]) > 0


def test_shares_are_of_the_peak_measured_likewise():
    speed = recursion.Speed("mlp", 30.0, recursion.Seconds(2.0, 3.0), recursion.Seconds(60.0, 40.0), {})
    assert speed.share == pytest.approx((0.25, 0.25))


def test_options_of_the_other_measurement_are_refused(capsys):
    assert main(["bench", "--recursion", "--turns", "3", "--run-dir", "runs/x"]) == 2
    assert "--recursion does not take --turns, --run-dir" in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["v4-8", "--recursion"]])
def test_a_slice_or_the_recursion(given, capsys):
    assert main(["bench", *given]) == 2
    assert "expected either a SLICE" in capsys.readouterr().err
