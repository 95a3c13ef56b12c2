"""`tests/run.sh lab schedules`: its formulas, and what it reads from a profile."""

import itertools

import pytest

from parallel.pipeline import schedules
from tests.lab import schedules as measuring
from tests.lab.schedules import Tick


@pytest.mark.parametrize(
    ("name", "passes"),
    [("gpipe", 8 + 3), ("circular", 8 + 3 / 2), ("one_f_one_b", 8 + 3), ("interleaved", 8 + 3 / 2),
     ("zero_bubble", 8 + 3 * 2 / 3)],
)  # fmt: skip
def test_formulas_count_passes_of_a_microbatch_with_the_bubble(name, passes):
    assert measuring.formula(measuring.MAKE[name](8), stages=4) == pytest.approx(passes)


def test_work_of_a_kind_has_a_place_for_every_lockstep_tick():
    at = measuring.works(schedules.one_f_one_b(num_microbatches=5), "B", 1, stages=3)
    assert [work and work.microbatch for work in at] == [None, 0, 1, 2, 3, 4, None]


def test_a_tick_extends_over_the_operations_that_run_once_in_it():
    rows = [("b", Tick(2, 3)), ("a", Tick(0, 1)), ("a", Tick(5, 6)), ("b", Tick(4, 7))]
    assert measuring._by_tick(rows) == [Tick(0, 3), Tick(4, 7)]


@pytest.mark.slow
def test_a_profile_shows_the_ticks_of_the_schedule():
    schedule = schedules.zero_bubble(num_microbatches=6)
    step = measuring.compiled_step(schedule, stages=4, layers=4, width=32, length=32)
    ticks = measuring.profiled(step, stages=4)
    for stage in range(4):
        for kind in schedules.KINDS:
            works = measuring.works(schedule, kind, stage, stages=4)
            assert len(ticks[kind, stage]) == len(works)
            assert [work.microbatch for work in works if work] == [0, 1, 2, 3, 4, 5]
        row = ticks["F", stage]
        assert all(a.end <= b.start for a, b in itertools.pairwise(row))
    ends = [*(ticks["F", stage][stage].end for stage in range(4)), ticks["B", 3][0].end]  # of the first microbatch
    assert ends == sorted(ends)  # operations that do not depend on it may begin earlier


@pytest.mark.slow
def test_steps_are_timed_in_turns(monkeypatch):
    monkeypatch.setattr(measuring, "MAKE", {"gpipe": measuring.MAKE["gpipe"]})
    (found,) = measuring.measure([8], turns=2)
    assert (found.schedule, found.microbatches, len(found.seconds)) == ("gpipe", 8, 2)
    assert measuring._table([found]).row_count == 1
