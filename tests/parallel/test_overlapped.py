"""FSDP with late gradient sums: rings equal reduce-scatters, steps equal the usual ones, other layers are refused."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from core import slices
from core.errors import UserError
from models import agreement_subjects
from parallel import ring_reduction, strategies
from parallel.partitioner import Partitioner
from tasks import streams

MODEL = agreement_subjects.MODEL
LATE, USUAL = strategies.fsdp(overlap_reduction=True), strategies.fsdp()


@pytest.mark.parametrize("toward", [1, -1])
@pytest.mark.parametrize("chips", [1, 2, 3, 6, 8, 16])
def test_rings_sum_as_a_reduce_scatter(chips, toward):
    mesh = jax.make_mesh((chips,), ("fsdp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:chips])
    x = np.random.default_rng(0).integers(-9, 9, (chips, 3, 2 * chips)).astype(np.float32)  # sums are exact

    def local(x):
        return ring_reduction.reduce_scatter(x[0], "fsdp", dimension=1, toward=toward)

    found = jax.shard_map(local, mesh=mesh, in_specs=P("fsdp"), out_specs=P(None, "fsdp"))(x)
    np.testing.assert_array_equal(found, x.sum(0))


def bind(tables, model=MODEL, slice_name="v4-16", **options):
    chips = slices.get(slice_name)
    at = Partitioner(tables, slice=chips, devices=jax.devices()[: chips.chips])
    spec = streams.batch_spec(agreement_subjects.ROWS, length=agreement_subjects.LENGTH)
    return at.program(model, agreement_subjects.OPTIMIZER, spec, seed=0, **options)


def trained(tables, **options):
    program = bind(tables, **options)
    state = program.init()
    for batch in agreement_subjects.batches_for(MODEL, steps=2):
        state, metrics = program.train_step(state, program.put(batch))
    return jax.device_get((state.params, metrics["loss"]))


@pytest.mark.parametrize(
    "options",
    [
        {"frozen": ("layers/*query", "embedding"), "frozen_dtype": "float32"},
        {"model": dataclasses.replace(MODEL, remat="full")},
        {"model": dataclasses.replace(MODEL, remat="projections"), "accum_steps": 2},
        {"gather_once": True, "accum_steps": 2},
    ],
    ids=["frozen", "full", "accumulated", "gathered once"],
)
def test_steps_are_those_of_the_usual_strategy(options):
    late, usual = trained(LATE, **options), trained(USUAL, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-7), late, usual)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_gathered_weights_are_saved_or_returned_by_a_loop(remat):
    program = bind(LATE, dataclasses.replace(MODEL, remat=remat))
    with program.partitioner.tracing():
        traced = program.jitted_train_step.trace(program.abstract_state, program.abstract_batch)
    shapes = [v.aval.shape for eqn in loops(traced.jaxpr.jaxpr) for v in eqn.outvars]
    whole = (MODEL.num_layers, MODEL.embed_dim, MODEL.mlp_dim)
    shard = (MODEL.num_layers, MODEL.embed_dim // 8, MODEL.mlp_dim)
    assert shard in shapes
    assert whole not in shapes


def loops(jaxpr):
    """All scans of a traced program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from loops(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"pattern": ("local", "global"), "window": 8}, "overlap_reduction: the layers are of 2 kinds, expected one")],
)
def test_layers_that_it_cannot_run_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        bind(LATE, dataclasses.replace(MODEL, **changes))


def test_a_mesh_axis_without_rows_is_refused():
    with pytest.raises(UserError, match="overlap_reduction: tensor = 2 does not shard rows"):
        dataclasses.replace(strategies.fsdp_tensor(tensor=2), overlap_reduction=True)
    with pytest.raises(UserError, match="overlap_reduction = 'yes'; expected True or False"):
        strategies.fsdp(overlap_reduction="yes")


def test_replicas_sum_shards():
    tables = dataclasses.replace(strategies.hsdp(data=2), name="hsdp_overlapped", overlap_reduction=True)
    late, usual = trained(tables), trained(strategies.hsdp(data=2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-7), late, usual)
