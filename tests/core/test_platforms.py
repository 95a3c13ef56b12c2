"""Tests of the choice of an implementation by platform."""

import jax
import jax.numpy as jnp
import pytest

from core import platforms

ONE = jnp.ones(())


def chosen(traced, **values):
    """Returns the result of by_platform with implementations that add their names to `traced`."""

    def implementation(name, value):
        return lambda x: (traced.append(name), x * value)[1]

    named = {name: implementation(name, value) for name, value in values.items()}
    return jax.jit(lambda: platforms.by_platform(ONE, default=implementation("default", 7), **named))()


def test_every_implementation_is_traced_and_that_for_the_device_runs():
    traced = []
    assert chosen(traced, cpu=2, tpu=3) == 2
    assert sorted(traced) == ["cpu", "default", "tpu"]


@pytest.mark.parametrize(
    ("values", "name", "value"), [({"cpu": 2, "tpu": 3}, "cpu", 2), ({"tpu": 3, "cuda": 4}, "default", 7)]
)
def test_for_one_platform_its_implementation_alone_is_traced(values, name, value):
    traced = []
    with platforms.use("cpu"):
        assert chosen(traced, **values) == value
    assert traced == [name]


def test_a_jitted_function_is_traced_for_each_platform_under_which_it_is_called():
    function = jax.jit(lambda: platforms.by_platform(ONE, default=lambda x: 7 * x, tpu=lambda x: 3 * x))
    results = []
    for platform in ("cpu", "tpu", "cpu", None):
        with platforms.use(platform):
            results.append(int(function()))
    assert results == [7, 3, 7, 7]
