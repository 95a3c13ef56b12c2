"""Arithmetic against compiled results, against shapes, and for consistency."""

import dataclasses
import re
from pathlib import Path

import jax
import pytest

from core import optimizers, slices
from core.slices import GIB
from models import trm
from models.decoder import experts, transformer
from models.decoder.layer_inputs import LayerInputs
from models.decoder.layers import Mlp
from parallel import strategies
from parallel.compiled import report
from parallel.partitioner import Partitioner
from parallel.pipeline import schedules, stage
from parallel.planning import arithmetic, model_trace
from parallel.planning.sharded_state import Refused, ShardedState, Step
from tasks import streams

FULL = Step("full", 32, 1)
PAGE = (Path(__file__).parents[3] / "docs" / "results" / "arithmetic.md").read_text()


def piped(schedule):
    return strategies.pipeline_fsdp(stage=4, fsdp=4, schedule=schedule)


# Peak GiB and GiB on the wire of Valkyrie-7B, 32 x 2048, full rematerialization, v4-32: docs/results/compiled-7b.md.
# After them the ratio of arithmetic to each: docs/results/arithmetic.md. `context`, `mesh3d`, `tensor` and `hsdp` were
# compiled while the gradient of the embedding was still reduced as a whole table.
COMPILED = {
    "fsdp": (strategies.fsdp(), 8.41, 46.18, 1.11, 1.00),
    "sequence_tensor": (strategies.sequence_tensor(tensor=4), 8.35, 40.41, 1.05, 0.92),
    "context": (strategies.context(sequence=4), 8.71, 64.61, 1.07, 0.99),
    "fsdp_tensor": (strategies.fsdp_tensor(tensor=4), 11.02, 37.39, 1.10, 0.99),
    "mesh3d": (strategies.mesh3d(data=2, tensor=2), 15.39, 30.34, 1.12, 0.84),
    "tensor": (strategies.tensor(), 25.50, 151.88, 1.00, 0.99),
    "hsdp": (strategies.hsdp(data=4), 27.10, 41.99, 1.13, 0.77),
    "gpipe": (piped(schedules.gpipe(num_microbatches=8)), 15.35, 9.9, 1.01, 0.75),
    "1F1B": (piped(schedules.one_f_one_b(num_microbatches=8)), 15.49, 9.9, 0.99, 0.75),
    "circular": (piped(schedules.circular(num_microbatches=8, repeats=4)), 16.72, 11.45, 0.92, 0.71),
}


@pytest.fixture(scope="module")
def two_layers(trace_of):
    """Two layers of 7B with 32 rows on a v4-32."""
    return trace_of(transformer.preset("7b", num_layers=2, remat="full"), remats=["full", "none"])


def test_what_is_saved_on_the_host_takes_pcie_and_no_hbm(trace_of):
    """Two layers of 7B, 2 rows of 2,048 tokens on a chip; attention's inputs and output are 64 MiB a row and layer."""
    known = trace_of(transformer.preset("7b", num_layers=2), remats=["attention", "attention_on_host", "full"])
    sharded = ShardedState(strategies.fsdp(), known)
    kept, moved, full = (arithmetic.estimate(sharded, Step(remat, 32, 1)) for remat in known.works)
    (host,) = [axis for axis in moved.time.traffic if axis.network == "PCIe"]
    assert host.wire_bytes / GIB == pytest.approx(2 * 2 * 2 * 64 / 1024, rel=0.01)  # there and back, layers, rows
    assert host.seconds == pytest.approx(host.wire_bytes / 16e9)
    assert not [axis for axis in kept.time.traffic if axis.network == "PCIe"]
    assert moved.hbm["saved activations"] == pytest.approx(full.hbm["saved activations"], rel=0.01)
    freed = kept.hbm["saved activations"] - moved.hbm["saved activations"]
    assert host.wire_bytes == pytest.approx(2 * freed)
    assert moved.time.compute == kept.time.compute < full.time.compute
    assert (moved.host_bytes, kept.host_bytes) == (freed, 0)
    arithmetic.check_fits(moved, known.slice)
    many = moved._replace(host_bytes=1.1 * known.slice.chip.host_memory_bytes)
    with pytest.raises(Refused, match=r"keeps 104\.2 GiB for each chip on its host, which has 94\.8"):
        arithmetic.check_fits(many, known.slice)


