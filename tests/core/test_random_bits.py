"""Random bits by row of the global batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import random_bits

KEY = jax.random.key(5)


def bits(rows):
    return np.asarray(jax.vmap(lambda key: jax.random.bits(key, (3,)))(random_bits.row_keys(KEY, jnp.asarray(rows))))


@pytest.mark.covers("T12")
def test_a_row_has_its_bits_wherever_it_is():
    whole = bits(range(8))
    assert len(np.unique(whole, axis=0)) == 8
    for some in ([5], [6, 2], [7, 0, 3]):
        np.testing.assert_array_equal(bits(some), whole[some])


def test_rows_are_numbered_from_zero_unless_the_step_numbered_them():
    batch = {"x": jnp.zeros((4, 2))}
    np.testing.assert_array_equal(random_bits.row_ids(batch), range(4))
    numbered = random_bits.with_row_ids(batch)
    np.testing.assert_array_equal(numbered["row_ids"], range(4))
    assert numbered["row_ids"].dtype == jnp.int32
    part = jax.tree.map(lambda a: a[1::2], numbered)
    np.testing.assert_array_equal(random_bits.row_ids(part), [1, 3])
