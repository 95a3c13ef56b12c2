"""HumanEval: the estimator."""

import gzip
import itertools

import pytest

from core.errors import UserError
from tasks.code import humaneval


@pytest.mark.covers("N14")
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n >= k:
            choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert humaneval.pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_the_compressed_file_that_is_distributed_is_refused_by_name(tmp_path):
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(UserError, match=r"HumanEval\.jsonl\.gz: not text in UTF-8 .*; if it is compressed, unpack it"):
        humaneval.read(str(tmp_path / "HumanEval.jsonl.gz"))
