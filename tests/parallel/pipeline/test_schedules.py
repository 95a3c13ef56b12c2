"""Schedules as arithmetic: work by tick, bubbles, and saved microbatches."""

import itertools

import numpy as np
import pytest

from parallel.pipeline import layer_order, schedules

ALL = [
    schedules.gpipe(num_microbatches=1),
    schedules.gpipe(num_microbatches=8),
    schedules.circular(num_microbatches=4, repeats=3),
    schedules.one_f_one_b(num_microbatches=2),
    schedules.one_f_one_b(num_microbatches=8),
]
PAIRS = [(schedule, stages) for schedule in ALL for stages in (1, 2, 4)]


def label(value):
    return getattr(value, "name", value)


def when(schedule, stages):
    """{(kind, microbatch, repeat, stage): tick}."""
    return {
        (w.kind, w.microbatch, w.repeat, s): t
        for t, row in enumerate(schedule.timeline(stages))
        for s, work in enumerate(row)
        for w in work
    }


@pytest.mark.parametrize(("schedule", "stages"), PAIRS, ids=label)
def test_every_microbatch_goes_through_every_part_in_order_and_back(schedule, stages):
    found = when(schedule, stages)
    assert len(found) == 2 * schedule.turns * stages
    parts = [(r, s) for r in range(schedule.repeats) for s in range(stages)]
    for m in range(schedule.num_microbatches):
        forward = [found["F", m, r, s] for r, s in parts]
        backward = [found["B", m, r, s] for r, s in reversed(parts)]
        assert all(a < b for a, b in itertools.pairwise(forward))
        assert all(a < b for a, b in itertools.pairwise(backward))
        assert forward[-1] <= backward[0]  # the tail of a microbatch runs between the two, within a tick of 1F1B


@pytest.mark.parametrize(("schedule", "stages"), PAIRS, ids=label)
def test_bubble_and_saved_inputs_match_the_timeline(schedule, stages):
    found, rows = when(schedule, stages), list(schedule.timeline(stages))
    for kind in "FB":
        ticks = [t for t, row in enumerate(rows) if any(w.kind == kind for work in row for w in work)]
        assert len(ticks) == schedule.ticks(stages)
        assert schedule.bubble(stages) == pytest.approx(1 - schedule.turns / len(ticks))
    for stage in range(stages):
        held = [
            sum(
                found["F", m, r, stage] <= t <= found["B", m, r, stage]
                for m in range(schedule.num_microbatches)
                for r in range(schedule.repeats)
            )
            for t in range(len(rows))
        ]
        assert max(held) <= schedule.kept(stages)
        assert stage or max(held) == schedule.kept(stages)


def test_the_figures_that_are_known():
    """The bubble of 4 stages: 8 and 16 microbatches, and 8 in 4 rounds."""
    found = [schedules.gpipe(num_microbatches=m).bubble(4) for m in (8, 16)]
    found.append(schedules.circular(num_microbatches=8, repeats=4).bubble(4))
    np.testing.assert_allclose(found, [0.273, 0.158, 0.086], atol=5e-4)
    assert [schedules.one_f_one_b(num_microbatches=m).kept(4) for m in (4, 8, 32)] == [4, 7, 7]


@pytest.mark.parametrize(("stages", "repeats"), itertools.product((1, 2, 4, 6), (1, 2, 3, 4)))
def test_every_part_is_exchanged_once_and_no_stage_twice_at_a_time(stages, repeats):
    exchanges = layer_order.exchanges(stages, repeats)
    for moves in exchanges:
        assert {m.stored_on for m in moves} == {m.runs_on for m in moves} == set(range(stages))
    parts = {m.stored_on * repeats + m.place: m.repeat * stages + m.runs_on for moves in exchanges for m in moves}
    assert parts == {part: part for part in range(stages * repeats)}
