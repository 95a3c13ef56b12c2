"""Tuning: candidates become gin bindings, settings are tried in turn, and what is measured is a real step."""

import jax
import pytest

from core import slices
from core.errors import UserError
from launch.config import changes, loader
from launch.hosts.cluster import Host
from launch.runs import prepared_run, tuning
from launch.runs.tuning import AS_IT_IS, Candidate, Measured
from models.splash_tiles import Tiles
from parallel import compiler_options

SMALL = [
    "LENGTH = 128",
    "BATCH_SIZE = 8",
    "transformer.Transformer.num_layers = 1",
    "transformer.Transformer.embed_dim = 32",
    "transformer.Transformer.mlp_dim = 64",
]
FUSED = Candidate("fused", {"fused_backward": True})  # its program differs on CPUs too, by a constant without use


@pytest.mark.parametrize(
    "file", ["gin/quickstart.gin", "gin/long/curriculum.gin", "gin/arrcoc/easy_vqa.gin", "gin/llama_3_1_8b_lora.gin"]
)
def test_the_file_changes_the_experiment_as_it_was_measured(file, tmp_path):
    given = ["experiment.Experiment.compiler_options = {'xla_a': 1, 'xla_b': 2}", "from launch import experiment"]
    config = loader.load(file, bindings=given, slice_name="v4-8")
    built = config.build()
    chosen = Candidate("x", {"keys": 256}, {"xla_b": 3}).joined(Candidate("y", {"fused_backward": True}))
    assert chosen.name == "x, y"
    (tmp_path / "tuned.gin").write_text(chosen.file(built, changes.Changes(config, built.model), header=["How."]))
    again = loader.load(file, bindings=[*given, f"include '{tmp_path / 'tuned.gin'}'"], slice_name="v4-8").build()
    assert again.model == chosen.applied(built).model
    model = again.model.decoder if hasattr(again.model, "vision") else again.model
    assert model.attention_tiles == Tiles(keys=256, fused_backward=True)
    assert again.compiler_options == {"xla_a": 1, "xla_b": 3}


@pytest.mark.parametrize("generation", list(slices.CHIPS))
def test_every_candidate_differs_from_the_defaults(generation):
    found = [c for lever in tuning.levers(generation, has_tiles=True) for c in lever]
    own = compiler_options.options(generation)
    assert len({c.name for c in found}) == len(found) > 5
    assert all(Tiles(**c.tiles) != Tiles() or any(own.get(n) != v for n, v in c.options.items()) for c in found)
    assert not any(c.tiles for lever in tuning.levers(generation, has_tiles=False) for c in lever)


@pytest.mark.parametrize("generation", ["cpu", "h100"])
def test_other_chips_have_no_candidates(generation):
    assert not tuning.levers(generation, has_tiles=True)


A, B = Candidate("a", {"keys": 128}), Candidate("b", {"keys": 256})
C, D = Candidate("c", options={"xla_c": 1}), Candidate("d", {"queries": 128})
LEVERS = [[A, B], [C], [D]]


def measuring(seconds):
    """A measurement with these seconds, in order for a name that is measured twice; a string is a problem."""
    left = {name: list(values) if isinstance(values, list) else [values] for name, values in seconds.items()}

    def measure(candidate):
        value = left[candidate.name].pop(0)
        return Measured(candidate.name, None, value) if isinstance(value, str) else Measured(candidate.name, value)

    return measure


def test_settings_are_tried_in_turn_with_those_that_were_chosen():
    seconds = {AS_IT_IS: [1.0, 1.02], "a": "does not fit", "b": 0.5, "b, c": 0.499, "b, d": 0.4}
    chosen, rows = tuning.search(LEVERS, measuring(seconds))  # c saves less than 1 %
    assert chosen == Candidate("b, d", {"keys": 256, "queries": 128})
    assert [row.name for row in rows] == [AS_IT_IS, "a", "b", "b, c", "b, d", AS_IT_IS]
    lines = [line.split() for line in tuning.table(rows).splitlines()]
    assert lines[1:4] == [
        ["1", "1.000", *AS_IT_IS.split()],
        ["-", "-", "a:", "does", "not", "fit"],
        ["0.5", "0.500", "b"],
    ]


def test_what_gains_less_than_the_experiment_fluctuates_is_not_chosen():
    seconds = {AS_IT_IS: [1.0, 0.9], "a": 0.95, "b": 0.96, "a, c": 1.0, "a, d": 1.0}
    assert tuning.search(LEVERS, measuring(seconds))[0] == Candidate()


def test_an_experiment_that_does_not_run_is_refused():
    with pytest.raises(UserError, match="does not run as it is: does not fit"):
        tuning.search(LEVERS, measuring({AS_IT_IS: "does not fit"}))


@pytest.fixture
def made(tmp_path):
    """A small run that is prepared in this process, and its configuration."""
    config = loader.load("gin/quickstart.gin", bindings=SMALL, slice_name="v4-8")
    how = {"config_text": config.text, "revision": "", "run_dir": str(tmp_path), "last_step": 1}
    return prepared_run.prepare_run(config.build(), host=Host(0, 1, True), **how), config


def test_steps_are_measured_and_the_fastest_settings_written(made, monkeypatch, tmp_path, capsys):
    run, config = made
    refused = Candidate("refused", {"keys": 100})
    equal = Candidate("equal", {"keys": 1024})
    monkeypatch.setattr(tuning, "levers", lambda *_, **__: [[equal, refused, FUSED]])
    monkeypatch.setattr(tuning, "LEAST_GAIN", -1e6)  # whatever ends counts as faster
    assert tuning.tune(run, config, steps=2) == FUSED
    said = capsys.readouterr().out
    assert "equal: the program is one that was measured" in said
    assert "refused: Tiles.keys = 100: expected an integer of at least 128" in said
    assert "simulated: not a measurement of TPUs" in (tmp_path / tuning.FILE).read_text()
    bindings = [*SMALL, f"include '{tmp_path / tuning.FILE}'"]
    again = loader.load("gin/quickstart.gin", bindings=bindings, slice_name="v4-8").build()
    assert again.model == FUSED.applied(run.experiment).model


def test_a_step_that_fails_does_not_end_the_tuning(made, monkeypatch, tmp_path, capsys):
    run, config = made
    timed, calls = tuning._Trials._timed, []

    def failing(self, step):
        calls.append(step)
        seconds = timed(self, step)
        if len(calls) == 2:
            jax.tree.leaves(self._state)[0].delete()
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too much\nand details")
        return seconds

    monkeypatch.setattr(tuning._Trials, "_timed", failing)
    monkeypatch.setattr(tuning, "levers", lambda *_, **__: [[FUSED]])
    assert tuning.tune(run, config, steps=1) == Candidate()
    assert "fused: RESOURCE_EXHAUSTED: too much\n" in capsys.readouterr().out
    assert len(calls) == 3
    assert not (tmp_path / tuning.FILE).exists()


def test_chips_without_settings_are_refused(made, monkeypatch):
    monkeypatch.setattr(tuning, "levers", lambda *_, **__: [])
    with pytest.raises(UserError, match="no settings to try on v4: expected TPUs"):
        tuning.tune(*made)
