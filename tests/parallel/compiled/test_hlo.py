"""Reading compiled programs: complete parsing, loop counts, and sums of estimates."""

import re

import jax
import pytest

from core import optimizers, slices, stack
from models.decoder import transformer
from parallel import partitioner, strategies
from parallel.compiled import analysis, compiling, traffic
from parallel.compiled.hlo import costs, executions, program, replica_groups
from parallel.compiled.hlo.trip_counts import Scope, TripCounts
from tasks import streams


def loop_text(
    *, condition, body="%next = s32[] add(%i, %one)", start="constant(0)", before="", parameters="(s32[], f32[8])"
):
    """A loop over (i, x) whose condition, step and start are given."""
    return f"""
%cond (state: {parameters}) -> pred[] {{
  %state = {parameters} parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  {condition}
}}

%body (state: {parameters}) -> {parameters} {{
  %state = {parameters} parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{{0}} get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  {body}
  %y = f32[8]{{0}} add(%x, %x), backend_config={{"window_config":{{"estimated_cycles":"10"}}}}
  ROOT %out = {parameters} tuple(%next, %y)
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  {before}
  %start = s32[] {start}
  %first = {parameters} tuple(%start, %x)
  %loop = {parameters} while(%first), condition=%cond, body=%body, metadata={{op_name="jit(run)/while"}}
  ROOT %result = f32[8]{{0}} get-tuple-element(%loop), index=1
}}
"""


def summary(text):
    return costs.summarize(executions.walk(program.parse(text)))


def compare(direction, limit, *, order="%i, %limit"):
    return f"%limit = s32[] constant({limit})\n  ROOT %go = pred[] compare({order}), direction={direction}"


DOWN = {"start": "constant(7)", "body": "%next = s32[] subtract(%i, %one)"}


@pytest.mark.parametrize(
    ("trips", "parts"),
    [
        (7, {"condition": compare("LT", 7)}),
        (8, {"condition": compare("LE", 7)}),
        (5, {"condition": compare("LT", 7), "start": "constant(2)"}),
        (4, {"condition": compare("LT", 7), "body": "%two = s32[] constant(2)\n  %next = s32[] add(%two, %i)"}),
        (7, {"condition": compare("GT", 0), **DOWN}),
        (8, {"condition": compare("GE", 0), **DOWN}),
        (7, {"condition": compare("NE", 7)}),
        (0, {"condition": compare("LT", 7), "start": "constant(9)"}),
        (7, {"condition": compare("GT", 7, order="%limit, %i")}),
        (
            6,
            {
                "condition": "%one = s32[] constant(1)\n  %after = s32[] add(%i, %one)\n  "
                + compare("LT", 7, order="%after, %limit")
            },
        ),
        (
            6,
            {
                "condition": compare("LT", 7),
                "before": "%one = s32[] constant(1)\n  %kept = s32[] copy(%one)",
                "start": "bitcast(%kept)",
            },
        ),
        (None, {"condition": compare("LT", 7), "body": "%next = s32[] multiply(%i, %one)"}),
        (None, {"condition": compare("LT", 7).replace("constant(7)", 'custom-call(%state), custom_call_target="R"')}),
    ],
)
def test_trip_counts(trips, parts):
    text = loop_text(**parts)
    parsed = program.parse(text)
    loop = parsed.computations["main"]["loop"]
    assert TripCounts(parsed).of(loop, Scope("main")) == trips
    found = summary(text)
    assert [loop.trips for loop in found.loops] == [trips]
    assert found.total_cycles == 10 * (1 if trips is None else trips)


