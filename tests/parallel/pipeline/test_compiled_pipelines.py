"""Pipelines compiled by the TPU compiler: no weights are sent inside ticks, and saved values."""

import dataclasses
import functools
import math

import jax
import pytest
from jax.sharding import PartitionSpec as P

from core import optimizers, slices
from models.decoder import transformer
from parallel import partitioner, strategies
from parallel.compiled import analysis, compiling
from parallel.compiled.hlo import executions, program
from parallel.pipeline import region, schedules
from tasks import streams

MODEL = transformer.Transformer(
    vocab_size=512, num_layers=16, embed_dim=128, mlp_dim=256, num_heads=4, num_kv_heads=4, head_dim=32,
    remat="full", attention="plain",
)  # fmt: skip
LENGTH = 512
MAKE = {
    "gpipe": schedules.gpipe,
    "1F1B": schedules.one_f_one_b,
    "circular": functools.partial(schedules.circular, repeats=2),
    "interleaved": functools.partial(schedules.interleaved, repeats=2),
    "zero-bubble": schedules.zero_bubble,
}


def compile_(name, microbatches, stages=4, remat="full", slice_name="v4-32", **degrees):
    """With fsdp 4 on v4-32, a row of every chip in a microbatch."""
    rows = 4 * microbatches
    spec = streams.batch_spec(rows, length=LENGTH)
    make = strategies.pipeline_fsdp_tensor if degrees else strategies.pipeline_fsdp
    tables = make(stage=stages, schedule=MAKE[name](num_microbatches=microbatches), **degrees)
    slice_ = slices.get(slice_name)
    bound = partitioner.Partitioner(tables, slice=slice_, devices=compiling.devices_of(slice_))
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-4))
    return analysis.analyze(bound.program(dataclasses.replace(MODEL, remat=remat), optimizer, spec, seed=0))


@pytest.fixture(scope="module")
def analyze():
    return functools.cache(compile_)


def inside_of_ticks(found):
    """{(mesh axes, kind)} of what travels inside of a loop."""
    return {(" ".join(c.axes), c.kind) for c in found.collectives if c.loops}


