"""What binds a step, what it touches of HBM, and which layouts are near one that does not fit."""

import types

import jax
import jax.numpy as jnp
import pytest

from core import optimizers, slices
from launch.plans import explaining
from launch.plans.planning import Tried
from models import transformer
from parallel import compiled, strategies
from parallel.compiled import OutOfHbmError
from parallel.hlo import executions, program
from parallel.partitioner import Partitioner
from parallel.pipeline import schedules
from parallel.planning.arithmetic import Estimate
from parallel.planning.candidates import Candidate, Choice, Layout
from parallel.planning.cost import AxisTime, StepTime
from parallel.planning.placed import Step


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
    assert explaining.binding(time, products=products, hbm=hbm) == binds


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
    touched = {e.instruction.name: t for e in run if (t := explaining._touched_bytes(e))}
    assert touched == {
        "copied": 4 * LAYER,  # read from HBM; what is written lies elsewhere
        "sliced": LAYER,  # a quarter of its operand
        "layer": 4 * (LAYER + LAYER),  # four times: a layer of the stack read, one written
        "near": 4 * LAYER,  # four times: read, and kept in another memory
    }


MODEL = transformer.Transformer(
    vocab_size=512, num_layers=4, embed_dim=64, mlp_dim=96, num_heads=2, num_kv_heads=2, remat="full"
)


def bound(tables, *, slice_name="v4-32"):
    slice_ = slices.get(slice_name)
    spec = {k: jax.ShapeDtypeStruct((16, 16), jnp.int32) for k in ("inputs", "targets", "segment_ids", "positions")}
    spec["weights"] = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    played = Partitioner(tables, slice=slice_, devices=jax.devices()[: slice_.chips])
    return played.program(MODEL, optimizers.adamw(learning_rate=optimizers.constant(1e-4)), spec, seed=0)


def tried(name, layout, remat="full", accum_steps=1, *, seconds=1.0, reason=""):
    estimate = Estimate({}, StepTime(seconds, 0.0, (), ()), 0.0)
    return Tried(Candidate(layout, remat, accum_steps, 16), name, (), estimate=estimate, reason=reason)


def mesh3d(data, tensor):
    return Layout("mesh3d", (("data", data), ("fsdp", -1), ("tensor", tensor)))


def test_the_nearest_change_least_and_the_layout_itself_is_none_of_them():
    found = explaining.nearest(
        [
            tried("another", Layout("fsdp", (("fsdp", -1),)), seconds=0.1),
            tried("mesh and accum", mesh3d(4, 2), accum_steps=2, seconds=0.1),
            tried("mesh", mesh3d(4, 2), seconds=0.2),
            tried("accum", mesh3d(2, 2), accum_steps=2, seconds=0.3),
            tried("itself", mesh3d(2, 2), seconds=0.1),
            tried("as written", None, seconds=0.1),
            tried("too large", mesh3d(2, 2), "none", seconds=0.1, reason="needs more"),
        ],
        bound(strategies.mesh3d(data=2, fsdp=4, tensor=2)),
    )
    assert [one.name for one in found] == ["mesh", "accum", "mesh and accum", "another"]


def test_a_degree_is_not_one_that_begins_with_its_digits():
    """fsdp 2 is not fsdp 256, whatever a candidate is called."""
    asked = types.SimpleNamespace(
        partitioner=types.SimpleNamespace(strategy=strategies.hsdp(data=256), slice=slices.get("v5p-1024")),
        model=MODEL,
        spec={"inputs": jax.ShapeDtypeStruct((512, 16), jnp.int32)},
        accum_steps=1,
    )
    (far, near) = (
        tried("hsdp: data 2 x fsdp 256", Layout("hsdp", (("data", 2), ("fsdp", -1))), "dots", seconds=0.1),
        tried("hsdp: data 256 x fsdp 2", Layout("hsdp", (("data", 256), ("fsdp", -1))), "dots", seconds=0.2),
    )
    assert explaining.step_of(asked) == Step("full", 512, 1)
    assert explaining.nearest([far, near], asked) == [near, far]


def test_another_schedule_is_another_layout():
    def layout(constructor, microbatches):
        return Layout(
            "pipeline", (("stage", 4), ("data", -1)), Choice(constructor, (("num_microbatches", microbatches),))
        )

    written = strategies.pipeline(stage=4, data=1, schedule=schedules.gpipe(num_microbatches=4))
    found = explaining.nearest(
        [tried("itself", layout("gpipe", 4), None), tried("1F1B", layout("one_f_one_b", 4), None)],
        bound(written, slice_name="v4-8"),
    )
    assert [one.name for one in found] == ["1F1B"]


@pytest.mark.parametrize("choice", ["fsdp", "gin/nothing_here.gin"])
def test_a_choice_that_is_none_is_refused(choice):
    with pytest.raises(ValueError, match="--explain"):
        explaining.explain("gin/quickstart.gin", choice, slice_name="v4-8", bindings=[])


def test_traffic_and_operations_are_printed(capsys):
    run = executions.walk(program.parse(TEXT))
    time = StepTime(0.8, 0.1, (AxisTime(("data", "fsdp"), "DCN", 0.25, 0.125, 3 * 2**29),), ("kernel mine x 7",))
    found = types.SimpleNamespace(costs=types.SimpleNamespace(total_cycles=80))
    explaining._operations(run, found, time, clock=1e9)
    explaining._traffic(time)
    said = capsys.readouterr().out
    assert "0.8 s of computation as the compiler estimates it, 0.1 s of kernels" in said
    assert "100.0%" in said  # two fusions of 10 cycles, four times
    assert "without an estimate: kernel mine x 7" in said
    assert "| data fsdp | DCN     |     1.50 |    0.25 |              0.125 |" in said


@pytest.fixture(scope="module")
def on_its_chips(question):
    return question.experiment.bind(compiled.devices_of(question.slice))


def test_a_roofline_says_what_binds(question, on_its_chips, capsys):
    time = time_of(compute=2.0, ICI=0.5)
    run = [e._replace(times=10**12) for e in executions.walk(program.parse(TEXT))]
    explaining._roofline(question, on_its_chips, run, time)
    said = capsys.readouterr().out
    assert "HBM binds: a step takes 2.1 s with all traffic hidden, 2.6 s with none" in said
    assert "| ICI links" in said
    assert "DCN" not in said
    explaining._roofline(question, on_its_chips, [], time)
    assert "computation binds" in capsys.readouterr().out


def test_what_does_not_fit_is_said_with_what_took_it_and_what_may_fit(question, on_its_chips, capsys, tmp_path):
    error = OutOfHbmError("too much", needed="40.25GiB", present="30.75GiB")
    error.__cause__ = RuntimeError("…\n  1. Size: 12.50G\n     Shape: bf16[4,5]{1,0}\n     Allocation type: HLO temp\n")
    explaining._too_much(question, on_its_chips, error, tmp_path)
    said = capsys.readouterr().out
    assert "needs 40.25GiB of 30.75GiB per chip, 9.50 GiB too much" in said
    assert "| 12.50 | HLO temp | bf16[4,5] HLO temp |" in said
    assert "by arithmetic: " in said
    near = said.partition("nearest that may fit")[2].splitlines()[1:]
    assert len(near) == 2 * explaining.NEAREST
    assert all(line.endswith(" GiB") for line in near[::2])
    assert explaining._written_down(tmp_path) == []  # for a message without a list
