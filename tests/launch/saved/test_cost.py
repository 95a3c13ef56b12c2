"""What saving costs is said: before, once, and at the end."""

import types

import pytest

from core.checkpoints.writing import Cost
from launch.saved import cost


@pytest.mark.covers("C14")
def test_costs_are_recorded_each_said_once_and_summed_up():
    said, written, now = [], [], iter([100.0, 137.0])
    costs = cost.Costs(
        say=said.append, write=lambda step, values: written.append((step, values)), clock=lambda: next(now)
    )
    for step, blocked in ((10, 0.5), (20, 0.4), (30, 0.9)):
        costs.add(Cost(step, blocked, 2.0, 440_234_000))
    costs.end()
    assert [step for step, _ in written] == [10, 20, 30]
    assert written[1][1] == {
        "checkpoint/blocked_seconds": 0.4,
        "checkpoint/write_seconds": 2.0,
        "checkpoint/bytes": 440_234_000.0,
    }
    assert said == [
        "step     10: 420 MiB saved; training waited 500 ms for it, it was written in 2 s",
        "checkpoints: 3 of 420 MiB, 600 ms each out of 37 s of training (4.9 %)",
    ]


def test_a_run_that_saved_nothing_says_nothing():
    said = []
    cost.Costs(say=said.append, write=lambda *_: None).end()
    assert said == []


def test_what_is_foreseen_names_what_is_lost_and_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(cost.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=3 * 2**30))
    words = {"interval": 1000, "keep": 3, "size_bytes": 2**29}
    want = "every 1,000 steps (at most so many are lost), the latest 3 kept, 512 MiB each"
    assert cost.foreseen(str(tmp_path / "new" / "run"), **words) == f"{want}; 3 GiB are free"
    short = cost.foreseen(str(tmp_path), **words | {"keep": 9})
    assert short.endswith("3 GiB are free, and 5 GiB are needed: free some, or lower KEEP_CHECKPOINTS")
    assert cost.foreseen("gs://bucket/run", **words) == want