@pytest.mark.covers("X05")
@pytest.mark.parametrize("name", COMPILED)
def test_hbm_and_traffic_of_7b_are_near_the_compiled_ones(seven_b, name):
    tables, peak, wire, peak_ratio, wire_ratio = COMPILED[name]
    found = arithmetic.estimate(ShardedState(tables, seven_b), FULL)
    assert found.peak_bytes / GIB / peak == pytest.approx(peak_ratio, rel=0.02)
    sent = sum(axis.wire_bytes for axis in found.time.traffic) / GIB
    assert sent / wire == pytest.approx(wire_ratio, rel=0.02)
    assert peak_ratio < arithmetic.REFUSED_FROM
    (row,) = re.findall(rf"^\| `{name}` \| (.*) / (.*) = (.*) \| (.*) / (.*) = (.*) \|$", PAGE, re.MULTILINE)
    shown = [found.peak_bytes / GIB, peak, found.peak_bytes / GIB / peak, sent, wire, sent / wire]
    assert [float(cell) for cell in row] == pytest.approx(shown, rel=0.02)


def test_a_pipeline_of_one_stage_costs_what_the_step_without_a_pipeline_costs(two_layers):
    one_stage = strategies.pipeline_fsdp(stage=1, schedule=schedules.interleaved(num_microbatches=8, repeats=4))
    for step in (FULL, Step("none", 32, 2)):
        found, wanted = (arithmetic.estimate(ShardedState(t, two_layers), step) for t in (one_stage, strategies.fsdp()))
        assert found == wanted
    ShardedState(one_stage, two_layers).check(FULL)  # 32 rows would not divide over 16 groups x 8 microbatches


@pytest.mark.parametrize(("slice_name", "wire"), [("v4-32", 3.77), ("v4-8", 2.34)])
def test_traffic_of_embedding_gradients_matches_the_compiled_step(trace_of, slice_name, wire):
    """Two layers of the 7B, `fsdp`: a third of what is sent belongs to the embedding and the output matrix."""
    model = transformer.preset("7b", num_layers=2, remat="full")
    found = arithmetic.estimate(
        ShardedState(strategies.fsdp(), trace_of(model, slice_name=slice_name, remats=["full"])), FULL
    )
    assert sum(axis.wire_bytes for axis in found.time.traffic) / GIB / wire == pytest.approx(1.0, rel=0.005)


def test_of_a_table_of_inputs_of_layers_only_what_was_looked_up_is_sent(trace_of):
    """And its gradient: 32 rows of 2,048 positions in 2 bytes, each way, of which a chip keeps a sixteenth."""
    found = {}
    for width in (64, 128):
        model = transformer.preset("7b", num_layers=2, remat="full", tied=True, layer_inputs=LayerInputs(width=width))
        traffic = arithmetic.estimate(
            ShardedState(strategies.fsdp(), trace_of(model, remats=["full"])), FULL
        ).time.traffic
        found[width] = sum(axis.wire_bytes for axis in traffic)
    sent = 2 * 32 * 2048 / 16 * 2 * 64 * 2 * 15 / 16
    projection = 4096 * 2 * 64 * 2 + 2 * 2 * 4096 * 64 * 2  # gathered and reduced, over at most 16 chips
    assert 0 < found[128] - found[64] - sent < 6 * projection


def test_a_replica_s_share_of_the_embedding_is_summed_in_float32(trace_of, two_layers):
    """Over data: twice 3/4 of the piece of a chip, as large as 4 bytes make it; over fsdp 3/4 of its own rows."""
    found = {}
    larger = trace_of(transformer.preset("7b", num_layers=2, remat="full", vocab_size=64000), remats=["full"])
    for vocab, known in {32000: two_layers, 64000: larger}.items():
        traffic = arithmetic.estimate(ShardedState(strategies.hsdp(data=4), known), FULL).time.traffic
        found[vocab] = {axis.axes: axis.wire_bytes for axis in traffic}
    more = {axes: found[64000][axes] - found[32000][axes] for axes in found[32000]}
    table = 32000 * 4096
    output = 2 * 3 / 4 * table * 2 / 4  # the matrix's gradient, in the dtype of computation
    assert more[("data",)] == pytest.approx(output + 2 * 3 / 4 * table * 4 / 4, rel=1e-6)
    assert more[("fsdp",)] == pytest.approx((2 + 1) * 3 / 4 * table * 2, rel=1e-6)


