"""Candidates that cannot work have a reason, the others are ranked, and the compiler decides."""

import collections
import itertools
import math

import pytest

from launch.plan import ranking, search
from parallel import strategies
from parallel.planning import records, selection


def seconds(one):
    """Half-way between hiding what is sent behind what is computed, and doing one after the other."""
    computes = one.estimate.time.compute + one.estimate.time.kernels
    sends = sum(axis.seconds for axis in one.estimate.time.traffic)
    return max(computes, sends) + min(computes, sends) / 2


def is_ascending(numbers):
    return all(first <= then * (1 + 1e-9) for first, then in itertools.pairwise(numbers))


@pytest.mark.covers("X04", "L05")
def test_every_candidate_is_estimated_or_has_a_reason(options):
    for one in options:
        assert (one.estimate is not None and bool(one.text)) or (one.kind and one.reason)
    assert {"a dimension does not divide", "layers do not divide into stages"} <= {
        kind for kind, _ in selection.by_reason(options)
    }


def test_candidates_are_ordered_by_likely_speed_and_refused_ones_are_last(options):
    """By the seconds of its traffic and computation, added up here, and by refusals by name."""
    possible = [one for one in options if one.estimate and not one.reason]
    assert list(options[: len(possible)]) == possible
    assert not any(one.reason == "" for one in options[len(possible) :])
    assert is_ascending([seconds(one) for one in possible])
    assert len({one.candidate.layout for one in possible}) > 3


def test_the_experiment_as_written_is_compiled_first_and_no_mesh_takes_all_places(options):
    (written,) = [one for one in options if one.is_as_written]
    ordered = list(selection.order(options, wanted=8, usable_bytes=math.inf))
    assert ordered[0] is written
    assert len(ordered) == sum(not one.reason for one in options)
    meshes = collections.Counter(one.name.partition(",")[0] for one in ordered[1:8])
    assert max(meshes.values()) <= 2  # of eight, besides the experiment itself
    assert len(meshes) >= 4


