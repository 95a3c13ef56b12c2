"""Gradient accumulation: which arrays are reduced and when, and the cost of gathering once."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from core import batches, logical, optimizers, parameters, slices
from models.decoder import transformer
from parallel import accumulation, partitioner, strategies
from parallel.pipeline import schedules
from tasks import streams

MODEL = transformer.preset("tiny", dtype="float32")
SPEC = streams.batch_spec(16, length=8)


MICROBATCHES = 4  # not the layers of the model, so that a loop is known by its length


def program(tables, spec=SPEC, **options):
    bound = partitioner.Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices())
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-3))
    return bound.program(MODEL, optimizer, spec, seed=0, accum_steps=MICROBATCHES, **options)


@pytest.mark.parametrize(
    ("tables", "gather_once", "manual"),
    [
        (strategies.data_parallel(), False, {"data"}),
        (strategies.fsdp(), False, set()),
        (strategies.fsdp(), True, {"fsdp"}),
        (strategies.hsdp(data=2), False, {"data"}),
        (strategies.hsdp(data=2), True, {"data", "fsdp"}),
        (strategies.fsdp_tensor(tensor=2), True, {"fsdp"}),
    ],
)
def test_which_axes_are_manual(tables, gather_once, manual):
    assert program(tables, gather_once=gather_once).manual_axes == manual


def test_gathering_once_costs_the_shards_of_other_chips():
    split = program(strategies.fsdp(), gather_once=True)
    leaves = jax.tree.leaves(split.abstract_state.params)
    held = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 for leaf in leaves)
    whole = sum(np.prod(leaf.shape) * 4 for leaf in leaves)
    assert split.gathered_bytes == 2 * (whole - held)
    frozen = program(strategies.fsdp(), gather_once=True, frozen=["layers/*"], frozen_dtype="float32")
    paths = parameters.names(frozen.abstract_state.params)
    params = dict(zip(paths, jax.tree.leaves(frozen.abstract_state.params), strict=True))
    layers = [leaf for path, leaf in params.items() if path.startswith("layers/")]
    assert 0 < len(layers) < len(params)
    of_layers = sum(np.prod(leaf.shape) - np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in layers)
    assert frozen.gathered_bytes == split.gathered_bytes - 4 * of_layers  # no gradients of frozen parameters
    assert program(strategies.fsdp()).gathered_bytes == 0
    assert program(strategies.data_parallel()).gathered_bytes == 0


def test_exchanged_parameters_are_not_gathered_over_the_axes_of_their_experts():
    axes = {"w": logical.Axes(("expert", "embed"), exchanged=True), "plain": logical.Axes(("expert", "embed"))}
    shapes = dict.fromkeys(axes, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    about = {"tables": strategies.experts(expert=2), "shape": {"expert": 2, "fsdp": 2, "tensor": 1, "data": 1}}
    kept, plain = (
        accumulation.gathered_bytes({n: shapes[n]}, {n: axes[n]}, [True], manual={"expert", "fsdp"}, **about)
        for n in ("w", "plain")
    )
    assert (kept, plain) == (2 * (128 // 2 - 128 // 4), 2 * (128 - 128 // 4))  # parameters and gradients


def scan_bodies(jaxpr):
    """Every scan over microbatches inside, as text."""
    assert MODEL.num_layers != MICROBATCHES
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                if eqn.primitive.name == "scan" and eqn.params["length"] == MICROBATCHES:
                    yield str(inner)
                yield from scan_bodies(inner)


def manual_regions(jaxpr, around=()):
    """The manual axes above 1 of every innermost region, in the order in which they became manual."""
    for eqn in jaxpr.eqns:
        inside = around
        if eqn.primitive.name == "shard_map":
            sizes = eqn.params["mesh"].shape
            inside = (*around, {axis for axis in eqn.params["newly_manual_axes"] if sizes[axis] > 1})
            yield tuple(region for region in inside if region)
        for inner in jaxprs_in_params(eqn.params):
            yield from manual_regions(inner, inside)


@pytest.mark.parametrize(
    ("tables", "length", "nested"),
    [
        pytest.param(  # the shortest length with an attention kernel
            strategies.hsdp(data=2), 128, ({"data"}, {"fsdp"}), marks=pytest.mark.slow
        ),
        (
            strategies.pipeline_fsdp(stage=2, schedule=schedules.gpipe(num_microbatches=2)),
            8,
            ({"fsdp"}, {"stage"}),
        ),
    ],
    ids=["hsdp", "pipeline_fsdp"],
)
def test_nested_manual_regions_follow_the_order_of_the_mesh(tables, length, nested):
    """XLA ends the process where the axes of an inner region stand before those of an outer one."""
    spec = streams.batch_spec(16, length=length)
    bound = program(tables, spec=spec)
    with bound.partitioner.tracing():
        traced = jax.make_jaxpr(bound.jitted_train_step)(bound.abstract_state, batches.batch_shapes(spec))
    found = list(manual_regions(traced.jaxpr))
    order = bound.partitioner.mesh.axis_names.index
    assert nested in found
    for regions in found:
        for outer, inner in itertools.pairwise(regions):
            assert max(map(order, outer)) < min(map(order, inner)), regions


@pytest.mark.covers("T03")
def test_replicas_reduce_once_after_the_loop():
    bound = program(strategies.data_parallel())
    batch = batches.batch_shapes(SPEC)
    with bound.partitioner.tracing():
        traced = jax.make_jaxpr(bound.jitted_train_step)(bound.abstract_state, batch)
    assert "psum" in str(traced)
    (body,) = scan_bodies(traced.jaxpr)
    assert "psum" not in body