@pytest.mark.covers("X06")
@pytest.mark.parametrize(("capacity", "sent"), [(1.25, 3 / 4 * 2 * 1.25), (None, 3)])
def test_tokens_go_to_their_experts_and_back_in_both_passes(trace_of, capacity, sent):
    """Slots of 4 chips' experts go to 3 others in 4; without a capacity, every chip gets the tokens of 3 others."""
    one = experts.Experts(num_experts=8, top_k=2, capacity_factor=capacity)
    sizes = {"num_layers": 2, "embed_dim": 128, "mlp_dim": 192, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 384}
    known = trace_of(transformer.Transformer(**sizes, feed_forward=one), length=256, remats=["none"])
    without = dataclasses.replace(known, works={"none": dataclasses.replace(known.works["none"], exchanges=())})
    found, others = (
        arithmetic.estimate(ShardedState(strategies.experts(expert=4), trace), Step("none", 32, 1)).time.traffic
        for trace in (known, without)
    )
    (mine,), (rest,) = ([axis.wire_bytes for axis in each if axis.axes == ("expert",)] for each in (found, others))
    tokens = 2 * 2 * 256 * 128 * 2  # of 2 layers, 2 rows on a chip, in bfloat16
    assert mine - rest == pytest.approx(4 * sent * tokens)  # to the experts and back, twice
    assert [axis for axis in found if axis.axes != ("expert",)] == [a for a in others if a.axes != ("expert",)]


def test_updated_parameters_are_gathered_where_only_the_optimizer_s_state_is_sharded(two_layers):
    states = [ShardedState(tables, two_layers) for tables in (strategies.zero1(), strategies.data_parallel())]
    (sharded,), (whole,) = (arithmetic.estimate(state, Step("none", 32, 1)).time.traffic for state in states)
    count = sum(leaf.size for leaf, of in states[0].params if "norm" not in of.names)
    assert (sharded.axes, sharded.wire_bytes - whole.wire_bytes) == (("data",), pytest.approx(15 / 16 * 4 * count))


def test_seconds_of_7b_are_near_the_compiled_ones(seven_b):
    found = arithmetic.estimate(ShardedState(strategies.fsdp(), seven_b), FULL)
    assert found.time.compute == pytest.approx(981e6 / 1.05e9, rel=0.1)
    flops = transformer.preset("7b").flops_per_token(2048) * 2048
    assert seven_b.works["none"].flops + 6 * 32 * 2048**2 / 2 * 4096 * 2 == pytest.approx(flops, rel=0.05)
    assert seven_b.works["full"].flops > 1.2 * seven_b.works["none"].flops


# Million cycles of Valkyrie-7B, compiled for v4-32 (docs/results/pipelines.md); stage 4, fsdp 4.
CYCLES = [
    (schedules.gpipe(num_microbatches=8), "full", 1411),
    (schedules.one_f_one_b(num_microbatches=8), "full", 1415),
    (schedules.circular(num_microbatches=8, repeats=4), "full", 1177),
    (schedules.circular(num_microbatches=8, repeats=4), "projections", 1033),
    (schedules.gpipe(num_microbatches=32), "full", 4356),
    (schedules.gpipe(num_microbatches=32, save="stage"), "full", 5525),
    (schedules.one_f_one_b(num_microbatches=32), "full", 4435),
    (schedules.interleaved(num_microbatches=32, repeats=4), "attention", 4794),
]


CYCLES_OF_8_LAYERS = {schedules.gpipe: 322.3, schedules.zero_bubble: 338.9}  # M = 8, `projections`


@pytest.mark.parametrize(("schedule", "remat", "cycles"), CYCLES)
def test_seconds_of_pipelines_of_7b_are_within_five_percent_of_the_compiled_ones(seven_b, schedule, remat, cycles):
    step = Step(remat, 4 * schedule.num_microbatches, 1)
    found = arithmetic.estimate(ShardedState(piped(schedule), seven_b), step)
    assert found.time.compute == pytest.approx(cycles / 1050, rel=0.05)


def test_seconds_of_zero_bubble_and_gpipe_are_within_five_percent_of_the_compiled_ones(trace_of):
    known = trace_of(transformer.preset("7b", num_layers=8), remats=["projections"])
    for make, cycles in CYCLES_OF_8_LAYERS.items():
        found = arithmetic.estimate(ShardedState(piped(make(num_microbatches=8)), known), Step("projections", 32, 1))
        assert found.time.compute == pytest.approx(cycles / 1050, rel=0.05)


