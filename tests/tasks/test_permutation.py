"""Permutations visit every place once, depend on the key, and never change."""

import numpy as np
import pytest

from tasks import permutation

ZERO = [2, 9, 1, 3, 4, 7, 8, 0, 6, 5]
LARGE = [395303599865, 846575794185]


@pytest.mark.covers("D06")
def test_every_number_comes_once():
    for count in [*range(1, 130), 1000, 4097]:
        assert sorted(permutation.permuted(range(count), count, key=(count,))) == list(range(count))


def test_the_order_depends_on_the_key_alone():
    """The numbers are written here, because positions in checkpoints rely on them."""
    assert permutation.permuted(range(10), 10, key=(0, 0)).tolist() == ZERO
    assert permutation.permuted([7, 2], 10, key=(0, 0)).tolist() == [ZERO[7], ZERO[2]]
    assert permutation.permuted([0, 10**11], 10**12, key=(3, 1)).tolist() == LARGE


def test_orders_look_random():
    """No place prefers a number, and neighbors are far apart, over 400 keys."""
    count = 64
    orders = np.array([permutation.permuted(range(count), count, key=(key,)) for key in range(400)])
    seen = np.zeros((count, count))
    for order in orders:
        seen[np.arange(count), order] += 1
    expected = len(orders) / count
    chi_square = ((seen - expected) ** 2 / expected).sum() / (count - 1) ** 2
    assert 0.9 < chi_square < 1.1
    assert abs(np.abs(np.diff(orders, axis=1)).mean() - (count + 1) / 3) < 0.5
