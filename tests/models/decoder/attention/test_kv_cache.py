"""What a KV cache holds, and what queries of new slots see of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decoder.attention import kv_cache
from models.decoder.attention.kv_cache import KeysAndValues


def numbered(slots):
    """Keys [1, T, 1, 1] that are the numbers of their slots, and values that are their squares."""
    keys = np.asarray(slots, np.float32)[None, :, None, None]
    return keys, keys**2


@pytest.mark.parametrize("window", [None, 4, 6, 9])
@pytest.mark.parametrize("lengths", [(1,) * 8, (3, 5), (8,), (5, 1, 2)])
def test_queries_see_the_slots_in_their_window(lengths, window):
    entries = 8 if window is None else min(8, window)
    empty = jnp.full((1, 1, entries, 1), -1.0)
    cache, start = KeysAndValues(empty, empty), 0
    extended = jax.jit(kv_cache.extended, static_argnames="window")
    for length in lengths:
        new = range(start, start + length)
        unseen = kv_cache.unseen(cache, length, window=window)
        seen, cache = extended(*numbered(new), cache, jnp.int32(start), window=window)
        assert [a.shape for a in unseen] == [a.shape for a in seen]
        held = np.asarray(kv_cache.held(entries, jnp.int32(start + length)))
        np.testing.assert_array_equal(np.asarray(cache.keys)[0, 0, :, 0], np.where(held >= 0, held, -1))
        for query in new:
            wanted = {slot for slot in range(query + 1) if window is None or query - slot < window}
            assert wanted <= set(np.asarray(seen.keys, int)[0, 0, :, 0])
        keys, values = map(np.asarray, seen)
        np.testing.assert_array_equal(values[keys >= 0], keys[keys >= 0] ** 2)
        start += length
