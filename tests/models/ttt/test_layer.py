"""TTT layers: the published numbers, a naive loop over tokens, state between calls, and segments.

The fixture holds what naive loops computed in float64 for one layer of width 32 with 2 heads and mini-batches of 8; the
published form was compared with its authors' Flax code, the other one with PonderTTT's.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from models.ttt import TTTConfig, inner_loop, layer

FIXTURE = np.load(pathlib.Path(__file__).parents[1] / "fixtures" / "ttt_parity.npz")
LINEAR = TTTConfig(num_heads=2, head_dim=16, mini_batch=8)
MLP = dataclasses.replace(LINEAR, inner="mlp")
PONDER = dataclasses.replace(LINEAR, variant="ponder", decay=0.3)
WANTED = {"published/y": LINEAR, "mlp/y": MLP, "ponder/y_decay0.3": PONDER}
WANTED["ponder/y_decay0"] = dataclasses.replace(PONDER, decay=0.0)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def weights(config, dtype=np.float64):
    """The fixture's parameters as ours."""

    def given(name):
        return jnp.asarray(FIXTURE[f"param/{name}"], dtype)

    def heads(name):
        return given(name).reshape(*given(name).shape[:-1], 2, 16)

    names = [("W1", "b1")] if config.inner == "linear" else [("W1", "b1"), ("W2", "b2")]
    prefix = "param" if config.inner == "linear" else "mlp/param"
    initial = tuple(inner_loop.Linear(*(jnp.asarray(FIXTURE[f"{prefix}/{n}"], dtype) for n in pair)) for pair in names)
    return layer.Weights(
        query=heads("wq"),
        value=heads("wv"),
        gate=heads("wg"),
        output=given("wo").reshape(2, 16, 32),
        conv_query=heads("conv_q"),
        conv_query_bias=heads("conv_q_b"),
        conv_key=heads("conv_k"),
        conv_key_bias=heads("conv_k_b"),
        rate=given("lr_w"),
        rate_bias=given("lr_b"),
        token_rate=given("tok_idx"),
        initial=initial,
        norm_scale=given("ln_g"),
        norm_bias=given("ln_b"),
        output_norm_scale=heads("post_g"),
        output_norm_bias=heads("post_b"),
    )


def x(dtype=np.float64):
    return jnp.asarray(FIXTURE["x"], dtype)


run = functools.partial(jax.jit, static_argnums=0)(layer.run)  # compiled once for equal shapes
extend = functools.partial(jax.jit, static_argnums=0)(layer.extend)