@pytest.mark.parametrize(
    ("tables", "optimizer"),
    [
        pytest.param(strategies.zero1(), optimizers.adamw(learning_rate=lambda step: 1e-3), marks=pytest.mark.slow),
        (strategies.fsdp_tensor(tensor=2), optimizers.adafactor(learning_rate=lambda step: 1e-3)),
        pytest.param(
            strategies.pipeline(stage=2), optimizers.adamw(learning_rate=lambda step: 1e-3), marks=pytest.mark.slow
        ),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_state_is_exact(trace_of, tables, optimizer):
    model = transformer.preset("tiny", vocab_size=512)
    known = trace_of(model, slice_name="v4-16", rows=16, length=128, optimizer=optimizer, remats=["none"])
    slice_ = slices.get("v4-16")
    program = Partitioner(tables, slice=slice_, devices=jax.devices()[:8]).program(
        model, optimizer, {k: dataclasses.replace(s, shape=(32, *s.shape[1:])) for k, s in known.spec.items()}, seed=0
    )
    wanted, found = report.totals(program), ShardedState(tables, known).state
    assert (found["parameters"], found["optimizer"]) == (wanted.params, wanted.opt_state)


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param(strategies.fsdp(), marks=pytest.mark.slow),  # as of the pipeline, with fewer formulas
        strategies.pipeline(stage=2, schedule=schedules.zero_bubble(num_microbatches=2)),
    ],
)
def test_a_program_has_the_estimate_of_its_candidate_in_a_plan(trace_of, tables):
    """Which traces every choice of `remat`: some formulas need those that save most and least."""
    model = transformer.preset("tiny", vocab_size=64, remat="full")
    planned = trace_of(model, slice_name="v4-16", rows=16, length=128)
    bound = Partitioner(tables, slice=planned.slice, devices=jax.devices()[:8])
    program = bound.program(model, optimizers.adamw(learning_rate=lambda step: 1e-3), planned.spec, seed=0)
    found = arithmetic.estimate(*arithmetic.place(program))
    assert found == arithmetic.estimate(ShardedState(tables, planned), Step("full", 16, 1))


def test_layers_before_the_first_stage_are_stored_and_gathered_over_stages():
    """By hand: both passes gather a matrix of the first layer over 8 chips, whose reduction is compiled as a sum.

    Of a model that computes nothing, all traffic is that of weights.
    """
    optimizer, spec = optimizers.adamw(learning_rate=lambda step: 1e-3), streams.batch_spec(16, length=8)
    later = transformer.preset("tiny", vocab_size=512, num_layers=2, feed_forward=None)
    model = dataclasses.replace(later, num_layers=3, first_feed_forward=(Mlp(),))
    tables = strategies.pipeline_fsdp(stage=2, fsdp=4, schedule=schedules.gpipe(num_microbatches=2))
    found = []
    for each in (later, model):
        bound = Partitioner(tables, slice=slices.get("v4-16"), devices=jax.devices()[:8])
        program = bound.program(each, optimizer, spec, seed=0)
        known = model_trace.ModelTrace(
            slice=bound.slice,
            shapes=program.abstract_state,
            axes=program.axes,
            spec=spec,
            works={None: model_trace.Work(0, 0, 0, 0, (), ())},
            itemsize=2,
            trained=(True,) * len(jax.tree.leaves(program.abstract_state.params)),
        )
        sharded, wanted = ShardedState(tables, known), report.totals(program)
        assert (sharded.state["parameters"], sharded.state["optimizer"]) == (wanted.params, wanted.opt_state)
        traffic = arithmetic.estimate(sharded, Step(None, 16, 1)).time.traffic
        found.append((sharded, {axis.axes: axis.wire_bytes for axis in traffic}))
    (without, before), (sharded, after) = found
    of_first = [a for name, leaves in known.shapes.params.items() if "first_" in name for a in leaves.values()]
    matrices, norms = (sum(a.size for a in of_first if (a.ndim > 2) == big) for big in (True, False))
    more = {axes: after[axes] - before.get(axes, 0) for axes in after}
    assert more.pop(("stage", "fsdp")) == pytest.approx((2 + 2) * 7 / 8 * matrices * 2, rel=1e-6)
    assert more.pop(("stage",)) == pytest.approx((2 + 1) * 1 / 2 * norms * 2, abs=1)
    assert more.pop(("fsdp",)) == pytest.approx(2 * 3 / 4 * norms / 2 * 2, abs=1)
    assert not any(more.values())
    assert sharded.gradients - without.gradients == 4 * (matrices / 8 + norms / 2)


