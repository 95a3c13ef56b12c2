"""The limit of a step, and the HBM bytes that it reads and writes."""

import pathlib

import pytest

from parallel.compiled.hlo import executions, program
from parallel.planning import roofline
from parallel.planning.cost import AxisTime, StepTime
from parallel.planning.roofline import Roofline


def time_of(*, compute=0.8, kernels=0.1, **networks):
    traffic = tuple(AxisTime(("fsdp",), network, seconds, 0.0, 1) for network, seconds in networks.items())
    return StepTime(compute, kernels, traffic, ())


@pytest.mark.parametrize(
    ("time", "products", "hbm", "binds"),
    [
        (time_of(ICI=0.5), 0.6, 0.5, "computation"),
        (time_of(ICI=0.5), 0.3, 0.7, "HBM"),  # computation of 0.8 s is 0.3 s of products that wait
        (time_of(ICI=0.5), 0.3, 7.0, "HBM"),  # "at most" says more than there is
        (time_of(kernels=0.6), 0.3, 0.8, "computation"),  # kernels and products 0.9
        (time_of(ICI=0.95), 0.3, 0.7, "ICI"),
        (time_of(ICI=0.4, DCN=0.6), 0.3, 0.7, "DCN"),  # both together are more than 0.9
        (time_of(ICI=0.4, DCN=0.3), 0.3, 0.7, "HBM"),
        (time_of(), 0.8, 0.2, "computation"),
    ],
)
def test_what_binds(time, products, hbm, binds):
    assert Roofline(time, products, 1.0, hbm).binds == binds


TEXT = (pathlib.Path(__file__).parents[2] / "parallel/compiled/fixtures/loop_over_layers.hlo").read_text()
LAYER = 2 * 8 * 16


def test_bytes_of_hbm_that_a_program_touches():
    run = executions.walk(program.parse(TEXT))
    touched = {e.instruction.name: t for e in run if (t := roofline.touched_bytes(e))}
    assert touched == {
        "copied": 4 * LAYER,  # read from HBM; what is written lies elsewhere
        "sliced": LAYER,  # a quarter of its operand
        "layer": 4 * (LAYER + LAYER),  # four times: a layer of the stack read, one written
        "near": 4 * LAYER,  # four times: read, and kept in another memory
    }
