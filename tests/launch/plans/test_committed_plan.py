"""The plan that is shipped answers for the experiment as it is."""

import pytest

from launch.plans import planning, records


@pytest.mark.covers("L12")
def test_valkyrie_7b_is_the_winner_of_its_committed_plan(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    question = planning.ask("gin/valkyrie_7b.gin", slice_name="v4-32", bindings=[], batch_sizes=[])
    store = records.Store(with_committed=True)
    known = [(one, store.find(one.text)) for one in planning.consider(question) if not one.reason]
    found = [(one, record) for one, record in known if record is not None]
    ranked = planning.ranked(found)
    assert len(ranked) >= 8
    best, record = planning.winner(found)
    assert best.is_as_written
    assert record.needed_bytes < question.slice.chip.usable_hbm_bytes
