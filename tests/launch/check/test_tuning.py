"""Tuning: candidates become gin bindings, the fastest of each lever is kept, and a run is measured by its metrics."""

import json

import pytest

from core import metrics, slices
from core.errors import UserError
from launch.check import tuning
from launch.check.tuning import AS_IT_IS, Candidate, Tuning
from launch.config import loader
from models.splash_tiles import Tiles

V4_8 = slices.get("v4-8")


def made(tmp_path, file="gin/quickstart.gin", **options):
    return Tuning(V4_8, file, run_dir=str(tmp_path), bindings=["SLICE = 'v4-8'"], **options)


@pytest.mark.parametrize("file", ["gin/quickstart.gin", "gin/long/curriculum.gin", "gin/arrcoc/easy_vqa.gin"])
def test_settings_are_bindings_of_the_decoder_and_of_the_compiler(tmp_path, file):
    given = ["experiment.Experiment.compiler_options = {'xla_a': 1, 'xla_b': 2}", "from launch import experiment"]
    found = Tuning(V4_8, file, run_dir=str(tmp_path), bindings=given)
    chosen = Candidate("x", {"keys": 256}, {"xla_b": 3}).joined(Candidate("y", {"fused_backward": True}))
    assert chosen.name == "x, y"
    (tmp_path / "tuned.gin").write_text(found.file(chosen, header=["How."]))
    built = loader.load(file, bindings=[*given, f"include '{tmp_path / 'tuned.gin'}'"], slice_name="v4-8").build()
    decoder = getattr(built.model, "decoder", built.model)
    assert decoder.attention_tiles == Tiles(keys=256, fused_backward=True)
    assert built.compiler_options == {"xla_a": 1, "xla_b": 3}


def test_a_model_without_a_decoder_has_no_tiles(tmp_path):
    assert "tiles" not in Tuning(V4_8, "gin/trm/exp01/exp01a.gin", run_dir=str(tmp_path), bindings=[]).levers


@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e"])
def test_no_candidate_is_the_default_of_its_generation(generation):
    from parallel import compiler_options

    own = compiler_options.options(generation)
    found = [c for lever in tuning.levers(generation, has_tiles=True).values() for c in lever]
    assert len({c.name for c in found}) == len(found) > 5
    assert all(c.tiles or any(own.get(name) != value for name, value in c.options.items()) for c in found)


def test_levers_are_tried_in_turn_with_what_was_chosen_before(tmp_path, monkeypatch):
    found, asked = made(tmp_path), []
    a, b = Candidate("a", {"keys": 1}), Candidate("b", {"keys": 2})
    c, d = Candidate("c", options={"o": 1}), Candidate("d", {"queries": 3})
    monkeypatch.setattr(Tuning, "levers", {"one": [a, b], "two": [c], "three": [d]})
    seconds = {AS_IT_IS: 1.0, "a": None, "b": 0.5, "b, c": 0.499, "b, d": 0.4}  # c gains less than one per cent

    def measured(self, candidate, *, number):
        asked.append((number, candidate.name))
        return seconds[candidate.name]

    monkeypatch.setattr(Tuning, "_seconds", measured)
    chosen, times = found.measure()
    assert chosen == Candidate("b, d", {"keys": 2, "queries": 3})
    assert times == seconds
    assert asked == list(enumerate(seconds))
    rows = [line.split() for line in tuning.table(times).splitlines()]
    assert rows[2:4] == [["failed", "a"], ["0.5", "0.500", "b"]]


def test_an_experiment_that_does_not_run_is_no_start(tmp_path, monkeypatch):
    monkeypatch.setattr(Tuning, "_seconds", lambda *_, **__: None)
    with pytest.raises(UserError, match=r"quickstart\.gin does not run as it is"):
        made(tmp_path).measure()
    with pytest.raises(UserError, match="TOTAL_STEPS = 10: expected at least 20"):
        Tuning(V4_8, "gin/quickstart.gin", run_dir=str(tmp_path), bindings=["TOTAL_STEPS = 10", "WARMUP_STEPS = 1"])


def test_the_first_steps_are_not_counted(tmp_path):
    lines = [{"step": step, "step_seconds": 9.0 if step <= 5 else 0.1 * (step % 3 + 1)} for step in range(1, 21)]
    (tmp_path / metrics.JSONL_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tuning.measured(str(tmp_path), patience=0) == pytest.approx(0.2)
    (tmp_path / metrics.JSONL_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    assert tuning.measured(str(tmp_path), patience=0) is None


@pytest.mark.slow  # three runs of 20 steps
@pytest.mark.covers("M19")
def test_a_simulated_slice_is_tuned(tmp_path, monkeypatch, capfd):
    few = {"tiles": [Candidate("small tiles", {"queries": 128})], "wrong": [Candidate("no option", options={"x": 1})]}
    monkeypatch.setattr(Tuning, "levers", few)
    made(tmp_path, simulated=True).write(is_host_zero=True)
    said = capfd.readouterr().out
    assert "s/step    ratio  settings" in said
    assert (tmp_path / "tuned.gin").exists() == ("tuned.gin has it" in said)
