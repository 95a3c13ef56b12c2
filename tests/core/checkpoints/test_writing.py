"""The cost of saves: estimated before the first, reported after it, and summed up at the end."""

import types

import pytest

from core.checkpoints import writing
from core.checkpoints.writing import Cost
from core.errors import UserError


@pytest.mark.covers("C14")
def test_every_save_is_recorded_and_the_first_and_the_total_reported():
    said, written, now = [], [], iter([100.0, 137.0])
    costs = writing.SaveCosts(
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
        "step     10: checkpoint of 420 MiB saved; training waited 500 ms, writing took 2 s",
        "checkpoints: 3 saved, 420 MiB each; training waited 600 ms per save, 4.9 % of 37 s",
    ]


def test_a_save_that_fails_while_it_is_asked_is_not_done(tmp_path):
    save = writing.Writing(3, tmp_path, size_bytes=1, host_bytes=1, limit_seconds=9.0)

    def fails():
        save._error = OSError("disk full")
        return False

    save._thread = types.SimpleNamespace(is_alive=fails)
    with pytest.raises(writing.WriteFailedError, match="disk full"):
        save.is_done()


def test_a_run_without_saves_reports_nothing():
    said = []
    writing.SaveCosts(say=said.append, write=lambda *_: None).end()
    assert said == []


def test_a_run_whose_checkpoint_does_not_fit_on_the_disk_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=3 * 2**30))
    writing.require_space(str(tmp_path / "new" / "run"), 3 * 2**30)
    writing.require_space("gs://bucket/run", 2**50)
    with pytest.raises(UserError, match="3 GiB free, and a checkpoint of this run takes up to 4 GiB"):
        writing.require_space(str(tmp_path / "new" / "run"), 4 * 2**30)


def test_the_estimate_compares_the_space_needed_with_the_free_space(tmp_path, monkeypatch):
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=3 * 2**30))
    words = {"interval": 1000, "keep": 3, "size_bytes": 2**29}
    want = "every 1,000 steps, keeping the latest 3, 512 MiB each"
    assert writing.estimate_saves(str(tmp_path / "new" / "run"), **words) == f"{want}; 3 GiB of disk free"
    short = writing.estimate_saves(str(tmp_path), **words | {"keep": 9})
    assert short.endswith("3 GiB of disk free, but 5 GiB are needed: free some space, or lower KEEP_CHECKPOINTS")
    assert writing.estimate_saves("gs://bucket/run", **words) == want
    best = writing.estimate_saves(str(tmp_path), **words, keeps_best=True)
    assert best == f"{want.replace('latest 3', 'latest 3 and the best')}; 3 GiB of disk free"
    alone = {"keep_params": 2, "params_bytes": 2**28}
    assert writing.estimate_saves(str(tmp_path), **words, **alone).endswith("3 GiB of disk free")
    both = writing.estimate_saves(str(tmp_path), **words, **alone, keeps_best=True)
    assert "but 3.25 GiB are needed" in both
