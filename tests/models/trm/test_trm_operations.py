"""Operations with custom derivatives agree with JAX's derivatives of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.trm import operations

B, D = 3, 16


def plain_norm(x, axis):
    wide = x.astype(jnp.float32)
    return (wide / jnp.sqrt(jnp.mean(wide**2, axis, keepdims=True) + 1e-5)).astype(x.dtype)


CASES = {
    "swiglu": (operations.swiglu, lambda g, u: g * jax.nn.sigmoid(g) * u, [(B, D), (B, D)]),
    "norm of the last": (lambda x: operations.rms_norm(x, -1, 1e-5), lambda x: plain_norm(x, -1), [(5, B, D)]),
    "norm of the first": (lambda x: operations.rms_norm(x, 0, 1e-5), lambda x: plain_norm(x, 0), [(5, B, D)]),
    "to more positions": (operations.over_positions, lambda w, x: jnp.tensordot(w, x, (0, 0)), [(5, 7), (5, B, D)]),
    "to fewer positions": (operations.over_positions, lambda w, x: jnp.tensordot(w, x, (0, 0)), [(7, 5), (7, B, D)]),
}


def values_and_gradients(function, arguments, direction):
    value, back = jax.vjp(function, *arguments)
    return [value, *back(direction.astype(value.dtype))]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    ours, plain, shapes = CASES[name]
    rng = np.random.default_rng(0)
    arguments = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    direction = jnp.asarray(rng.normal(size=jax.eval_shape(plain, *arguments).shape), jnp.float32)
    want = values_and_gradients(plain, arguments, direction)
    for a, b in zip(values_and_gradients(ours, arguments, direction), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
    narrow = [a.astype(jnp.bfloat16) for a in arguments]
    wide = values_and_gradients(plain, [a.astype(jnp.float32) for a in narrow], direction.astype(jnp.bfloat16))
    for a, b in zip(values_and_gradients(ours, narrow, direction), wide, strict=True):
        assert a.dtype == jnp.bfloat16
        distance = np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b)
        assert distance < 2**-7  # two roundings to eight bits
