"""`tests/run.sh lab bench` measures the right steps; the speed of this machine is not tested."""

import time

import pytest

from core.hosts import activity
from core.training import hooks
from launch.hosts.cluster import Host
from tests.lab import bench, overhead


@pytest.mark.slow
def test_bench_counts_the_settled_steps_of_both_sides(tmp_path, monkeypatch, capsys):
    timed = overhead.experiment("v4-8", width=16, length=16, batch_size=4, total_steps=15)
    monkeypatch.setattr(hooks.Log, "after_step", lambda self, report: time.sleep(0.05))  # makes the trainer slower
    activities, at = [], activity.at
    monkeypatch.setattr(activity, "at", lambda word, **more: (activities.append(word), at(word, **more)))
    result = overhead.measure(timed, turn_steps=5, run_dir=str(tmp_path / "run"), host=Host(0, 1, True))
    assert [len(turn) for turn in result.trainer] == [2, 2]  # two turns of five, three steps of each settling
    assert [len(turn) for turn in result.bare] == [2, 2]
    assert min(min(turn) for turn in result.trainer) >= 0.05  # one log per step
    assert result.ratios_by_turn == sorted(result.ratios_by_turn)
    before = [
        activity.OPENING,
        activity.PREPARING,
        activity.OPENING,
        activity.RESTORING,
        activity.OPENING,
        activity.COMPILING,
    ]
    assert activities[: len(before)] == before  # every activity has a limit, except preparing the data
    assert activity.BETWEEN in activities[len(before) :]
    assert activities.count("bare steps") == 3
    bench._print(result)
    assert f"trainer / bare = {result.ratio:.3f}" in capsys.readouterr().out


def test_the_overhead_is_the_ratio_of_medians():
    measured = overhead.Overhead(trainer=[[7.0, 6.0, 5.0], [2.0, 3.0, 4.0]], bare=[[2.0, 2.0, 9.0], [1.0, 3.0, 1.0]])
    assert measured.ratio == 4.5 / 2.0
    assert measured.ratios_by_turn == [3.0, 3.0]
    slower = measured._replace(trainer=[[8.0], [2.0]], bare=[[2.0], [1.0]])
    assert slower.ratios_by_turn == [2.0, 4.0]
