"""HumanEval: the estimator."""

import itertools

import pytest

from tasks.code import humaneval


@pytest.mark.covers("N14")
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n >= k:
            choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert humaneval.pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))
