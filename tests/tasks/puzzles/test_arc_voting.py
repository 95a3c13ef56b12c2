"""Votes over variants become attempts; those of one checkpoint and of an ensemble are kept apart."""

import json
import math

import numpy as np
import pytest

from core import types
from tasks import puzzles
from tasks.puzzles import arc_grids, arc_voting, writing
from tasks.puzzles.arc_grids import Variant
from tasks.puzzles.arc_voting import Answer

ASKED = [[1, 2], [3, 4]]
RIGHT, WRONG, OTHER = [[5, 6, 7]], [[5, 6, 8]], [[9]]
PUZZLES = {"p": {"train": [], "test": [{"input": ASKED, "output": RIGHT}]}}


def answer(said, *, q=0.0, seed=0, asked=ASKED, puzzle="p"):
    variant = arc_grids.random_variant(np.random.default_rng(seed))
    shown, said = (arc_grids.frame(variant.apply(np.asarray(grid))) for grid in (asked, said))
    return Answer(variant.name(puzzle), shown, said, q)


def votes(*said, q=()):
    q = q or [0.0] * len(said)
    return arc_voting.count_votes(answer(s, q=x, seed=i) for i, (s, x) in enumerate(zip(said, q, strict=True)))


def test_three_wrong_and_two_right_are_right_at_the_second_attempt():
    found = votes(WRONG, RIGHT, WRONG, RIGHT, WRONG)
    assert arc_voting.pass_at(found, PUZZLES, ks=(1, 2)) == {1: 0.0, 2: 1.0}
    attempts = arc_voting.submission(found, PUZZLES)
    assert attempts == {"p": [{"attempt_1": WRONG, "attempt_2": RIGHT}]}


@pytest.mark.parametrize(("q_right", "first"), [(3.0, 1.0), (-3.0, 0.0)])
def test_ties_go_to_the_higher_mean_confidence(q_right, first):
    found = votes(WRONG, RIGHT, q=(0.0, q_right))
    assert arc_voting.pass_at(found, PUZZLES, ks=(1,)) == {1: first}
    both = votes(WRONG, RIGHT, WRONG, RIGHT, q=(0.0, q_right, 0.1, 0.2 if q_right > 0 else -2))
    assert arc_voting.pass_at(both, PUZZLES, ks=(1,)) == {1: first}


def test_the_order_of_answers_decides_nothing():
    said = [answer(s, seed=i) for i, s in enumerate((WRONG, RIGHT, OTHER, RIGHT, OTHER))]
    every = [arc_voting.submission(arc_voting.count_votes(said[i:] + said[:i]), PUZZLES) for i in range(5)]
    assert all(found == every[0] for found in every)


def test_one_checkpoint_and_the_ensemble_of_several():
    first, second = votes(WRONG, WRONG, RIGHT), votes(RIGHT, RIGHT, OTHER)
    assert arc_voting.pass_at(first, PUZZLES, ks=(1,)) == {1: 0.0}
    assert arc_voting.pass_at(second, PUZZLES, ks=(1,)) == {1: 1.0}
    assert arc_voting.pass_at(arc_voting.merged(first, second), PUZZLES, ks=(1, 2)) == {1: 1.0, 2: 1.0}
    support = arc_voting.merged(first, second)["p", arc_voting.as_grid(ASKED)][arc_voting.as_grid(RIGHT)]
    assert support == (3, pytest.approx(1.5))
    assert arc_voting.pass_at(first, PUZZLES, ks=(1,)) == {1: 0.0}  # merging changes neither


def test_a_puzzle_counts_by_the_share_of_its_tests():
    puzzles = {
        **PUZZLES,
        "r": {"test": [{"input": [[i]], "output": [[i, i]]} for i in range(3)]},
    }
    found = arc_voting.count_votes(
        [answer([[0, 0]], asked=[[0]], puzzle="r"), answer([[1, 2]], asked=[[1]], puzzle="r"), answer(RIGHT)]
    )
    assert arc_voting.pass_at(found, puzzles, ks=(1,)) == {1: pytest.approx((1 + 1 / 3) / 2)}
    attempts = arc_voting.submission(found, puzzles)
    assert [test["attempt_1"] for test in attempts["r"]] == [[[0, 0]], [[1, 2]], [[0]]]
    assert attempts["r"][2] == {"attempt_1": [[0]], "attempt_2": [[0]]}


