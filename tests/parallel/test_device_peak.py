"""The measured peak of a CPU."""

from core import slices
from parallel import device_peak


def test_the_peak_of_cpus_is_that_of_products_on_each_host():
    assert 1e9 < device_peak.of_cpus(slices.get("cpu:1")) < 1e14
    assert slices.get("cpu:1").mfu(1e9, seconds=1.0, peak_flops=4e9) == 0.25