def test_candidates_that_may_not_fit_displace_none_that_fit(options):
    """With room for the median: of the first places every mesh has those below as if those above were not there."""
    possible = [one for one in options if not one.reason]
    room = sorted(one.estimate.peak_bytes for one in possible)[len(possible) // 2]
    fit = [one for one in possible if one.estimate.peak_bytes <= room]
    ordered = list(selection.order(options, wanted=3, usable_bytes=room))
    assert len(ordered) == len(possible)
    assert [one for one in ordered if one in fit] == list(selection.order(fit, wanted=3, usable_bytes=room))
    first = {one.name.partition(",")[0] for one in fit if not one.is_as_written}
    meshes = len({one.name.partition(",")[0] for one in possible})
    places = max(ordered.index(next(o for o in fit if o.name.partition(",")[0] == mesh)) for mesh in first)
    assert places < 1 + 2 * meshes  # the experiment itself, and a place of either kind for every mesh


def test_the_quickest_as_scheduled_wins(options, compiled_as):
    possible = [one for one in options if not one.reason][:4]
    found = [(one, compiled_as(one, factor)) for one, factor in zip(possible, (4.0, 3.0, 0.1, 2.0), strict=True)]
    found.append((possible[0], records.Record(records.TOO_MUCH, needed_bytes=1e12)))
    assert search.ranked(found)[0][0] is possible[2]
    ranked = [record.time.scheduled for _, record in search.ranked(found)]
    assert ranked == sorted(ranked)
    assert len(ranked) == 4


def test_batches_are_compared_by_row(question):
    asked = search.ask(question.path, slice_name=question.slice.name, batch_sizes=[16, 64])
    both = search.options(asked, only=["fsdp"])
    assert {one.candidate.batch_size for one in both} == {16, 64}
    twice = [one for one in both if one.candidate.batch_size == 64]
    assert all({"BATCH_SIZE = 64", "TOTAL_STEPS = 50"} <= set(one.bindings) for one in twice)
    assert not any("TOTAL_STEPS" in binding for one in both if one not in twice for binding in one.bindings)
    rows = [one.candidate.batch_size for one in both if not one.reason]
    likely = [seconds(one) / one.candidate.batch_size for one in both if not one.reason]
    assert is_ascending(likely)
    assert is_ascending(rows) is is_ascending(rows[::-1]) is False  # neither size is all before the other
    assert asked.total_tokens == question.total_tokens


def test_only_requested_strategies_are_tried(question):
    found = search.options(question, only=["hsdp", "tensor"])
    assert {one.candidate.layout.constructor for one in found} == {"hsdp", "tensor"}


@pytest.mark.parametrize(
    "bindings",
    [
        ["BATCH_SIZE = 48", "ACCUM_STEPS = 3"],
        pytest.param(
            [
                "BATCH_SIZE = 32",
                "ACCUM_STEPS = 2",
                "STRATEGY = @strategies.pipeline()",
                "strategies.pipeline.stage = 2",
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["not a power of two", "pipeline"],
)
def test_the_experiment_as_written_is_a_candidate_whatever_it_accumulates(bindings):
    asked = search.ask("gin/quickstart.gin", slice_name="v4-8", bindings=bindings)
    found = search.options(asked)
    (written,) = [one for one in found if one.is_as_written]
    assert not written.reason
    assert written.candidate.accum_steps == asked.experiment.accum_steps > 1
    assert len({(one.name, one.candidate.batch_size) for one in found}) == len(found)
    assert not any(one.is_as_written for one in search.options(asked, only=["tensor"]))


def test_own_tables_are_tried_as_they_are(question):
    bindings = [
        "STRATEGY = @strategies.override()",
        "strategies.override.strategy = @strategies.fsdp_tensor()",
        "strategies.fsdp_tensor.tensor = 4",
        "strategies.override.param_rules = {'kv_heads': None}",
        "strategies.override.activation_rules = {'kv_heads': None}",
    ]
    asked = search.ask(question.path, slice_name=question.slice.name, bindings=bindings)
    own = [one for one in search.options(asked) if one.candidate.layout is None]
    assert own
    assert not any(one.reason for one in own if one.candidate.accum_steps == 1)
    assert any(one.is_as_written for one in own)


OVERLAPPED = "strategies.fsdp.overlap_reduction = True"


def constructors(found):
    return {one.candidate.layout.constructor for one in found if one.candidate.layout}


def test_a_parameter_of_a_strategy_given_by_flag_applies_to_the_layouts_of_that_strategy(question, options):
    asked = search.ask(question.path, slice_name=question.slice.name, bindings=[OVERLAPPED])
    found = search.options(asked)
    assert constructors(found) == constructors(options)
    for one in found:
        overlaps = one.candidate.layout.strategy().overlap_reduction
        assert overlaps == (one.candidate.layout.constructor == "fsdp"), one.name
        assert overlaps == ("overlap_reduction True" in one.name)
    (written,) = [one for one in found if one.is_as_written]
    assert written.candidate.layout.constructor == "fsdp"
    assert not written.reason
    assert len({(one.name, one.candidate.batch_size) for one in found}) == len(found)


def test_a_chosen_layout_fixes_nothing_for_others(question, options):
    chosen = ["STRATEGY = @strategies.fsdp_tensor()", "strategies.fsdp_tensor.tensor = 4"]
    asked = search.ask(question.path, slice_name=question.slice.name, chosen=chosen)
    assert asked.experiment.strategy == strategies.fsdp_tensor(tensor=4)
    assert asked.bindings == tuple(chosen)
    found = {one.name for one in search.options(asked)}
    assert found >= {one.name for one in options if one.candidate.layout and not one.is_as_written}


def test_a_layout_has_another_key_with_a_given_parameter_and_its_own_without(question, options):
    asked = search.ask(question.path, slice_name=question.slice.name, bindings=[OVERLAPPED])
    before = {one.name: one.text for one in options}
    after = {one.name: one.text for one in search.options(asked)}
    same = before.keys() & after.keys()
    assert all(before[name] == after[name] for name in same)
    assert not {before[name] for name in before.keys() - same} & {after[name] for name in after.keys() - same} - {""}
    assert {name.partition(":")[0] for name in after.keys() - same} >= {"fsdp"}


@pytest.mark.parametrize(
    ("bindings", "is_right"),
    [
        (
            ["STRATEGY = @strategies.fsdp_tensor()", "strategies.fsdp_tensor.tensor = 2"],
            lambda layout: layout.constructor != "fsdp_tensor" or dict(layout.degrees)["tensor"] == 2,
        ),
        (
            ["STRATEGY = @strategies.context()", "strategies.context.sequence = 2", "strategies.context.ring = True"],
            lambda layout: layout.ring == (layout.constructor == "context"),
        ),
        (
            [
                "from parallel.pipeline import schedules",
                "STRATEGY = @strategies.pipeline()",
                "strategies.pipeline.stage = 2",
                "strategies.pipeline.schedule = @schedules.gpipe()",
                "schedules.gpipe.num_microbatches = %NUM_STREAMS",
            ],
            lambda layout: (
                layout.choice is None
                or (layout.choice.constructor == "gpipe" and layout.choice.schedule().num_microbatches == 8)
                or (layout.choice.constructor != "gpipe" and layout.constructor != "pipeline")
            ),
        ),
    ],
    ids=["degree", "ring", "schedule"],
)
def test_given_parameters_are_those_of_every_layout_that_has_them(question, bindings, is_right):
    asked = search.ask(question.path, slice_name=question.slice.name, bindings=[*bindings, "NUM_STREAMS = 8"])
    found = search.options(asked)
    assert all(is_right(one.candidate.layout) for one in found)
    (written,) = [one for one in found if one.is_as_written]
    assert written.candidate.layout.strategy() == asked.experiment.strategy
    assert {"fsdp", "tensor", written.candidate.layout.constructor} <= constructors(found)


def test_a_schedule_that_a_plan_cannot_try_is_tried_as_written(tmp_path):
    (tmp_path / "own_schedule.py").write_text(
        "from parallel.pipeline import schedules\n\n\n"
        "def small() -> schedules.Schedule:\n    return schedules.gpipe(num_microbatches=4)\n"
    )
    file = tmp_path / "mine.gin"
    lines = ("from __gin__ import dynamic_registration", "import own_schedule", "include 'gin/quickstart.gin'")
    file.write_text("\n".join(lines))
    bindings = [
        "STRATEGY = @strategies.pipeline()",
        "strategies.pipeline.stage = 2",
        "strategies.pipeline.schedule = @own_schedule.small()",
    ]
    found = search.options(search.ask(str(file), slice_name="v4-8", bindings=bindings))
    assert "pipeline" not in constructors(found)
    assert [one.candidate.layout for one in found if one.is_as_written] == [None]


@pytest.mark.slow
def test_another_model_has_its_own_choices():
    asked = search.ask("gin/trm/suite.gin", slice_name="v4-64", bindings=["DATA = 'x'"])
    found = search.options(asked, only=["data_parallel", "pipeline"])
    remats = {one.candidate.remat for one in found if not one.candidate.layout.choice}
    assert {"norms", "mixing", "full"} <= remats
    assert all(one.reason for one in found if one.candidate.layout.choice)
    assert any("no layer stack" in one.reason for one in found)
    assert any(b.startswith("trm.TRM.remat = ") for b in itertools.chain(*(one.bindings for one in found)))


def test_the_winner_is_compared_with_the_fastest_pipeline_and_a_pipeline_with_the_fastest_other_layout(options):
    possible = [one for one in options if one.estimate and not one.reason]
    pipeline = next(one for one in possible if one.estimate.bubble)
    other = next(one for one in possible if not one.estimate.bubble)
    for best, against in ((other, pipeline), (pipeline, other)):
        title, figures = ranking.against_pipelines(best, options)
        assert against.name in title
        assert f"idle {against.estimate.bubble:.1%} (best: {best.estimate.bubble:.1%})" in figures
    assert not ranking.against_pipelines(other, [other])