def test_an_answer_without_a_grid_votes_for_nothing():
    nothing = Answer("p", arc_grids.frame(np.asarray(ASKED)), np.zeros(900), 5.0)
    found = arc_voting.count_votes([nothing])
    assert arc_voting.pass_at(found, PUZZLES) == dict.fromkeys(arc_voting.KS, 0.0)
    assert found == {("p", arc_voting.as_grid(ASKED)): {}}


def test_confidence_is_a_sigmoid_at_any_size():
    for q, expected in ((0.0, 0.5), (2.0, 1 / (1 + math.exp(-2))), (1e4, 1.0), (-1e4, 0.0)):
        (candidates,) = arc_voting.count_votes(
            [Answer(Variant().name("p"), *[arc_grids.frame(np.ones((1, 1), int))] * 2, q)]
        ).values()
        assert next(iter(candidates.values())).confidence == pytest.approx(expected)


def test_no_puzzles_are_no_score():
    with pytest.raises(ValueError, match="no puzzles to score"):
        arc_voting.pass_at({}, {})


@pytest.fixture
def arc_set(tmp_path):
    """The folder of p and one variant of it."""
    pair = [answer(RIGHT, seed=seed) for seed in (0, 1)]
    with writing.dataset(str(tmp_path / "set"), vocab_size=12, seq_len=900, about={}) as out:
        out.identifiers += [a.name for a in pair]
        for split in (out.train, out.test):
            split.add_group(*np.asarray([a[1:3] for a in pair]).swapaxes(0, 1), identifiers=[1, 2])
        out.extra["test_puzzles.json"] = PUZZLES
    return tmp_path / "set"


def test_a_judge_names_rows_by_their_ids_and_leaves_out_those_that_fill_up(arc_set):
    judge = puzzles.dataset(directory=str(arc_set), length=900, vocab_size=12).judge()
    right, wrong, filler = answer(RIGHT, seed=0), answer(WRONG, seed=1), answer(OTHER)
    rows = [(1, right), (2, wrong), (0, filler), (0, filler)]
    batch = {
        "puzzle_ids": np.asarray([identifier for identifier, _ in rows]),
        "inputs": np.stack([a.inputs for _, a in rows]),
        "predicted": np.stack([a.predicted for _, a in rows]),
        "q_halt": np.asarray([1.0, 2.0, 9.0, 9.0]),
    }
    assert types.missing(judge, types.AnswerJudge) == []
    found = judge.votes([batch])
    assert found == arc_voting.count_votes([right._replace(q_halt=1.0), wrong._replace(q_halt=2.0)])
    scores = judge.scores(judge.merged(found, judge.votes([batch])))
    assert scores["pass_at"] == {"1": 0.0, "2": 1.0, "5": 1.0, "10": 1.0, "100": 1.0, "1000": 1.0}
    assert {k: v for k, v in scores.items() if k != "pass_at"} == {
        "puzzles": 1,
        "tests": 1,
        "tests_with_votes": 1,
        "votes": 4,
    }
    assert judge.scores({}) == {
        "pass_at": dict.fromkeys(scores["pass_at"], 0.0),
        "puzzles": 1,
        "tests": 1,
        "tests_with_votes": 0,
        "votes": 0,
    }


def test_only_a_set_with_puzzles_to_score_has_a_judge(arc_set, write_dataset):
    assert arc_voting.read_judge(write_dataset("no arc")) is None
    assert puzzles.sudoku().judge() is None  # not built yet
    for text, message in (("{", "is not JSON"), ("{}", "names no puzzles")):
        (arc_set / "test_puzzles.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            arc_voting.read_judge(str(arc_set))
    (arc_set / "test_puzzles.json").write_text(json.dumps(PUZZLES))
    assert arc_voting.read_judge(str(arc_set)).names[0] == "<blank>"
