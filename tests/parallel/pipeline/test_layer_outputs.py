"""Layers with a tree as stream, inputs, summed outputs and kinds: under every schedule as on one device."""

import dataclasses
import functools
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, optimizers, slices
from core.batches import Field
from core.stack import Tail, haiku_tail, layer_stack
from core.types import LossOutput
from parallel import partitioner, strategies
from parallel.pipeline import schedules
from tests.haiku_model import HaikuModel

ROWS, WIDTH, HIDDEN = 8, 8, 12
SPEC = {"x": Field((ROWS, WIDTH), np.float32, ("batch", None)), "scale": Field((ROWS,), np.float32, ("batch",))}
MAKE = {
    "gpipe": schedules.gpipe,
    "circular": functools.partial(schedules.circular, repeats=2),
    "1F1B": schedules.one_f_one_b,
}


@dataclasses.dataclass(frozen=True)
class Scored(HaikuModel):
    """Layers with an auxiliary loss, whose stream has scores of rows, and that read a scale and a number of their own.

    Attributes:
      layers: L.
      pattern: kinds "local" and "global" of layers; None: all are "local".
      tail: whether the loss is the tail of the stack: "params" with a parameter of the model, "haiku" with its own.
      group: the layers that are one layer of the stack; those of kind "global" then have a parameter more.
    """

    layers: int = 4
    pattern: tuple[str, ...] | None = None
    tail: str = "params"
    group: int = 1

    def _block(self, x, side, layer_in, *, kind="local"):
        if self.group == 1:
            return self._layer(x, side, layer_in, kind)
        with hk.experimental.name_scope(kind):
            return self._layer(x, side, layer_in, kind)

    def _layer(self, x, side, layer_in, kind):
        init = hk.initializers.RandomNormal(0.6 / self.layers**0.5)  # deep stacks do not amplify rounding errors
        wide = logical.param("wide", (WIDTH, HIDDEN), ("embed", "mlp"), init)
        narrow = logical.param("narrow", (HIDDEN, WIDTH), ("mlp", "embed"), init)
        bend = {"local": jnp.tanh, "global": jnp.sin}[kind]
        bias = logical.param("bias", (HIDDEN,), ("mlp",), init) if kind == "global" and self.group > 1 else 0.0
        hidden = logical.constrain(bend(x["x"] @ wide + bias) * layer_in["scale"], "batch", "mlp")
        after = x["x"] + (hidden @ narrow) * side[:, None]
        scores = x["scores"] + jnp.where(layer_in["number"] % 2 == 0, after[:, 0], after[:, 1])
        return {"x": after, "scores": scores}, {"balance": jnp.sum(hidden**2), "units": jnp.sum(hidden, axis=0)}

    def _loss(self, batch):
        def last(head, x, side, summed):
            balance = 0.1 * summed["balance"] + jnp.sum(jnp.arange(HIDDEN) * summed["units"])
            main = jnp.sum((x["x"] @ head) ** 2) + jnp.sum(x["scores"] * side)
            return LossOutput(main + balance, jnp.float32(x["scores"].shape[0]), {})

        def haiku_last(x, side, summed):
            return last(logical.param("head", *of_head), x, side, summed)

        of_head = (WIDTH, 2), ("embed", None), hk.initializers.RandomNormal(0.5)
        x = {"x": batch["x"], "scores": jnp.zeros(batch["x"].shape[:1])}
        if self.tail == "haiku":
            like = {"balance": jnp.zeros(()), "units": jnp.zeros(HIDDEN)}
            tail = haiku_tail(haiku_last, x, batch["scale"], summed=like)
        else:
            head = logical.param("head", *of_head)
            tail = Tail(last, head) if self.tail else None
        scale = logical.param("scales", (self.layers,), (None,), hk.initializers.RandomNormal(0.1, 1.0))
        stack = layer_stack(
            self._block,
            self.layers,
            outputs={"balance": "summed", "units": "summed"},
            pattern=self.pattern,
            tail=tail,
            group=self.group,
        )
        result, summed = stack(x, batch["scale"], {"scale": scale, "number": jnp.arange(self.layers)})
        return result if self.tail else last(head, result, batch["scale"], summed)


