"""AdamATan2 in closed form, signs for a table's touched rows, averages, and a schedule with a floor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import optimizers
from core.logical import Axes
from core.parameters import ParamSpec

RATE = optimizers.warmup_floor(peak=1e-2, warmup_steps=10, total_steps=100, floor=0.1)
PARAMS = {
    "~": {"h_init": jnp.full((4,), 0.7), "puzzle_table": jnp.arange(20.0).reshape(5, 4) / 7 - 1},
    "layers/block": {"w": jnp.linspace(-1, 1, 12).reshape(3, 4), "bias": jnp.full((2,), -5.0)},
}
SPECS = {
    "~": {"h_init": ParamSpec(("embed",), trainable=False), "puzzle_table": ParamSpec(("puzzles", None), kind="table")},
    "layers/block": {"w": ParamSpec(("embed", "mlp")), "bias": ParamSpec((None,))},
}
TOUCHED = {"puzzle_table": jnp.array([1, 3, 3], jnp.int32)}


def composed(**options):
    dense = optimizers.adam_atan2(learning_rate=RATE, weight_decay=0.1)
    table = optimizers.with_table(dense=dense, learning_rate=optimizers.constant(0.05), **options)
    return optimizers.averaged(optimizer=table, decay=0.9).bound(SPECS)


def grads_at(step):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(0, 1, p.shape), jnp.float32), PARAMS)


def steps_of(optimizer, count, *, extras=TOUCHED, grads=grads_at, specs=SPECS):
    optimizer = optimizer.bound(specs)
    state, params, seen = optimizer.init(PARAMS), PARAMS, []
    for step in range(count):
        params, state = optimizer.update(grads(step), state, params, extras)
        seen.append((params, state))
    return seen


@pytest.mark.covers("T06")
def test_a_schedule_with_a_floor_counts_the_step_it_is_made_for():
    rate = optimizers.warmup_floor(peak=2.0, warmup_steps=4, total_steps=14, floor=0.25)
    found = [float(rate(jnp.int32(s))) for s in (0, 2, 3, 8, 13, 50)]
    np.testing.assert_allclose(found, [0.5, 1.5, 2.0, 2 * (0.25 + 0.75 / 2), 0.5, 0.5], rtol=1e-6)
    flat = optimizers.warmup_floor(peak=2.0, warmup_steps=4, total_steps=14)
    np.testing.assert_allclose([float(flat(jnp.int32(s))) for s in (0, 3, 9, 99)], [0.5, 2, 2, 2], rtol=1e-6)
    never_warm = optimizers.warmup_floor(peak=2.0, warmup_steps=2000, total_steps=813, floor=0.1)
    assert float(never_warm(jnp.int32(812))) == pytest.approx(2.0 * 813 / 2000, rel=1e-6)
    with pytest.raises(ValueError, match=r"floor = 1\.5: expected from 0 to 1"):
        optimizers.warmup_floor(peak=1.0, warmup_steps=0, total_steps=1, floor=1.5)
    with pytest.raises(ValueError, match="warmup_steps = -1: expected at least 0"):
        optimizers.warmup_floor(peak=1.0, warmup_steps=-1, total_steps=1)


def test_adam_atan2_is_its_closed_form_for_100_steps():
    optimizer = optimizers.adam_atan2(learning_rate=RATE, weight_decay=0.1).bound(SPECS)
    p = {"w": np.linspace(-1, 1, 12), "bias": np.full(2, -5.0)}
    m, v = ({k: np.zeros_like(a) for k, a in p.items()} for _ in range(2))
    state, params, update = optimizer.init(PARAMS), PARAMS, jax.jit(optimizer.update)
    for t in range(1, 101):
        grads = grads_at(t)
        params, state = update(grads, state, params)
        rate = 1e-2 * t / 10 if t < 10 else 1e-2 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (t - 10) / 90)))
        for k in p:
            g = np.asarray(grads["layers/block"][k], np.float64).ravel()
            m[k], v[k] = 0.9 * m[k] + 0.1 * g, 0.95 * v[k] + 0.05 * g**2
            angle = np.arctan2(m[k], np.sqrt(v[k]) / np.sqrt(1 - 0.95**t))
            p[k] = p[k] * (1 - rate * 0.1) - rate / (1 - 0.9**t) * angle
    for k in p:
        np.testing.assert_allclose(np.ravel(params["layers/block"][k]), p[k], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(params["~"]["h_init"], PARAMS["~"]["h_init"])


def test_a_parameter_without_a_gradient_only_decays():
    optimizer = optimizers.adam_atan2(learning_rate=RATE, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    params, _ = steps_of(optimizer, 20, grads=lambda _: zeros)[-1]
    left = np.prod([1 - 0.5 * float(RATE(jnp.int32(s))) for s in range(20)])
    np.testing.assert_allclose(params["layers/block"]["bias"], -5 * left, rtol=1e-6)


def test_touched_rows_follow_the_sign_and_the_others_keep_their_bits():
    found = steps_of(composed(weight_decay=0.3), 3)
    table = np.asarray(PARAMS["~"]["puzzle_table"])
    for step, (params, _) in enumerate(found):
        changed = table * np.float32(1 - 0.05 * 0.3) - np.float32(0.05) * np.sign(grads_at(step)["~"]["puzzle_table"])
        table = np.where(np.isin(np.arange(5), [1, 3])[:, None], changed, table)
        np.testing.assert_allclose(params["~"]["puzzle_table"], table, rtol=3e-7)
        np.testing.assert_array_equal(params["~"]["puzzle_table"][np.array([0, 2, 4])], table[[0, 2, 4]])


def test_constants_have_no_state_and_never_change():
    params, state = steps_of(composed(), 5)[-1]
    np.testing.assert_array_equal(params["~"]["h_init"], PARAMS["~"]["h_init"])
    kept = [a.shape for a in jax.tree.leaves(state) if a.ndim]
    assert sorted(kept) == sorted([(3, 4), (2,)] * 3)  # two moments and an average; nothing of table and constants
    trainable = composed().trainable(PARAMS)
    grads = jax.grad(lambda p: sum(jnp.sum(a) for a in jax.tree.leaves(composed().trainable(p))))(trainable)
    assert not np.any(grads["~"]["h_init"])
    assert np.all(grads["layers/block"]["w"] == 1)


@pytest.mark.covers("T17")
def test_an_average_starts_at_the_first_parameters_and_is_evaluated():
    found = steps_of(composed(), 4)
    want = np.asarray(PARAMS["layers/block"]["w"], np.float64)
    for params, state in found:
        want = 0.9 * want + 0.1 * np.asarray(params["layers/block"]["w"])
        evaluated = composed().evaluated(params, state)
        np.testing.assert_allclose(evaluated["layers/block"]["w"], want, rtol=1e-5)
    np.testing.assert_array_equal(evaluated["~"]["puzzle_table"], params["~"]["puzzle_table"])
    np.testing.assert_array_equal(evaluated["~"]["h_init"], params["~"]["h_init"])
    plain = optimizers.adamw(learning_rate=RATE).bound(SPECS)
    assert plain.evaluated(PARAMS, plain.init(PARAMS)) is PARAMS


def test_the_reported_rate_is_that_of_the_dense_schedule_inside_a_table_and_an_average():
    _, state = steps_of(composed(), 3)[-1]
    assert float(composed().rate(state, jnp.int32(50), after=state)) == float(RATE(jnp.int32(3)))


@pytest.mark.parametrize("dense", [optimizers.adamw, optimizers.lion, optimizers.adam_atan2])
def test_any_rule_can_be_combined_with_the_table(dense):
    optimizer = optimizers.with_table(dense=dense(learning_rate=RATE), learning_rate=RATE)
    params, _ = steps_of(optimizer, 1)[-1]
    assert np.sum(params["layers/block"]["w"] != PARAMS["layers/block"]["w"]) >= 10
    np.testing.assert_array_equal(params["~"]["puzzle_table"][0], PARAMS["~"]["puzzle_table"][0])


def test_averages_are_laid_out_as_their_parameters_are():
    named = optimizers.state_axes(composed(), jax.eval_shape(lambda: PARAMS))
    assert named.average["layers/block"]["w"] == Axes(("embed", "mlp"))
    assert sorted(map(str, jax.tree.leaves(named, is_leaf=lambda a: isinstance(a, Axes)))).count("(embed, mlp)") == 3


@pytest.mark.parametrize("around", [lambda o: o, lambda o: optimizers.averaged(optimizer=o)], ids=["alone", "averaged"])
def test_with_all_else_frozen_only_the_table_is_trained(around):
    dense = optimizers.adam_atan2(learning_rate=RATE, weight_decay=0.1)
    frozen = {**SPECS, "layers/block": {n: spec.frozen("float32") for n, spec in SPECS["layers/block"].items()}}
    optimizer = around(optimizers.with_table(dense=dense, learning_rate=optimizers.constant(0.05)))
    bound = optimizer.bound(frozen)
    grads = jax.grad(lambda p: sum(jnp.sum(a) for a in jax.tree.leaves(bound.trainable(p))))(PARAMS)
    assert np.all(grads["~"].pop("puzzle_table") == 1)
    assert not any(np.any(a) for a in jax.tree.leaves(grads))
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    params, state = steps_of(optimizer, 2, grads=lambda _: ones, specs=frozen)[-1]
    row = (PARAMS["~"]["puzzle_table"][1] * 0.95 - 0.05) * 0.95 - 0.05  # decay and sign, twice
    np.testing.assert_allclose(params["~"]["puzzle_table"][1], row, rtol=1e-6)
    np.testing.assert_array_equal(params["~"]["puzzle_table"][0], PARAMS["~"]["puzzle_table"][0])
    jax.tree.map(np.testing.assert_array_equal, params["layers/block"], PARAMS["layers/block"])
    assert not [a for a in jax.tree.leaves(state) if a.ndim]  # no moment and no average of what is frozen


def test_a_frozen_table_has_no_sign_updates():
    optimizer = optimizers.with_table(dense=optimizers.adam_atan2(learning_rate=RATE), learning_rate=RATE)
    frozen = {**SPECS, "~": {**SPECS["~"], "puzzle_table": SPECS["~"]["puzzle_table"].frozen("float32")}}
    with pytest.raises(ValueError, match="no trained parameter is a table"):
        optimizer.bound(frozen)
    two = {**frozen, "other": {"table": SPECS["~"]["puzzle_table"]}}
    params = {**PARAMS, "other": {"table": PARAMS["~"]["puzzle_table"]}}
    grads, extras = jax.tree.map(jnp.ones_like, params), {"other/table": jnp.array([1])}
    bound = optimizer.bound(two)
    after, _ = bound.update(grads, bound.init(params), params, extras)
    np.testing.assert_array_equal(after["~"]["puzzle_table"], PARAMS["~"]["puzzle_table"])
    assert np.any(after["other"]["table"] != PARAMS["~"]["puzzle_table"])


def test_constants_are_not_updated_whatever_their_name():
    specs = {"~": {"w": ParamSpec(("embed", "mlp")), "fixed": ParamSpec(("embed", "mlp"), "matrix", trainable=False)}}
    params = jax.tree.map(lambda _: jnp.ones((2, 2)), specs)
    optimizer = optimizers.adam_atan2(learning_rate=optimizers.constant(0.1)).bound(specs)
    after, _ = optimizer.update(params, optimizer.init(params), params)
    still = jax.tree.map(lambda a, b: bool(np.all(a == b)), after, params)
    assert still == {"~": {"w": False, "fixed": True}}


def test_invalid_compositions_are_refused():
    dense = optimizers.adamw(learning_rate=RATE)
    with pytest.raises(ValueError, match=r"averaged: decay = 1\.0: expected from 0 to below 1"):
        optimizers.averaged(optimizer=dense, decay=1.0)
    with pytest.raises(ValueError, match="`dense` averages; reverse the order"):
        optimizers.with_table(dense=optimizers.averaged(optimizer=dense), learning_rate=RATE)
    with pytest.raises(
        ValueError, match=r"no trained parameter is a table .* are layers/block/bias, layers/block/w\. Use the"
    ):
        optimizers.with_table(dense=dense, learning_rate=RATE).bound({"layers/block": SPECS["layers/block"]})
    with pytest.raises(ValueError, match="does not list the rows of 'puzzle_table' that a step used"):
        steps_of(composed(), 1, extras=())
