"""What limits a step, and what it reads and writes of HBM."""

import pytest

from parallel.hlo import executions, program
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


CYCLES = 'backend_config={"estimated_cycles":"10"}'
TEXT = f"""
%fused (a: bf16[8,16]) -> bf16[8,16] {{
  %a = bf16[8,16]{{1,0}} parameter(0)
  ROOT %twice = bf16[8,16]{{1,0}} add(%a, %a), {CYCLES}
}}

%cond (state: (s32[], bf16[4,8,16])) -> pred[] {{
  %state = (s32[], bf16[4,8,16]{{2,1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant(4)
  ROOT %go = pred[] compare(%i, %limit), direction=LT
}}

%body (state: (s32[], bf16[4,8,16])) -> (s32[], bf16[4,8,16]) {{
  %state = (s32[], bf16[4,8,16]{{2,1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = bf16[4,8,16]{{2,1,0:T(8,128)(2,1)}} get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %layer = bf16[8,16]{{1,0}} fusion(%stack), kind=kLoop, calls=%fused, {CYCLES}
  %near = bf16[8,16]{{1,0:T(8,128)S(1)}} fusion(%layer), kind=kLoop, calls=%fused, {CYCLES}
  ROOT %out = (s32[], bf16[4,8,16]{{2,1,0}}) tuple(%next, %stack)
}}

ENTRY %main (x: bf16[4,8,16]) -> bf16[4,8,16] {{
  %x = bf16[4,8,16]{{2,1,0}} parameter(0)
  %copied = (bf16[4,8,16]{{2,1,0:S(1)}}, bf16[4,8,16]{{2,1,0}}, u32[]{{:S(2)}}) copy-start(%x)
  %sliced = ((bf16[4,8,16]{{2,1,0}}), bf16[1,8,16]{{2,1,0:S(1)}}, s32[]) slice-start(%x), slice={{[0:1], [0:8], [0:16]}}
  %free = bf16[4,8,16]{{2,1,0}} bitcast(%x)
  %zero = s32[] constant(0)
  %first = (s32[], bf16[4,8,16]{{2,1,0}}) tuple(%zero, %x)
  %loop = (s32[], bf16[4,8,16]{{2,1,0}}) while(%first), condition=%cond, body=%body
  ROOT %result = bf16[4,8,16]{{2,1,0}} get-tuple-element(%loop), index=1
}}
"""
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