def quick(*names, among):
    """The cases, all but `names` marked slow: each costs a compilation."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow, id=name) for name in among]


@pytest.mark.covers("N04")
@pytest.mark.parametrize("name", quick("published/y", "mlp/y", "ponder/y_decay0.3", among=WANTED))
def test_the_layer_has_the_published_numbers(name):
    np.testing.assert_allclose(run(WANTED[name], weights(WANTED[name]), x()).output, FIXTURE[name], atol=1e-9, rtol=0)


@pytest.mark.covers("N04")
def test_state_and_statistics_have_the_published_numbers():
    found = run(LINEAR, weights(LINEAR), x())
    ours = {
        "W": found.state.memory.fast[0].weight,
        "b": found.state.memory.fast[0].bias,
        "stats": found.errors,
    }
    for name, value in ours.items():
        np.testing.assert_allclose(value, FIXTURE[f"published/{name}"], atol=1e-9, rtol=0, err_msg=name)


@pytest.mark.parametrize("name", quick("published/y", among=["published/y", "mlp/y"]))
def test_float32_is_close(name):
    with jax.enable_x64(False):
        found = run(WANTED[name], weights(WANTED[name], np.float32), x(np.float32)).output
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, FIXTURE[name], atol=2e-4, rtol=0)


class LargerEpsilon(TTTConfig):
    norm_eps = 1e-5


MUTATIONS = {  # name: (settings, parameters)
    "epsilon 1e-5": (LargerEpsilon(**dataclasses.asdict(LINEAR)), {}),
    "half the rate": (dataclasses.replace(LINEAR, base_rate=0.5), {}),
    "no tau": (LINEAR, {"token_rate": np.zeros(8)}),
    "the other variant": (PONDER, {}),
    "mini-batches of 4": (dataclasses.replace(LINEAR, mini_batch=4), {"token_rate": FIXTURE["param/tok_idx"][:4]}),
    "no learning": (dataclasses.replace(LINEAR, rate_scale=0.0), {}),
    "resets": (dataclasses.replace(LINEAR, resets=True), {}),
    "reads before it learns": (dataclasses.replace(LINEAR, diagonal=-1), {}),
    "another base of positions": (dataclasses.replace(LINEAR, rope_theta=500.0), {}),
}


@pytest.mark.parametrize("name", quick("epsilon 1e-5", "half the rate", "no tau", "the other variant", among=MUTATIONS))
def test_the_published_numbers_tell_every_mutation(name):
    config, changes = MUTATIONS[name]
    changed = weights(LINEAR)._replace(**{key: jnp.asarray(value) for key, value in changes.items()})
    assert np.abs(run(config, changed, x()).output - FIXTURE["published/y"]).max() > 1e-5


def naive(config, initial, norm, token_rate, tokens):
    """Outputs of the inner loop by its definition: gradients by JAX, one token at a time, one head at a time."""

    def standard(z, head):
        z = (z - jnp.mean(z)) / jnp.sqrt(jnp.var(z) + norm.eps)
        return z * norm.scale[head] + norm.bias[head]

    def model(fast, x):
        for n, (w, b) in enumerate(fast):
            x = (jax.nn.gelu(x) if n else x) @ w + b
        return x

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0, 0, None))
    def gradient(fast, key, value, head):
        return jax.grad(lambda f: 0.5 * jnp.sum((standard(model(f, key), head) - (value - key)) ** 2))(fast)

    @jax.jit
    def read(fast, query, head):
        return query + standard(model(fast, query), head)

    out = np.zeros(tokens.query.shape)
    for row, head in np.ndindex(out.shape[:2]):
        fast = jax.tree.map(lambda a, head=head: np.asarray(a[head]), initial)
        for begin in range(0, out.shape[2], config.mini_batch):
            part = slice(begin, begin + config.mini_batch)
            q, k, v, rate = (np.asarray(a[row, head, part]) for a in tokens[:4])
            grads = jax.tree.map(np.asarray, gradient(fast, k, v, head))
            total, start = jax.tree.map(np.zeros_like, fast), fast
            for t in range(len(q)):
                total = jax.tree.map(lambda a, g, t=t, rate=rate: a + rate[t] * g[t], total, grads)
                fast = jax.tree.map(lambda a, b, t=t: a - token_rate[t] * b, start, total)
                out[row, head, begin + t] = read(fast, q[t], head)
    return out


@pytest.mark.covers("N04")
@pytest.mark.parametrize("name", quick("mlp/y", among=["published/y", "mlp/y"]))
def test_a_naive_loop_over_tokens_agrees_at_any_length(name):
    config = WANTED[name]
    w, draw = weights(config), np.random.default_rng(0)
    norm = inner_loop.Norm(w.norm_scale, w.norm_bias, 1e-6)
    learned = inner_loop.Learned(w.initial, norm, jnp.asarray(draw.uniform(0.1, 1, 8)))
    q, k, v = (jnp.asarray(draw.normal(size=(1, 2, 13, 16))) for _ in range(3))
    tokens = inner_loop.Tokens(q, k, v, jnp.asarray(draw.uniform(0, 0.1, (1, 2, 13))), None)
    memory = inner_loop.start(learned, 1, segments=False)
    found = jax.jit(lambda *args: inner_loop.run(config, *args)[1][0])(learned, memory, tokens)
    np.testing.assert_allclose(found, naive(config, w.initial, norm, learned.token_rate, tokens), atol=1e-10, rtol=0)


@pytest.mark.covers("N04", "X16")
@pytest.mark.parametrize("name", quick("published/y", among=["published/y", "mlp/y"]))
def test_a_packed_segment_learns_as_if_the_others_had_a_rate_of_zero(name):
    """Also where a segment begins or ends inside a mini-batch; the last mini-batch is not full."""
    config, segments = WANTED[name], np.asarray([[1] * 13 + [2] * 16 + [3] * 8])
    w, draw = weights(config), np.random.default_rng(0)
    norm = inner_loop.Norm(w.norm_scale, w.norm_bias, 1e-6)
    learned = inner_loop.Learned(w.initial, norm, jnp.asarray(draw.uniform(0.1, 1, 8)))
    q, k, v = (jnp.asarray(draw.normal(size=(1, 2, 37, 16))) for _ in range(3))
    rate = jnp.asarray(draw.uniform(0.01, 0.1, (1, 2, 37)))
    own = segments == np.arange(1, 4)[:, None]  # [3, 37], a row for each segment

    def run(tokens):
        memory = inner_loop.start(learned, len(tokens.key), segments=tokens.segment is not None)
        return inner_loop.run(config, learned, memory, tokens)[1][0]

    alone = inner_loop.Tokens(*(jnp.tile(a, (3, 1, 1, 1)) for a in (q, k, v)), rate * own[:, None], None)
    packed = inner_loop.Tokens(q, k, v, rate, jnp.asarray(segments, jnp.int32))
    found, each = jax.jit(lambda: (run(packed), run(alone)))()
    want = np.sum(np.where(own[:, None, :, None], each, 0), axis=0, keepdims=True)
    np.testing.assert_allclose(found, want, atol=1e-12, rtol=0)
    assert np.abs(found - each[:1]).max() > 1e-3  # what was learned in other segments would show


@pytest.mark.covers("N04")
@pytest.mark.parametrize("name", quick("published/y", among=["published/y", "mlp/y", "ponder/y_decay0.3"]))
def test_state_between_calls_is_exact_also_inside_a_mini_batch(name):
    config = WANTED[name]
    w, whole = weights(config), run(config, weights(config), x()).output
    first = run(config, w, x()[:, :16])
    second = run(config, w, x()[:, 16:], state=first.state)
    np.testing.assert_array_equal(jnp.concatenate([first.output, second.output], axis=1), whole)
    dropped = run(config, w, x()[:, 16:]).output
    assert np.abs(dropped - second.output).max() > 0.1
    begun = run(config, w, x()[:, :11])
    by_token, _ = extend(config, w, x()[:, 11:], begun.state, jnp.ones((2, 21), bool))
    np.testing.assert_allclose(jnp.concatenate([begun.output, by_token], axis=1), whole, atol=1e-12, rtol=0)


def test_tokens_that_are_not_real_leave_the_state():
    w = weights(LINEAR)
    real = jnp.asarray([[False] * 3 + [True] * 18, [True] * 21])
    padded = jnp.stack([jnp.pad(x()[0, :18], ((3, 0), (0, 0)), constant_values=7.0), x()[1, :21]])
    found, _ = extend(LINEAR, w, padded, layer.empty(LINEAR, w, 2), real)
    np.testing.assert_allclose(found[0, 3:], FIXTURE["published/y"][0, :18], atol=1e-9, rtol=0)
    np.testing.assert_allclose(found[1], FIXTURE["published/y"][1, :21], atol=1e-9, rtol=0)


@pytest.mark.covers("X16")
def test_segments_do_not_see_one_another_and_no_token_sees_a_later_one():
    w = weights(LINEAR)
    segments = jnp.asarray([[1] * 13 + [2] * 11 + [0] * 8] * 2, jnp.int32)
    found = run(LINEAR, w, x(), segments)
    other = run(LINEAR, w, x().at[:, :13].add(1.0).at[:, 20:].add(1.0), segments)
    same = np.abs(found.output - other.output).max((0, 2)) == 0
    assert same.tolist() == [False] * 13 + [True] * 7 + [False] * 12
    aligned = run(LINEAR, w, x(), jnp.asarray([[1] * 16 + [2] * 16] * 2, jnp.int32))
    np.testing.assert_allclose(aligned.output[:, 16:], run(LINEAR, w, x()[:, 16:]).output, atol=1e-12, rtol=0)


@pytest.mark.slow
def test_gradients_are_those_of_differences():
    w = weights(LINEAR)
    ways = jax.tree.map(lambda a: np.random.default_rng(a.size).normal(size=a.shape), w)

    @jax.jit
    def loss(step):
        found = layer.run(LINEAR, jax.tree.map(lambda a, d: a + step * d, w, ways), x()[:, :24])
        return jnp.sum(found.output**2) + jnp.sum(found.errors)

    by_difference = (loss(1e-6) - loss(-1e-6)) / 2e-6
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(0.0), by_difference, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inner": "cubic"}, "expected one of linear, mlp"),
        ({"mini_batch": 0}, "mini_batch = 0: expected an integer of at least 1"),
        ({"mini_batch": 2.5}, "mini_batch = 2.5: expected an integer of at least 1"),
        ({"num_heads": 2.0}, "num_heads = 2.0: expected an integer of at least 1"),
        ({"variant": "ponder", "decay": float("nan")}, "decay = nan: expected a finite number"),
        ({"base_rate": "1"}, "base_rate = '1': expected a finite number"),
        ({"head_dim": 7}, "head_dim = 7 is odd"),
        ({"diagonal": 1}, "expected 0 or -1"),
        ({"decay": 0.3}, "only the variant 'ponder' has a decay"),
        ({"rate_scale": -1.0}, "at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(LINEAR, **change)


@pytest.mark.covers("N04")
def test_the_weights_kept_for_the_backward_pass_grow_as_the_root_of_the_length():
    """All else that is kept are the inputs of the loop; 16 times the length has 4 times the groups of mini-batches."""

    def kept(length):
        w = weights(LINEAR)
        learned = inner_loop.Learned(w.initial, inner_loop.Norm(w.norm_scale, w.norm_bias, 1e-6), jnp.ones(8))

        def run(initial, query, key, value, rate):
            tokens = inner_loop.Tokens(query, key, value, rate, jnp.ones((1, length), jnp.int32))
            memory = inner_loop.start(learned, 1, segments=True)
            return inner_loop.run(LINEAR, learned._replace(initial=initial), memory, tokens)[1][0]

        by_token = jax.ShapeDtypeStruct((1, 2, length, 16), np.float64)
        inputs = (by_token, by_token, by_token, jax.ShapeDtypeStruct((1, 2, length), np.float64))
        found = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(run, *args)[1], w.initial, *inputs))
        of_inputs = [leaf.size for leaf in found if leaf.ndim > 1 and 8 in leaf.shape[-2:]]  # mini-batches have 8
        assert sum(of_inputs) == sum(leaf.size for leaf in inputs) + length  # and the segments
        return sum(leaf.size for leaf in found) - sum(of_inputs)

    short, long = kept(8 * 10**2), kept(8 * 40**2)
    assert 3 * short < long < 4.5 * short