SPARSECORE = """
%gathering (table: bf16[32000,1024], ids: s32[16]) -> bf16[16,1024] {
  %table = bf16[32000,1024]{1,0} parameter(0)
  %ids = s32[16]{0} parameter(1)
  ROOT %found = bf16[16,1024]{1,0} gather(%table, %ids), offset_dims={1}
}, execution_thread="sparsecore"

%offloaded (table: bf16[32000,1024], ids: s32[16]) -> bf16[16,1024] {
  %table = bf16[32000,1024]{1,0} parameter(0)
  %ids = s32[16]{0} parameter(1)
  ROOT %rows = bf16[16,1024] fusion(%table, %ids), calls=%gathering, backend_config={"estimated_cycles":"NONE"}
}, execution_thread="sparsecore"

%powers () -> f32[64] {
  %i = f32[64]{0} iota(), iota_dimension=0
  ROOT %sine = f32[64]{0} sine(%i)
}

ENTRY %main (table: bf16[32000,1024], ids: s32[16]) -> (bf16[16,1024], f32[64]) {
  %table = bf16[32000,1024]{1,0} parameter(0)
  %ids = s32[16]{0} parameter(1)
  %start = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%offloaded
  %update = ((bf16[32000,1024]{1,0}, s32[16]{0}), bf16[16,1024]{1,0}) call-update(%start, %table, %ids)
  %angles = f32[64]{0} fusion(), kind=kLoop, calls=%powers, backend_config={"estimated_cycles":"21"}
  %rows = bf16[16,1024]{1,0} call-done(%update)
  ROOT %out = (bf16[16,1024]{1,0}, f32[64]{0}) tuple(%rows, %angles)
}
""".replace("NONE", str(2**63 - 1))


def test_operations_on_sparsecores_are_listed_without_an_estimate():
    """As libtpu 0.0.50.1 writes an embedding's gather for v5p, shortened."""
    assert list(program.parse(SPARSECORE).computations) == ["gathering", "offloaded", "powers", "main"]
    found = summary(SPARSECORE)
    assert found.cycles == {"fusion kLoop": 21}
    assert (found.unknown, found.unpriced) == ({}, {"call on sparsecore": 1})


def test_a_limit_that_the_loop_carries_and_a_fused_condition():
    text = """
%compare (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%cond (s: (s32[], s32[])) -> pred[] {
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  ROOT %go = pred[] fusion(%i, %n), kind=kLoop, calls=%compare
}

%body (s: (s32[], s32[])) -> (s32[], s32[]) {
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  ROOT %out = (s32[], s32[]) tuple(%next, %n)
}

%outer_cond (s: (s32[], s32[])) -> pred[] {
  %s = (s32[], s32[]) parameter(0)
  %k = s32[] get-tuple-element(%s), index=0
  %three = s32[] constant(3)
  ROOT %go = pred[] compare(%k, %three), direction=LT
}

%outer_body (s: (s32[], s32[])) -> (s32[], s32[]) {
  %s = (s32[], s32[]) parameter(0)
  %k = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  %zero = s32[] constant(0)
  %first = (s32[], s32[]) tuple(%zero, %n)
  %inner = (s32[], s32[]) while(%first), condition=%cond, body=%body
  %kept = s32[] get-tuple-element(%inner), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%k, %one)
  ROOT %out = (s32[], s32[]) tuple(%next, %kept)
}

ENTRY %main () -> (s32[], s32[]) {
  %zero = s32[] constant(0)
  %ten = s32[] constant(10)
  %first = (s32[], s32[]) tuple(%zero, %ten)
  ROOT %outer = (s32[], s32[]) while(%first), condition=%outer_cond, body=%outer_body
}
"""
    assert [(loop.name, loop.trips) for loop in summary(text).loops] == [("outer", 3), ("inner", 5)]