@pytest.mark.slow
@pytest.mark.covers("M12")
@pytest.mark.compiled("v4-32")
@pytest.mark.parametrize("name", MAKE)
def test_weights_are_gathered_once_and_gradients_reduced_once(name, analyze):
    found = analyze(name, 8)
    trips = {loop.trips for loop in found.costs.loops}
    schedule = MAKE[name](num_microbatches=8)
    ticks = {"gpipe": {11}, "circular": {19}, "1F1B": {3, 8}, "interleaved": {7, 4}, "zero-bubble": {3, 5}}[name]
    assert trips == ticks | {MODEL.num_layers // schedule.layer_unit(4)}  # and the layers that a stage runs in one
    if isinstance(schedule, schedules.OneFOneB):
        assert ticks == {phase.ticks for _, phases in schedule.rounds(4) for phase in phases}
    named = {kind for kind, scope in schedules.SCOPES.items() if f"/{scope}/" in found.compiled.hlo}  # in profiles
    assert named == set(schedule.starts(4)) | ({"T"} if isinstance(schedule, schedules.OneFOneB) else set())
    inside = inside_of_ticks(found)
    assert not {pair for pair in inside if pair[0] != "stage"}
    assert {kind for _, kind in inside} == {"collective-permute"} | (
        {"all-reduce"} if isinstance(schedule, schedules.OneFOneB) else set()
    )
    activation = LENGTH * MODEL.embed_dim * 4
    assert max(c.payload_bytes for c in found.collectives if c.loops) <= 2 * activation
    e, m, h = MODEL.embed_dim, MODEL.mlp_dim, MODEL.num_heads * MODEL.head_width
    a_stage = MODEL.num_layers // 4 * (4 * e * h + 3 * e * m)
    head = 2 * e * MODEL.stored_vocab_size // 4  # and the embedding
    gathered = sum(c.payload_bytes for c in found.collectives if c.axes == ("fsdp",) and c.kind == "all-gather")
    assert gathered == 2 * a_stage + 4 * head  # layers in bfloat16, the two tables of the vocabulary in float32


@pytest.mark.slow
@pytest.mark.compiled("v4-32")
def test_only_tensor_collectives_and_activations_are_sent_inside_ticks(analyze):
    found = analyze("gpipe", 8, stages=2, tensor=2)
    inside = [c for c in found.collectives if c.loops]
    assert {c.axes for c in inside} == {("stage",), ("tensor",)}
    assert max(c.payload_bytes for c in inside if c.axes == ("tensor",)) <= 2 * LENGTH * MODEL.embed_dim * 4


@pytest.mark.slow
@pytest.mark.compiled("2xv4-8")
@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_between_slices_each_chip_of_tensor_sends_its_part(name, analyze):
    found = analyze(name, 4, stages=1, slice_name="2xv4-8", slices=2, tensor=2)
    sent = [c for c in found.collectives if c.loops and c.kind == "collective-permute"]
    assert {c.network for c in sent} == {"DCN"}
    rows = 4 * 4 // 4 // 2  # of a microbatch, with fsdp 2
    whole = rows * LENGTH * MODEL.embed_dim * 2
    assert {c.payload_bytes for c in sent} == {whole // 2}


@pytest.mark.slow
@pytest.mark.compiled("v4-32")
def test_left_to_the_partitioner_weights_and_gradients_travel_at_every_tick(monkeypatch):
    """What the test above looks for is there to be found, were the axes of the rows automatic."""

    def automatic(*args, original=region.region):
        at = original(*args)
        none = jax.tree.map(lambda spec: P(), at.stored, is_leaf=lambda a: isinstance(a, P))
        return at._replace(rows=(), stored=none, held=none)

    monkeypatch.setattr(region, "region", automatic)
    inside = inside_of_ticks(compile_("gpipe", 8))
    assert ("fsdp", "all-gather") in inside
    assert inside & {("fsdp", "all-reduce"), ("fsdp", "reduce-scatter")}


@pytest.mark.slow
@pytest.mark.compiled("v4-32")
def test_memory_of_1f1b_does_not_grow_with_layers_times_microbatches(analyze):
    """From 8 to 32 microbatches: gpipe keeps inputs of 4 layers for each, 1F1B what enters alone."""
    names = ("gpipe", "1F1B")
    grown = {name: analyze(name, 32).compiled.temp_bytes - analyze(name, 8).compiled.temp_bytes for name in names}
    one = 24 * LENGTH * MODEL.embed_dim * 2  # the inputs of a layer for 24 microbatches of one row
    assert grown["gpipe"] > 2 * one
    assert grown["1F1B"] < 1.2 * one  # the microbatches wait on the first stage


@pytest.mark.slow
@pytest.mark.compiled("v4-32")
@pytest.mark.parametrize("name", ["gpipe", "1F1B", "interleaved"])
def test_loops_carry_what_remat_saves_of_the_microbatches_in_flight(name, analyze):
    """The input of a layer and the outputs of its products but the last, for every place and one more for bubbles."""
    schedule = MAKE[name](num_microbatches=8)
    saved = (MODEL.num_layers // schedule.layer_unit(4), schedule.kept(4) + 1, 1, LENGTH)
    module = program.parse(analyze(name, 8, remat="projections").compiled.hlo)
    loops = [e.instruction.arrays for e in executions.walk(module) if e.instruction.opcode == "while"]
    carried = max(sum(math.prod(a.dims) for a in arrays if a.dims[:4] == saved and len(a.dims) > 4) for arrays in loops)
    e, m, h = MODEL.embed_dim, MODEL.mlp_dim, MODEL.num_heads * MODEL.head_width
    assert carried == math.prod(saved) * (2 * e + 3 * h + 2 * m)
