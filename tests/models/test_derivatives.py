"""Custom derivatives against those that JAX derives, and the checkpoint names they use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import derivatives
from models.decoder import rotary


def normal(*shape):
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


X = 2.0 + 3.0 * normal(2, 5, 6)
POSITIONS = np.random.default_rng(3).integers(0, 50, (2, 5))


def plain_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-2) * scale


def plain_turn(x):
    """Pairs as complex numbers, times 0.7 of unit ones."""
    angle = POSITIONS[..., None, None] * 20.0 ** (-jnp.arange(3.0) / 3)
    pairs = (x[..., :3] + 1j * x[..., 3:]) * 0.7 * jnp.exp(1j * angle)
    return jnp.concatenate([pairs.real, pairs.imag], axis=-1)


CASES = {
    "rms_norm": (
        lambda x, scale: derivatives.rms_norm(x, scale, 1e-2),
        plain_norm,
        (X, 1.0 + normal(6)),
    ),
    "gated": (derivatives.gated, lambda gate, up: gate / (1 + jnp.exp(-gate)) * up, (X, X[::-1] - 1.0)),
    "unembedded": (derivatives.unembedded, lambda x, w: x @ w, (X, normal(6, 11))),
    "turned": (
        lambda x: rotary.apply(x, rotary.tables(POSITIONS, 6, theta=20.0, length=0.7)),
        plain_turn,
        (normal(2, 5, 3, 6),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_every_gradient_are_those_of_the_plain_form(name):
    ours, plain, inputs = CASES[name]
    want, vjp = jax.vjp(plain, *inputs)
    dy = normal(*want.shape)
    got, our_vjp = jax.vjp(ours, *inputs)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-5)
    for gradient, expected in zip(our_vjp(dy), vjp(dy), strict=True):
        assert gradient.dtype == expected.dtype
        np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_comes_back_as_bfloat16_near_the_wide_result(name):
    ours, plain, inputs = CASES[name]
    narrow = [a.astype(jnp.bfloat16) for a in inputs]
    want, vjp = jax.vjp(plain, *(a.astype(jnp.float32) for a in narrow))
    got, our_vjp = jax.vjp(ours, *narrow)
    assert got.dtype == (jnp.float32 if name == "unembedded" else jnp.bfloat16)
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-7, atol=0.02)
    for gradient, expected in zip(our_vjp(jnp.ones_like(got)), vjp(jnp.ones_like(want)), strict=True):
        assert gradient.dtype == jnp.bfloat16
        np.testing.assert_allclose(gradient.astype(jnp.float32), expected, rtol=2**-6, atol=0.1)


def test_a_large_gate_neither_overflows_nor_loses_its_gradient():
    gate, up = jnp.array([-1e4, -90.0, 0.0, 90.0, 1e4]), jnp.full(5, 2.0)
    np.testing.assert_allclose(derivatives.gated(gate, up), [0, 0, 0, 180, 2e4], atol=1e-6)
    d_gate, d_up = jax.grad(lambda *a: jnp.sum(derivatives.gated(*a)), argnums=(0, 1))(gate, up)
    np.testing.assert_allclose(d_gate, [0, 0, 1, 2, 2], atol=1e-6)
    np.testing.assert_allclose(d_up, [0, 0, 0, 90, 1e4], atol=1e-6)


IDS = ("batch", "length")  # logical axes of the ids


def test_embedded_is_a_lookup_and_its_gradient_that_of_the_plain_form():
    table = normal(7, 6)
    ids = jnp.array([[0, 3, 3, 6], [3, 0, 5, 3]])
    want, vjp = jax.vjp(lambda t: t[ids], table)
    got, our_vjp = jax.vjp(lambda t: derivatives.embedded(t, ids, IDS, "float32"), table)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(our_vjp(want)[0], vjp(want)[0], rtol=1e-6)


def test_gradients_of_frequent_tokens_are_summed_in_float32():
    """Tokens as frequent as in text (Zipf): each row of the gradient against a sum in float64."""
    draw = np.random.default_rng(0)
    ids = (draw.zipf(1.2, (8, 1024)) - 1) % 512
    dy = jnp.asarray(1.0 + draw.normal(size=(8, 1024, 16)), jnp.bfloat16)
    _, vjp = jax.vjp(lambda table: derivatives.embedded(table, jnp.asarray(ids), IDS, "bfloat16"), jnp.zeros((512, 16)))
    (got,) = vjp(dy)
    want = np.zeros((512, 16))
    np.add.at(want, ids, np.asarray(dy, np.float64))
    seen = np.bincount(ids.ravel(), minlength=512)
    frequent = seen >= 256
    assert np.sum(frequent) == 4
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got[frequent], want[frequent], rtol=1e-5)  # in bfloat16: 3 %
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)  # a sum of few may cancel