@pytest.mark.covers("X04")
def test_more_fsdp_is_less_hbm(seven_b):
    peaks = [
        arithmetic.estimate(ShardedState(strategies.mesh3d(data=n), seven_b), FULL).peak_bytes for n in (16, 8, 4, 2, 1)
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def test_more_recomputation_is_less_hbm_and_more_time(seven_b):
    sharded = ShardedState(strategies.fsdp(), seven_b)
    none, dots, full = (arithmetic.estimate(sharded, Step(remat, 32, 1)) for remat in ("none", "dots", "full"))
    assert none.peak_bytes > dots.peak_bytes > full.peak_bytes
    assert none.time.busy < dots.time.busy < full.time.busy


def test_logits_of_more_than_2_gib_are_those_of_a_chunk(trace_of):
    """Compares 2 and 8 rows on a chip, in 1 and 4 chunks; counts the output matrix's float32 gradient and cast."""
    known = trace_of(transformer.preset("7b", num_layers=2, vocab_size=128000), remats=["full"])
    sharded = ShardedState(strategies.fsdp(), known)
    one, four = (arithmetic.estimate(sharded, Step("full", 16 * rows, 1)).hbm["logits"] for rows in (2, 8))
    logits, matrix, stream = 2 * 2048 * 128000 * 4, 4096 * 128000 * 4, 8 * 2048 * 4096 * 2
    assert one == pytest.approx(2 * logits, rel=0.1)
    assert four == pytest.approx(1.5 * logits + 2 * matrix + stream, rel=0.1)


def test_accumulation_is_less_hbm_and_more_traffic(seven_b):
    sharded = ShardedState(strategies.fsdp(), seven_b)
    one, two = (arithmetic.estimate(sharded, Step("dots", 32, n)) for n in (1, 2))
    assert one.peak_bytes > two.peak_bytes
    assert one.time.traffic_seconds < two.time.traffic_seconds


def test_gathering_once_takes_whole_float32_parameters_and_gradients_and_sends_them_once(two_layers):
    """By hand, of two layers over fsdp 16: a gather, and a reduction that is compiled as a sum over all chips."""
    sharded = ShardedState(strategies.fsdp(), two_layers)
    each, once, alone = (
        arithmetic.estimate(sharded, Step("full", 64, steps, gather_once=is_once))
        for steps, is_once in ((4, False), (4, True), (1, True))
    )
    matrices = sum(leaf.size for leaf, of in sharded.params if "norm" not in of.names)
    sent = 4 * matrices * 15 / 16
    assert once.peak_bytes - each.peak_bytes == pytest.approx(2 * sent, rel=1e-3)
    (found,) = (axis for axis in once.time.traffic if axis.axes == ("fsdp",))
    assert found.wire_bytes == pytest.approx((1 + 2) * sent, rel=1e-3)
    assert found.wire_bytes < each.time.traffic[0].wire_bytes / 2
    assert alone == arithmetic.estimate(sharded, Step("full", 64, 1))


def test_more_microbatches_are_a_smaller_bubble_and_less_time(seven_b):
    def at(microbatches):
        schedule = schedules.gpipe(num_microbatches=microbatches)
        return arithmetic.estimate(ShardedState(strategies.pipeline_fsdp(stage=4, schedule=schedule), seven_b), FULL)

    few, many = at(4), at(8)
    assert few.bubble > many.bubble > 0
    assert few.time.compute > many.time.compute


@pytest.mark.parametrize("save", schedules.SAVES)
def test_a_pipeline_computes_its_layers_in_bubbles_and_again_as_remat_says(seven_b, save):
    """With `full` kernels are 2 products forward, 2 again, 7 backward; if a stage runs again first, 2 more."""
    sharded = ShardedState(piped(schedules.gpipe(num_microbatches=8, save=save)), seven_b)
    causal = 2 * 2048 * 2048 * 4096 / 2 * 32  # one product of all layers of a row
    head = 3 * 2 * 2048 * 4096 * 32000  # the output matrix, in both passes: not part of a tick
    for remat in ("full", "attention"):
        planned, work = arithmetic.estimate(sharded, Step(remat, 32, 1)), seven_b.works[remat]
        products = 2 * work.kernel_flops / work.forward_kernel_flops
        assert products == pytest.approx(11, rel=0.05) or remat != "full"
        kernels = (products + 2 * (save == "stage")) * causal * 2 * (11 / 8) / (0.4 * 275e12)  # 2 rows a chip, 11 ticks
        assert planned.time.kernels == pytest.approx(kernels, rel=0.05)
        again = work.forward_flops if save == "stage" else 0.0
        found = arithmetic.product_flops(sharded, Step(remat, 32, 1))
        assert found == pytest.approx(((work.flops + again - head) * 11 / 8 + head) * 2, rel=0.01)


def test_a_pipeline_keeps_what_remat_saves_of_the_microbatches_in_flight(seven_b):
    """MiB that 8 layers save for 2,048 tokens: those of a layer (`models.decoder.config.REMAT`) times the places.

    One place more than microbatches are in flight is for bubbles.
    """

    def kept(schedule, remat):
        found = arithmetic.estimate(ShardedState(piped(schedule), seven_b), Step(remat, 32, 1))
        return found.hbm["saved activations"] / GIB

    for remat, mib in (("attention", 80), ("full", 16)):
        assert kept(schedules.gpipe(num_microbatches=8), remat) == pytest.approx(8 * 9 * mib / 1024, rel=0.01)
        assert kept(schedules.one_f_one_b(num_microbatches=8), remat) == pytest.approx(8 * 8 * mib / 1024, rel=0.01)
        interleaved = schedules.interleaved(num_microbatches=8, repeats=4)  # 19 passes of two layers
        assert kept(interleaved, remat) == pytest.approx(2 * 20 * mib / 1024, rel=0.01)
    by_stage = kept(schedules.gpipe(num_microbatches=8, save="stage"), "attention")
    whole = schedules.PLACES_AGAIN * 8 * 80  # of a microbatch, beside the inputs of a stage
    assert by_stage == pytest.approx((9 * 16 + whole) / 1024, rel=0.01)
    one, zero = (kept(make(num_microbatches=8), "full") for make in (schedules.one_f_one_b, schedules.zero_bubble))
    # As much as is saved where no product is computed again waits, of four microbatches.
    assert zero - one == pytest.approx(4 * 8 * (182 - 16) / 1024, rel=0.1)


ON_HOST = "attention_and_input_on_host"


@pytest.mark.parametrize(
    ("schedule", "layers", "remat"),
    [
        (schedules.gpipe(num_microbatches=4), 5, ON_HOST),
        (schedules.one_f_one_b(num_microbatches=8), 4, "projections"),
        (schedules.interleaved(num_microbatches=4, repeats=2, save="stage"), 4, "full"),
        # Each value of these is in one above; circular runs as gpipe does.
        pytest.param(schedules.gpipe(num_microbatches=4), 4, "full", marks=pytest.mark.slow),
        pytest.param(schedules.gpipe(num_microbatches=4, save="stage"), 4, "projections", marks=pytest.mark.slow),
        pytest.param(schedules.one_f_one_b(num_microbatches=8, save="stage"), 5, ON_HOST, marks=pytest.mark.slow),
        pytest.param(schedules.circular(num_microbatches=4, repeats=2), 4, "projections", marks=pytest.mark.slow),
    ],
    ids=lambda value: f"{value.name}-{value.save}" if isinstance(value, schedules.Schedule) else str(value),
)
def test_the_saved_values_of_a_pipeline_are_those_that_it_allocates(schedule, layers, remat, monkeypatch):
    """In the step as traced for its checks; `_allocate` gets the same arrays again where a loop is traced again."""
    allocate, calls = stage._allocate, {}

    def recorded(*arguments):
        arrays = allocate(*arguments)
        leaves = [jax.typeof(a) for a in jax.tree.leaves(arrays)]
        calls[tuple(map(str, leaves))] = [(a.size * a.dtype.itemsize, a.memory_space) for a in leaves]
        return arrays

    monkeypatch.setattr(stage, "_allocate", recorded)
    model = transformer.preset("tiny", vocab_size=512, num_layers=layers, remat=remat, attention="plain")
    tables = strategies.pipeline(stage=2, data=2, schedule=schedule)
    bound = Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices()[:4])
    spec = streams.batch_spec(16, length=128)
    program = bound.program(model, optimizers.adamw(learning_rate=lambda step: 1e-3), spec, seed=0)
    host, hbm = (
        sum(size for arrays in calls.values() for size, place in arrays if (place == jax.memory.Space.Host) == is_host)
        for is_host in (True, False)
    )
    found = arithmetic.estimate(*arithmetic.place(program))
    assert hbm > 0
    assert (host > 0) == (remat == ON_HOST)
    assert found.hbm["saved activations"] == pytest.approx(hbm)
    assert found.host_bytes == pytest.approx(host)


