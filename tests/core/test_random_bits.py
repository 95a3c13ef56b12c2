"""Random bits by row of the global batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import random_bits

KEY = jax.random.key(5)


def bits(rows):
    return np.asarray(_bits(jnp.asarray(rows)))


@jax.jit
def _bits(rows):
    return jax.vmap(lambda key: jax.random.bits(key, (3,)))(random_bits.row_keys(KEY, rows))


@pytest.mark.covers("T12")
def test_a_row_has_its_bits_wherever_it_is():
    whole = bits(range(8))
    assert len(np.unique(whole, axis=0)) == 8
    for some in ([5], [6, 2], [7, 0, 3]):
        np.testing.assert_array_equal(bits(some), whole[some])


def test_dropout_draws_by_row_and_keeps_the_mean():
    x = jnp.ones((8, 4000))
    dropped = np.asarray(random_bits.dropout(KEY, 0.25, x, jnp.arange(8)))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    np.testing.assert_allclose(dropped.mean(1), 1, atol=0.05)
    assert len(np.unique(dropped, axis=0)) == 8
    some = jnp.asarray([6, 1])
    np.testing.assert_array_equal(random_bits.dropout(KEY, 0.25, x[some], some), dropped[some])
    assert random_bits.dropout(KEY, 0.0, x.astype(jnp.bfloat16), jnp.arange(8)).dtype == jnp.bfloat16


@pytest.mark.parametrize(("rate", "rows", "message"), [(1.0, 8, "rate = 1.0: expected from 0"), (0.5, 3, "one id for")])
def test_impossible_dropout_is_refused(rate, rows, message):
    with pytest.raises(ValueError, match=message):
        random_bits.dropout(KEY, rate, jnp.ones((8, 2)), jnp.arange(rows))


def test_rows_are_numbered_from_zero_unless_the_step_numbered_them():
    batch = {"x": jnp.zeros((4, 2))}
    np.testing.assert_array_equal(random_bits.row_ids(batch), range(4))
    numbered = random_bits.with_row_ids(batch)
    np.testing.assert_array_equal(numbered["row_ids"], range(4))
    assert numbered["row_ids"].dtype == jnp.int32
    part = jax.tree.map(lambda a: a[1::2], numbered)
    np.testing.assert_array_equal(random_bits.row_ids(part), [1, 3])
