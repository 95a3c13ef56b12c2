"""The Tiny Recursive Model: sizes, initial values, halting, evaluation, and gradients."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from core import logical, random_bits
from core.types import IGNORED
from models import losses, trm
from models.trm import halting, net

ROWS, CELLS = 5, 7
MODEL = trm.TRM(
    vocab_size=6,
    num_layers=1,
    embed_dim=16,
    num_heads=2,
    h_cycles=2,
    l_cycles=3,
    num_puzzles=4,
    puzzle_multiple=1,
    prefix_length=2,
    halt_max_steps=4,
    exploration=0.0,
    dtype="float32",
)
MIXING = dataclasses.replace(MODEL, mixer="mlp")


def batch(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    labels = rng.integers(1, 6, (rows, CELLS))
    labels[:, 2] = np.where(rng.random(rows) < 0.5, IGNORED, labels[:, 2])
    return {
        "inputs": jnp.asarray(rng.integers(0, 6, (rows, CELLS)), jnp.int32),
        "labels": jnp.asarray(labels, jnp.int32),
        "puzzle_ids": jnp.asarray(rng.integers(0, 4, rows), jnp.int32),
    }


@functools.cache
def lively(model):
    """Parameters with a table and a halting head that are not zero."""
    rng = np.random.default_rng(3)

    def drawn(path, leaf):
        fan_in = {"unembedding": 0, "halt_head": 0}.get(path[-1].key, 1)
        width = leaf.shape[fan_in] if leaf.ndim > 1 else 1
        return jnp.asarray(rng.normal(0, 1 / math.sqrt(width), leaf.shape).astype(np.float32))

    params = jax.tree_util.tree_map_with_path(drawn, jax.eval_shape(model.init, jax.random.key(0), batch()))
    return {**params, "~": params["~"] | {"halt_bias": jnp.array([0.1, -0.3])}}


@functools.cache
def step_of(model):
    return jax.jit(lambda params, carry, key, batch: model.loss(params, carry, key, random_bits.with_row_ids(batch)))


# Sizes and first values


def spec(cells):
    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return {"inputs": ints(2, cells), "labels": ints(2, cells), "puzzle_ids": ints(2)}


def count(cells, **fields):
    """Trained parameters outside the table, from shapes alone."""
    model = trm.TRM(**{"vocab_size": 11, **fields})
    shapes, _ = logical.abstract_init(model.init, jax.random.key(0), spec(cells))
    beside = ("puzzle_table", "h_init", "l_init")
    return sum(math.prod(a.shape) for leaves in shapes.values() for name, a in leaves.items() if name not in beside)


def test_parameter_counts_of_the_paper():
    assert count(81, mixer="mlp") == 5_028_866
    assert count(81) == 6_828_034
    assert count(900, vocab_size=6) == 6_822_914
    assert count(900, vocab_size=6, mixer="mlp") == 18_795_522
    assert count(900, vocab_size=12) == 6_829_058
    assert count(900, vocab_size=12, mixer="mlp") == 18_801_666


def test_parameter_counts_by_width_and_depth():
    by_width = [count(81, mixer="mlp", embed_dim=d) for d in (256, 384, 512, 768, 1024, 1536)]
    assert [round(n / 1e6, 2) for n in by_width] == [1.48, 2.67, 5.03, 9.75, 17.62, 38.08]
    by_depth = [count(81, mixer="mlp", num_layers=n) for n in (1, 2, 3, 4, 6)]
    assert [round(n / 1e6, 1) for n in by_depth] == [2.5, 5.0, 7.5, 10.0, 15.1]
    assert by_depth[2] - by_depth[1] == by_depth[1] - by_depth[0]


def test_flops_are_those_of_the_formula():
    def giga(cells, **fields):
        return trm.TRM(vocab_size=11, **fields).flops_per_row(cells) / 1e9

    assert giga(81, mixer="mlp") == pytest.approx(42.7, abs=0.1)
    assert giga(81) == pytest.approx(47.6, abs=0.1)
    assert giga(900, l_cycles=4) == pytest.approx(398, rel=3e-3)
    assert [round(giga(81, mixer="mlp", embed_dim=d), 1) for d in (256, 1536)] == [13.4, 288.4]
    assert [round(giga(81, mixer="mlp", l_cycles=n)) for n in (2, 12)] == [18, 79]
    model = trm.TRM(vocab_size=11)
    assert model.flops_per_token(81) * 81 == model.flops_per_row(81)


WIDE = dataclasses.replace(
    MODEL, vocab_size=100, embed_dim=128, prefix_length=16, puzzle_multiple=8, positions="learned"
)


@pytest.mark.parametrize("mixer", trm.config.MIXERS)
def test_first_values(mixer):
    """At sizes at which the deviation of a draw is known to half a percent; 2.2737 deviations are where it is cut."""
    model, cells = dataclasses.replace(WIDE, mixer=mixer), 80
    given = {k: jnp.zeros(s.shape, s.dtype) for k, s in spec(cells).items()}
    params = jax.device_get(jax.jit(model.init)(jax.random.key(1), given))
    root, block = dict(params["~"]), params["layers/block"]
    across = {"qkv": 128, "output": 128} if mixer == "attention" else {"token_gate_up": 96, "token_down": 256}
    fan_in = {"embedding": 128, "unembedding": 128, "positions": 128, "gate_up": 128, "down": 512, **across}
    for name, width in fan_in.items():
        drawn, deviation = root.pop(name) if name in root else block[name], 1 / math.sqrt(width)
        assert np.std(drawn) == pytest.approx(deviation, rel=0.02), name
        assert abs(np.mean(drawn)) < 0.03 * deviation, name
        assert 2.2 * deviation <= np.max(np.abs(drawn)) <= 2.2737 * deviation, name
    assert set(block) < set(fan_in)
    assert not np.any(root["halt_head"])
    assert np.all(root["halt_bias"] == -5)
    assert root["puzzle_table"].shape == (8, 128)
    assert not np.any(root["puzzle_table"])
    assert set(root) == {"halt_head", "halt_bias", "puzzle_table", "h_init", "l_init"}


def test_first_values_of_the_states():
    wide = dataclasses.replace(WIDE, embed_dim=2**15)  # so that few entries say what the law is; the rest is not drawn
    rest = {k: jnp.zeros(s.shape, s.dtype) for k, s in spec(4).items()}
    drawn = jax.jit(lambda key: {k: wide.init(key, rest)["~"][k] for k in ("h_init", "l_init")})(jax.random.key(1))
    for name, shape in (("h_init", (2**15,)), ("l_init", (1, 2**15))):
        assert drawn[name].shape == shape
        assert np.std(drawn[name]) == pytest.approx(1, rel=0.02), name
        assert 2.2 <= np.max(np.abs(drawn[name])) <= 2.2737, name
    assert np.any(drawn["h_init"] != drawn["l_init"][0])


# Rows and vocabulary


def test_rows_do_not_see_one_another():
    params, data = lively(MIXING), batch()
    other = {k: jnp.concatenate([batch(1)[k][:2], v[2:3], batch(1)[k][3:]]) for k, v in data.items()}
    one, two = (step_of(MIXING)(params, MIXING.init_carry(d), jax.random.key(0), d)[0].states for d in (data, other))
    np.testing.assert_allclose(one.z_h[2], two.z_h[2], atol=1e-5)
    assert np.max(np.abs(one.z_h[3] - two.z_h[3])) > 0.1


@pytest.mark.slow
def test_a_vocabulary_stored_wider_changes_nothing():
    wide = dataclasses.replace(MODEL, vocab_multiple=8)
    params, data = lively(MODEL), batch()
    shapes = jax.eval_shape(wide.init, jax.random.key(0), data)
    assert (shapes["~"]["embedding"].shape, shapes["~"]["unembedding"].shape) == ((8, 16), (16, 8))
    padded = {
        **params["~"],
        "embedding": jnp.pad(params["~"]["embedding"], ((0, 2), (0, 0))),
        "unembedding": jnp.pad(params["~"]["unembedding"], ((0, 0), (0, 2))),
    }
    _, want = step_of(MODEL)(params, MODEL.init_carry(data), jax.random.key(0), data)
    _, got = step_of(wide)({**params, "~": padded}, wide.init_carry(data), jax.random.key(0), data)
    np.testing.assert_allclose(got.loss_sum, want.loss_sum, rtol=1e-6)
    assert got.metrics["accuracy"] == want.metrics["accuracy"]
    logits = jnp.array([[0.5, -1.0, 3.0]])
    for log_probabilities in (losses.log_stablemax, losses.log_softmax):
        wider = log_probabilities(jnp.pad(logits, ((0, 0), (0, 2))), vocab_size=3)[:, :3]
        np.testing.assert_allclose(wider, log_probabilities(logits, vocab_size=3), rtol=1e-6)


# Halting


def run(model, steps, *, key=0, params=None):
    """Carries and outputs of some steps over different batches."""
    params = lively(model) if params is None else params
    carry, seen = model.init_carry(batch()), []
    for number in range(steps):
        before = carry
        carry, out = step_of(model)(params, carry, jax.random.key(key + number), batch(number))
        seen.append((before, carry, out))
    return seen


def test_halted_rows_take_new_puzzles_and_the_others_keep_theirs():
    fates = set()
    for number, (before, after, _) in enumerate(run(MODEL, 8)):
        incoming = batch(number)
        for row in range(ROWS):
            new = bool(before.halted[row])
            fates.add(new)
            source = incoming if new else before.data
            for name in halting.DATA:
                np.testing.assert_array_equal(after.data[name][row], source[name][row])
            assert after.steps[row] == (1 if new else before.steps[row] + 1)
            assert 1 <= after.steps[row] <= 4
            assert bool(after.halted[row]) or after.steps[row] < 4
    assert fates == {True, False}


def test_a_row_that_takes_a_puzzle_starts_afresh():
    params, data = lively(MODEL), batch()
    dirty = MODEL.init_carry(data)
    dirty = dirty._replace(states=jax.tree.map(lambda a: a + 7.0, dirty.states), steps=dirty.steps + 3)
    clean, _ = step_of(MODEL)(params, MODEL.init_carry(data), jax.random.key(0), data)
    again, _ = step_of(MODEL)(params, dirty, jax.random.key(0), data)
    jax.tree.map(np.testing.assert_array_equal, clean, again)


def decided(exploration, most, *, q=1.0, steps=1, rows=2000, key=0):
    """Which rows halt at a step."""
    return np.asarray(
        halting.halts(
            jnp.full(rows, q),
            jnp.full(rows, steps, jnp.int32),
            jax.random.key(key),
            jnp.arange(rows),
            most=most,
            exploration=exploration,
        )
    )


def test_exploration():
    assert np.all(decided(0.0, 16))
    assert not np.any(decided(1.0, 16, steps=1))  # the least that is drawn is 2
    assert 0.85 < np.mean(decided(0.1, 16, steps=1)) < 0.95
    assert np.mean(decided(1.0, 16, steps=9)) == pytest.approx(8 / 15, abs=0.04)  # drawn from 2..16, at most 9
    assert np.all(decided(1.0, 16, steps=16, q=-1.0))  # the last step halts in any case
    assert not np.any(decided(0.0, 16, steps=15, q=-1.0))
    assert np.all(decided(1.0, 1, q=-1.0))
    np.testing.assert_array_equal(decided(0.3, 8, steps=3), decided(0.3, 8, steps=3))
    assert np.any(decided(0.3, 8, steps=3) != decided(0.3, 8, steps=3, key=1))
    np.testing.assert_array_equal(decided(0.3, 8, steps=3)[:5], decided(0.3, 8, steps=3, rows=5))  # bits of rows


def test_without_exploration_nothing_is_drawn():
    first, other = (run(MODEL, 3, key=key) for key in (0, 50))
    jax.tree.map(np.testing.assert_array_equal, first, other)


def test_metrics_count_halted_rows_alone():
    for _, after, out in run(MODEL, 6):
        halted = float(np.sum(after.halted))
        assert {float(out.metrics[m].weight) for m in ("accuracy", "exact_accuracy", "steps")} == {halted}
        assert float(out.metrics["steps"].total) == np.sum(np.where(after.halted, after.steps, 0))
        assert float(out.weight_sum) == float(out.metrics["lm_loss"].weight) == ROWS
        total = out.metrics["lm_loss"].total + 0.5 * out.metrics["q_halt_loss"].total
        assert float(out.loss_sum) == pytest.approx(float(total), rel=1e-6)


def test_rows_without_labels_count_in_no_metric_of_training():
    eager = dataclasses.replace(MODEL, halt_max_steps=1)  # every row halts
    params, data = lively(MODEL), batch()
    answers = np.argmax(jax.jit(eager.predict)(params, data).logits, -1)
    labels = np.where(np.arange(CELLS) == 3, (answers + 1) % 6, answers)  # all right but one cell
    labels[1:4] = IGNORED
    _, out = step_of(eager)(params, eager.init_carry(data), jax.random.key(0), {**data, "labels": jnp.asarray(labels)})
    assert float(out.metrics["accuracy"].total) == pytest.approx(2 * (CELLS - 1) / CELLS)
    assert float(out.metrics["steps"].total) == float(out.metrics["halted"].total) == 2
    assert {float(out.metrics[m].weight) for m in ("accuracy", "exact_accuracy", "q_halt_accuracy", "steps")} == {2.0}
    assert float(out.weight_sum) == float(out.metrics["lm_loss"].weight) == ROWS  # the loss divides by all rows


def test_evaluation_takes_every_step():
    """Each row's labels are what the model says after another step; and every step is one of training."""
    model, data = dataclasses.replace(MIXING, h_cycles=1, l_cycles=2), batch()
    sure = {**lively(model), "~": lively(model)["~"] | {"halt_bias": jnp.array([9.0, 0.0])}}  # would halt at once
    said = [
        np.argmax(jax.jit(dataclasses.replace(model, halt_max_steps=n).predict)(sure, data).logits, -1)
        for n in (1, 2, 3, 4)
    ]
    assert len({answer[:4].tobytes() for answer in said}) == 4
    data["labels"] = jnp.asarray(np.stack([said[min(row, 3)][row] for row in range(ROWS)]), jnp.int32)
    right = [int(np.sum(np.all(answer == data["labels"], axis=1))) for answer in said]
    assert len(set(right)) > 1
    out = jax.jit(model.evaluate)(sure, jax.random.key(0), data)
    assert [float(out.metrics[f"exact_accuracy_step_{n:02d}"].total) for n in (1, 2, 3, 4)] == right
    assert float(out.metrics["exact_accuracy"].total) == right[-1]
    carry = model.init_carry(data)
    for number in range(4):
        carry, trained = step_of(model)(sure, carry, jax.random.key(0), data)
        assert np.all(carry.halted)
        carry = carry._replace(halted=jnp.zeros(ROWS, bool), steps=jnp.full(ROWS, number + 1))
    for name in ("accuracy", "exact_accuracy", "q_halt_accuracy", "steps", "lm_loss", "q_halt_loss"):
        np.testing.assert_allclose(out.metrics[name], trained.metrics[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(out.loss_sum, trained.loss_sum, rtol=1e-5)


def test_evaluation_leaves_padded_rows_out():
    params, evaluate = lively(MODEL), jax.jit(MODEL.evaluate)
    found = []
    for seed in (1, 2):  # what stands in the padded rows
        data = {k: jnp.concatenate([batch()[k][:3], batch(seed)[k][3:]]) for k in halting.DATA}
        data["labels"] = data["labels"].at[3:].set(IGNORED)
        found.append(evaluate(params, jax.random.key(seed), data))
    real = [out._replace(extras=jax.tree.map(lambda x: x[:3], out.extras)) for out in found]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *real)
    assert float(found[0].weight_sum) == float(found[0].metrics["accuracy"].weight) == 3


def test_evaluation_returns_the_answer_to_each_row():
    answers = jax.jit(MODEL.evaluate)(lively(MODEL), jax.random.key(0), batch()).extras
    asked = {name: field for name, field in batch().items() if name != "labels"}
    outputs = jax.jit(MODEL.predict)(lively(MODEL), asked)
    assert answers["predicted"].shape == (ROWS, CELLS)
    np.testing.assert_array_equal(answers["predicted"], jnp.argmax(outputs.logits[..., : MODEL.vocab_size], axis=-1))
    np.testing.assert_allclose(answers["q_halt"], outputs.q_halt, rtol=1e-5)
    for name in ("inputs", "puzzle_ids"):
        np.testing.assert_array_equal(answers[name], batch()[name])


def test_a_right_answer_counts_by_row():
    logits = jax.nn.one_hot(jnp.array([[1, 2, 3], [1, 2, 0], [0, 0, 0]]), 4) * 9
    labels = jnp.array([[1, 2, IGNORED], [1, 2, 3], [IGNORED] * 3])
    outputs = halting.Outputs(logits, jnp.array([2.0, 2.0, -2.0]), jnp.zeros(3))
    score = functools.partial(halting.score, vocab_size=4, log_probabilities=losses.log_stablemax)
    found = jax.jit(score)(outputs, labels)
    assert found.right.tolist() == [True, False, True]
    assert found.labeled.tolist() == [True, True, False]
    np.testing.assert_allclose(found.accuracy, [1, 2 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(
        found.token_loss, [math.log(13 / 10), (2 * math.log(1.3) + math.log(13)) / 3, 0], rtol=1e-5
    )
    np.testing.assert_allclose(found.halt_loss, np.log1p(np.exp([-2.0, 2.0, 2.0])), rtol=1e-6)


# Gradients


def test_the_gradient_is_that_of_a_program_whose_early_cycles_are_constants():
    params, data = lively(MODEL), batch()

    def constant_early(params):
        weights = MODEL._cast(params, data)
        still = MODEL._cast(jax.lax.stop_gradient(params), data)
        states = net._cycle(
            functools.partial(MODEL._net, still.layers),
            MODEL._fresh(still, data),
            MODEL._embed(still, data),
            MODEL.recursion,
        )
        states = net._cycle(
            functools.partial(MODEL._net, weights.layers),
            jax.tree.map(jnp.asarray, jax.lax.stop_gradient(states)),
            MODEL._embed(weights, data),
            MODEL.recursion,
        )
        scores = MODEL._score(MODEL._heads(weights, states), data["labels"])
        return jnp.sum(scores.token_loss + 0.5 * scores.halt_loss)

    def ours(params):
        return MODEL.loss(params, MODEL.init_carry(data), jax.random.key(0), data)[1].loss_sum

    want = jax.jit(jax.grad(constant_early))(params)
    got = jax.jit(jax.grad(ours))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), got, want)
    assert not np.any(got["~"]["h_init"])
    assert not np.any(got["~"]["l_init"])
    assert not np.any(got["~"]["halt_head"][:, 1])  # what stands for going on is only decayed
    assert float(got["~"]["halt_bias"][1]) == 0.0
    assert np.all(got["~"]["halt_head"][:, 0])


@pytest.mark.slow
def test_unrolled_calls_give_the_same_gradient():
    params, data = lively(MODEL), batch()

    def gradient(model):
        loss = jax.grad(lambda p: model.loss(p, model.init_carry(data), jax.random.key(0), data)[1].loss_sum)
        return str(jax.make_jaxpr(loss)(params)), jax.jit(loss)(params)

    (looped, want), (unrolled, found) = gradient(MODEL), gradient(dataclasses.replace(MODEL, unroll=6))
    assert looped != unrolled
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, want)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["mlp", "attention"])
def test_remat_saves_less_and_changes_no_gradient(mixer):
    data, whole = batch(), dataclasses.replace(MODEL, mixer=mixer)
    params = lively(whole)

    def loss(remat):
        model = dataclasses.replace(whole, remat=remat)
        return lambda p: model.loss(p, model.init_carry(data), jax.random.key(0), data)[1].loss_sum

    kept, found = {}, {}
    for remat in ("none", "dots", "mixing", "norms", "full"):
        residuals = jax.eval_shape(lambda f, p: jax.vjp(f, p)[1], jax.tree_util.Partial(loss(remat)), params)
        kept[remat] = sum(leaf.size for leaf in jax.tree.leaves(residuals))
        found[remat] = jax.jit(jax.grad(loss(remat)))(params)["layers/block"]
    assert kept["full"] <= kept["norms"] < kept["mixing"] < kept["none"] > kept["dots"]
    for remat in ("dots", "mixing", "norms", "full"):
        for name, want in found["none"].items():
            np.testing.assert_allclose(found[remat][name], want, atol=1e-5, rtol=1e-4, err_msg=f"{remat} {name}")