def test_zero_bubble_has_no_bubble_in_gradients_of_matrices(seven_b):
    """Three more ticks for eight microbatches, but for a third of the products where nothing is computed again."""
    flops = {}
    for make in (schedules.one_f_one_b, schedules.zero_bubble):
        flops[make] = arithmetic.product_flops(
            ShardedState(piped(make(num_microbatches=8)), seven_b), Step("dots", 32, 1)
        )
    one, zero = flops.values()
    layers = 2 * (seven_b.works["dots"].flops - 3 * 2 * 2048 * 4096 * 32000)
    assert one - zero == pytest.approx(3 / 8 * layers / 3, rel=0.02)


def test_sums_over_tensor_happen_again_with_a_pipeline_s_layers(seven_b):
    """Both passes, again but for the last product of a block, and once more whole for a stage's inputs."""

    def sent(save):
        tables = strategies.pipeline_fsdp_tensor(
            stage=2, tensor=4, schedule=schedules.gpipe(num_microbatches=2, save=save)
        )
        found = arithmetic.estimate(ShardedState(tables, seven_b), FULL)
        return next(axis.wire_bytes for axis in found.time.traffic if axis.axes == ("tensor",))

    of_all_layers = 2 * 32 * 2048 * 4096 * 2  # two sums of bfloat16 rows
    once = 2 * 3 / 4 * of_all_layers * 32 / 2 / 2  # 32 rows over fsdp 2, layers over 2 stages
    assert sent("layers") == pytest.approx(2.5 * once, rel=0.05)
    assert sent("stage") - sent("layers") == pytest.approx(once, rel=0.01)


