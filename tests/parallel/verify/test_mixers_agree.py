"""Strategies do not change the numbers of decoders whose layers differ: state-space layers, mixers by pattern."""

import dataclasses
import functools

import pytest

from core.errors import UserError
from models.agreement_subjects import random_batches
from models.decoder import transformer
from models.decoder.experts import Experts
from models.decoder.layers import Attention
from models.decoder.planner_config import Planner
from models.mixers.block_sparse import BlockSparse
from models.mixers.gated_delta import GatedDelta
from models.mixers.s5 import S5
from parallel import strategies
from parallel.pipeline import schedules
from parallel.verify import agreement
from parallel.verify.agreement import ONE_DEVICE, Example
from tests.lab.subjects import bind

STEPS = 3
SIZES = {"vocab_size": 203, "embed_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 4, "dtype": "float32"}
STATES = S5(states=16, min_dt=0.02, max_dt=0.5, chunk=8)  # rows have 24 positions; segments of packed rows are shorter
MODELS = {
    "s5": transformer.Transformer(**SIZES, num_layers=2, mixer=STATES, feed_forward=None),
    "block_sparse": transformer.Transformer(
        **SIZES,
        num_layers=2,
        mixer=BlockSparse(block=4, global_blocks=1, window=1, random=1),
        feed_forward=STATES,
    ),
    "hybrid": transformer.Transformer(
        **SIZES,
        num_layers=4,
        mixer=(STATES, Attention(window=8), STATES, Attention()),
        feed_forward=(Experts(num_experts=4, top_k=2, load_balance_coef=0.05), STATES),
        remat="full",
    ),
    "preset": transformer.preset("valkyrie-long", vocab_size=203, dtype="float32").shrink(
        dict.fromkeys(("embed", "mlp", "heads", "kv_heads", "head_dim", "layers", "expert"), 4)
    ),
    "delta": transformer.Transformer(
        **SIZES,
        num_layers=4,
        norm_eps=1e-2,  # the norm behind a delta rule amplifies rounding where its input is near zero
        mixer=(
            GatedDelta(key_heads=4, value_heads=8, key_dim=8, value_dim=4, chunk=8),
            Attention(output_gate=True, qk_norm=True),
        ),
    ),
    "planner": transformer.Transformer(**SIZES, num_layers=2, planner=Planner(chunk=4)),
}
STRATEGIES = {
    "fsdp": strategies.fsdp(),
    "fsdp_tensor": strategies.fsdp_tensor(tensor=2),
    "sequence_tensor": strategies.sequence_tensor(tensor=2),
    "context": strategies.context(sequence=4),
    "ring": strategies.context(sequence=2, ring=True),
    "pipeline_fsdp": strategies.pipeline_fsdp(stage=2, schedule=schedules.one_f_one_b(num_microbatches=4)),
}
REFUSED = dict.fromkeys(
    [("block_sparse", "ring"), ("preset", "ring")],
    "block-sparse attention with keys and values that travel around a ring",
)
REFUSED |= dict.fromkeys(
    [("planner", name) for name in ("sequence_tensor", "context", "ring")], "planner: this strategy shards positions"
)
QUICK = {("s5", "context")}
# The most that any of these differed, in ulp: gradients, losses, parameters, optimizer state.
MEASURED = (28, 8, 3, 28)


@functools.cache
def trained(name, strategy=None):
    example = ONE_DEVICE if strategy is None else Example("v4-8", STRATEGIES[strategy])
    data = list(random_batches(SIZES["vocab_size"], steps=STEPS))
    return agreement.run(bind(MODELS[name], example, data[0]), data)


@pytest.mark.covers("N08", "M06", "M10")
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=[pytest.mark.slow] * ((name, strategy) not in QUICK))
        for name in MODELS
        for strategy in STRATEGIES
        if (name, strategy) not in REFUSED
    ],
)
def test_numbers_do_not_depend_on_the_strategy(name, strategy):
    found = agreement.compare(trained(name, strategy), trained(name))
    figures = [f"{part} {apart.absolute:.1e} ({apart.ulp:.0f} ulp, {apart.where})" for part, apart in found.items()]
    print(f"{name}, {strategy}: {'; '.join(figures)}")
    limits = agreement.limits(MEASURED)
    assert not {part: apart for part, apart in found.items() if apart.ulp > limits[part]}


@pytest.mark.parametrize(("name", "strategy"), REFUSED)
def test_strategies_that_parts_cannot_run_under_are_refused(name, strategy):
    with pytest.raises(UserError, match=REFUSED[name, strategy]):
        trained(name, strategy)


KEEPING = dataclasses.replace(MODELS["block_sparse"], keeps_states=True)


@functools.cache
def trained_in_chunks(strategy=None):
    """Chunks of 8 positions of rows of 24, so that the states of a step start in those of the step before."""
    example = ONE_DEVICE if strategy is None else Example("v4-8", STRATEGIES[strategy])
    whole = random_batches(SIZES["vocab_size"], steps=2)
    data = [{n: a[:, i : i + 8] for n, a in batch.items()} for batch in whole for i in (0, 8, 16)]
    return agreement.run(bind(KEEPING, example, data[0]), data)


@pytest.mark.covers("N08", "M06", "M10")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_tensor", "sequence_tensor", "context"])
def test_states_that_steps_keep_do_not_depend_on_the_strategy(strategy):
    found = agreement.compare(trained_in_chunks(strategy), trained_in_chunks())
    print(strategy, {part: f"{apart.ulp:.0f} ulp, {apart.where}" for part, apart in found.items()})
    limits = agreement.limits(MEASURED)
    assert not {part: apart for part, apart in found.items() if apart.ulp > limits[part]}


def test_a_pipeline_cannot_keep_states():
    with pytest.raises(UserError, match="a layer stack with stacked outputs runs without a pipeline"):
        trained_in_chunks("pipeline_fsdp")
