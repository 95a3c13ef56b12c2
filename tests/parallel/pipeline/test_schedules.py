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
    schedules.interleaved(num_microbatches=4, repeats=2),
    schedules.interleaved(num_microbatches=8, repeats=3),
    schedules.zero_bubble(num_microbatches=2),
    schedules.zero_bubble(num_microbatches=8),
    schedules.zero_bubble(num_microbatches=8, repeats=2),
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
    kinds = schedule.starts(stages)
    assert len(found) == len(kinds) * schedule.turns * stages
    parts = [(r, s) for r in range(schedule.repeats) for s in range(stages)]
    for m in range(schedule.num_microbatches):
        forward = [found["F", m, r, s] for r, s in parts]
        backward = [found["B", m, r, s] for r, s in reversed(parts)]
        assert all(a < b for a, b in itertools.pairwise(forward))
        assert all(a < b for a, b in itertools.pairwise(backward))
        assert forward[-1] <= backward[0]  # the tail of a microbatch runs between the two, within a tick of 1F1B
        if "W" in kinds:
            assert all(found["W", m, r, s] >= found["B", m, r, s] for r, s in parts)


@pytest.mark.parametrize(("schedule", "stages"), PAIRS, ids=label)
def test_ticks_and_bubble_match_the_timeline(schedule, stages):
    rows = list(schedule.timeline(stages))
    ticks = {kind: sum(any(w.kind == kind for work in row for w in work) for row in rows) for kind in schedules.KINDS}
    assert ticks["F"] == ticks["B"] == schedule.ticks(stages)
    assert ticks["W"] == (schedule.turns if "W" in schedule.starts(stages) else 0)  # never a bubble
    time = {"F": 1, "B": 1, "W": 1} if ticks["W"] else {"F": 1, "B": 2, "W": 0}
    useful = schedule.turns * sum(time.values())
    assert schedule.bubble(stages) == pytest.approx(1 - useful / sum(ticks[kind] * time[kind] for kind in time))


@pytest.mark.parametrize(("schedule", "stages"), PAIRS, ids=label)
def test_saved_values_of_two_passes_are_never_in_one_place(schedule, stages):
    found, places = when(schedule, stages), schedule.places(stages)
    order = sorted((t, m, r) for (kind, m, r, s), t in found.items() if (kind, s) == ("F", 0))
    place = {(m, r): places[i] for i, (_, m, r) in enumerate(order)}
    most = []
    for stage in range(stages):
        ends = {(m, r): found["W" if "W" in schedule.starts(stages) else "B", m, r, stage] for m, r in place}
        for t in range(len(list(schedule.timeline(stages)))):
            held = [place[m, r] for m, r in place if found["F", m, r, stage] <= t <= ends[m, r]]
            assert len(set(held)) == len(held)
            most.append(len(held))
    assert max(most) == schedule.kept(stages) == max(places) + 1
    if isinstance(schedule, schedules.OneFOneB):
        assert max(most) == min(schedule.turns, stages * schedule.repeats + stages - 1)


@pytest.mark.parametrize(("schedule", "stages"), PAIRS, ids=label)
def test_what_waits_for_the_gradients_of_matrices_is_never_in_one_place(schedule, stages):
    """At tick t of its part a microbatch takes place t modulo S, also in a bubble."""
    starts = schedule.starts(stages)
    if "W" not in starts:
        return
    for stage in range(stages):
        first = starts["B"] + stages - 1 - stage
        for turn in range(schedule.turns):
            written, read = first + turn, starts["W"] + turn
            between = [t - first for t in range(written + 1, read + 1) if t - first < schedule.ticks(stages) + stages]
            assert turn % stages not in {other % stages for other in between}


@pytest.mark.parametrize(("schedule", "stages"), PAIRS, ids=label)
def test_the_phases_are_those_of_the_timeline(schedule, stages):
    if not isinstance(schedule, schedules.OneFOneB):
        return
    rounds = schedule.rounds(stages)
    phases = [phase for times, phases in rounds for phase in phases * times]
    ticks = [phase.kinds for phase in phases for _ in range(phase.ticks)]
    rows = list(schedule.timeline(stages))
    assert [kinds.replace("T", "") for kinds in ticks] == [
        "".join(kind for kind in schedules.KINDS if any(w.kind == kind for work in row for w in work)) for row in rows
    ]
    found = when(schedule, stages)
    leaves = {found["F", m, schedule.repeats - 1, stages - 1] for m in range(schedule.num_microbatches)}
    assert [t for t, kinds in enumerate(ticks) if "T" in kinds] == sorted(leaves)
    assert sum(len(phases) for _, phases in rounds) <= 7  # loops that are compiled, for any number of microbatches


def test_the_figures_that_are_known():
    """The bubble of 4 stages: 8 and 16 microbatches, and 8 in 4 rounds."""
    found = [schedules.gpipe(num_microbatches=m).bubble(4) for m in (8, 16)]
    found.append(schedules.circular(num_microbatches=8, repeats=4).bubble(4))
    np.testing.assert_allclose(found, [0.273, 0.158, 0.086], atol=5e-4)
    assert [schedules.one_f_one_b(num_microbatches=m).kept(4) for m in (4, 8, 32)] == [4, 7, 7]
    assert [schedules.interleaved(num_microbatches=m, repeats=4).kept(4) for m in (8, 32)] == [19, 19]  # quarters
    assert schedules.zero_bubble(num_microbatches=8).bubble(4) == pytest.approx(6 / 30)


@pytest.mark.parametrize(("stages", "repeats"), itertools.product((1, 2, 4, 6), (1, 2, 3, 4)))
def test_every_part_is_exchanged_once_and_no_stage_twice_at_a_time(stages, repeats):
    exchanges = layer_order.exchanges(stages, repeats)
    for moves in exchanges:
        assert {m.stored_on for m in moves} == {m.runs_on for m in moves} == set(range(stages))
    parts = {m.stored_on * repeats + m.place: m.repeat * stages + m.runs_on for moves in exchanges for m in moves}
    assert parts == {part: part for part in range(stages * repeats)}
