"""Transformations of optax as optimizers: masks, layouts, evaluation, extra arguments, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from core import optimizers, parameters
from core.logical import Axes
from core.parameters import ParamSpec

SPECS = {
    "~": {"embedding": ParamSpec(("vocab", "embed")), "turn": ParamSpec(("embed",), trainable=False)},
    "layers/block": {"query": ParamSpec(("layers", "embed", "heads"), stacked=1)},
}
RANDOM = np.random.default_rng(0)
PARAMS = {
    "~": {"embedding": jnp.asarray(RANDOM.normal(size=(6, 4)), jnp.float32), "turn": jnp.ones(4)},
    "layers/block": {"query": jnp.asarray(RANDOM.normal(size=(3, 4, 2)), jnp.float32)},
}
SHAPES = jax.eval_shape(lambda: PARAMS)


def adapted(transformation, specs=SPECS, **options):
    return optimizers.from_optax(transformation=transformation, **options).bound(specs)


def test_the_rate_of_a_transformation_that_is_applied_to_each_layer_is_a_number():
    rate = optax.linear_schedule(0.5, 0.0, 5)
    optimizer = optimizers.Optimizer(lambda specs: parameters.by_layer(optax.sgd(rate), specs), rate).bound(SPECS)
    state = optimizer.init(PARAMS)
    _, after = optimizer.update(grads_at(PARAMS), state, PARAMS, extras={}, value=jnp.float32(1))
    for counted, expected in ((state, 0.5), (after, 0.4)):
        found = optimizer.rate(counted, jnp.int32(0), after=counted)
        assert found.shape == ()
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def grads_at(params):
    return jax.tree.map(lambda p: jnp.sin(3 * p) + 0.1, params)


def trained(optimizer, steps=3, params=PARAMS):
    state = optimizer.init(params)
    for _ in range(steps):
        params, state = optimizer.update(grads_at(params), state, params, value=jnp.float32(2.0))
    return params, state


def by_optax(transformation, params, steps=3):
    state = transformation.init(params)
    for _ in range(steps):
        updates, state = transformation.update(grads_at(params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def without_constant(params):
    return {"~": {"embedding": params["~"]["embedding"]}, "layers/block": params["layers/block"]}


@pytest.mark.covers("M16")
@pytest.mark.parametrize("make", [lambda: optax.contrib.prodigy(estim_lr0=0.1), lambda: optax.adan(1e-2)])
def test_it_updates_trained_parameters_as_optax_does_and_no_others(make):
    params, _ = trained(adapted(make()))
    want, _ = by_optax(make(), without_constant(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, without_constant(params), want)
    np.testing.assert_array_equal(params["~"]["turn"], PARAMS["~"]["turn"])
    specs = {**SPECS, "layers/block": {"query": SPECS["layers/block"]["query"].frozen("float32")}}
    frozen, state = trained(adapted(make(), specs))
    jax.tree.map(np.testing.assert_array_equal, frozen["layers/block"], PARAMS["layers/block"])
    assert np.any(frozen["~"]["embedding"] != PARAMS["~"]["embedding"])
    assert not [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (3, 4, 2)]


def test_the_gradient_is_clipped_only_on_request():
    params = without_constant(PARAMS)
    norm = optax.tree.norm(grads_at(params))
    for clip_norm, factor in ((None, 1.0), (0.5, 0.5 / norm)):
        changed, _ = trained(adapted(optax.sgd(1.0), clip_norm=clip_norm), steps=1)
        step = jax.tree.map(lambda new, old: old - new, without_constant(changed), params)
        want = jax.tree.map(lambda g, f=factor: g * f, grads_at(params))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), step, want)  # of a difference


def test_layers_may_be_parameters_of_their_own():
    specs = {"layers/block": {"query": SPECS["layers/block"]["query"]}}
    stack = {"layers/block": dict(PARAMS["layers/block"])}
    apart = {str(i): {"query": stack["layers/block"]["query"][i]} for i in range(3)}
    for make in (lambda: optax.lamb(0.1), lambda: optax.sm3(0.1)):
        want, _ = by_optax(make(), apart)
        for by_layer in (True, False):
            params, _ = trained(adapted(make(), specs, by_layer=by_layer), params=stack)
            found = params["layers/block"]["query"]
            differs = max(float(jnp.max(jnp.abs(found[i] - want[str(i)]["query"]))) for i in range(3))
            assert (differs < 1e-6) == by_layer  # a vectorized norm is summed in another order


@pytest.mark.parametrize(
    ("transformation", "copies"),
    [
        (optax.contrib.prodigy(), 4),
        (optax.adan(1e-3), 4),
        (optax.contrib.schedule_free_adamw(), 2),
        (optax.sm3(1e-3), 1),
        (optax.lamb(1e-3), 2),
        (optax.lbfgs(linesearch=None, memory_size=3), 4),
    ],
)
def test_state_is_sharded_like_its_parameters(transformation, copies):
    axes = optimizers.state_axes(adapted(transformation), SHAPES)
    named = [a.names for a in jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, Axes)) if any(a.names)]
    for names in (("vocab", "embed"), ("layers", "embed", "heads")):
        assert len([n for n in named if n[-len(names) :] == names]) == copies
    assert len(named) == 2 * copies


def test_schedule_free_is_evaluated_at_its_average():
    make = lambda: optax.contrib.schedule_free_adamw(0.1)  # noqa: E731
    optimizer = adapted(make())
    params, state = trained(optimizer)
    want = optax.contrib.schedule_free_eval_params(*reversed(by_optax(make(), without_constant(PARAMS))))
    found = optimizer.evaluated(params, state)
    jax.tree.map(np.testing.assert_array_equal, without_constant(found), want)
    assert np.any(found["~"]["embedding"] != params["~"]["embedding"])
    np.testing.assert_array_equal(found["~"]["turn"], PARAMS["~"]["turn"])
    same = adapted(optax.adan(0.1))
    assert same.evaluated(PARAMS, same.init(PARAMS)) is PARAMS
    averaged = optimizers.averaged(optimizer=same).bound(SPECS)
    averaging = [each.is_averaging(jax.eval_shape(each.init, PARAMS)) for each in (same, optimizer, averaged)]
    assert averaging == [False, True, True]
    for averaging, name in ((optimizer, "schedule_free"), (averaged, "averaged")):
        with pytest.raises(ValueError, match=rf"already averages its parameters \({name}\); use it alone"):
            optimizers.averaged(optimizer=averaging).bound(SPECS).init(PARAMS)


def test_the_rate_is_reported_if_the_state_has_it():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    for transformation, want in ((optax.adan(schedule), None), (optax.inject_hyperparams(optax.adan)(schedule), 0.5)):
        optimizer = adapted(transformation)
        params, before = trained(optimizer, steps=2)
        _, after = optimizer.update(grads_at(params), before, params)
        rate = optimizer.rate(before, jnp.int32(7), after=after)
        assert rate == want  # of the third update


def test_the_loss_is_given():
    params = without_constant(PARAMS)
    found, _ = trained(adapted(optax.polyak_sgd(max_learning_rate=10.0)), steps=1)
    scale = 2.0 / optax.tree.norm(grads_at(params)) ** 2  # (f - 0) / |g|^2
    want = jax.tree.map(lambda p: p - scale * grads_at(p), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), without_constant(found), want)  # of 1


def growing():
    return optax.GradientTransformation(lambda p: {"n": jnp.zeros(1)}, lambda u, s, p=None: (u, {"n": jnp.zeros(2)}))


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (
            lambda: optax.lbfgs(),
            {},
            r"required keyword-only arguments.*'value_fn'.*\(value_fn, obj_fn, grad_fn\) cannot",
        ),
        (lambda: optax.contrib.sophia(1e-3), {}, r"obj_fn must be provided.*cannot be given"),
        (growing, {}, r"changes the form of its state \(.*n: float32\[1\] becomes float32\[2\]\)"),
        (lambda: optax.adan, {}, "transformation is of type function, expected an optax.GradientTransformation"),
        (lambda: optax.adan(1e-3), {"clip_norm": 0.0}, "from_optax: clip_norm = 0.0: expected above 0"),
    ],
)
def test_inapplicable_transformations_are_refused_before_the_first_step(make, options, says):
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(adapted(make(), **options).init, SHAPES)
