"""Collectives mapped back to mesh axes, with bytes that agree with a hand calculation."""

import dataclasses
import functools
import math
import pathlib
import re

import pytest

from core import logical, optimizers, slices
from core.errors import UserError
from models.decoder import experts, layers, transformer
from parallel import partitioner, strategies, strategy
from parallel.compiled import analysis, compiling, traffic
from parallel.compiled.hlo import costs, dataflow, executions, program, replica_groups
from parallel.verify.agreement import EXAMPLES
from tasks import streams

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
GRID = traffic.Grid({"data": 2, "fsdp": 2, "tensor": 4}, (0,) * 16)
FLAT = traffic.Grid({"fsdp": 16}, (0,) * 16)


def instruction(attributes, opcode="all-gather"):
    return program.Instruction("x", opcode, "f32[4]", "y", attributes, False)


def groups(attributes):
    return [tuple(g) for g in replica_groups.device_groups(instruction(attributes), 16)]


FSDP_GROUPS = [(8 * d + t, 8 * d + 4 + t) for d in range(2) for t in range(4)]


@pytest.mark.parametrize(
    ("attributes", "expected", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}, x=1", None, ("tensor",)),
        ("replica_groups=[4,4]<=[16], x=1", None, ("tensor",)),
        ("replica_groups=[8,2]<=[2,8]T(1,0), x=1", [(i, i + 8) for i in range(8)], ("data",)),
        ("replica_groups=[8,2]<=[2,2,4]T(0,2,1), x=1", FSDP_GROUPS, ("fsdp",)),
        ("replica_groups=[4,4]<=[4,4]T(1,0), x=1", [(i, i + 4, i + 8, i + 12) for i in range(4)], ("data", "fsdp")),
        ("channel_id=1, replica_groups={}, use_global_device_ids=true", [tuple(range(16))], ("data", "fsdp", "tensor")),
        (
            'replica_groups={}, dimensions={0}, backend_config={"a":[],"b":{"c":["1"]}}',
            [tuple(range(16))],
            ("data", "fsdp", "tensor"),
        ),
        ("channel_id=1, replica_groups={{0}}, dimensions={0}", [tuple(range(16))], ("data", "fsdp", "tensor")),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=4] {'b'}, x={1}", FSDP_GROUPS, ("fsdp",)),
        ("replica_groups=mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0)) {'b'}", [(i, i + 8) for i in range(8)], ("data",)),
        ("replica_groups=mesh['a'=4,'b'=4] {'b':(2)2}, x=1", [(i, i + 1) for i in range(0, 16, 2)], ("tensor",)),
        ("replica_groups=mesh['a'=4,'b'=4] {'a':(1)2}, x=1", [(i, i + 8) for i in range(8)], ("data",)),
        ("replica_groups=mesh[a=4,b=4] {a,b}, x=1", [tuple(range(16))], ("data", "fsdp", "tensor")),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, x=1", [(0, 1, 2, 3)], ("tensor",)),
        ("source_target_pairs={{0,8},{8,0},{1,9},{9,1}}", [(0, 8), (1, 9)], ("data",)),
        ("replica_groups={{0},{1}}, x=1", [(0,), (1,)], ()),
    ],
)
def test_groups_of_every_form_and_their_mesh_axes(attributes, expected, axes):
    found = groups(attributes)
    assert found == (expected or [tuple(range(i, i + 4)) for i in range(0, 16, 4)])
    assert traffic.varying_axes(found, GRID) == axes


def test_a_mesh_whose_devices_are_listed():
    text = "replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}, x=1"
    assert groups(text) == [(0, 2), (1, 3)]


def test_a_chip_outside_the_mesh_is_refused():
    with pytest.raises(ValueError, match=r"contains device 16, but the mesh .* has 16 devices"):
        traffic.varying_axes([(0, 16)], GRID)


def collectives(text, grid=GRID):
    module = program.parse(text)
    return traffic.collectives(module, executions.walk(module), grid)