def test_gradients_of_the_calls_are_summed_in_float32():
    model, data = dataclasses.replace(MODEL, dtype="bfloat16", mixer="mlp"), batch()
    params = lively(model)
    weights = {leaf.shape[1:] for leaf in jax.tree.leaves(params["layers/block"])}
    weights |= {(shape[0], shape[2]) for shape in weights if len(shape) == 3}

    def summed(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "add_any":
                yield equation.outvars[0].aval
            for inner in jaxprs_in_params(equation.params):
                yield from summed(inner)

    loss = jax.grad(lambda p: model.loss(p, model.init_carry(data), jax.random.key(0), data)[1].loss_sum)
    found = [aval for aval in summed(jax.make_jaxpr(loss)(params).jaxpr) if aval.shape in weights]
    assert {str(aval.dtype) for aval in found} == {"float32"}


def test_no_gradient_reaches_the_carry():
    params, data = lively(MODEL), batch()
    carry, _ = step_of(MODEL)(params, MODEL.init_carry(data), jax.random.key(0), data)
    carry = carry._replace(halted=jnp.zeros(ROWS, bool))

    def loss(states, table):
        root = {**params["~"], "puzzle_table": table}
        after, out = MODEL.loss({**params, "~": root}, carry._replace(states=states), jax.random.key(0), data)
        return out.loss_sum + sum(jnp.sum(a) for a in jax.tree.leaves(after.states))

    states, table = jax.jit(jax.grad(loss, argnums=(0, 1)))(carry.states, params["~"]["puzzle_table"])
    assert not any(np.any(a) for a in jax.tree.leaves(states))
    touched = np.isin(np.arange(4), carry.data["puzzle_ids"])
    assert 0 < touched.sum() < 4
    np.testing.assert_array_equal(np.any(np.asarray(table), axis=1), touched)


# Choices


@pytest.mark.parametrize(
    "fields",
    [
        {"puzzle_dim": 0, "prefix_length": 0},
        {"puzzle_dim": 24},
        {"positions": "learned", "dtype": "bfloat16"},
        {"mixer": "mlp", "positions": "learned", "dtype": "float16", "h_cycles": 1, "l_cycles": 1, "halt_max_steps": 1},
    ],
    ids=str,
)
def test_choices_make_finite_steps(fields):
    model, data = dataclasses.replace(MODEL, **fields), batch()
    params = lively(model)
    carry, out = step_of(model)(params, model.init_carry(data), jax.random.key(0), data)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), carry) == jax.tree.map(
        lambda a: (a.shape, a.dtype), model.init_carry(data)
    )
    assert np.isfinite(out.loss_sum)
    assert ("puzzle_table" in params["~"]) == (fields.get("puzzle_dim") != 0) == ("puzzle_table" in out.extras)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixer": "convolution"}, "TRM.mixer = 'convolution': expected one of attention, mlp"),
        ({"mixer": "mlp", "positions": "rope"}, "rotates queries and keys"),
        ({"embed_dim": 18, "num_heads": 2}, "embed_dim = 18 does not divide into num_heads = 2 heads of even size"),
        ({"puzzle_dim": 40}, "puzzle_dim = 40 does not fit into prefix_length = 2 positions"),
        ({"puzzle_dim": 0}, "leaves prefix_length = 2 empty"),
        ({"h_cycles": 0}, "TRM.h_cycles = 0: expected at least 1"),
        ({"exploration": 1.5}, "TRM.exploration = 1.5: expected a probability"),
    ],
)
def test_choices_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MODEL, **fields)


def test_the_smallest_model_keeps_every_divisibility():
    multiples = dict.fromkeys(logical.LOGICAL_AXES, 1) | {"embed": 24, "heads": 4, "vocab": 4, "puzzles": 3}
    for model in (MODEL, MIXING):
        small = model.shrink(multiples)
        assert (small.embed_dim % 24, small.num_heads % 4, small.stored_vocab_size % 4) == (0, 0, 0)
        assert jax.eval_shape(small.init, jax.random.key(0), batch())["~"]["puzzle_table"].shape[0] % 3 == 0
        assert small.mixer == model.mixer
