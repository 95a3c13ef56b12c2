"""Schedules, the decay mask, clipping, frozen groups, and the axes of optimizer state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from core import logical, optimizers
from core.errors import UserError
from core.logical import Axes
from core.parameters import ParamSpec

PARAMS = {
    "~": {"embedding": jnp.ones((6, 4)), "final_norm": jnp.ones((4,))},
    "layers/block": {"query": jnp.ones((3, 4, 2)), "attention_norm": jnp.ones((3, 4))},
}
SPECS = {
    "~": {"embedding": ParamSpec(("vocab", "embed")), "final_norm": ParamSpec(("norm",))},
    "layers/block": {
        "query": ParamSpec(("layers", "embed", "heads"), stacked=1),
        "attention_norm": ParamSpec(("layers", "norm"), stacked=1),
    },
}
FROZEN_LAYERS = {**SPECS, "layers/block": {n: s.frozen("float32") for n, s in SPECS["layers/block"].items()}}
AXES = logical.axes_of(SPECS)
SHAPES = jax.eval_shape(lambda: PARAMS)


def rates(schedule, steps):
    return np.array([float(schedule(jnp.int32(s))) for s in steps])


@pytest.mark.covers("T06")
def test_schedules_at_the_steps_that_matter():
    cosine = optimizers.warmup_cosine(peak=2.0, warmup_steps=4, total_steps=15, final_fraction=0.1)
    np.testing.assert_allclose(rates(cosine, [0, 1, 3, 4]), [0.5, 1.0, 2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(rates(cosine, [9, 14, 99]), [2 * (0.1 + 0.9 / 2), 0.2, 0.2], rtol=1e-6)
    linear = optimizers.warmup_linear(peak=2.0, warmup_steps=0, total_steps=11)
    np.testing.assert_allclose(rates(linear, [0, 5, 10, 30]), [2.0, 1.0, 0.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(rates(optimizers.constant(0.3), [0, 7]), [0.3, 0.3], rtol=1e-6)
    assert optimizers.constant(0.3)(jnp.int32(1)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"warmup_steps": 10, "total_steps": 10}, r"warmup_steps = 10: expected from 0 to total_steps - 1 = 9"),
        ({"warmup_steps": -1, "total_steps": 10}, r"warmup_steps = -1: expected"),
        ({"warmup_steps": 1, "total_steps": 10, "final_fraction": 1.5}, r"final_fraction = 1.5: expected from 0 to 1"),
    ],
)
def test_impossible_schedules_are_refused(wrong, message):
    for schedule in (optimizers.warmup_cosine, optimizers.warmup_linear):
        with pytest.raises(ValueError, match=message):
            schedule(peak=1.0, **wrong)


def test_an_average_of_bfloat16_parameters_follows_them():
    """In bfloat16, 0.999 is 1 and the average would stay where it began."""
    specs = {"w": ParamSpec((None,), dtype="bfloat16")}
    rule = optimizers.averaged(optimizer=optimizers.adamw(learning_rate=optimizers.constant(0.0)), decay=0.999)
    bound, start = rule.bound(specs), {"w": jnp.ones(3, jnp.bfloat16)}
    state, after = bound.init(start), {"w": -jnp.ones(3, jnp.bfloat16)}

    def more(state, _):
        return bound.update(after, state, after, ())[1], None

    state, _ = jax.lax.scan(more, state, None, length=4000)
    found = bound.evaluated(after, state)["w"]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(found), 2 * 0.999**4000 - 1, atol=0.01)


@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf")])
def test_rates_that_cannot_be_are_refused(value):
    with pytest.raises(ValueError, match=rf"learning rate: peak = {value}: expected at least 0"):
        optimizers.warmup_cosine(peak=value, warmup_steps=0, total_steps=1)
    with pytest.raises(ValueError, match=rf"constant: value = {value}: expected at least 0"):
        optimizers.constant(value)


@pytest.mark.parametrize(
    ("make", "name", "values", "expected"),
    [
        ("adamw lion muon", "b1", (-0.1, 1.0, float("nan")), "from 0 to below 1"),
        ("adamw lion muon", "b2", (-0.1, 1.0), "from 0 to below 1"),
        ("muon", "momentum", (1.0,), "from 0 to below 1"),
        ("adamw muon", "eps", (0.0, -1e-8), "above 0"),
        ("muon", "rms", (0.0,), "above 0"),
        ("adafactor", "decay_rate", (0.0,), "above 0"),
        ("adafactor", "clip_update", (-1.0,), "above 0"),
        ("adafactor", "min_factored", (0,), "at least 1"),
        ("adamw adafactor lion muon", "weight_decay", (-0.1, None, "0.1"), "at least 0, and finite"),
        ("adamw adafactor lion muon", "clip_norm", (0.0, -1.0), "above 0, or None"),
    ],
)
def test_numbers_out_of_range_are_refused(make, name, values, expected):
    for optimizer in make.split():
        for value in values:
            with pytest.raises(ValueError, match=rf"{optimizer}: {name} = {value!r}: expected {expected}"):
                getattr(optimizers, optimizer)(learning_rate=optimizers.constant(1.0), **{name: value})


def test_a_number_is_no_learning_rate():
    adamw = optimizers.adamw(learning_rate=optimizers.constant(0.1))
    for made_by, make in {
        "adamw": lambda: optimizers.adamw(learning_rate=0.1),
        "with_table": lambda: optimizers.with_table(dense=adamw, learning_rate=0.1),
        "joined": lambda: optimizers.joined(schedules=[optimizers.constant(0.1), 0.1], boundaries=[5]),
    }.items():
        with pytest.raises(
            UserError, match=f"{made_by}: learning_rate = 0.1: expected a schedule, such as optimizers.c"
        ):
            make()


def test_wrappers_take_transformations_of_optax():
    averaged = optimizers.averaged(optimizer=optax.sgd(0.1), decay=0.5).bound(SPECS)
    assert averaged.is_averaging(averaged.init(PARAMS))
    with pytest.raises(UserError, match="with_table: no trained parameter is a table"):
        optimizers.with_table(dense=optax.sgd(0.1), learning_rate=optimizers.constant(0.1)).bound(SPECS)


def test_a_transformation_with_a_random_key_in_its_state_is_refused_before_the_first_step():
    with pytest.raises(
        UserError, match=r"keeps a random key \(jax.random.key\) in its state.*makes its key from a count"
    ):
        optimizers.as_optimizer(optax.noisy_sgd(0.1, key=0)).bound(SPECS).init(PARAMS)


@pytest.mark.parametrize("make", ["adamw", "adam_atan2", "lion", "adafactor", "muon"])
def test_a_state_shares_no_buffer_with_another_or_with_the_parameters(make):
    """A step may donate all of them."""
    optimizer = getattr(optimizers, make)(learning_rate=optimizers.constant(0.1))
    for one in (optimizer, optimizers.averaged(optimizer=optimizer)):
        params = jax.tree.map(jnp.array, PARAMS)
        leaves = [leaf for leaf in jax.tree.leaves((params, one.bound(SPECS).init(params))) if leaf.size]
        places = [leaf.unsafe_buffer_pointer() for leaf in leaves]
        assert len({*places}) == len(places)


def update(optimizer, grads, specs=SPECS):
    optimizer = optimizer.bound(specs)
    state = optimizer.init(PARAMS)
    return optimizer.transformation.update(grads, state, PARAMS)[0]


@pytest.mark.covers("T07")
def test_decay_spares_norms_wherever_they_are():
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(0.5), weight_decay=0.1)
    updates = update(optimizer, jax.tree.map(jnp.zeros_like, PARAMS))
    want = {
        "~": {"embedding": -0.05, "final_norm": 0.0},
        "layers/block": {"query": -0.05, "attention_norm": 0.0},
    }
    jax.tree.map(lambda u, w: np.testing.assert_allclose(u, np.full(u.shape, w), atol=1e-8), updates, want)


@pytest.mark.covers("T07")
@pytest.mark.parametrize("make", ["adamw", "adafactor", "lion"])
def test_a_no_decay_pattern_that_matches_nothing_is_refused_unless_it_is_the_default(make):
    def bind(specs=SPECS, **options):
        return getattr(optimizers, make)(learning_rate=optimizers.constant(1.0), **options).bound(specs)

    with pytest.raises(
        ValueError, match=r"no_decay = \('\*nrom', '\*ing'\): no parameter matches '\*nrom'; .*the para"
    ):
        bind(no_decay=("*nrom", "*ing"))
    bind({"~": {"w": ParamSpec(("embed", "mlp"))}})  # a model without norms
    frozen = {**SPECS, "~": {n: s.frozen("float32") for n, s in SPECS["~"].items()}}
    bind(frozen, no_decay=("embedd*",))  # matches, and is not trained


@pytest.mark.covers("T05")
def test_the_gradient_is_clipped_by_its_global_norm():
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    numbers = sum(g.size for g in jax.tree.leaves(grads))

    def moments(clip_norm):
        optimizer = optimizers.adamw(learning_rate=optimizers.constant(1.0), clip_norm=clip_norm, b1=0.9)
        optimizer = optimizer.bound(SPECS)
        _, state = optimizer.transformation.update(grads, optimizer.init(PARAMS), PARAMS)
        return float(state[1].mu["~"]["embedding"][0, 0])

    assert moments(1.0) == pytest.approx(0.1 / np.sqrt(numbers), rel=1e-5)
    assert moments(None) == pytest.approx(0.1, rel=1e-6)


@pytest.mark.covers("T07")
def test_frozen_groups_get_no_gradient_and_no_update():
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1.0)).bound(FROZEN_LAYERS)
    grads = jax.grad(lambda p: sum(jnp.sum(a**2) for a in jax.tree.leaves(optimizer.trainable(p))))(PARAMS)
    assert not np.any(grads["layers/block"]["query"])
    assert np.all(grads["~"]["embedding"])
    updates = update(optimizer, jax.tree.map(jnp.ones_like, PARAMS), FROZEN_LAYERS)
    assert not np.any(updates["layers/block"]["query"])
    assert np.all(updates["~"]["embedding"])


def test_frozen_parameters_keep_every_bit():
    """A sum with an update of 0 would turn -0.0 into 0.0."""
    optimizer = optimizers.Optimizer(lambda _: optax.sgd(1.0), None).bound(FROZEN_LAYERS)
    params = {**PARAMS, "layers/block": jax.tree.map(lambda a: -0.0 * a, PARAMS["layers/block"])}
    after, _ = optimizer.update(params, optimizer.init(params), params)
    assert all(np.all(np.signbit(a)) for a in jax.tree.leaves(after["layers/block"]))
    assert not np.any(after["~"]["embedding"])


def test_a_model_without_trained_parameters_is_refused():
    specs = jax.tree.map(lambda spec: spec.frozen("float32"), SPECS)
    with pytest.raises(ValueError, match=r"all parameters are frozen \(layers/block.*\): leave some to train"):
        optimizers.adamw(learning_rate=optimizers.constant(1.0)).bound(specs)


@pytest.mark.parametrize("use", [lambda o: o.trainable(PARAMS), lambda o: o.init(PARAMS)])
def test_an_optimizer_is_bound_before_it_is_used(use):
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1.0))
    with pytest.raises(ValueError, match=r"not bound to the parameters of a model: use optimizer\.for_model"):
        use(optimizer)
    with pytest.raises(ValueError, match=r"bound to the parameters of another model: .* is not among other/w"):
        use(optimizer.bound({"other": {"w": ParamSpec(("embed", "mlp"))}}))


def axes_by_shape(optimizer, specs=SPECS):
    optimizer = optimizer.bound(specs)
    axes = optimizers.state_axes(optimizer, SHAPES)
    state = jax.eval_shape(optimizer.init, SHAPES)
    assert jax.tree.structure(axes, is_leaf=lambda a: isinstance(a, Axes)) == jax.tree.structure(state)
    return axes, state


def test_adam_moments_have_the_axes_of_their_parameter():
    axes, _ = axes_by_shape(optimizers.adamw(learning_rate=optimizers.constant(1.0)))
    assert axes[1].mu == AXES
    assert axes[1].nu == AXES
    assert axes[1].count == Axes(())


def test_frozen_leaves_have_no_state_to_name():
    axes, _ = axes_by_shape(optimizers.adamw(learning_rate=optimizers.constant(1.0)), FROZEN_LAYERS)
    named = [a for a in jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, Axes)) if a.names]
    assert sorted(map(str, named)) == ["(norm)", "(norm)", "(vocab, embed)", "(vocab, embed)"]


def test_factored_moments_keep_the_axes_that_remain():
    rule = optax.adafactor(1e-3, min_dim_size_to_factor=2)
    axes, state = axes_by_shape(optimizers.Optimizer(lambda _: rule, optimizers.constant(1e-3)))
    factored = next(s for s in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "v_row")) if hasattr(s, "v_row"))
    named = next(s for s in jax.tree.leaves(axes, is_leaf=lambda s: hasattr(s, "v_row")) if hasattr(s, "v_row"))
    assert factored.v_row["~"]["embedding"].shape in ((4,), (6,))
    for name in ("v_row", "v_col"):
        for module, leaf in (("~", "embedding"), ("layers/block", "query")):
            shape, param = getattr(factored, name)[module][leaf].shape, PARAMS[module][leaf].shape
            by_size = dict(zip(param, AXES[module][leaf].names, strict=True))
            assert getattr(named, name)[module][leaf] == Axes(tuple(by_size[n] for n in shape)), (name, leaf)
    assert named.v["~"]["final_norm"] == Axes(("norm",))
    assert named.v["~"]["embedding"] == Axes((None,))  # a placeholder of one element, replicated


def test_factored_moments_of_a_square_matrix_lie_along_its_axes():
    shapes = {"~": {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}
    rule = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    optimizer = optimizers.Optimizer(lambda _: rule, optimizers.constant(1.0))
    axes = optimizers.state_axes(optimizer.bound({"~": {"w": ParamSpec(("embed", "mlp"))}}), shapes)
    assert axes.v_row["~"]["w"] == Axes(("embed",))
    assert axes.v_col["~"]["w"] == Axes(("mlp",))
    grads = {"~": {"w": jnp.outer(jnp.arange(1.0, 9.0), jnp.ones(8))}}  # rows differ, columns do not
    _, state = rule.update(grads, rule.init(grads), grads)
    assert np.ptp(state.v_row["~"]["w"]) > 1
    assert np.ptp(state.v_col["~"]["w"]) == 0


def test_adafactor_takes_a_parameter_without_axes():
    optimizer = optimizers.adafactor(learning_rate=optimizers.constant(0.1)).bound({"~": {"scale": ParamSpec(())}})
    shapes = {"~": {"scale": jax.ShapeDtypeStruct((), jnp.float32)}}
    axes = optimizers.state_axes(optimizer, shapes)
    state = jax.eval_shape(optimizer.init, shapes)
    same = jax.tree.map(lambda leaf, named: len(named.names) == len(leaf.shape), state, axes)
    assert jax.tree.leaves(state)
    assert all(jax.tree.leaves(same))
