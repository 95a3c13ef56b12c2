"""Candidates: all combinations that strategies, schedules and models offer, each once."""

import dataclasses

import pytest

from core import slices
from models import trm
from models.decoder import transformer
from parallel import strategies, strategy
from parallel.pipeline import schedules
from parallel.planning import candidates
from parallel.planning.candidates import Candidate, Layout

V4_32, TWO = slices.get("v4-32"), slices.get("2xv4-32")


@pytest.fixture(scope="module")
def layouts():
    return candidates.layouts(V4_32)


def test_every_strategy_for_one_slice_is_tried_with_every_degree(layouts):
    constructors = {layout.constructor for layout in layouts}
    wanted = set(strategies.__all__) - {"REPLICATED", "Strategy", "override", "multislice", "pipeline_data"}
    assert constructors == wanted
    assert {dict(x.degrees)["data"] for x in layouts if x.constructor == "hsdp"} == {2, 4, 8}
    assert {dict(x.degrees)["tensor"] for x in layouts if x.constructor == "fsdp_tensor"} == {2, 4, 8}
    stages = {dict(x.degrees)["stage"] for x in layouts if x.constructor == "pipeline"}
    assert stages == {2, 4, 8, 16}
    kinds = {x.choice.constructor for x in layouts if x.choice}
    assert kinds == {"gpipe", "circular", "one_f_one_b", "interleaved", "zero_bubble"}


def test_nothing_is_tried_twice(layouts):
    meshes = [
        (tuple(strategy.resolve(s, V4_32).items()), str(s.param_rules), str(s.activation_rules), s.pipeline)
        for s in (layout.strategy() for layout in layouts)
        if s.optimizer_rules is None
    ]
    assert len(meshes) == len(set(map(str, meshes)))


def test_degrees_multiply_to_the_slice(layouts):
    for layout in layouts:
        shape = strategy.resolve(layout.strategy(), V4_32)
        assert all(n >= 1 for n in shape.values())


def test_keys_travel_in_a_ring_where_rows_are_long(layouts):
    assert not any(layout.ring for layout in layouts)
    long = candidates.layouts(V4_32, only=["context", "fsdp"], has_long_rows=True)
    rings = [layout for layout in long if layout.ring]
    assert [dict(layout.degrees)["sequence"] for layout in rings] == [2, 4, 8, 16]
    assert rings[1].strategy() == strategies.context(sequence=4, ring=True)
    assert {layout for layout in long if not layout.ring} == set(candidates.layouts(V4_32, only=["context", "fsdp"]))
    names = {Candidate(layout, None, 1, 32).name("sequence 4") for layout in long if ("sequence", 4) in layout.degrees}
    assert names == {"context: sequence 4", "context: sequence 4, keys in a ring"}


def test_across_slices_each_strategy_says_how_many():
    found = candidates.layouts(TWO, only=["multislice", "pipeline_data", "pipeline_fsdp"])
    assert {dict(layout.degrees)["slices"] for layout in found} == {2}
    assert {1, 2, 4} <= {dict(layout.degrees)["stage"] for layout in found if layout.constructor == "pipeline_data"}


def test_a_strategy_enters_by_being_there(monkeypatch):
    def rings(*, tensor: int, fsdp: int = -1, gather: str = "ring"):
        return strategies.fsdp_tensor(tensor=tensor, fsdp=fsdp)

    monkeypatch.setattr(strategies, "rings", rings, raising=False)
    monkeypatch.setattr(strategies, "__all__", [*strategies.__all__, "rings"])
    found = candidates.layouts(V4_32, only=["rings"])
    assert {layout.degrees for layout in found} == {(("tensor", n), ("fsdp", -1)) for n in (2, 4, 8, 16)}


def test_the_microbatches_of_the_remaining_stages_are_counted():
    found = candidates.layouts(V4_32, only=["pipeline_fsdp"], given={"pipeline_fsdp": {"stage": -1, "fsdp": 4}})
    assert found
    for layout in found:
        pipeline = layout.strategy().pipeline
        assert (dict(layout.degrees)["stage"], pipeline.num_microbatches % 4) == (-1, 0)  # 16 chips


def test_an_unknown_strategy_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"--only fsdb: no such strategy.*did you mean fsdp"):
        candidates.layouts(V4_32, only=["fsdb"])


def test_rematerialization_is_what_the_model_offers():
    decoder = transformer.preset("tiny")
    assert {"none", "dots", "full"} <= set(candidates.remats(decoder))
    assert {"norms", "mixing"} <= set(candidates.remats(trm.TRM(vocab_size=11)))
    assert "mixing" not in candidates.remats(decoder)
    assert "attention_on_host" not in candidates.remats(decoder)
    assert "attention_on_host" in candidates.remats(dataclasses.replace(decoder, remat="attention_on_host"))

    @dataclasses.dataclass(frozen=True)
    class Plain:
        width: int = 1

    assert candidates.remats(Plain()) == [None]


def test_rows_are_cut_down_to_one_at_a_time():
    assert candidates.accumulations(8) == [1, 2, 4, 8]
    assert candidates.accumulations(6) == [1, 2]
    assert candidates.accumulations(1) == [1]


def test_a_pipeline_determines_its_microbatches_and_tries_every_recomputation(layouts):
    model = transformer.preset("7b", remat="dots")
    every = list(candidates.candidates(layouts, own=strategies.fsdp(), slice=V4_32, model=model, batch_sizes=[32, 64]))
    assert len(every) == len(set(every))
    pipelines = [c for c in every if c.layout.choice]
    assert {c.accum_steps for c in pipelines} == {1}
    by_save = {
        save: {c.remat for c in pipelines if c.layout.choice.schedule().save == save} for save in schedules.SAVES
    }
    assert by_save == {"layers": set(candidates.remats(model)), "stage": {"dots"}}
    fsdp = [c for c in every if c.layout.constructor == "fsdp" and c.batch_size == 64]
    assert {c.accum_steps for c in fsdp} == {1, 2, 4}
    assert {c.remat for c in fsdp} == set(candidates.remats(model))


def test_the_own_strategy_is_one_of_them():
    own = strategies.override(strategies.fsdp(), activation_rules={"embed": None})
    every = candidates.candidates(
        [None], own=own, slice=V4_32, model=transformer.preset("tiny", remat="full"), batch_sizes=[16]
    )
    assert Candidate(None, "full", 1, 16) in list(every)
    assert Layout("fsdp", (("fsdp", -1),)).strategy() == strategies.fsdp()
