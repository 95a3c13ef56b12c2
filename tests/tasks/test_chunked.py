"""Chunks of long rows: their order, their position, and what is refused."""

import dataclasses

import numpy as np
import pytest

from core.types import CountsTokens, DataLayout, NamesFiles, SizesEvaluation, SplitsRows, can
from tasks import chunked, long_range, synthetic

WHOLE = long_range.rows(kind="retrieval", length=12, num_streams=2)
TASK = chunked.rows(task=WHOLE, length=4)
LAYOUT = DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3))


def taken(batches, count):
    return [next(batches) for _ in range(count)]


@pytest.mark.covers("D01")
def test_chunks_of_a_row_follow_one_another():
    whole = next(WHOLE.train(LAYOUT, seed=3))
    parts = taken(TASK.train(LAYOUT, seed=3), 3)
    for name, a in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts], axis=1), a)
    assert {name: a.shape for name, a in parts[0].items()} == {n: f.shape for n, f in TASK.spec(4).items()}
    assert TASK.spec(4)["inputs"].shape == (4, 4)


@pytest.mark.parametrize("done", [0, 1, 2, 3, 5])
def test_a_position_is_that_of_a_chunk(done):
    batches = TASK.train(LAYOUT, seed=3)
    taken(batches, done)
    state = batches.state()
    wanted = taken(batches, 4)
    resumed = TASK.train(LAYOUT, seed=3)
    taken(resumed, 2)
    resumed.restore(state)
    assert resumed.state() == state
    for found, expected in zip(taken(resumed, 4), wanted, strict=True):
        for name, a in expected.items():
            np.testing.assert_array_equal(found[name], a)


def test_the_abilities_are_those_of_the_task_of_long_rows():
    assert can(TASK, SplitsRows)
    assert TASK.vocabulary == WHOLE.vocabulary
    assert (can(TASK, CountsTokens), can(TASK, NamesFiles)) == (can(WHOLE, CountsTokens), can(WHOLE, NamesFiles))
    assert TASK.describe().endswith("in chunks of 4")
    assert TASK.problems() == WHOLE.problems()


def test_an_evaluation_says_how_many_rows_of_the_task_it_reads():
    class Rows:
        def __init__(self, most=9):
            self.most = most

        def evaluating(self, rows):
            return Rows(rows)

        def evaluated_on(self, most):
            return f"{most or self.most} of 9 rows"

    task = chunked.ChunkedTask(Rows(), 4)
    assert task.evaluating(3).evaluated_on(None) == "3 of 9 rows, in chunks of 4 positions"
    assert task.evaluated_on(8).startswith("8 chunks of 4 positions, batch after batch")
    assert TASK.evaluated_on(None).startswith("all chunks of 4 positions")


@pytest.mark.parametrize("length", [5, 12, 24])
def test_rows_that_do_not_divide_are_refused(length):
    task = chunked.rows(task=WHOLE, length=length)
    with pytest.raises(ValueError, match=f"chunked.rows.length = {length}: rows of 12 positions do not divide"):
        task.spec(4)


def test_wrong_lengths_and_positions_are_refused():
    with pytest.raises(ValueError, match=r"chunked\.rows\.length = 0: expected an integer of at least 1"):
        chunked.rows(task=WHOLE, length=0)
    batches = chunked.rows(task=WHOLE, length=3).train(LAYOUT, seed=3)
    taken(batches, 3)
    with pytest.raises(ValueError, match=r"position is of chunks of 3 positions, and chunked\.rows\.length = 4"):
        TASK.train(LAYOUT, seed=3).restore(batches.state())
    plain = synthetic.random_tokens(vocab_size=8, length=12, num_streams=2).train(LAYOUT, seed=3)
    with pytest.raises(ValueError, match="not a data position"):
        TASK.train(LAYOUT, seed=3).restore(plain.state())


def test_fewer_rows_to_evaluate_are_divided_into_chunks_too():
    class Sized(type(WHOLE)):
        def evaluating(self, rows):
            return dataclasses.replace(self, length=rows)  # seen in the task that it returns

    whole = Sized(**{field.name: getattr(WHOLE, field.name) for field in dataclasses.fields(WHOLE)})
    assert not can(TASK, SizesEvaluation)
    task = chunked.rows(task=whole, length=4)
    assert can(task, SizesEvaluation)
    assert task.evaluating(8) == chunked.ChunkedTask(whole.evaluating(8), 4)
