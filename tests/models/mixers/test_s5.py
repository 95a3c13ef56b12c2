"""State-space layers against a fixture in float64, and what any recurrence over packed rows must satisfy."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decoder.layers import Attention, Mlp
from models.decoder.parts import Sum
from models.mixers import s5
from tests.models.decoder.test_layers import PLAIN, check_generation, params_of

FIXTURE = np.load(pathlib.Path(__file__).parents[1] / "fixtures" / "s5_parity.npz")
STATES = 8


def numbers(name, index=...):
    return FIXTURE[f"{name}_re"][index] + 1j * FIXTURE[f"{name}_im"][index]


def pair(a):
    return s5.Complex(jnp.asarray(a.real, jnp.float32), jnp.asarray(a.imag, jnp.float32))


def joined(a):
    return np.asarray(a.re) + 1j * np.asarray(a.im)


SYSTEM = s5.discretized(*(
    jnp.asarray(a, jnp.float32)
    for a in (np.log(-FIXTURE["lambda_re"]), FIXTURE["lambda_im"], np.log(FIXTURE["dt"]))
))  # fmt: skip
INPUTS = np.einsum("pd,btd->btp", numbers("B"), FIXTURE["u"])  # [2, 40, 8]
ONES = jnp.ones((2, 40), jnp.int32)


def states(inputs=INPUTS, segment_ids=ONES, before=None, **options):
    before = np.zeros((len(inputs), STATES)) if before is None else before
    run = jax.jit(functools.partial(s5.scan, **{"chunk": 16, **options}))
    found, last = run(SYSTEM, pair(inputs), segment_ids, pair(np.asarray(before)))
    return joined(found), joined(last)


def outputs(states):
    return 2 * np.einsum("dp,btp->btd", numbers("C"), states).real + FIXTURE["D"] * FIXTURE["u"]


@pytest.mark.covers("N08")
def test_the_fixture():
    np.testing.assert_allclose(joined(SYSTEM.decay), numbers("lambda_bar"), atol=1e-6)
    np.testing.assert_allclose(joined(SYSTEM.gain)[:, None] * numbers("B"), numbers("B_bar"), atol=1e-6)
    for chunk in (64, 7):  # 40 positions: one chunk, and chunks of which the last is shorter
        found, last = states(before=numbers("x0"), chunk=chunk)
        np.testing.assert_allclose(outputs(found), FIXTURE["y"], atol=2e-6)
        np.testing.assert_allclose(last, numbers("xT"), atol=2e-6)
    np.testing.assert_allclose(outputs(states()[0]), FIXTURE["y_zero_state"], atol=2e-6)
    assert np.max(np.abs(FIXTURE["y"] - FIXTURE["y_zero_state"])) > 0.2  # a layer that drops the state fails


def test_a_row_in_two_calls_with_the_state_carried():
    whole, end = states(before=numbers("x0"))
    first, state = states(INPUTS[:, :16], ONES[:, :16], numbers("x0"))
    second, last = states(INPUTS[:, 16:], ONES[:, 16:], state)
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, atol=1e-6)
    np.testing.assert_allclose(last, end, atol=1e-6)


def test_segments_of_a_packed_row_are_as_each_alone():
    ids = jnp.asarray([[1] * 5 + [2] * 20 + [3] * 10 + [0] * 5] * 2, jnp.int32)
    before = numbers("x0")
    packed, _ = states(segment_ids=ids, before=before, chunk=8)
    for start, end in ((0, 5), (5, 25), (25, 35)):
        alone, _ = states(INPUTS[:, start:end], ONES[:, start:end], before if start == 0 else None)
        np.testing.assert_allclose(packed[:, start:end], alone, atol=1e-6)


def test_gradients_against_float64():
    """The adjoint recurrence, written out, for the sum of the real parts of conj(weights) times states."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=INPUTS.shape) + 1j * rng.normal(size=INPUTS.shape)
    decay, gain = numbers("lambda_bar"), (numbers("lambda_bar") - 1) / numbers("lambda")

    def total(system, inputs, before):
        found, _ = s5.scan(system, inputs, ONES, before, chunk=16)
        return jnp.sum(found.re * weights.real + found.im * weights.imag)

    of_system, of_inputs, of_before = jax.jit(jax.grad(total, (0, 1, 2)))(SYSTEM, pair(INPUTS), pair(numbers("x0")))
    every, state, back = [], numbers("x0"), np.zeros((2, STATES))
    for t in range(40):
        every.append(state)
        state = decay * state + gain * INPUTS[:, t]
    of_decay, of_gain, want = 0, 0, np.zeros(INPUTS.shape, complex)
    for t in reversed(range(40)):
        back = weights[:, t] + np.conj(decay) * back
        want[:, t] = np.conj(gain) * back
        of_decay += np.sum(np.conj(every[t]) * back, axis=0)
        of_gain += np.sum(np.conj(INPUTS[:, t]) * back, axis=0)
    for got, expected in (
        (of_inputs, want),
        (of_before, np.conj(decay) * back),
        (of_system.decay, of_decay),
        (of_system.gain, of_gain),
    ):
        np.testing.assert_allclose(joined(got), expected, atol=5e-6 * np.max(np.abs(expected)))


