"""A record is found by what makes a program, and by nothing else."""

import dataclasses
import json

import pytest

from launch.plans import planning, records

BINDINGS = {
    "TOTAL_STEPS = 7000": True,
    "LEARNING_RATE = 1e-5": True,
    "LOG_INTERVAL = 3": True,
    "PROMPT = 'x'": True,
    "BATCH_SIZE = 64": False,
    "LENGTH = 256": False,
    "transformer.Transformer.remat = 'full'": False,
    "STRATEGY = @strategies.data_parallel()": False,
    "include 'gin/optimizers/lion.gin'": False,
    "optimizers.adamw.b1 = 0.8": False,
}


@pytest.mark.parametrize(("binding", "same"), BINDINGS.items())
def test_only_what_makes_a_program_names_its_record(question, binding, same):
    other = planning.ask(question.path, slice_name=question.slice.name, bindings=[binding])
    texts = [records.program_text(q.experiment, q.config) for q in (question, other)]
    assert (texts[0] == texts[1]) is same


def test_another_slice_is_another_program(question):
    other = planning.ask(question.path, slice_name="v4-16")
    assert records.program_text(other.experiment, other.config) != records.program_text(
        question.experiment, question.config
    )


def test_a_record_is_what_was_written(tried, compiled_as, cache):
    one = next(t for t in tried if not t.reason)
    record = compiled_as(one)
    assert cache.find(one.text) is None
    cache.keep(one.text, record)
    assert cache.find(one.text) == record
    assert [p.name.startswith(".") for p in cache.folder.iterdir()] == [False]


def test_other_versions_and_edited_sources_know_nothing(tried, compiled_as, cache, monkeypatch):
    one = next(t for t in tried if not t.reason)
    cache.keep(one.text, compiled_as(one))
    with monkeypatch.context() as patched:
        patched.setattr(records, "versions", lambda: {"libtpu": "0"})
        assert cache.find(one.text) is None
    monkeypatch.setattr(records, "sources_digest", lambda: "other")
    assert cache.find(one.text) is None


def test_what_is_committed_is_found_whatever_the_sources(tried, compiled_as, tmp_path, monkeypatch):
    one = next(t for t in tried if not t.reason)
    record = compiled_as(one)
    records.ship(tmp_path / "small.json", iter([(one.text, record)]))
    monkeypatch.setattr(records, "sources_digest", lambda: "other")
    monkeypatch.setattr(records, "COMMITTED", tmp_path)
    store = records.Store(tmp_path / "mine")
    assert store.find(one.text) == dataclasses.replace(record, is_committed=True)
    assert records.Store(tmp_path / "mine", with_committed=False).find(one.text) is None
    assert set(json.loads((tmp_path / "small.json").read_text())) == {"records"}


def test_what_does_not_fit_is_kept_with_what_it_needs():
    record = records.Record(
        records.TOO_MUCH, reason="needs 75.31GiB of 30.75GiB", needed_bytes=records.gib_of("75.31GiB")
    )
    again = records.from_json(json.loads(json.dumps(record.as_json())))
    assert again == record
    assert again.needed_bytes / 2**30 == pytest.approx(75.31)
