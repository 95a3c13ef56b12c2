import math

import numpy as np
import pytest

from core.types import DataLayout
from tasks import synthetic

ROWS = tuple(range(8))
LAYOUT = DataLayout(8, ROWS, ROWS)


@pytest.mark.covers("D11")
def test_rows_are_one_segment_of_even_ids():
    batches = synthetic.random_tokens(vocab_size=11, length=64, num_streams=2).train(LAYOUT, seed=1)
    batch = next(batches)
    assert (batch["inputs"][:, 1:] == batch["targets"][:, :-1]).all()
    assert (batch["inputs"][:, 0] == 0).all()
    assert (batch["segment_ids"] == 1).all()
    assert (batch["weights"] == 1).all()
    assert (batch["positions"] == np.arange(64)).all()
    counts = np.bincount(np.concatenate([next(batches)["targets"].ravel() for _ in range(40)]), minlength=11)
    assert counts[0] == 0
    share = counts[1:] / counts.sum()
    entropy = -(share * np.log(share)).sum()
    assert entropy == pytest.approx(math.log(10), abs=1e-3)


def test_seeds_streams_rows_and_splits_differ():
    task = synthetic.random_tokens(vocab_size=1000, length=16, num_streams=4)
    first = next(task.train(LAYOUT, seed=1))["targets"]
    others = [next(task.train(LAYOUT, seed=2))["targets"], next(task.evaluation(LAYOUT))["targets"]]
    assert len({row.tobytes() for batch in (first, *others) for row in batch}) == 24
    np.testing.assert_array_equal(next(task.evaluation(LAYOUT))["targets"], others[1])


def test_a_position_is_small():
    batches = synthetic.random_tokens(vocab_size=1000, length=16, num_streams=4).train(LAYOUT, seed=1)
    assert max(map(len, batches.state().values())) < 400


@pytest.mark.parametrize("wrong", [{"vocab_size": 1}, {"length": True}, {"num_streams": 0}, {"length": "8"}])
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(ValueError, match=f"synthetic.random_tokens.{next(iter(wrong))}"):
        synthetic.random_tokens(**{"vocab_size": 10, "length": 8, "num_streams": 2, **wrong})


def test_numbers_go_there_and_back():
    vocabulary = synthetic.random_tokens(vocab_size=30, length=8, num_streams=1).vocabulary
    assert vocabulary.decode(vocabulary.encode("4 29 1 7")) == "4 29 1 7"
    with pytest.raises(ValueError, match="id 30"):
        vocabulary.decode([30])
