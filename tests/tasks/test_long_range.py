"""Rows that can only be answered from distant tokens."""

import numpy as np
import pytest

from tasks import long_range


def row_of(kind, index=0, **settings):
    task = long_range.rows(kind=kind, num_streams=1, **{"length": 24, "items": 3, **settings})
    return task, task.row(np.random.default_rng(index), is_training=True)


@pytest.mark.parametrize("index", range(20))
def test_answers_follow_from_the_row(index):
    _, row = row_of("retrieval", index)
    inputs, targets = row["inputs"], row["targets"]
    assert targets[-1] == inputs[np.flatnonzero(inputs == 2)[0] + 1]
    assert row["weights"].sum() == row["weights"][-1] == 1

    _, row = row_of("recall", index)
    inputs, targets, asked = row["inputs"], row["targets"], row["weights"] == 1
    pairs = dict(zip(inputs[:6:2], inputs[1:6:2], strict=True))
    assert asked.sum() == len(pairs) == 3
    assert all(pairs[key] == value for key, value in zip(inputs[asked], targets[asked], strict=True))

    _, row = row_of("selective_copy", index)
    inputs, asked = row["inputs"], row["weights"] == 1
    given = inputs[: np.flatnonzero(inputs == 3)[0]]
    np.testing.assert_array_equal(row["targets"][asked], given[given >= 4])


@pytest.mark.parametrize("kind", long_range.KINDS)
def test_ids_are_in_the_vocabulary(kind):
    for index in range(20):
        task, row = row_of(kind, index)
        assert row["inputs"].min() >= 0
        assert max(row["inputs"].max(), row["targets"].max()) < task.vocabulary.size


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "copy"}, "kind = 'copy': expected one of retrieval, recall, selective_copy"),
        ({"kind": "recall", "length": 8}, "length = 8: recall of 4 needs at least 16 tokens"),
        ({"kind": "recall", "items": 17, "length": 99}, "items = 17: expected at most values = 16"),
        ({"kind": "retrieval", "length": 0}, "length = 0: expected an integer of at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        long_range.rows(**{"length": 32, "num_streams": 1, **settings})
