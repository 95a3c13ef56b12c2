"""The step over a model that can be computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from core import optimizers, step
from core.errors import UserError
from core.parameters import ParamSpec
from core.types import LossOutput, WeightedSum


class Line:
    """y = w x on rows of two numbers; the random bits of a step are reported as a metric."""

    def init(self, rng, batch):
        return {"~": {"w": jax.random.normal(rng, ()), "idle_norm": jnp.ones(())}}

    def init_carry(self, batch):
        return ()

    def loss(self, params, carry, rng, batch, *, is_training):
        errors = (params["~"]["w"] * batch["x"] - batch["y"]) ** 2  # [B]
        weight = jnp.sum(batch["weights"])
        bits = jax.random.uniform(rng)
        out = LossOutput(
            jnp.sum(errors * batch["weights"]), weight, {"bits": WeightedSum(bits * weight, weight)}, extras=errors
        )
        return carry, out


class Counting(Line):
    """Counts the rows that it has seen, row by row."""

    def init_carry(self, batch):
        return jnp.zeros(batch["x"].shape)

    def loss(self, params, carry, rng, batch, *, is_training):
        return carry + 1, super().loss(params, (), rng, batch, is_training=is_training)[1]


SPECS = {"~": {"w": ParamSpec(()), "idle_norm": ParamSpec((), kind="norm")}}


def sgd(rate=0.1):
    return optimizers.Optimizer(lambda _: optax.sgd(rate), optimizers.constant(rate)).bound(SPECS)


def batch(rows=4, weights=None):
    x = jnp.arange(1.0, rows + 1)
    return {"x": x, "y": 3 * x + 1, "weights": jnp.ones(rows) if weights is None else jnp.asarray(weights)}


def start(model=None, rows=4):
    return step.create(model or Line(), sgd(), {"~": {"w": jnp.float32(2.0), "idle_norm": jnp.ones(())}}, batch(rows))


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"accuracy": jnp.float32(0.5)}, "'accuracy' is .*expected WeightedSum"),
        ({"accuracy": (jnp.float32(1), jnp.float32(2))}, "'accuracy' is tuple, expected WeightedSum"),
        ({"accuracy": WeightedSum(jnp.ones(3), jnp.float32(3))}, "of two scalars"),
        ({"tag": WeightedSum(jnp.float32(1), jnp.float32(2))}, "'tag' has a reserved name"),
    ],
)
def test_metrics_that_cannot_be_averaged_or_written_are_refused(metrics, said):
    class Measuring(Line):
        def loss(self, *given, **options):
            carry, out = super().loss(*given, **options)
            return carry, out._replace(metrics=metrics)

    for made in (step.eval_step(Measuring(), sgd(), seed=0), step.train_step(Measuring(), sgd(), seed=0)):
        with pytest.raises(UserError, match=said):
            jax.eval_shape(made, start(), batch())


@pytest.mark.covers("T01")
def test_one_step_by_hand():
    state, metrics = jax.jit(step.train_step(Line(), sgd(), seed=0))(start(), batch(weights=[1.0, 1.0, 0.0, 2.0]))
    # errors 2x - (3x + 1) = -(x + 1): squares 4, 9, 16, 25; weights 1, 1, 0, 2 sum to 4
    assert metrics["loss"] == pytest.approx((4 + 9 + 50) / 4)
    gradient = 2 * (-2 * 1 - 3 * 2 - 2 * 5 * 4) / 4
    assert metrics["gradient_norm"] == pytest.approx(-gradient)
    assert state.params["~"]["w"] == pytest.approx(2.0 - 0.1 * gradient)
    assert (int(state.step), float(metrics["weight"])) == (1, 4.0)
    assert metrics["learning_rate"] == pytest.approx(0.1)


@pytest.mark.parametrize("scale", [2.0**-10, 0.25, 8.0])
def test_the_scale_of_the_weights_does_not_matter(scale):
    weights = jnp.asarray([0.5, 0.25, 0.0, 1.0])
    train_step = jax.jit(step.train_step(Line(), sgd(), seed=0))
    (want, wanted), (got, found) = (train_step(start(), batch(weights=weights * by)) for by in (1.0, scale))
    assert found["weight"] == scale * wanted["weight"]
    assert (found["loss"], found["gradient_norm"]) == (wanted["loss"], wanted["gradient_norm"])
    assert got.params == want.params


@pytest.mark.covers("T03")
@pytest.mark.parametrize("accum_steps", [2, 4])
def test_microbatches_with_uneven_weights_equal_one_batch(accum_steps):
    uneven = batch(8, weights=[1, 0, 0, 0, 5, 0, 0, 1])
    want, want_metrics = step.train_step(Line(), sgd(), seed=0)(start(rows=8), uneven)
    got, metrics = step.train_step(Line(), sgd(), seed=0, accum_steps=accum_steps)(start(rows=8), uneven)
    np.testing.assert_allclose(got.params["~"]["w"], want.params["~"]["w"], rtol=1e-6)
    for name in ("loss", "gradient_norm", "weight"):
        np.testing.assert_allclose(metrics[name], want_metrics[name], rtol=1e-6, err_msg=name)


def test_microbatch_m_takes_every_nth_row():
    split = step._split_rows(jnp.arange(6), 3)
    np.testing.assert_array_equal(split, [[0, 3], [1, 4], [2, 5]])
    with pytest.raises(ValueError, match="batch_size = 6 does not divide into accum_steps = 4 microbatches"):
        step._split_rows(jnp.arange(6), 4)


def test_a_batch_without_a_supervised_item_changes_nothing():
    state, metrics = step.train_step(Line(), sgd(), seed=0)(start(), batch(weights=[0.0] * 4))
    assert float(state.params["~"]["w"]) == 2.0
    assert float(metrics["loss"]) == 0.0
    assert (float(metrics["bits"].total), float(metrics["bits"].weight)) == (0.0, 0.0)  # no mean of nothing


def test_random_bits_belong_to_seed_and_step():
    def bits(seed, at):
        state = start()._replace(step=jnp.int32(at))
        found = step.train_step(Line(), sgd(), seed=seed)(state, batch())[1]["bits"]
        return float(found.total / found.weight)

    assert bits(0, 3) == bits(0, 3)
    assert len({bits(0, 3), bits(0, 4), bits(1, 3)}) == 3


def test_the_carry_travels_and_cannot_be_accumulated():
    run = step.train_step(Counting(), sgd(), seed=0)
    state = start(Counting())
    for _ in range(2):
        state, _ = run(state, batch())
    np.testing.assert_array_equal(state.carry, [2.0] * 4)
    with pytest.raises(ValueError, match="accum_steps = 2: a model whose carry belongs to the rows"):
        step.train_step(Counting(), sgd(), seed=0, accum_steps=2)(start(Counting()), batch())


def test_the_rows_of_a_table_cannot_be_accumulated_which_is_no_fault_of_the_model():
    specs = {"~": {**SPECS["~"], "idle_norm": ParamSpec((None,), kind="table")}}
    dense = optimizers.adamw(learning_rate=optimizers.constant(0.1))
    table = optimizers.with_table(dense=dense, learning_rate=optimizers.constant(0.1))
    for optimizer in (table.bound(specs), optimizers.averaged(optimizer=table).bound(specs)):
        with pytest.raises(UserError, match=r"accum_steps = 2: .*microbatches do not add theirs up"):
            step.train_step(Line(), optimizer, seed=0, accum_steps=2)(start(), batch())


@pytest.mark.covers("T17")
class Dropping(Line):
    """Leaves half of the inputs out while it trains."""

    def loss(self, params, carry, rng, batch, *, is_training):
        kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape) if is_training else 1.0
        return super().loss(params, carry, rng, {**batch, "x": batch["x"] * kept}, is_training=is_training)


def test_evaluation_leaves_dropout_out():
    state = start(Dropping())
    losses = [step.eval_step(Dropping(), sgd(), seed=seed)(state, batch())["loss"].total for seed in range(3)]
    whole = step.eval_step(Line(), sgd(), seed=0)(state, batch())["loss"].total
    assert losses == [whole] * 3
    trained = {float(step.train_step(Dropping(), sgd(), seed=seed)(state, batch())[1]["loss"]) for seed in range(3)}
    assert len(trained) > 1


def test_evaluation_returns_sums_and_starts_from_a_fresh_carry():
    state = start(Counting())._replace(carry=jnp.full(4, 9.0))
    sums = step.eval_step(Counting(), sgd(), seed=0)(state, batch(weights=[1.0, 1.0, 0.0, 2.0]))
    assert (float(sums["loss"].total), float(sums["loss"].weight)) == (63.0, 4.0)
    assert set(sums) == {"loss", "bits"}


class Answering(Line):
    """Is evaluated otherwise than it is trained, and answers."""

    def evaluate(self, params, rng, batch):
        return self.loss(params, (), rng, batch, is_training=False)[1]._replace(
            extras={"y": params["~"]["w"] * batch["x"]}
        )


@pytest.mark.parametrize(("model", "answers"), [(Answering(), {"y": [2.0, 4.0, 6.0, 8.0]}), (Line(), {})])
def test_answers_come_with_the_same_sums(model, answers):
    sums, found = step.answer_step(model, sgd(), seed=0)(start(), batch())
    assert {name: values.tolist() for name, values in found.items()} == answers
    assert sums == step.eval_step(model, sgd(), seed=0)(start(), batch())


def test_frozen_parameters_do_not_count_in_the_gradient_norm():
    specs = {"~": {**SPECS["~"], "w": SPECS["~"]["w"].frozen("float32")}}
    frozen = optimizers.adamw(learning_rate=optimizers.constant(0.1)).bound(specs)
    params = {"~": {"w": jnp.float32(2.0), "idle_norm": jnp.ones(())}}
    state = step.create(Line(), frozen, params, batch())
    after, metrics = step.train_step(Line(), frozen, seed=0)(state, batch())
    assert float(metrics["gradient_norm"]) == 0.0
    assert float(after.params["~"]["w"]) == 2.0


@pytest.mark.covers("X12")
def test_a_step_with_statistics_of_the_update_is_the_same_step():
    plain, found = (jax.jit(step.train_step(Line(), sgd(), seed=0, with_statistics=on)) for on in (False, True))
    state = want = start()
    for _ in range(4):
        before, (want, without) = state, plain(want, batch())
        state, metrics = found(state, batch())
    jax.tree.map(np.testing.assert_array_equal, state, want)
    assert step.STATISTICS not in without
    w, after = (float(s.params["~"]["w"]) for s in (before, state))
    grad = float(np.mean(2 * (w * np.arange(1.0, 5.0) - batch()["y"]) * np.arange(1.0, 5.0)))
    values = {name: float(value.total) for name, value in metrics[step.STATISTICS].named().items()}
    assert values == pytest.approx(
        {
            "statistics/param_rms/w": abs(w),
            "statistics/gradient_rms/w": abs(grad),
            "statistics/update_rms/w": abs(after - w),
            "statistics/update_ratio/w": abs(after - w) / abs(w),
            "statistics/param_rms/idle_norm": 1.0,
            "statistics/gradient_rms/idle_norm": 0.0,
            "statistics/update_rms/idle_norm": 0.0,
            "statistics/update_ratio/idle_norm": 0.0,
        },
        rel=1e-6,
    )


class Layers(Line):
    """Two layers stored as two parameters, and one that is frozen."""

    def init(self, rng, batch):
        return {"layer_0": {"w": jnp.ones(3)}, "layer_1": {"w": jnp.zeros(1)}, "other": {"w": jnp.ones(2)}}

    def loss(self, params, carry, rng, batch, *, is_training):
        total = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return carry, LossOutput(total, jnp.float32(1.0), {}, extras=())


@pytest.mark.covers("X12")
def test_layers_are_one_group_and_frozen_parameters_none():
    specs = {name: {"w": ParamSpec((None,), trainable=name != "other")} for name in ("layer_0", "layer_1", "other")}
    optimizer = optimizers.Optimizer(
        lambda specs: optimizers.base.only_trainable(optax.sgd(0.1), specs), optimizers.constant(0.1)
    ).bound(specs)
    model = Layers()
    run = jax.jit(step.train_step(model, optimizer, seed=0, with_statistics=True))
    _, metrics = run(step.create(model, optimizer, model.init(None, None), batch()), batch())
    named = {name: float(value.total) for name, value in metrics[step.STATISTICS].named().items()}
    assert named["statistics/param_rms/layer_*/w"] == pytest.approx(np.sqrt(3 / 4))
    assert named["statistics/update_ratio/layer_*/w"] == pytest.approx(0.2)
    assert len(named) == 4


class Centered(Line):
    """Errors relative to the mean of the batch, which couples rows."""

    couples_rows = True

    def loss(self, params, carry, rng, batch, *, is_training):
        centered = batch | {"y": batch["y"] - jnp.mean(batch["y"])}
        return super().loss(params, carry, rng, centered, is_training=is_training)


def test_a_loss_that_couples_rows_is_found():
    params = {"~": {"w": jnp.float32(2.0), "idle_norm": jnp.ones(())}}
    uneven = batch(8, weights=[1, 0, 0, 0, 5, 0, 0, 1])
    assert step.rows_are_coupled(Line(), params, uneven) is None
    together, apart = step.rows_are_coupled(Centered(), params, batch(8))
    assert abs(together - apart) > 0.1


def test_a_loss_that_couples_rows_is_not_divided():
    step.refuse_coupled_rows(Line(), "accum_steps = 2")
    with pytest.raises(UserError, match=r"accum_steps = 2 divides the rows .* Centered couples them"):
        step.refuse_coupled_rows(Centered(), "accum_steps = 2")


@pytest.mark.parametrize("make", [optimizers.adamw, optimizers.lion, optimizers.adam_atan2])
def test_a_state_keeps_its_dtypes_where_trained_parameters_are_in_bfloat16(make):
    optimizer = optimizers.averaged(optimizer=make(learning_rate=optimizers.constant(0.1))).bound(SPECS)
    params = {"~": {"w": jnp.ones((), jnp.bfloat16), "idle_norm": jnp.ones((), jnp.bfloat16)}}
    batch = {name: jnp.ones(2) for name in ("x", "y", "weights")}
    state = step.create(Line(), optimizer, params, batch)
    after, _ = jax.eval_shape(step.train_step(Line(), optimizer, seed=0), state, batch)
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, state)


class Named(Line):
    """Has a metric of its own with the name of the loss."""

    def loss(self, params, carry, rng, batch, *, is_training):
        carry, out = super().loss(params, carry, rng, batch, is_training=is_training)
        return carry, out._replace(metrics={"loss": WeightedSum(jnp.float32(1e6), jnp.float32(1.0))})


def test_the_loss_is_the_mean_loss_in_training_and_evaluation_whatever_a_model_names_its_metrics():
    params = {"~": {"w": jnp.ones(()), "idle_norm": jnp.ones(())}}
    batch = {"x": jnp.ones(2), "y": jnp.zeros(2), "weights": jnp.ones(2)}
    state = step.create(Named(), sgd(), params, batch)
    _, trained = step.train_step(Named(), sgd(), seed=0)(state, batch)
    evaluated = step.eval_step(Named(), sgd(), seed=0)(state, batch)["loss"]
    assert trained["loss"] == evaluated.total / evaluated.weight == 1.0
