"""The order of puzzles: that of the published sampler where it is reproducible, and small positions."""

import pathlib

import numpy as np
import pytest

from tasks.puzzles import order

FIXTURE = np.load(pathlib.Path(__file__).parent / "fixtures/sampler.npz")  # made by running the published TRM's loader


def test_the_published_order_is_reproduced(make_split):
    visits = order.Shuffled(make_split([[1, 1, 1]] * 7), batch_size=4, seed=0, epochs=2)
    for iteration in (1, 2):
        for number, expected in enumerate(FIXTURE[f"iter{iteration}_batches"]):
            examples, puzzles = next(visits)
            np.testing.assert_array_equal(examples, expected)
            np.testing.assert_array_equal(puzzles, expected)
            groups = FIXTURE[f"iter{iteration}_group_order"][4 * number : 4 * number + 4]
            np.testing.assert_array_equal(examples // 3, groups)


def test_drawing_a_batch_at_once_gives_the_numbers_of_drawing_one_by_one(make_split):
    split = make_split([[1] * (1 + i % 4) for i in range(23)])
    at_once, one_by_one = (order.Shuffled(split, batch_size=8, seed=5, epochs=3) for _ in range(2))
    one_by_one._single = False
    for _ in range(30):
        for fast, slow in zip(next(at_once), next(one_by_one), strict=True):
            np.testing.assert_array_equal(fast, slow)


def test_an_epoch_visits_every_group_once_whatever_its_variants(make_split):
    visits = order.Shuffled(make_split([[1] * 5] * 12), batch_size=4, seed=1, epochs=1)
    for _ in range(4):
        epoch = np.concatenate([next(visits).examples for _ in range(3)])
        assert sorted(epoch // 5) == list(range(12))


def test_puzzles_of_several_examples_fill_the_batch_without_repeating_one(make_split):
    split = make_split([[3, 4], [5, 2], [6, 1]] * 3)
    visits = order.Shuffled(split, batch_size=7, seed=0, epochs=1)  # each group once at most
    for _ in range(40):
        examples, puzzles = next(visits)
        assert len(set(examples.tolist())) == 7
        np.testing.assert_array_equal(np.searchsorted(split.puzzle_indices, examples, side="right") - 1, puzzles)


@pytest.mark.parametrize("groups", [[[1, 1]] * 9, [[3, 4], [5, 2], [6, 1]]])
@pytest.mark.parametrize("read", [0, 1, 5, 17])
def test_a_position_continues_bit_for_bit(make_split, groups, read):
    split = make_split(groups)
    straight = order.Shuffled(split, batch_size=4, seed=3, epochs=3)
    for _ in range(read):
        next(straight)
    again = order.Shuffled(split, batch_size=4, seed=3, epochs=3)
    next(again)
    again.restore(straight.state())
    for _ in range(20):
        np.testing.assert_array_equal(next(again).examples, next(straight).examples)


def test_a_malformed_position_is_refused(make_split):
    visits = order.Shuffled(make_split([[1]] * 5), batch_size=4, seed=0)
    for state in (b"", b"{}", b'{"iteration": 1, "visit": 0, "generator": {"bit_generator": "PCG64"}}'):
        with pytest.raises(ValueError, match="is not a position"):
            visits.restore(state)


def test_an_iteration_drops_little_and_never_everything(make_split):
    assert order.epochs_per_iteration(make_split([[1]] * 5), batch_size=12) == 2400
    few = make_split([[1]] * 5)
    assert len(next(order.Shuffled(few, batch_size=12, seed=0)).examples) == 12
    with pytest.raises(ValueError, match="2 epochs of 5 puzzles give no batch of 12: set epochs_per_iteration to 3"):
        order.Shuffled(few, batch_size=12, seed=0, epochs=2)


def test_an_evaluation_reads_everything_once_and_fills_up(make_split):
    visits = order.InOrder(make_split([[2], [3], [5]]), batch_size=4)
    batches = [next(visits) for _ in range(3)]
    assert np.concatenate([b.examples for b in batches]).tolist() == [*range(10), order.FILLER, order.FILLER]
    assert np.concatenate([b.puzzles for b in batches])[:10].tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    with pytest.raises(StopIteration):
        next(visits)


def test_a_subset_is_drawn_once_for_all(make_split):
    split = make_split([[1]] * 50)

    def chosen(batch_size, seed):
        visits = order.InOrder(split, batch_size=batch_size, subset=12, seed=seed)
        found = np.concatenate([next(visits).examples for _ in range(-(-12 // batch_size))])
        return found[found != order.FILLER].tolist()

    assert chosen(4, 0) == chosen(5, 0) == sorted(set(chosen(4, 0)))
    assert len(chosen(4, 0)) == 12
    assert chosen(4, 0) != chosen(4, 1)
