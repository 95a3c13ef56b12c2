"""The measured peak of a CPU."""

import itertools
import types

import pytest

from core import slices
from parallel.planning import device_peak


@pytest.mark.parametrize(("name", "hosts"), [("cpu:1", 1), ("cpu:1x2", 2)])
def test_the_peak_is_that_of_a_product_on_each_host(monkeypatch, name, hosts):
    """By a clock on which each product takes a second."""
    clock = types.SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(device_peak, "time", clock)
    assert device_peak.of_cpus(slices.get(name)) == hosts * 2 * 1536**3


def test_the_measured_peak_is_plausible():
    assert 1e9 < device_peak.of_cpus(slices.get("cpu:1")) < 1e14


def test_utilization_is_relative_to_the_peak():
    assert slices.get("cpu:1").mfu(1e9, seconds=1.0, peak_flops=4e9) == 0.25