def test_instructions_after_a_kernel_with_line_breaks_are_parsed():
    text = """
ENTRY %main (q: bf16[8,128]) -> bf16[8,128] {
  %q = bf16[8,128]{1,0} parameter(0)
  %kernel = (bf16[8,128]{1,0}, f32[8]{0}) custom-call(%q), custom_call_target="tpu_custom_call", attributes={metadata={
"a": "}
  %fake = f32[1] add(%q, %q)
}"
}}, metadata={op_name="jit(run)/while/splash_fwd/pallas_call" stack_frame_id=1}, backend_config={"config":{"body":"x
}
y"}}
  %out = bf16[8,128]{1,0} get-tuple-element(%kernel), index=0, frontend_attributes={kernel_metadata={
"a": "b"
}}
  ROOT %last = bf16[8,128]{1,0} negate(%out), backend_config={"window_config":{"estimated_cycles":"77"}}
}
"""
    assert list(program.parse(text).computations["main"]) == ["q", "kernel", "out", "last"]
    found = summary(text)
    assert found.total_cycles == 77
    (kernel,) = found.kernels
    assert (kernel.name, kernel.operands, kernel.results, kernel.times) == (
        "kernel", ("bf16[8,128]",), ("bf16[8,128]", "f32[8]"), 1,
    )  # fmt: skip
    assert kernel.op_name.endswith("splash_fwd/pallas_call")


def test_text_that_ends_too_early_is_refused():
    with pytest.raises(RuntimeError, match="ends inside: %a"):
        program.parse("ENTRY %main () -> f32[] {\n  %a = f32[] add(%b,\n")
    with pytest.raises(RuntimeError, match="without an ENTRY"):
        program.parse("%main () -> f32[] {\n  ROOT %a = f32[] constant(1)\n}\n")


CONDITIONAL = """
%cheap (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} add(%x, %x), backend_config={"window_config":{"estimated_cycles":"3"}}
}

%dear (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %b = f32[8]{0} tan(%x), backend_config={"window_config":{"estimated_cycles":"50"}}
}

ENTRY %main (x: f32[8], p: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %p = s32[] parameter(1)
  %odd = f32[8]{0} frobnicate(%x)
  ROOT %c = f32[8]{0} conditional(%p, %odd, %x, %x), branch_computations={%cheap, %dear, %cheap}
}
"""


def test_the_most_expensive_branch_counts_and_unknown_operations_are_listed():
    found = summary(CONDITIONAL)
    assert found.cycles == {"tan": 50}
    assert found.unknown == {"frobnicate": 1}
    runs = executions.walk(program.parse(CONDITIONAL))
    assert [e.times for e in runs if e.instruction.opcode in ("add", "tan")] == [0, 1, 0]


def test_a_branch_with_a_collective_weighs_what_it_sends():
    sends = CONDITIONAL.replace("add(%x, %x)", "all-reduce(%x), replica_groups={{0,1}}").replace("f32[8]", "f32[8192]")
    (reduced, tan, _) = [e for e in executions.walk(program.parse(sends)) if e.instruction.name in ("a", "b")]
    assert (reduced.times, tan.times) == (1, 0)


def test_an_opcode_costs_time_or_nothing():
    assert not costs._FREE & costs._PRICED


def test_a_call_counts_once_and_a_fusion_as_a_whole():
    text = """
%inner (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} add(%x, %x), backend_config={"window_config":{"estimated_cycles":"3"}}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %f = f32[8]{0} fusion(%x), kind=kLoop, calls=%inner, backend_config={"window_config":{"estimated_cycles":"20"}}
  %c = f32[8]{0} call(%f), to_apply=%inner
  %s = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%c), calls=%inner
  %d = f32[8]{0} async-done(%s)
  ROOT %z = f32[8]{0} sort(%d), dimensions={0}, to_apply=%compare
}
"""
    found = summary(text)
    assert found.cycles == {"fusion kLoop": 20, "add": 3}
    assert found.unpriced == {"sort": 1}


