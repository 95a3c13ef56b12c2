"""Near duplicates are found by MinHash signatures, whatever the batches in which documents come."""

import random

import numpy as np
import pytest

from core.errors import UserError
from tasks.text import near_duplicates
from tasks.text.near_duplicates import Seen, signatures

DRAW = random.Random(3)
WORDS = [f"w{number}" for number in range(3000)]


def altered(text, changes):
    words = text.split()
    for place in DRAW.sample(range(len(words)), changes):
        words[place] = "other"
    return " ".join(words)


def runs(text):
    words = text.split()
    return {tuple(words[at : at + 5]) for at in range(len(words) - 4)}


def similarity(one, other):
    return len(runs(one) & runs(other)) / len(runs(one) | runs(other))


@pytest.fixture(scope="module")
def texts():
    """40 different texts, and then each again with 1 to 19 of its 200 words changed."""
    first = [" ".join(DRAW.choices(WORDS, k=200)) for _ in range(40)]
    return first + [altered(text, number % 10 * 2 + 1) for number, text in enumerate(first)]


@pytest.fixture(scope="module")
def signed(texts):
    return signatures(texts)


def repeats(signed, *, batch, known=0):
    """Which documents repeat one before, in batches; the first `known` are added at once, as a command continues."""
    seen = Seen(0.8)
    found = [repeats(signed[:known], batch=known)] if known else []
    if known:
        seen.add(signed[:known][~found[0]])
    return np.concatenate(found + [seen.repeats(signed[at : at + batch]) for at in range(known, len(signed), batch)])


@pytest.mark.covers("D13")
def test_similar_documents_are_found_and_others_kept(texts, signed):
    found = repeats(signed, batch=7)
    assert not found[:40].any()
    truth = np.array([similarity(*pair) for pair in zip(texts[:40], texts[40:], strict=True)])
    assert found[40:][truth > 0.9].all()
    assert not found[40:][truth < 0.7].any()
    assert (truth > 0.9).sum() >= 4 <= (truth < 0.7).sum()


def test_the_estimate_is_the_share_of_common_runs(texts, signed):
    estimated = (signed[:40] == signed[40:]).mean(1)
    truth = np.array([similarity(*pair) for pair in zip(texts[:40], texts[40:], strict=True)])
    error = estimated - truth
    assert abs(error.mean()) < 0.02
    assert np.abs(error).max() < 4 * np.sqrt(0.25 / near_duplicates.HASHES)


def test_batches_and_interruptions_change_nothing(signed):
    order = np.random.default_rng(0).permutation(len(signed))
    expected = repeats(signed[order], batch=1)
    for batch, known in ((5, 0), (80, 0), (11, 45)):
        np.testing.assert_array_equal(repeats(signed[order], batch=batch, known=known), expected)
    assert 4 < expected.sum() < 40


def test_a_chain_of_changes_is_compared_with_what_was_kept():
    """Each differs little from the one before; one that is left out is not compared with."""
    chain = [" ".join(WORDS[:200])]
    for number in range(20):
        chain.append(chain[-1].replace(f"w{number * 9} ", "x "))
    found = repeats(signatures(chain), batch=4)
    assert found[1]
    assert not found.all()
    assert 2 <= (~found).sum() < 12


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("The cat sat on the mat, again.", "the CAT sat; on the mat again", True),
        ("Yes.", "yes", True),
        ("Yes.", "no", False),
        ("***", "---", False),
        ("   ***", "***\n", True),
        ("a b c d e f", "f e d c b a", False),
    ],
)
def test_short_texts_case_and_punctuation(one, other, equal):
    first, second = signatures([one, other])
    assert (first == second).all() == equal


def test_long_texts_are_hashed_in_parts(monkeypatch):
    text = " ".join(WORDS)
    whole = signatures([text])
    monkeypatch.setattr(near_duplicates, "_RUNS", 100)
    np.testing.assert_array_equal(signatures([text]), whole)


@pytest.mark.parametrize("value", [0.4, 0.96, float("nan")])
def test_similarities_out_of_range_are_refused(value):
    with pytest.raises(UserError, match=r"expected 0\.5 to 0\.95"):
        Seen(value)