def test_layers_of_padding_cost_what_others_do(seven_b):
    """32 layers over 4 stages x 3 repeats run as 36: more work, memory and traffic, of which the model has no use."""
    even, uneven = (
        ShardedState(piped(schedules.circular(num_microbatches=8, repeats=repeats)), seven_b) for repeats in (2, 3)
    )
    assert (even.padding, uneven.padding) == (1, 36 / 32)
    for sharded in (even, uneven):
        sharded.check(FULL)
    ticks = {sharded: arithmetic.product_flops(sharded, FULL) for sharded in (even, uneven)}
    head = 3 * 2 * 2048 * 4096 * 32000  # the output matrix, in both passes
    layers = seven_b.works["full"].flops - head
    work = (layers * 36 / 32 * (24 + 3) / 24 + head) / (layers * (16 + 3) / 16 + head)
    assert ticks[uneven] / ticks[even] == pytest.approx(work, rel=1e-3)
    found, wanted = arithmetic.estimate(uneven, FULL), arithmetic.estimate(even, FULL)
    assert 1 - found.bubble == pytest.approx(32 / 36 * 24 / 27)
    places = (24 + 1) / 24 / ((16 + 1) / 16)  # one more than turns, each of a repeat's layers
    assert found.hbm["saved activations"] == pytest.approx(36 / 32 * places * wanted.hbm["saved activations"])
    assert found.hbm["parameters"] == wanted.hbm["parameters"]  # stored without padding
    of_layers = 2 * sum(leaf.size for leaf, of in seven_b_layers(seven_b)) / 4 / 8  # bfloat16, 4 more of 32
    assert uneven.gathered - even.gathered == pytest.approx(of_layers)
    assert uneven.gradients - even.gradients == pytest.approx(2 * of_layers)
    again = even.rescheduled(uneven.tables)
    assert (again.gathered, again.gradients, again.padding) == (uneven.gathered, uneven.gradients, uneven.padding)


def seven_b_layers(trace):
    return [pair for pair in model_trace.leaves(trace.shapes.params, trace.axes.params) if "layers" in pair[1].names]


def test_frozen_parameters_cost_no_gradient_and_half_the_bytes(trace_of, two_layers):
    model, all_ = transformer.preset("7b", num_layers=2, remat="full"), two_layers
    frozen = trace_of(model, frozen=("layers/*", "embedding"), remats=["none", "full"])
    trained, tuned = (ShardedState(strategies.fsdp(), trace) for trace in (all_, frozen))
    output = 4 * (32000 * 4096 + 4096)  # the output matrix and the final norm, in float32
    assert tuned.gradients == pytest.approx(output / 16, rel=1e-3)
    others = 4 * sum(leaf.size for leaf in jax.tree.leaves(all_.shapes.params)) - output
    assert 16 * (trained.state["parameters"] - tuned.state["parameters"]) == pytest.approx(others / 2, rel=1e-3)
    assert tuned.state["optimizer"] == pytest.approx(2 * output / 16, rel=1e-3)
    assert frozen.works["none"].flops < 0.55 * all_.works["none"].flops  # no backward pass but of the output matrix
    sent = [sum(axis.wire_bytes for axis in arithmetic.estimate(one, FULL).time.traffic) for one in (trained, tuned)]
    assert sent[1] < 0.8 * sent[0]


def test_candidates_slightly_too_large_by_arithmetic_are_compiled(seven_b):
    have = seven_b.slice.chip.usable_hbm_bytes
    found = arithmetic.estimate(ShardedState(strategies.fsdp(), seven_b), FULL)
    for share in (0.99, 1.01, 1.14):
        arithmetic.check_fits(found._replace(hbm={"logits": share * have}), seven_b.slice)
    with pytest.raises(Refused, match=r"needs 35.7 GiB of 30.75, over 115% of it"):
        arithmetic.check_fits(found._replace(hbm={"logits": 1.16 * have}), seven_b.slice)