@pytest.mark.parametrize(
    "attributes",
    [
        "all-reduce(%x), channel_id=1, replica_groups={{0,20}}, use_global_device_ids=true, to_apply=%add",
        "all-gather(%x), channel_id=1, replica_groups=[2,20]<=[40], dimensions={0}, use_global_device_ids=true",
        "collective-permute(%x), channel_id=1, source_target_pairs={{0,20},{20,0}}",
    ],
)
@pytest.mark.parametrize("slices_", [(0,) * 16, (0,) * 8 + (1,) * 8])
def test_a_program_with_a_chip_outside_the_mesh_is_refused(attributes, slices_):
    text = f"  %x = f32[8]{{0}} parameter(0)\n  ROOT %c = f32[8]{{0}} {attributes}\n}}\n"
    with pytest.raises(UserError, match=r"contains device \d+, but the mesh .* has 16 devices"):
        collectives("ENTRY %main (x: f32[8]) -> f32[8] {\n" + text, traffic.Grid({"data": 16}, slices_))


def one(opcode, attributes, *, operand="bf16[16,128]", result="bf16[16,128]"):
    (found,) = collectives(
        f"ENTRY %main (x: {operand}) -> {result} {{\n  %x = {operand}{{1,0}} parameter(0)\n"
        f"  ROOT %c = {result}{{1,0}} {opcode}(%x), channel_id=1, {attributes}, use_global_device_ids=true\n}}\n"
    )
    return found


X = 16 * 128 * 2  # bytes of bf16[16,128]
FOURS = "replica_groups=[4,4]<=[16]"