def batch_of(rows=ROWS):
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(rows, WIDTH)).astype(np.float32),
        "scale": rng.uniform(size=rows).astype(np.float32),
    }


@functools.cache
def parameters_of(model):
    return jax.device_get(jax.jit(model.init)(jax.random.key(3), batch_of()))


def gradients(model, tables, slice_name):
    """The loss and its gradients."""
    bound = partitioner.Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())

    def loss(params, batch):
        return model.loss(params, (), jax.random.key(0), batch, is_training=True)[1].loss_sum

    with bound.tracing():
        return jax.device_get(jax.jit(jax.value_and_grad(loss))(parameters_of(model), batch_of()))


@pytest.fixture(scope="module")
def one_device():
    return functools.cache(lambda model: gradients(model, strategies.data_parallel(), "v5e-1"))


class Case(NamedTuple):
    """One pipeline."""

    schedule: str
    stages: int
    make: str = "pipeline"
    save: str = "layers"
    tail: str = "params"

    @property
    def tables(self):
        """Bubbles compute on NaN: had a number anything to do with them, it would be NaN too."""
        schedule = dataclasses.replace(MAKE[self.schedule](num_microbatches=4, save=self.save), bubble_input=np.nan)
        options = {"tensor": 2} if self.make == "pipeline_fsdp_tensor" else {}
        return getattr(strategies, self.make)(stage=self.stages, schedule=schedule, **options)


# Other schedules have quick tests below: 1F1B with layers of different parameters, and circular.
CASES = [
    Case("gpipe", 2, tail=""),
    *(Case(name, 2, save=save) for name in MAKE for save in ("layers", "stage")),
    *(Case(name, 2, make) for name in MAKE for make in ("pipeline_fsdp", "pipeline_fsdp_tensor")),
    Case("circular", 2, "pipeline_fsdp", tail=""),
    Case("gpipe", 2, tail="haiku"),
    Case("gpipe", 4, save="stage"),
    Case("1F1B", 4, save="stage"),
]


def label(case):
    return ", ".join(map(str, case))


