"""FSDP with late gradient sums: rings equal reduce-scatters, steps equal the usual ones, other layers are refused."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from core import logical, optimizers, slices
from core.batches import Field
from core.errors import UserError
from core.stack import layer_stack
from core.types import LossOutput
from models import agreement_subjects
from models.decoder import experts
from models.decoder.layers import Attention
from parallel import ring_reduction, strategies
from parallel.partitioner import Partitioner
from tasks import streams
from tests.haiku_model import HaikuModel

MODEL = agreement_subjects.MODEL
LATE, USUAL = strategies.fsdp(overlap_reduction=True), strategies.fsdp()


@pytest.mark.parametrize(("chips", "toward"), [(1, 1), (3, 1), (8, -1), pytest.param(16, 1, marks=pytest.mark.slow)])
def test_rings_sum_as_a_reduce_scatter(chips, toward):
    mesh = jax.make_mesh((chips,), ("fsdp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:chips])
    x = np.random.default_rng(0).integers(-9, 9, (chips, 3, 2 * chips)).astype(np.float32)  # sums are exact

    def local(x):
        return ring_reduction.reduce_scatter(x[0], "fsdp", dimension=1, toward=toward)

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("fsdp"), out_specs=P(None, "fsdp")))(x)
    np.testing.assert_array_equal(found, x.sum(0))


def bind(tables, model=MODEL, slice_name="v4-16", **options):
    chips = slices.get(slice_name)
    at = Partitioner(tables, slice=chips, devices=jax.devices()[: chips.devices])
    spec = streams.batch_spec(agreement_subjects.ROWS, length=agreement_subjects.LENGTH)
    return at.program(model, agreement_subjects.OPTIMIZER, spec, seed=0, **options)


def trained(tables, **options):
    program = bind(tables, **options)
    state = program.init()
    for batch in agreement_subjects.batches_for(MODEL, steps=2):
        state, metrics = program.train_step(state, program.put(batch))
    return jax.device_get((state.params, metrics["loss"]))


MIXTURE = dataclasses.replace(
    MODEL, feed_forward=experts.Experts(num_experts=4, top_k=2, capacity_factor=1.0, load_balance_coef=0.1)
)
CASES = {
    "frozen and summed outputs": {
        "frozen": ("layers/*query", "embedding"),
        "frozen_dtype": "float32",
        "model": MIXTURE,
    },
    "full": {"model": dataclasses.replace(MODEL, remat="full")},
    "on host": {"model": dataclasses.replace(MODEL, remat="attention_on_host")},
    "accumulated": {"model": dataclasses.replace(MODEL, remat="projections"), "accum_steps": 2},
    "gathered once": {"gather_once": True, "accum_steps": 2},
}


@pytest.mark.parametrize(
    "options",
    [o if name == "full" else pytest.param(o, marks=pytest.mark.slow) for name, o in CASES.items()],
    ids=CASES,
)
def test_steps_are_those_of_the_usual_strategy(options):
    late, usual = trained(LATE, **options), trained(USUAL, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-7), late, usual)


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "full"])
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


@dataclasses.dataclass(frozen=True)
class Stack(HaikuModel):
    """Layers `tanh(x w)` of rows [B, D], and ways to go wrong; rows: of the batch in the stack, None: all."""

    draws = True

    stacked: bool = False
    integers: bool = False
    scaled: bool = False
    drops: bool = False
    rows: int | None = None

    def _loss(self, batch):
        def block(x, side):
            w = logical.param("w", (8, 8), ("embed", None), hk.initializers.RandomNormal(0.3))
            y = jnp.tanh(x["y"] @ w) * side
            if self.drops:
                y = hk.dropout(hk.next_rng_key(), 0.5, y)
            return ({**x, "y": y}, y) if self.stacked else {**x, "y": y}

        scale = logical.param("scale", (), (), jnp.ones) if self.scaled else 1.0
        x = {"y": batch["x"][: self.rows]}
        rows = len(x["y"])
        if self.integers:
            x["count"] = jnp.zeros(rows, jnp.int32)
        layers = layer_stack(block, 3, outputs="stacked" if self.stacked else None)
        found = layers(x, jnp.full((rows, 1), scale))
        x = found[0] if self.stacked else found
        return LossOutput(jnp.sum(x["y"] ** 2), jnp.float32(rows), {})


SPEC = {"x": Field((16, 8), jnp.float32, ("batch", None))}


def bind_stack(tables, model):
    at = Partitioner(tables, slice=slices.get("v4-16"), devices=jax.devices()[:8])
    return at.program(model, optimizers.adamw(learning_rate=optimizers.constant(1e-2)), SPEC, seed=0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Stack(stacked=True), "overlap_reduction: the layers have stacked outputs, expected summed ones or none"),
        (Stack(integers=True), "overlap_reduction: x of the layer stack has arrays of int32, expected floating-point"),
        (Stack(scaled=True), "overlap_reduction: the side of the layer stack depends on parameters"),
        (Stack(drops=True), r"or chip \(overlap_reduction\) would draw the same ones"),
        (Stack(rows=4), "overlap_reduction: 4 rows of the layer stack do not divide over 8 chips: train on a multiple"),
    ],
)
def test_stacks_that_it_cannot_differentiate_are_refused(model, message):
    with pytest.raises(UserError, match=message):
        bind_stack(LATE, model)


def test_layers_of_several_kinds_are_refused():
    with pytest.raises(UserError, match="overlap_reduction: the layers are of 2 kinds, expected one"):
        bind(LATE, dataclasses.replace(MODEL, mixer=(Attention(window=8), Attention())))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Stack(stacked=True), Stack(rows=4)])
def test_what_has_no_gradient_is_evaluated(model):
    late, usual = bind_stack(LATE, Stack()), bind_stack(USUAL, Stack())  # for their meshes
    batch = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)}
    params = model.init(jax.random.key(0), batch)
    found = []
    for program in (late, usual):
        with program.partitioner.tracing():
            found.append(jax.jit(lambda p, b: model.loss(p, (), None, b, is_training=False)[1].loss_sum)(params, batch))
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.slow
def test_one_layer():
    model = dataclasses.replace(MODEL, num_layers=1)
    late, usual = trained(LATE, model=model), trained(USUAL, model=model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-7), late, usual)


@pytest.mark.slow
@pytest.mark.parametrize("tables", [strategies.hsdp(data=8, fsdp=1), strategies.mesh3d(fsdp=8)])
def test_axes_of_one_chip_do_not_matter(tables):
    bind(dataclasses.replace(tables, overlap_reduction=True))


def test_a_mesh_axis_without_rows_is_refused():
    with pytest.raises(UserError, match="overlap_reduction would gather all experts on every chip"):
        dataclasses.replace(strategies.experts(expert=2), overlap_reduction=True)
    with pytest.raises(UserError, match=r"overlap_reduction: layers must not be sharded; set .*'layers': None"):
        strategies.override(strategies.fsdp(overlap_reduction=True), param_rules={"layers": "fsdp", "embed": None})
    with pytest.raises(UserError, match="overlap_reduction: tensor = 2 does not shard rows"):
        dataclasses.replace(strategies.fsdp_tensor(tensor=2), overlap_reduction=True)
    with pytest.raises(UserError, match="overlap_reduction = 'yes'; expected True or False"):
        strategies.fsdp(overlap_reduction="yes")


@pytest.mark.slow
def test_replicas_sum_shards():
    tables = dataclasses.replace(strategies.hsdp(data=2), overlap_reduction=True)
    late, usual = trained(tables), trained(strategies.hsdp(data=2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-7), late, usual)
