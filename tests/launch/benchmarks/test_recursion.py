"""`launch/run bench --recursion` measures what it says; how fast this machine is, is not a test's affair."""

import pytest

from launch.__main__ import main
from launch.benchmarks import recursion
from models.trm import TRM


def test_a_step_is_timed_beside_the_peak_and_profiled():
    speed = recursion.measure("mlp", width=16, times=2)
    assert speed.flops == TRM(vocab_size=11, mixer="mlp", embed_dim=16).flops_per_row(81) * 8
    assert speed.share.clock == pytest.approx(speed.flops / speed.step.clock / speed.peak.clock)
    assert 0 < speed.share.cpu < 1
    assert sum(speed.profile.values()) == pytest.approx(1)
    assert min(speed.profile[recursion.PRODUCTS], speed.profile[recursion.REST]) > 0


@pytest.mark.parametrize("given", [[], ["v4-8", "--recursion"]])
def test_a_slice_or_the_recursion(given, capsys):
    assert main(["bench", *given]) == 2
    assert "expected either a SLICE" in capsys.readouterr().err