@pytest.mark.parametrize(
    ("opcode", "attributes", "result", "payload", "wire"),
    [
        ("all-gather", f"{FOURS}, dimensions={{0}}", "bf16[64,128]", 4 * X, 3 * X),
        ("all-gather", f"{FOURS}, dimensions={{1}}", "bf16[16,512]", 4 * X, 3 * X),
        ("reduce-scatter", f"{FOURS}, dimensions={{0}}, to_apply=%add", "bf16[4,128]", X, 3 * X // 4),
        ("all-reduce", f"{FOURS}, to_apply=%add", "bf16[16,128]", X, 2 * 3 * X // 4),
        ("all-to-all", f"{FOURS}, dimensions={{0}}", "bf16[16,128]", X, 3 * X // 4),
        ("collective-permute", "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", "bf16[16,128]", X, X // 4),
        ("collective-broadcast", FOURS, "bf16[16,128]", X, X),
    ],
)
def test_payload_and_wire_bytes(opcode, attributes, result, payload, wire):
    found = one(opcode, attributes, result=result)
    assert (found.kind, found.payload_bytes, found.wire_bytes) == (opcode, payload, wire)
    assert (found.group_size, found.axes, found.network, found.dtype) == (4, ("tensor",), "ICI", "bf16")
    assert (found.times, found.loops, found.is_overlapped) == (1, (), False)


ASYNC = """
ENTRY %main (x: f32[8], y: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %s = (f32[8]{0}, f32[8]{0}) all-reduce-start(%x), channel_id=1, replica_groups=[4,4]<=[16], to_apply=%add
  BETWEEN
  ROOT %d = f32[8]{0} all-reduce-done(%s)
}
"""


@pytest.mark.parametrize(
    ("between", "cycles"),
    [('%z = f32[8]{0} add(%y, %y), backend_config={"window_config":{"estimated_cycles":"9"}}', 9), ("", 0)],
)
def test_a_pair_is_overlapped_where_something_runs_between(between, cycles):
    (found,) = collectives(ASYNC.replace("BETWEEN", between))
    assert (found.kind, found.is_overlapped, found.cycles_beside) == ("all-reduce", cycles > 0, cycles)
    assert found.wire_bytes == 2 * 32 * 3 // 4


def test_a_gather_fused_with_computation_counts_once():
    """Two gathers of 7B's attention, cut from its forward loop; one is written three times."""
    by_itself, fused = collectives((FIXTURES / "fused_gather.hlo").read_text(), FLAT)
    assert not by_itself.is_overlapped
    assert fused.is_overlapped
    assert fused.cycles_beside == 563824
    for found in (by_itself, fused):
        assert (found.kind, found.axes, found.dtype) == ("all-gather", ("fsdp",), "bf16")
        assert found.wire_bytes == 15 * 256 * 32 * 128 * 2  # 15 other shards of [256, 32, 128]


def test_a_gather_that_is_hidden_by_a_loop_is_not_sent_inside_of_it():
    module = program.parse((FIXTURES / "fused_gather.hlo").read_text())
    run = executions.walk(module)
    loop = executions.Loop("while.1", "", 11)
    inside = [
        e._replace(loops=(*e.loops, loop), schedule={}, times=11) if e.wrappers and not dataflow.is_start(e) else e
        for e in run
    ]
    assert inside != run
    found = traffic.collectives(module, inside, FLAT)
    assert [(c.kind, c.times, c.loops) for c in found] == [("all-gather", 1, ())] * 2


def test_an_all_reduce_fused_with_its_slice_is_a_reduce_scatter():
    grid = traffic.Grid({"fsdp": 4, "tensor": 4}, (0,) * 16)
    (found,) = collectives((FIXTURES / "fused_scatter.hlo").read_text(), grid)
    assert (found.kind, found.axes, found.group_size) == ("reduce-scatter", ("fsdp",), 4)
    assert found.wire_bytes == 3 * 512 * 256 * 4 // 4
    assert found.sliced_bytes == 0


def test_a_send_between_slices_is_the_collective_that_it_stands_for():
    grid = traffic.Grid({"data": 2, "fsdp": 4}, (0,) * 4 + (1,) * 4)
    (found,) = collectives((FIXTURES / "between_slices.hlo").read_text(), grid)
    assert (found.kind, found.axes, found.network, found.group_size) == ("all-reduce", ("data",), "DCN", 2)
    assert found.wire_bytes == found.payload_bytes == 48 * 8 * 128 * 2
    assert found.is_overlapped


def test_a_group_that_spans_slices_is_on_dcn():
    grid = traffic.Grid({"data": 2, "fsdp": 8}, (0,) * 8 + (1,) * 8)
    text = ASYNC.replace("BETWEEN", "")
    assert collectives(text, grid)[0].network == "ICI"
    (found,) = collectives(text.replace("[4,4]<=[16]", "[8,2]<=[2,8]T(1,0)"), grid)
    assert (found.network, found.axes) == ("DCN", ("data",))


IN_EACH_SLICE = """
ENTRY %main (x: f32[8,128]) -> f32[16,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %a = f32[8,128]{1,0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0},{2,2}}
  %b = f32[8,128]{1,0} collective-permute(%a), channel_id=2, source_target_pairs={}
  ROOT %r = f32[16,128]{1,0} all-gather(%b), channel_id=3, replica_groups={{0,2},{1,3}}, dimensions={0}
}
"""


def test_a_program_for_several_slices_numbers_the_chips_of_one():
    """In this mesh the slices alternate along its second axis, so chip 2 of a slice is at position 4."""
    grid = traffic.Grid({"fsdp": 2, "stage": 2, "tensor": 2}, (0, 0, 1, 1) * 2)
    moved, unmoved, gathered = collectives(IN_EACH_SLICE, grid)
    assert (moved.axes, moved.network, moved.wire_bytes) == (("tensor",), "ICI", 8 * 128 * 4 * 2 // 4)
    assert (unmoved.axes, unmoved.network, unmoved.wire_bytes) == ((), "ICI", 0)
    assert (gathered.axes, gathered.network, gathered.group_size) == (("fsdp",), "ICI", 2)


def test_a_program_that_names_chips_of_several_slices_numbers_all():
    """Its permutation among the first chips, and its sum over all, are then of the whole mesh."""
    grid = traffic.Grid({"stage": 2, "fsdp": 4}, (0,) * 4 + (1,) * 4)
    text = IN_EACH_SLICE.replace("{{0,2},{1,3}}", "{{0,4},{1,5},{2,6},{3,7}}").replace(
        "ROOT %r", "%s = f32[8,128]{1,0} all-reduce(%b), channel_id=4, replica_groups={}, to_apply=%add\n  ROOT %r"
    )
    moved, _, summed, gathered = collectives(text, grid)
    assert moved.wire_bytes == 8 * 128 * 4 * 2 // 8
    assert (summed.axes, summed.network, summed.group_size) == (("stage", "fsdp"), "DCN", 8)
    assert (gathered.axes, gathered.network) == (("stage",), "DCN")


TO_HOST = """
ENTRY %main (x: bf16[1,8,128], y: f32[8], i: s32[]) -> f32[8] {
  %x = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %y = f32[8]{0} parameter(1)
  %i = s32[] parameter(2)
  %kept = bf16[4,8,128]{2,1,0:T(8,128)(2,1)S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %s = ((bf16[4,8,128]{2,1,0:T(8,128)(2,1)S(5)}, bf16[1,8,128]{2,1,0:T(8,128)(2,1)}, s32[]{:T(128)}), bf16[4,8,128]{2,1,0:T(8,128)(2,1)S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%kept, %x, %i)
  %z = f32[8]{0} add(%y, %y), backend_config={"window_config":{"estimated_cycles":"9"}}
  %d = bf16[4,8,128]{2,1,0:T(8,128)(2,1)S(5)} dynamic-update-slice-done(%s)
  %c = ((bf16[4,8,128]{2,1,0:T(8,128)(2,1)S(5)}, s32[]{:T(128)}), bf16[1,8,128]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) dynamic-slice-start(%d, %i), dynamic_slice_sizes={1,8,128}
  %e = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} dynamic-slice-done(%c)
  %f = (bf16[1,8,128]{2,1,0:T(8,128)(2,1)S(5)}, bf16[1,8,128]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%e)
  %g = bf16[1,8,128]{2,1,0:T(8,128)(2,1)S(5)} copy-done(%f)
  %h = bf16[1,8,128]{1,2,0:T(8,128)(2,1)} copy(%e)
  %k = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} copy(%g)
  ROOT %r = f32[8]{0} add(%z, %z)
}
"""  # noqa: E501 (as the compiler writes them)


def test_copies_between_chip_and_host_are_listed_with_what_they_move():
    """Out while something runs; back; out and back again as copies. A copy on the chip is not listed."""
    found = [(c.kind, c.network, c.wire_bytes, c.is_overlapped, c.cycles_beside) for c in collectives(TO_HOST)]
    moved = 8 * 128 * 2
    assert found == [
        ("to host", "PCIe", moved, True, 9),
        ("from host", "PCIe", moved, False, 0),
        ("to host", "PCIe", moved, False, 0),
        ("from host", "PCIe", moved, False, 0),
    ]
    without = costs.summarize(executions.walk(program.parse(TO_HOST))).unpriced
    assert without == {"copy": 1, "add": 1}  # that on the chip; and the sum, whose estimate this text leaves out


FUSED_TO_HOST = """
%update (k: bf16[4,8,128], x: bf16[1,8,128], i: s32[]) -> bf16[4,8,128] {
  %k = bf16[4,8,128]{2,1,0:S(5)} parameter(0)
  %x = bf16[1,8,128]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = bf16[4,8,128]{2,1,0:S(5)} dynamic-update-slice(%k, %x, %i)
}

ENTRY %main (k: bf16[4,8,128], x: bf16[1,8,128], i: s32[]) -> bf16[4,8,128] {
  %k = bf16[4,8,128]{2,1,0:S(5)} parameter(0)
  %x = bf16[1,8,128]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = bf16[4,8,128]{2,1,0:S(5)} fusion(%k, %x, %i), kind=kLoop, calls=%update
}
"""


def test_a_fusion_that_copies_to_the_host_is_traffic_and_nothing_else():
    (found,) = collectives(FUSED_TO_HOST)
    assert (found.kind, found.network, found.wire_bytes) == ("to host", "PCIe", 8 * 128 * 2)
    assert not costs.summarize(executions.walk(program.parse(FUSED_TO_HOST))).unpriced


@pytest.mark.slow  # the tests of the text above and of arithmetic are quick
@pytest.mark.compiled("v4-8")
def test_what_is_saved_on_the_host_crosses_pcie_twice_and_frees_memory():
    """Queries, keys, values and outputs of attention, of two layers; they leave and return beside other work."""
    model = dataclasses.replace(MODEL, num_layers=2, attention="plain")
    kept, moved, all_moved = (
        analyze(strategies.fsdp(), "v4-8", model=dataclasses.replace(model, remat=remat))
        for remat in ("attention", "attention_on_host", "attention_and_input_on_host")
    )
    copies = [c for c in moved.collectives if c.network == "PCIe"]
    sent, fetched = (sum(c.wire_bytes * c.times for c in copies if c.kind == kind) for kind in ("to host", "from host"))
    assert sent == fetched > 0
    assert not [c for c in kept.collectives if c.network == "PCIe"]
    assert kept.compiled.peak_bytes - moved.compiled.peak_bytes > sent / 2
    for one in (moved, all_moved):
        assert one.compiled.argument_bytes < one.compiled.peak_bytes < kept.compiled.peak_bytes


SLICED = """
%read (g: f32[64,8], i: s32[]) -> f32[4,8] {
  %g = f32[64,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %piece = f32[4,8]{1,0} dynamic-slice(%g, %i, %zero), dynamic_slice_sizes={4,8}
}

ENTRY %main (g: f32[64,8], h: f32[64,8], i: s32[]) -> (f32[4,8], f32[64,8]) {
  %g = f32[64,8]{1,0} parameter(0)
  %h = f32[64,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %sum = (f32[64,8]{1,0}, f32[64,8]{1,0}) all-reduce(%g, %h), channel_id=1, replica_groups=[1,16]<=[16], to_apply=%add
  %a = f32[64,8]{1,0} get-tuple-element(%sum), index=0
  %b = f32[64,8]{1,0} get-tuple-element(%sum), index=1
  %piece = f32[4,8]{1,0} fusion(%a, %i), kind=kLoop, calls=%read
  %all = f32[64,8]{1,0} negate(%b)
  ROOT %out = (f32[4,8]{1,0}, f32[64,8]{1,0}) tuple(%piece, %all)
}
"""


def asynchronous(text):
    """The reduction as a start and an end."""
    at = next(line for line in text.splitlines() if " all-reduce(" in line)
    type_ = at.split(" = ")[1].split(" all-reduce")[0]
    start = at.replace("%sum", "%started").replace("all-reduce(", "all-reduce-start(")
    return text.replace(at, f"{start}\n  %sum = {type_} all-reduce-done(%started)")


@pytest.mark.parametrize("text", [SLICED, asynchronous(SLICED)], ids=["one instruction", "start and end"])
def test_a_reduction_of_which_only_a_slice_is_read_is_noticed(text):
    (found,) = collectives(text)
    assert (found.kind, found.payload_bytes, found.sliced_bytes) == ("all-reduce", 2 * 64 * 8 * 4, 64 * 8 * 4)


MODEL = transformer.Transformer(
    vocab_size=1000, num_layers=4, embed_dim=256, mlp_dim=768, num_heads=8, num_kv_heads=4, head_dim=32,
    remat="full", attention="plain",
)  # fmt: skip
ROWS, LENGTH = 16, 64


def analyze(tables, slice_name, *, model=MODEL, **options):
    slice_ = slices.get(slice_name)
    spec = streams.batch_spec(ROWS, length=LENGTH)
    bound = partitioner.Partitioner(tables, slice=slice_, devices=compiling.devices_of(slice_))
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-4))
    return analysis.analyze(bound.program(model, optimizer, spec, seed=0, **options))


def both(axes, kind):
    """Inside the loop over layers, and outside for embedding and head."""
    return {(axes, kind, "loop"), (axes, kind, "once")}


# What each strategy sends, by mesh axis and kind, inside the loop over layers or outside; what is under 4 KiB per
# execution (metrics, norms) left out. A line that appears or disappears is a change of the strategy or of the compiler.
WEIGHTS_OVER_FSDP = both("fsdp", "all-gather")
ROWS_OVER_FSDP = {("fsdp", "all-to-all", "once")}  # gradients of the embedding's rows, to the chips that store columns
PIECES_OF_GRADIENTS = both("fsdp", "reduce-scatter") | {("fsdp", "all-reduce", "loop")}
# Activations alone; the last stage's results go to all stages, and the vocabulary is split over them.
BETWEEN_STAGES = both("stage", "collective-permute")
ONCE_OVER_FSDP = {("fsdp", kind, "once") for kind in ("all-gather", "all-reduce", "reduce-scatter")}
SIGNATURES = {
    "data_parallel": both("data", "all-reduce"),
    "zero1": both("data", "all-reduce") | {("data", "all-gather", "once")},  # the updated parameters
    "fsdp": WEIGHTS_OVER_FSDP | ROWS_OVER_FSDP | both("fsdp", "all-reduce"),
    "fsdp_overlapped": WEIGHTS_OVER_FSDP
    | ROWS_OVER_FSDP
    | both("fsdp", "collective-permute")  # gradients of layers; those of the first one after the loop
    | {("fsdp", "all-reduce", "once")},
    "hsdp": WEIGHTS_OVER_FSDP | ROWS_OVER_FSDP | both("data fsdp", "all-reduce") | {("data", "all-reduce", "once")},
    "tensor": both("tensor", "all-reduce"),
    "fsdp_tensor": WEIGHTS_OVER_FSDP
    | ROWS_OVER_FSDP
    | PIECES_OF_GRADIENTS
    | both("tensor", "all-reduce")
    | {("fsdp", "all-reduce", "once")},
    "sequence_tensor": WEIGHTS_OVER_FSDP
    | ROWS_OVER_FSDP
    | PIECES_OF_GRADIENTS
    | both("tensor", "all-gather")
    | both("tensor", "reduce-scatter")
    | {("fsdp tensor", "all-reduce", "once")},  # gradients of the norms
    "context": both("fsdp sequence", "all-gather")
    | ROWS_OVER_FSDP
    | {("sequence", "all-to-all", "once")}
    | both("fsdp sequence", "all-reduce")
    | {("sequence", kind, "loop") for kind in ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")},
    "context_ring": both("fsdp sequence", "all-gather")
    | ROWS_OVER_FSDP
    | {("sequence", "all-to-all", "once")}
    | both("fsdp sequence", "all-reduce")
    | {("sequence", "collective-permute", "loop")},  # keys and values, and their gradients
    "mesh3d": WEIGHTS_OVER_FSDP
    | ROWS_OVER_FSDP
    | both("data fsdp", "all-reduce")
    | both("tensor", "all-reduce")
    | {("data", "all-reduce", "once")},
    "multislice": WEIGHTS_OVER_FSDP | ROWS_OVER_FSDP | both("fsdp", "all-reduce") | both("data", "all-reduce"),
    # Of a decoder without experts, whose matrices of attention are stored over expert, too.
    "experts": WEIGHTS_OVER_FSDP
    | {("fsdp expert", "all-gather", "loop"), ("expert", "all-reduce", "once")}
    | both("fsdp expert", "all-reduce")
    | {("fsdp expert", kind, "once") for kind in ("all-to-all", "collective-permute")}
    | both("tensor", "all-reduce"),
    "pipeline": BETWEEN_STAGES | {(axis, "all-reduce", "once") for axis in ("stage", "data")},
    "pipeline_data": BETWEEN_STAGES | {(axis, "all-reduce", "once") for axis in ("stage", "data")},
    "pipeline_fsdp": BETWEEN_STAGES
    | ONCE_OVER_FSDP
    | ROWS_OVER_FSDP
    | both("stage", "all-reduce"),  # 1F1B: the tail loops
    "pipeline_experts": BETWEEN_STAGES
    | ONCE_OVER_FSDP
    | {("expert", kind, "once") for kind in ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")}
    | {("fsdp expert", kind, "once") for kind in ("all-reduce", "collective-permute")}
    | both("stage tensor", "all-reduce")
    | both("tensor", "all-reduce"),
    "pipeline_fsdp_tensor": BETWEEN_STAGES
    | ONCE_OVER_FSDP
    | ROWS_OVER_FSDP
    | {("stage tensor", "all-reduce", "once"), ("tensor", "all-reduce", "loop")}
    | {("", "collective-permute", "once")},  # parts of the circular order that stay
}
# Of a mixture, in a step: capacity sends the slots of the experts there and back, forward, recomputed and backward.
EXCHANGED = {
    1.0: {
        ("expert", "all-to-all", "bf16"): 6 * [ROWS // 4 * 4 * 32 * MODEL.embed_dim * 2]
    },  # 4 experts x 32 slots of a row
    None: {
        ("expert", "all-gather", "bf16"): 3 * [ROWS * LENGTH * MODEL.embed_dim * 2],
        ("expert", "reduce-scatter", "bf16"): 2 * [ROWS * LENGTH * MODEL.embed_dim * 2],
    },
}
BETWEEN_SLICES = {"multislice": {"data"}, "pipeline_data": {"stage"}}


@pytest.fixture(scope="module")
def compiled_for_a_slice():
    return functools.cache(lambda name: analyze(EXAMPLES[name].strategy, EXAMPLES[name].slice))


LARGE_BYTES = 4096


def signature(found):
    return {(" ".join(c.axes), c.kind, "loop" if c.loops else "once") for c in found if c.payload_bytes >= LARGE_BYTES}


QUICK = ("fsdp",)  # which another quick test compiles too


def some_quick(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.compiled("v4-8", "v4-32", "2xv4-16")
@pytest.mark.parametrize("name", some_quick(EXAMPLES))
def test_signature(name, compiled_for_a_slice):
    found = compiled_for_a_slice(name).collectives
    assert signature(found) == SIGNATURES[name]
    large = [c for c in found if c.payload_bytes >= LARGE_BYTES]
    assert {" ".join(c.axes) for c in large if c.network == "DCN"} == BETWEEN_SLICES.get(name, set())


@pytest.mark.slow  # tests/parallel/verify has quick tests of decoders
@pytest.mark.compiled("v4-32")
def test_heads_of_two_sizes_are_sharded_as_those_of_one_size():
    """Layers with windows alternate with layers of wider heads, whose values are their keys."""
    mixers = layers.Attention(window=32), layers.Attention(head_dim=64, num_kv_heads=8, values_are_keys=True)
    example = EXAMPLES["fsdp_tensor"]
    found = analyze(example.strategy, example.slice, model=dataclasses.replace(MODEL, mixer=mixers))
    assert signature(found.collectives) == SIGNATURES["fsdp_tensor"]
    whole = MODEL.embed_dim * 8 * 64 * 2  # the query matrix of the wider heads, in bfloat16
    gathers = [c.payload_bytes for c in found.collectives if c.kind == "all-gather" and c.axes == ("fsdp",)]
    assert whole // 4 in gathers  # each chip has the heads of its part of `tensor`
    assert max(gathers) < whole


@pytest.mark.slow  # tests/parallel/verify/test_experts_agree.py is quick
@pytest.mark.covers("M18", "M19")
@pytest.mark.compiled("v4-8")
@pytest.mark.parametrize("capacity", [1.0, None])
def test_tokens_are_exchanged_over_the_axis_of_experts_and_matrices_of_experts_stay(capacity):
    routed = experts.Experts(num_experts=4, top_k=2, capacity_factor=capacity)
    found = analyze(
        strategies.experts(expert=4), "v4-8", model=dataclasses.replace(MODEL, feed_forward=routed)
    ).collectives
    matrix = MODEL.embed_dim * MODEL.mlp_dim * 2  # of one expert, in bfloat16
    assert not [c for c in found if c.loops and c.payload_bytes == 4 * matrix]
    for (axes, kind, dtype), payloads in EXCHANGED[capacity].items():
        sent = [c for c in found if (" ".join(c.axes), c.kind, c.dtype) == (axes, kind, dtype) and c.loops]
        tokens = [c for c in sent if c.payload_bytes == payloads[0]]
        assert [c.payload_bytes for c in tokens] == payloads
        assert {c.times for c in tokens} == {MODEL.num_layers}
        assert capacity is None or any(c.is_overlapped for c in tokens)


@pytest.mark.covers("T02")
@pytest.mark.compiled("v4-8", "v4-32", "2xv4-16")
@pytest.mark.parametrize("name", some_quick(EXAMPLES))
def test_gradients_of_the_embedding_are_summed_in_float32(name, compiled_for_a_slice):
    """The only sum by index of the compiled program, in the pieces in which the parameter is stored."""
    example = EXAMPLES[name]
    text = compiled_for_a_slice(name).compiled.hlo
    ((dtype, shape),) = re.findall(r"= (\w+)\[([\d,]+)\]\S* scatter\(", text)
    degrees = strategy.resolve(example.strategy, slices.get(example.slice))
    split = [logical.shards(example.strategy.param_rules[axis], degrees) for axis in ("vocab", "embed")]
    stored = (MODEL.stored_vocab_size // split[0], MODEL.embed_dim // split[1])
    assert (dtype, tuple(map(int, shape.split(",")))) == ("f32", stored)


# In microbatches: inside their loop, or inside that over layers within it; outside.
ACCUMULATED = {
    "hsdp": (
        strategies.hsdp(data=2),
        {},
        {("fsdp", kind, "loop") for kind in ("all-gather", "all-to-all", "all-reduce", "reduce-scatter")}
        | {("data", "all-reduce", "once")},
    ),
    "gathered once": (strategies.fsdp(), {"gather_once": True}, ONCE_OVER_FSDP),
}


@pytest.mark.slow
@pytest.mark.covers("T03")
@pytest.mark.compiled("v4-8")
@pytest.mark.parametrize("name", ["hsdp", "gathered once"])
def test_signature_of_accumulation(name):
    """Over axes along which parameters are whole, or are made whole, gradients are reduced once, behind the loop."""
    tables, options, expected = ACCUMULATED[name]
    found = analyze(tables, "v4-8", accum_steps=2, **options).collectives
    assert signature(found) == expected
    if name == "hsdp":
        over_data = [a for c in found if c.axes == ("data",) for a in c.arrays if a.dims]
        assert sum(math.prod(a.dims) for a in over_data) == matrices() // 2 + norms()  # of pieces over fsdp 2


def matrices():
    """Entries of the parameters that strategies split."""
    return MODEL.num_layers * layer_bytes() // 2 + 2 * MODEL.stored_vocab_size * MODEL.embed_dim


def norms():
    """Entries of the parameters that every chip holds."""
    return (2 * MODEL.num_layers + 1) * MODEL.embed_dim


def layer_bytes():
    """Of the matrices of one layer, in bfloat16."""
    e, m, h, n, k = MODEL.embed_dim, MODEL.mlp_dim, MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_width
    return 2 * (2 * e * h * k + 2 * e * n * k + 3 * e * m)


@pytest.mark.compiled("v4-32")
def test_fsdp_gathers_each_layer_forward_and_again_backward(compiled_for_a_slice):
    found = compiled_for_a_slice("fsdp").collectives
    gathers = [c for c in found if c.kind == "all-gather" and c.loops]
    assert sum(c.wire_bytes * c.times for c in gathers) == 2 * MODEL.num_layers * layer_bytes() * 15 // 16
    assert all(c.dtype == "bf16" for c in gathers)


@pytest.mark.slow  # the signature of fsdp is quick
@pytest.mark.compiled("v4-32")
def test_data_parallel_adds_up_every_gradient_once(compiled_for_a_slice):
    found = compiled_for_a_slice("data_parallel").collectives
    assert sum(math.prod(a.dims) * c.times for c in found for a in c.arrays if a.dims) == matrices() + norms()