@pytest.mark.parametrize(
    ("tables", "step", "kind", "said"),
    [
        (strategies.fsdp(fsdp=8), FULL, "degrees do not make the slice", "needs 8 devices, but v4-32 has 16"),
        (strategies.fsdp(), Step("full", 24, 1), "rows do not divide", "nearest that do: 16, 32"),
        (strategies.fsdp(), Step("full", 32, 4), "rows do not divide", "in 4 microbatches"),
        (strategies.pipeline(stage=16), FULL, "layers do not divide into stages", "16 x 4 repeats"),
        (strategies.data_parallel(), FULL, "too much HBM by arithmetic", "of 30.75"),
    ],
    ids=lambda x: "" if isinstance(x, (strategies.Strategy, Step)) else x,
)
def test_impossible_layouts_are_refused_with_the_reason(seven_b, tables, step, kind, said):
    if kind.startswith("layers"):
        tables = strategies.pipeline(stage=16, schedule=schedules.circular(num_microbatches=16, repeats=4))

    def judge():
        sharded = ShardedState(tables, seven_b)
        sharded.check(step)
        arithmetic.check_fits(arithmetic.estimate(sharded, step), seven_b.slice)

    with pytest.raises(Refused, match=said) as refused:
        judge()
    assert refused.value.kind == kind


@pytest.mark.parametrize("owner", ["carry", "loss"])
def test_rows_that_belong_together_are_not_divided(trace_of, owner):
    """As the partitioner refuses them; a carry's rows may still go through a pipeline."""
    known = trace_of(transformer.preset("tiny", vocab_size=512), slice_name="v4-8", rows=16, remats=["none"])
    assert not known.couples_rows
    if owner == "carry":
        carry = {"memory": jax.ShapeDtypeStruct((16, 8), "float32")}
        known = dataclasses.replace(known, shapes=known.shapes._replace(carry=carry))
    else:
        known = dataclasses.replace(known, couples_rows=True)
    piped_ = strategies.pipeline(stage=2, schedule=schedules.gpipe(num_microbatches=2))
    cases = {
        "accumulation": (strategies.fsdp(), 2, True),
        "one batch": (strategies.fsdp(), 1, False),
        "a pipeline": (piped_, 1, owner == "loss"),
        "overlap_reduction": (strategies.fsdp(overlap_reduction=True), 1, owner == "loss"),
    }
    found = {}
    for name, (tables, accum_steps, _) in cases.items():
        try:
            ShardedState(tables, known).check(Step("none", 16, accum_steps))
        except Refused as error:
            found[name] = error.kind
    assert found == {name: "rows belong together" for name, (*_, is_refused) in cases.items() if is_refused}


def test_a_dimension_that_does_not_divide_is_refused(trace_of):
    known = trace_of(transformer.preset("tiny", vocab_size=512), rows=16, length=128, remats=["none"])
    with pytest.raises(Refused, match="kv_heads = 2 does not divide over tensor = 4") as refused:
        ShardedState(strategies.fsdp_tensor(tensor=4), known)
    assert refused.value.kind == "a dimension does not divide"


@pytest.mark.slow
def test_a_model_without_a_stack_is_measured_too():
    """The recursion keeps what its loops leave; no formula here knows it."""
    from launch.config import loader

    experiment = loader.load("gin/trm/suite.gin", bindings=["DATA = 'x'"], slice_name="v4-64").build()
    assert isinstance(experiment.model, trm.TRM)
    known = model_trace.trace(
        experiment.model, experiment.optimizer, experiment.task.spec(experiment.batch_size), slice=slices.get("v4-64")
    )
    sharded = ShardedState(strategies.data_parallel(), known)
    kept = {remat: arithmetic.estimate(sharded, Step(remat, 6144, 1)) for remat in known.works}
    assert kept["none"].hbm["saved activations"] > kept["full"].hbm["saved activations"]
    assert all(found.time.compute > 0 for found in kept.values())


def test_traffic_between_slices_uses_dcn(trace_of):
    known = trace_of(
        transformer.preset("tiny", vocab_size=512), slice_name="2xv4-8", rows=16, length=128, remats=["none"]
    )
    found = arithmetic.estimate(ShardedState(strategies.multislice(slices=2), known), Step("none", 16, 1))
    assert {axis.axes: axis.network for axis in found.time.traffic if len(axis.axes) == 1} == {
        ("data",): "DCN",
        ("fsdp",): "ICI",
    }
