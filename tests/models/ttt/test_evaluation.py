"""Scores of gates from recorded chunks, by hand, and intervals over documents."""

import numpy as np
import pytest

from models.ttt import evaluation, gates

DRAW = np.random.default_rng(0)


def chunks(skip, update, tokens=None, document=None):
    count = len(skip)
    tokens = np.full(count, 10.0) if tokens is None else np.asarray(tokens, float)
    document = np.arange(count) if document is None else np.asarray(document)
    step_0 = np.linspace(1, 2, count)
    losses = (np.asarray(loss) * tokens for loss in (skip, update))
    return evaluation.Chunks(document, np.zeros(count), tokens, *losses, step_0, step_0, step_0 / 2)


@pytest.mark.covers("N06")
def test_scores_are_those_of_the_definitions():
    found = chunks([2.0, 4.0, 3.0, 1.0], [1.0, 3.5, 3.25, 1.5])  # advantages 1, 0.5, -0.25, -0.5
    update = evaluation.score(found, np.ones(4, bool))
    assert update["loss"] == pytest.approx(9.25 / 4)
    assert update["gain"] == pytest.approx(0.75 / 4)
    assert (update["recovery"], update["cost"], update["update_rate"]) == (pytest.approx(1.0), 3.0, 1.0)
    half = evaluation.score(found, np.asarray([True, False, True, False]))
    assert half["recovery"] == pytest.approx((1 - 0.25) / 1.5)
    assert half["agreement"] == 0.5
    assert half["perplexity"] == pytest.approx(np.exp(half["loss"]))
    assert np.isnan(evaluation.score(found, np.zeros(4, bool))["recovery"])
    greedy = evaluation.decide(gates.Oracle(None), found).updates
    assert evaluation.score(found, greedy)["loss"] == pytest.approx(8.5 / 4)


@pytest.mark.covers("N06")
def test_the_oracle_chooses_by_the_gain_of_whole_chunks():
    """No gate with as many updates gains more, also where a short chunk gains most by token."""
    found = chunks([2.0, 2.0], [1.0, 1.5], tokens=[16, 512])
    long = evaluation.score(found, np.asarray([False, True]))
    assert (long["recovery"], long["agreement"]) == (pytest.approx(1.0), 1.0)
    assert evaluation.score(found, np.asarray([True, False]))["recovery"] == pytest.approx(16 / 256)
    assert evaluation.decide(gates.Oracle(0.5), found).updates.tolist() == [False, True]


@pytest.mark.covers("N06")
def test_an_interval_counts_documents_not_chunks():
    """With 50 equal chunks in each of 20 documents it is as wide as with one, and about 1.96 standard errors."""
    gain = DRAW.normal(0.1, 0.5, 20)
    once = chunks(np.zeros(20) + gain, np.zeros(20))
    often = chunks(np.repeat(gain, 50), np.zeros(1000), document=np.repeat(np.arange(20), 50))
    mean, low, high = evaluation.interval(once, once.loss_update, once.loss_skip)
    assert mean == pytest.approx(gain.mean())
    assert (high - low) / 2 == pytest.approx(1.96 * gain.std() / 20**0.5, rel=0.1)
    assert evaluation.interval(often, often.loss_update, often.loss_skip) == pytest.approx((mean, low, high))


def test_chunks_without_tokens_are_left_out_and_documents_are_kept():
    one = {name: np.ones((2, 3)) for name in evaluation.Chunks._fields[2:]}
    one |= {"tokens": np.asarray([[4, 4, 0], [4, 0, 0]]), "documents": np.asarray([7, 9])}
    found = evaluation.collected([one, one])
    assert found.document.tolist() == [7, 7, 9] * 2
    assert found.place.tolist() == [0, 1, 0] * 2
    del one["documents"]
    assert evaluation.collected([one, one]).document.tolist() == [0, 0, 1, 2, 2, 3]


def test_decisions_in_order_have_thresholds():
    found = chunks(DRAW.uniform(1, 2, 40), np.ones(40))
    decided = evaluation.decide(gates.Reconstruction(calibration=4), found)
    assert decided.updates[:4].all()
    assert (decided.thresholds[4:] > 0).all()
    assert evaluation.decide(gates.LossThreshold(1.5), found).updates.tolist() == (found.signals.loss > 1.5).tolist()


def test_a_constant_has_no_correlation():
    assert np.isnan(evaluation.correlation(np.ones(3), np.arange(3.0)))
