"""Transformations of optax treat a layer of a stack as a parameter of its own, whatever they look at."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from core import optimizers, parameters
from core.checkpoints import reading
from core.errors import UserError
from core.optimizers import stacks
from core.parameters import ParamSpec
from launch import environment

LAYERS = 3
SPECS = {
    "~": {"embedding": ParamSpec(("vocab", "embed")), "norm": ParamSpec(("norm",))},
    "layers/block": {
        "query": ParamSpec(("embed", "heads", "head_dim")).in_stack("layers"),
        "up": ParamSpec(("embed", "mlp")).in_stack("layers"),
        "norm": ParamSpec(("norm",)).in_stack("layers"),
    },
}
SHAPES = {
    "~": {"embedding": (11, 6), "norm": (6,)},
    "layers/block": {"query": (LAYERS, 6, 4, 2), "up": (LAYERS, 6, 10), "norm": (LAYERS, 6)},
}
PARAMS = jax.tree.map(
    lambda shape: jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32),
    SHAPES,
    is_leaf=lambda s: isinstance(s, tuple),
)
ALL = tuple(f"layers/block/{name}" for name in ("norm", "query", "up"))
NORM = ("layers/block/norm",)


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda p: "a" if p.ndim > 1 else "b", params)


def labels_by_name(params):
    return {m: {name: "b" if name == "norm" else "a" for name in leaves} for m, leaves in params.items()}


def two(of, by):
    return optax.partition({"a": of(0.1), "b": of(0.01)}, by)


def by_the_loss(scale):
    return optax.GradientTransformationExtraArgs(
        lambda params: (), lambda g, s, p=None, *, value, **_: (jax.tree.map(lambda x: x * scale(x) * value, g), s)
    )


SCHEDULE = optax.linear_schedule(0.1, 0.0, 9)
ALONE = {  # transformation: the stacked parameters that it would treat in another way than a single layer
    "adamw": (optax.adamw(0.1), ()),
    "adamw, mask": (optax.adamw(0.1, mask=matrices), NORM),
    "adamw, mask by name": (optax.adamw(0.1, mask=lambda p: {"~": False, "layers/block": True}), ()),
    "nadamw, mask": (optax.nadamw(0.1, mask=matrices), NORM),
    "adamaxw, mask": (optax.adamaxw(SCHEDULE, mask=matrices), NORM),
    "lion, mask": (optax.lion(0.1, mask=matrices), NORM),
    "injected": (optax.inject_hyperparams(optax.adamw)(SCHEDULE), ()),
    "injected, mask": (optax.inject_hyperparams(optax.adamw, static_args="mask")(SCHEDULE, mask=matrices), NORM),
    "masked": (optax.chain(optax.masked(optax.trace(0.9), matrices), optax.scale(-0.1)), NORM),
    "rates by label": (two(optax.adam, labels), NORM),
    "transformations by label": (optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, labels), NORM),
    "rates by name": (two(optax.adam, labels_by_name), ()),
    "several steps": (optax.MultiSteps(optax.adamw(0.1, mask=matrices), 2).gradient_transformation(), NORM),
    "several steps, no mask": (optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), ()),
    "schedule_free, mask": (optax.contrib.schedule_free(optax.adamw(0.1, mask=matrices), 0.1), NORM),
    "sm3": (optax.sm3(0.1), ALL),
    "adafactor": (optax.adafactor(0.1, min_dim_size_to_factor=4), ALL),
    "novograd": (optax.novograd(0.1), ALL),
    "clip_by_block_rms": (optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)), ALL),
    "adaptive_grad_clip": (optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)), ALL),
    "centralize": (optax.chain(optax.centralize(), optax.sgd(0.1)), ALL),
    "muon of one": (optax.partition({"a": optax.contrib.muon(0.1), "b": optax.adam(0.1)}, labels), None),
    "the loss": (optax.chain(by_the_loss(lambda x: x.ndim), optax.sgd(0.1)), ALL),
    "momentum": (optax.sgd(0.1, 0.9), ()),
    "adan": (optax.adan(0.1), ()),
    "schedule_free": (optax.contrib.schedule_free_adamw(0.1), ()),
    "rprop": (optax.rprop(0.1), ()),
    "adabelief": (optax.adabelief(0.1), ()),
    "ademamix": (optax.contrib.ademamix(0.1), ()),
    "acprop": (optax.contrib.acprop(0.1), ()),
    "cocob": (optax.contrib.cocob(), ()),
    "adopt": (optax.contrib.adopt(0.1), ()),
}
TOGETHER = {  # those that combine parameters
    "clipped": (optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)), ()),
    "clipped, mask": (optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1, mask=matrices)), NORM),
    "apply_if_finite, labels": (optax.apply_if_finite(two(optax.adam, labels), 3), NORM),
    "prodigy": (optax.contrib.prodigy(), ()),
    "dog": (optax.contrib.dog(), ()),
    "dadapt": (optax.contrib.dadapt_adamw(), ()),
    "polyak": (optax.polyak_sgd(), ()),
    "lbfgs": (optax.lbfgs(linesearch=None, memory_size=2), ()),
    "mechanize": (optax.contrib.mechanize(optax.adamw(0.1)), ()),
}
WITHOUT_MUON = {name: case for name, case in ALONE.items() if case[1] is not None}


@pytest.mark.parametrize("name", [*WITHOUT_MUON, *TOGETHER])
def test_it_is_known_what_looks_at_the_dimension_of_the_layers(name):
    transformation, otherwise = (ALONE | TOGETHER)[name]
    found = stacks.treatment(transformation, SPECS, jax.eval_shape(lambda: PARAMS))
    assert found == (otherwise, name in TOGETHER)


def layer(params, i):
    return jax.tree.map(lambda p: p[i], params["layers/block"])


def apart(params):
    return {"~": params["~"], **{f"layer_{i}": layer(params, i) for i in range(LAYERS)}}


def trained(init, update, params, steps=3):
    state, update = jax.jit(init)(params), jax.jit(update)
    for _ in range(steps):
        grads = jax.tree.map(lambda p: jnp.sin(3 * p) + 0.1, params)
        params, state = update(grads, state, params)
    return params, state


ERRORS = ("clipped, mask", "apply_if_finite, labels")
TRAINED = [n for n in (*WITHOUT_MUON, *TOGETHER) if n not in (*ERRORS, "adamw, mask by name")]
QUICK = ("adamw, mask", "rates by label", "the loss", "injected, mask", "clipped")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in TRAINED])
def test_a_layer_is_trained_as_a_parameter_of_its_own(name):
    transformation = optax.with_extra_args_support((ALONE | TOGETHER)[name][0])
    optimizer = optimizers.from_optax(transformation=transformation).bound(SPECS)
    loss = jnp.float32(2.0)

    def update(grads, state, params):
        updates, state = transformation.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    found, state = trained(optimizer.init, lambda g, s, p: optimizer.update(g, s, p, value=loss), PARAMS)
    want, _ = trained(transformation.init, update, apart(PARAMS))
    # It divides by small differences of sums, here in another order: an error of its parameters, which reach 12.
    rtol, atol = (1e-4, 1e-5) if name == "lbfgs" else (2e-5, 1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), apart(found), want)
    rate = optimizer.rate(state, jnp.int32(0), after=state)
    assert rate is None or rate.shape == ()


@pytest.mark.slow
def test_averages_of_layers_that_are_trained_apart():
    make = lambda: optax.contrib.schedule_free(optax.adamw(0.1, mask=matrices), 0.1)  # noqa: E731
    optimizer = optimizers.from_optax(transformation=make()).bound(SPECS)
    found = optimizer.evaluated(*trained(optimizer.init, optimizer.update, PARAMS))

    def update(grads, state, params):
        updates, state = make().update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = trained(make().init, update, apart(PARAMS))
    want = optax.contrib.schedule_free_eval_params(state, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), apart(found), want)


@pytest.mark.parametrize("name", ERRORS)
def test_what_looks_at_dimensions_and_combines_parameters_is_an_error(name):
    optimizer = optimizers.from_optax(transformation=TOGETHER[name][0]).bound(SPECS)
    with pytest.raises(UserError, match=r"layers/block/norm in another way.*from_optax\(clip_norm=…\)"):
        jax.eval_shape(optimizer.init, PARAMS)
    for by_layer in (True, False):
        optimizer = optimizers.from_optax(transformation=TOGETHER[name][0], by_layer=by_layer).bound(SPECS)
        jax.eval_shape(optimizer.init, PARAMS)


@pytest.mark.parametrize("make", [lambda: optax.contrib.muon(0.1), lambda: ALONE["muon of one"][0]])
def test_muon_of_optax_is_an_error_where_dimensions_do_not_tell_the_matrices(make):
    optimizer = optimizers.from_optax(transformation=make()).bound(SPECS)
    said = r"Adam for layers/block/query \(a matrix of 3 dim.*Muon for embedding \(kind embedding\).*by kind"
    with pytest.raises(UserError, match=said):
        jax.eval_shape(optimizer.init, PARAMS)
    for by_layer in (True, False):
        as_it_is = optimizers.from_optax(transformation=make(), by_layer=by_layer).bound(SPECS)
        jax.eval_shape(as_it_is.init, PARAMS)


@pytest.mark.parametrize(
    ("saved", "is_advised"), [({"by_layer": False}, True), ({}, False), ({"clip_norm": None, "by_layer": False}, False)]
)
def test_a_state_from_before_layers_were_separate_names_the_setting(saved, is_advised):
    def state(**settings):
        made = optimizers.from_optax(
            **{"transformation": optax.adamw(0.1, mask=matrices), "clip_norm": 1.0, **settings}
        )
        return jax.eval_shape(made.bound(SPECS).init, PARAMS)

    kinds = {name: reading.kind(leaf) for name, leaf in reading.by_name(state(**saved)).items()}
    advice = "".join(reading.advice(kinds, state()))
    assert ("set optimizers.from_optax.by_layer = False" in advice) == is_advised


def test_muon_of_optax_takes_the_matrices_of_each_layer():
    names = {"layers/block": ("up", "norm"), "~": ("norm",)}
    specs, params = ({m: {n: t[m][n] for n in of} for m, of in names.items()} for t in (SPECS, PARAMS))
    optimizer = optimizers.from_optax(transformation=optax.contrib.muon(0.1)).bound(specs)
    state = jax.eval_shape(optimizer.init, params)
    muon = optimizers.base.nodes(state, optax.contrib.MuonState)
    assert {name for node in muon for name in parameters.names(node.mu)} == {"layers/block/up"}


def test_frozen_parameters_are_left_out():
    specs = {**SPECS, "layers/block": {n: s.frozen("float32") for n, s in SPECS["layers/block"].items()}}
    optimizer = optimizers.from_optax(transformation=TOGETHER["clipped, mask"][0]).bound(specs)
    jax.eval_shape(optimizer.init, PARAMS)  # no stack is trained


def test_a_rule_of_a_user_takes_the_matrices_of_each_layer(monkeypatch):
    monkeypatch.syspath_prepend(environment.WORKSPACE / "tests" / "outside")
    optimizer = importlib.import_module("muon_by_kind").muon_by_kind(learning_rate=0.1, weight_decay=0.2).bound(SPECS)
    grads = jax.tree.map(lambda p: jnp.sin(3 * p), PARAMS)
    found, state = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(grads, PARAMS)
    muon = optimizers.base.nodes(state, optax.contrib.MuonState)
    matrices = {"layers/block/query", "layers/block/up"}
    assert {name for node in muon for name in parameters.names(node.mu)} == matrices
    of_one = optax.chain(optax.contrib.scale_by_muon(), optax.add_decayed_weights(0.2), optax.scale(-0.1))
    alone = jax.jit(lambda g, p: p + of_one.update(g, of_one.init(p), p)[0])
    for i in range(LAYERS):
        p, g = (layer(tree, i)["query"].reshape(6, 8) for tree in (PARAMS, grads))
        want = alone(g, p)
        np.testing.assert_allclose(layer(found, i)["query"].reshape(6, 8), want, atol=2e-5)