@pytest.mark.parametrize(
    ("type_", "arrays", "size"),
    [
        ("bf16[2,3]{1,0:T(8,128)(2,1)S(3)}", ["bf16[2,3]"], 12),
        ("((f32[4]{0}, /*index=1*/pred[]), s4[3]{0:E(4)}, u32[]{:S(2)})", ["f32[4]", "pred[]", "s4[3]", "u32[]"], 23),
        ("f8e4m3fn[16]{0}", ["f8e4m3fn[16]"], 16),
        ("token[]", ["token[]"], 0),
    ],
)
def test_types(type_, arrays, size):
    found = program.arrays_of(type_)
    assert [str(a) for a in found] == arrays
    assert sum(a.bytes for a in found) == size


def unrolled(fn, stacked, x, side, tail):
    """A runner that writes the layers of one loop out."""
    stacked = stacked._replace(params=jax.tree.map(lambda a, dtype: a.astype(dtype), stacked.params, fn.dtypes))
    x, _ = jax.lax.scan(lambda x, layer: (fn(layer, x, side)[0], None), x, stacked, unroll=4)
    return x if tail is None else tail.fn(tail.params, x, side, ()), stack.Outputs()


def scanned_and_unrolled(shape, **sizes):
    """A model of 4 layers, mostly matrix products: as a loop, and written out."""
    model = transformer.Transformer(
        vocab_size=256, num_layers=4, num_heads=4, num_kv_heads=4, attention="none", remat="full", **sizes
    )
    spec = streams.batch_spec(shape[0], length=shape[1])
    slice_ = slices.get("v4-8")
    bound = partitioner.Partitioner(strategies.fsdp(), slice=slice_, devices=compiling.devices_of(slice_))
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-4))
    scanned = analysis.analyze(bound.program(model, optimizer, spec, seed=0))
    with stack.use_runner(unrolled):
        flat = analysis.analyze(bound.program(model, optimizer, spec, seed=0))
    assert [loop.trips for loop in scanned.costs.loops] == [4, 4]
    assert not flat.costs.loops
    wire = [traffic.wire_bytes_by_axes(found.collectives) for found in (scanned, flat)]
    assert wire[0].keys() == wire[1].keys() == {("fsdp",)}
    # Written out, the last layer's weights are still there when its backward pass begins.
    gathered = sum(c.wire_bytes * c.times for c in scanned.collectives if c.kind == "all-gather" and c.loops)
    assert wire[0][("fsdp",)] - wire[1][("fsdp",)] == gathered // (2 * model.num_layers)
    return scanned, flat


@pytest.mark.slow
@pytest.mark.compiled("v4-8")
def test_matrix_products_of_a_scanned_and_an_unrolled_model_cost_the_same():
    scanned, flat = scanned_and_unrolled((16, 64), embed_dim=128, mlp_dim=512, head_dim=32)
    products = [found.costs.cycles["fusion kOutput"] for found in (scanned, flat)]
    # Written out, the last of 4 layers need not be computed again: at most 1 of 16 passes through a layer's products.
    assert 0.98 <= products[0] / products[1] <= 1 + 1 / 16


@pytest.mark.slow
@pytest.mark.compiled("v4-8")
def test_a_scanned_model_costs_little_more_than_an_unrolled_one():
    """A loop also slices its weights and stacks its residuals: 15 % of the cycles at these widths."""
    scanned, flat = scanned_and_unrolled((32, 128), embed_dim=256, mlp_dim=2048, head_dim=64)
    assert 1 < scanned.costs.total_cycles / flat.costs.total_cycles < 1.2


def test_an_attribute_that_an_instruction_lacks_is_named():
    loop = program.Instruction("w.1", "while", "(s32[])", "%state", "condition=%cond", is_root=False)
    assert loop.required("condition") == "cond"
    with pytest.raises(RuntimeError, match=re.escape("the program's %w.1 = while(...) has no attribute body")):
        loop.required("body")


def test_replica_groups_of_an_unknown_form_are_refused():
    summed = program.Instruction("r", "all-reduce", "f32[2]", "%x", "replica_groups=?", is_root=False)
    with pytest.raises(RuntimeError, match=re.escape("replica groups in an unknown format: ?")):
        replica_groups.device_groups(summed, 2)