def equal(found, wanted):
    """Up to the order of sums, whose terms are much larger than some of the results."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=3e-6 * np.max(np.abs(b)))


@pytest.mark.covers("M12")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=label(case), marks=[pytest.mark.slow] * (case != CASES[0]))
        for case in dict.fromkeys(CASES)
    ],
)
def test_an_auxiliary_loss_has_the_value_and_gradients_of_one_device(case, one_device):
    model = Scored(tail=case.tail)
    equal(gradients(model, case.tables, "v4-8"), one_device(model))


@pytest.mark.covers("M12")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=label(case), marks=[pytest.mark.slow] * (case != Case("1F1B", 2)))
        for case in (Case("1F1B", 2), Case("1F1B", 2, "pipeline_fsdp_tensor"), Case("circular", 2, save="stage"))
    ],
)
def test_layers_with_different_parameters_have_the_gradients_of_one_device(case, one_device):
    """Stages have groups of layers; four of them in the model, so that a stage has two."""
    model = Scored(layers=8, pattern=("local", "global"), group=2)
    assert {"layers/local", "layers/global"} <= set(parameters_of(model))
    equal(gradients(model, case.tables, "v4-8"), one_device(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables",
    [
        strategies.data_parallel(),
        strategies.zero1(),
        strategies.fsdp(),
        strategies.hsdp(data=2),
        strategies.tensor(),
        strategies.fsdp_tensor(tensor=2),
        strategies.sequence_tensor(tensor=2),
        strategies.context(sequence=2),
        strategies.mesh3d(data=2, tensor=2),
    ],
    ids=lambda tables: tables.name,
)
def test_an_auxiliary_loss_without_a_pipeline_is_that_of_one_device(tables, one_device):
    equal(gradients(Scored(), tables, "v4-8"), one_device(Scored()))


def count_products(jaxpr):
    """Counts the matrix products in a program, each once however often it runs."""
    inner = [part for eqn in jaxpr.eqns for value in eqn.params.values() for part in jax.tree.leaves(value)]
    programs = [getattr(part, "jaxpr", part) for part in inner if hasattr(part, "eqns") or hasattr(part, "jaxpr")]
    own = sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)
    return own + sum(count_products(program) for program in programs)


@pytest.mark.parametrize(("name", "written_out"), [("gpipe", 2), ("circular", 1), ("1F1B", 2 * 2)])
def test_no_gradient_of_frozen_layers_is_computed(name, written_out):
    """Each layer that is written out (1F1B: in two loops) lacks the products of its two matrices; all others remain."""
    model, bound = (
        Scored(),
        partitioner.Partitioner(Case(name, 2).tables, slice=slices.get("v4-8"), devices=jax.devices()),
    )
    params = parameters_of(model)

    def loss(params, is_frozen):
        layers = jax.lax.stop_gradient(params["layers/~"]) if is_frozen else params["layers/~"]
        own = {**params, "layers/~": layers}
        return model.loss(own, (), jax.random.key(0), batch_of(), is_training=True)[1].loss_sum

    with bound.tracing():
        counts = [
            count_products(jax.make_jaxpr(jax.grad(lambda p, stop=stop: loss(p, stop)))(params).jaxpr)
            for stop in (False, True)
        ]
    assert counts[0] - counts[1] == 2 * written_out


FIVE_TO_ONE = Scored(26, ("local",) * 5 + ("global",))
TWO_TO_ONE = Scored(3, ("local",) * 2 + ("global",), tail="haiku")


def test_layers_of_two_kinds_that_do_not_divide_over_the_stages(one_device):
    """Three layers over 2 stages: the second has one layer, of another kind than the first layer of the first stage."""
    equal(gradients(TWO_TO_ONE, Case("1F1B", 2, "pipeline_fsdp").tables, "v4-8"), one_device(TWO_TO_ONE))


@pytest.mark.covers("M12")
@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("stages", "make"),
    [(2, "pipeline"), (4, "pipeline"), (2, "pipeline_fsdp_tensor"), (2, "pipeline_fsdp")],
)
def test_a_pattern_over_26_layers_has_the_numbers_of_one_device(name, stages, make, one_device):
    """They do not divide over 4 stages, and the pattern over neither 2 nor 4."""
    wanted = one_device(FIVE_TO_ONE)
    assert {a.shape[0] for a in jax.tree.leaves(wanted[1]["layers/~"])} == {26}
    equal(gradients(FIVE_TO_ONE, Case(name, stages, make).tables, "v4-8"), wanted)


@pytest.mark.parametrize(("layers", "tail"), [(6, ""), pytest.param(7, "params", marks=pytest.mark.slow)])
def test_parts_of_a_circular_pipeline_that_are_not_full(layers, tail, one_device):
    """Over 2 stages x 2 repeats: 6 layers are stored by stages, 7 are not; parts have 2 layers, the last 0 or 1."""
    model = Scored(layers, ("local",) * 2 + ("global",), tail)
    equal(gradients(model, Case("circular", 2).tables, "v4-8"), one_device(model))


@pytest.mark.slow
def test_layers_that_do_not_divide_train_and_are_stored_in_equal_shards():
    """The parameters and the optimizer's state are sharded over the stages by another dimension."""

    def trained(tables, slice_name):
        bound = partitioner.Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
        optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-2), eps=1e-3)
        program = bound.program(TWO_TO_ONE, optimizer, SPEC, seed=3)
        state, _ = program.train_step(program.init(), program.put(batch_of()))
        return state

    state = trained(Case("gpipe", 2, "pipeline_fsdp").tables, "v4-8")
    for name, stored in (("wide", (3, WIDTH // 4, HIDDEN)), ("narrow", (3, HIDDEN // 2, WIDTH // 2))):
        assert state.params["layers/~"][name].addressable_shards[0].data.shape == stored
    equal(jax.device_get(state.params), jax.device_get(trained(strategies.data_parallel(), "v5e-1").params))


# Without a gradient a cache works, in a pipeline's strategy too; with one it is refused.


def linear(x):
    return x @ logical.param("w", (WIDTH, WIDTH), ("embed", None), hk.initializers.RandomNormal(0.3))


def running_sums(x, cache):
    """Layers that add x to a cache [L, B, D] of what they have seen, and return it."""

    def block(x, side, cache):
        cache = cache + linear(x)
        return jnp.tanh(cache), cache

    return layer_stack(block, 4, outputs="stacked")(x, (), cache)


def bound_pipeline(schedule=None):
    tables = strategies.pipeline(stage=2, schedule=schedule or schedules.gpipe(num_microbatches=2))
    return partitioner.Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices())


def test_a_cache_is_threaded_through_layers_under_a_pipeline_without_gradient():
    net = hk.without_apply_rng(hk.transform(running_sums))
    x, cache = batch_of()["x"], jnp.ones((4, ROWS, WIDTH))
    params = net.init(jax.random.key(0), x, cache)
    wanted = net.apply(params, x, net.apply(params, x, cache)[1])
    with bound_pipeline().tracing():
        step = jax.jit(net.apply)
        equal(jax.device_get(step(params, x, step(params, x, cache)[1])), wanted)
        with pytest.raises(
            ValueError, match="a layer stack with stacked outputs runs without a pipeline, and has no grad"
        ):
            jax.eval_shape(jax.grad(lambda params: jnp.sum(net.apply(params, x, cache)[0])), params)


def stacked_net(block, layer_in=(), x=None, **options):
    x = jnp.ones((ROWS, WIDTH)) if x is None else x
    return hk.transform(lambda: layer_stack(block, 4, **options)(x, (), layer_in))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (
            stacked_net(lambda x, side: x, x={"x": jnp.ones((ROWS, 3)), "ids": jnp.ones(ROWS, int)}),
            r"x\['ids'\] of the layer stack is int32\[8\], and stages exchange gradients",
        ),
        (
            stacked_net(lambda x, side, rows: linear(x) + rows[:, None], jnp.ones((4, ROWS))),
            "runs on all rows, but not on those of a microbatch. layer_in belongs to layers",
        ),
        (
            stacked_net(lambda x, side: (linear(x), jnp.sum(x, axis=1)), outputs="summed"),
            r"shapes .*\(2,\).* instead of .*\(8,\).*: a summed output is a sum over rows",
        ),
    ],
)
def test_arrays_of_rows_are_refused_elsewhere(net, message):
    with bound_pipeline().tracing(), pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: net.apply(net.init(jax.random.key(0)), None))


def test_outputs_of_1f1b_other_than_the_tail_have_no_gradient():
    def block(x, side):
        y = linear(x)
        return jnp.tanh(y), jnp.sum(y)

    tail = Tail(lambda params, x, side, summed: LossOutput(jnp.sum(x) + summed, jnp.float32(1), {}), ())
    net = hk.transform(lambda: layer_stack(block, 4, outputs="summed", tail=tail)(jnp.ones((ROWS, WIDTH))))
    params = net.init(jax.random.key(0))

    def loss(params):
        out, summed = net.apply(params, None)
        return out.loss_sum + summed

    bound = bound_pipeline(schedules.one_f_one_b(num_microbatches=4))
    with (
        bound.tracing(),
        pytest.raises(ValueError, match=r"only loss_sum of the tail's result.*as its fourth argument"),
    ):
        jax.eval_shape(jax.grad(loss), params)
