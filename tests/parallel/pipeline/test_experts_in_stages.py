"""Experts inside the stages of a pipeline, or under parameters that are gathered once: tokens are exchanged."""

import functools

import pytest
from jax.extend.core import jaxprs_in_params

from models.agreement_subjects import random_batches
from models.decoder.experts import Experts
from models.decoder.transformer import Transformer
from parallel import strategies
from parallel.pipeline import schedules
from parallel.verify.agreement import Example
from tests.lab.subjects import bind

SIZES = {"vocab_size": 64, "num_layers": 4, "embed_dim": 16, "mlp_dim": 24, "num_heads": 4, "num_kv_heads": 4}
EXPERTS = {
    "dropless": Experts(num_experts=8, top_k=2, load_balance_coef=0.1),
    "capacity": Experts(num_experts=8, top_k=2, capacity_factor=1.0),
}
ONCE = {"accum_steps": 2, "gather_once": True}
ONE_F_ONE_B = schedules.one_f_one_b(num_microbatches=4)
CASES = {
    "1F1B": (strategies.pipeline_experts(stage=2, expert=4, schedule=ONE_F_ONE_B), {}),
    "gpipe": (strategies.pipeline_experts(stage=2, expert=4, schedule=schedules.gpipe(num_microbatches=4)), {}),
    "zero-bubble": (
        strategies.pipeline_experts(stage=2, expert=2, schedule=schedules.zero_bubble(num_microbatches=4)),
        {},
    ),
    "tensor": (strategies.pipeline_experts(stage=2, expert=2, tensor=2, schedule=ONE_F_ONE_B), {}),
    "gathered once": (strategies.experts(expert=4), ONCE),
    "1F1B, gathered once": (
        strategies.pipeline_experts(stage=2, expert=2, schedule=schedules.one_f_one_b(num_microbatches=2)),
        ONCE,
    ),
}
# Each kind without a pipeline, and every schedule with one of them: `tensor` is 1F1B.
QUICK = {
    ("gpipe", "dropless"),
    ("zero-bubble", "capacity"),
    ("tensor", "capacity"),
    ("gathered once", "dropless"),
    ("gathered once", "capacity"),
}


def collectives(jaxpr):
    """Yields the name and the mesh axes of every collective, and the shapes of its results."""
    for eqn in jaxpr.eqns:
        axes = eqn.params.get("axis_name", ())
        if eqn.primitive.name in ("all_to_all", "all_gather", "reduce_scatter"):
            yield eqn.primitive.name, axes, [tuple(out.aval.shape) for out in eqn.outvars]
        for inner in jaxprs_in_params(eqn.params):
            yield from collectives(inner)


@functools.cache
def batches():
    return list(random_batches(SIZES["vocab_size"], steps=2))


def program(kind, example, options):
    return bind(Transformer(**SIZES, feed_forward=EXPERTS[kind]), example, batches()[0], **options)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(case, kind, marks=[pytest.mark.slow] * ((case, kind) not in QUICK))
        for case in CASES
        for kind in EXPERTS
    ],
)
def test_a_step_exchanges_tokens_and_gathers_no_expert(case, kind):
    tables, options = CASES[case]
    bound = program(kind, Example("v4-16", tables), options)
    with bound.partitioner.tracing():
        traced = bound.jitted_train_step.trace(bound.abstract_state, bound.abstract_batch)
    found = [entry for entry in collectives(traced.jaxpr.jaxpr) if "expert" in entry[1]]
    used = {name for name, axes, _ in found if axes == ("expert",)}
    assert used >= ({"all_to_all"} if kind == "capacity" else {"all_gather", "reduce_scatter"})
    if kind == "dropless":
        assert [shape for name, _, shapes in found for shape in shapes if name == "all_gather" and shape[1:] == (16,)]
    whole = {(8, 16, 24), (8, 24, 16), (8, 16, 12), (8, 12, 16)}  # the matrices of all experts of a layer, or of a half
    assert not [entry for entry in found if any(shape[-3:] in whole for shape in entry[2])]