@pytest.mark.covers("N08")
def test_the_initial_system_is_hippo_and_remembers_a_row():
    np.testing.assert_allclose(np.sort(FIXTURE["lambda_im"]), s5.hippo(16), rtol=1e-9)
    root = np.sqrt(np.arange(16) + 0.5)
    skew = np.triu(np.outer(root, root), 1)
    eigenvalues = np.linalg.eigvals(skew - skew.T - 0.5 * np.eye(16))
    np.testing.assert_allclose(eigenvalues.real, -0.5, atol=1e-9)
    np.testing.assert_allclose(np.sort(eigenvalues.imag)[8:], s5.hippo(16), rtol=1e-9)
    for length in (4096, 65536):
        frequency, dt = jnp.asarray(s5.hippo(4), jnp.float32), jnp.asarray([1 / length, 0.1])
        system = s5.discretized(jnp.log(jnp.asarray([0.5, 0.5])), frequency, jnp.log(dt))
        kept = np.abs(joined(system.decay)) ** length
        np.testing.assert_allclose(kept[0], np.exp(-0.5), rtol=1e-2)  # of an input at the other end of the row
        assert kept[1] < 1e-30


def test_blocks_repeat_the_frequencies_of_a_smaller_matrix():
    np.testing.assert_array_equal(s5.S5(states=8, blocks=2).frequencies, np.tile(s5.hippo(4), 2))


LAYER = s5.S5(states=8, min_dt=0.05, max_dt=0.5, chunk=4)
HYBRID = dataclasses.replace(
    PLAIN,
    num_layers=2,
    mixer=(LAYER, Sum((Attention(), LAYER))),
    feed_forward=(Mlp(), LAYER),
)


@pytest.mark.covers("N08")
def test_generation_with_the_state_equals_the_full_pass():
    params = params_of(HYBRID)
    assert {"layers/block_0/s5", "layers/block_1/s5", "layers/block_1/feed_forward"} <= set(params)
    check_generation(HYBRID, params)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"states": 7}, "S5.states = 7: expected an even number"),
        ({"states": 8, "blocks": 3}, r"S5.blocks = 3: states = 8 do not divide .* expected a divisor of 4"),
        ({"states": 8, "blocks": 0}, "S5.blocks = 0: expected an integer of at least 1"),
        ({"states": 8, "chunk": 0}, "S5.chunk = 0: expected an integer of at least 1"),
        ({"states": 8, "min_dt": 0.2}, r"min_dt = 0.2, max_dt = 0.1: expected finite numbers, 0 < min_dt <= max_dt"),
        ({"states": 8, "activation": "tanh"}, "S5.activation = 'tanh': expected None or one of silu"),
    ],
)
def test_wrong_settings_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        s5.S5(**settings)
