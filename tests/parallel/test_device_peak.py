"""Peak of matrix products: of a table, or measured."""

import jax
import pytest

from core import slices
from parallel import device_peak


def test_the_peak_of_a_table_is_not_measured(monkeypatch):
    monkeypatch.delattr(jax, "jit")
    assert device_peak.of(slices.get("h100:8")) == 8 * 989e12


def test_the_peak_of_a_cpu_is_that_of_its_products():
    assert 1e9 < device_peak.of(slices.get("cpu:1")) < 1e14
    with pytest.raises(AssertionError, match="has no peak"):
        slices.get("cpu:1").mfu(1.0, seconds=1.0)
