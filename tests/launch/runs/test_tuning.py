"""Tuning: candidates become gin bindings, settings are tried in turn, and what is measured is a real step."""

import dataclasses

import jax
import pytest

from core import optimizers, slices
from core.errors import UserError
from core.hosts import exit_codes
from core.training.hooks import PreemptedError
from launch import __main__ as cli
from launch.config import changes, loader
from launch.hosts.cluster import Host
from launch.runs import prepared_run, tuning
from launch.runs.tuning import AS_IT_IS, Candidate
from models.decoder.attention.splash_tiles import Tiles
from parallel.compiled import compiler_options

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


def measuring(seconds, names):
    """A measurement with these seconds, in order for a name that is measured twice; None is a problem."""
    left = {name: list(values) if isinstance(values, list) else [values] for name, values in seconds.items()}

    def measure(candidate):
        names.append(candidate.name)
        return left[candidate.name].pop(0)

    return measure


def test_settings_are_tried_in_turn_with_those_that_were_chosen():
    names = []
    seconds = {AS_IT_IS: [1.0, 1.02], "a": None, "b": 0.5, "b, c": 0.499, "b, d": [0.4, 0.41]}
    chosen, ratio = tuning.search(LEVERS, measuring(seconds, names))  # c saves less than 1 %
    assert chosen == Candidate("b, d", {"keys": 256, "queries": 128})
    assert ratio == 0.41
    assert names == [AS_IT_IS, "a", "b", "b, c", "b, d", "b, d", AS_IT_IS]


@pytest.mark.parametrize("again", [0.95, 0.895, None])
def test_a_choice_must_be_faster_again_than_both_measurements_of_the_unchanged_experiment(again):
    seconds = {AS_IT_IS: [1.0, 0.9], "a": [0.89, again], "b": 0.96, "a, c": 1.0, "a, d": 1.0}
    assert tuning.search(LEVERS, measuring(seconds, [])) == (Candidate(), 1.0)


def test_an_experiment_that_does_not_run_is_refused():
    with pytest.raises(UserError, match="the unchanged experiment does not run"):
        tuning.search(LEVERS, measuring({AS_IT_IS: None}, []))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, kept_programs):
    """A small run that is prepared in this process, and its configuration. Trials of one program compile it once."""
    config = loader.load("gin/quickstart.gin", bindings=SMALL, slice_name="v5e-1")
    how = {"config": config, "revision": "", "run_dir": str(tmp_path_factory.mktemp("run")), "last_step": 1}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JAX_COMPILATION_CACHE_DIR", kept_programs)
        return prepared_run.prepare_run(config.build(), host=Host(0, 1, True), **how), config


@pytest.fixture
def made(prepared, tmp_path):
    """The same in a run directory of its own."""
    run, config = prepared
    return dataclasses.replace(run, run_dir=str(tmp_path)), config


class KernelError(Exception):
    """As Pallas raises them."""


def test_steps_are_measured_and_the_fastest_settings_written(made, monkeypatch, tmp_path, capsys):
    run, config = made
    refused, equal = Candidate("refused", {"keys": 100}), Candidate("equal", {"keys": 1024})
    harmed = Candidate("harmed", options={"xla_harmed": 1})
    wrong = Candidate("wrong", {"keys": 512})
    applied = Candidate.applied

    def failing(self, experiment):
        if self.options:
            raise KernelError("Mosaic failed\nand details")
        if self == wrong:  # the first loss is right
            return dataclasses.replace(experiment, optimizer=optimizers.adamw(learning_rate=optimizers.constant(0.3)))
        return applied(self, experiment)

    monkeypatch.setattr(Candidate, "applied", failing)
    monkeypatch.setattr(tuning, "levers", lambda *_, **__: [[equal, refused, harmed, wrong, FUSED]])
    monkeypatch.setattr(tuning, "LEAST_GAIN", -1e6)  # whatever ends counts as faster
    assert tuning.tune(run, config, steps=2) == FUSED
    said = capsys.readouterr().out
    assert f"equal: the same program as '{AS_IT_IS}'" in said
    assert "refused: Tiles.keys = 100: expected an integer of at least 128" in said
    assert "harmed: Mosaic failed\n" in said
    losses = [line.partition("wrong: wrong results: losses ")[2] for line in said.splitlines() if "wrong: " in line]
    ours, theirs = losses[0].split("; the unchanged experiment has ")
    assert ours.split(", ")[0] == theirs.split(", ")[0]
    assert all(a != b for a, b in zip(ours.split(", ")[1:], theirs.split(", ")[1:], strict=True))
    file = tmp_path / tuning.FILE
    assert f"use it with --gin \"include '{file}'\"" in said
    assert "simulated: not a measurement of TPUs" in file.read_text()
    again = loader.load("gin/quickstart.gin", bindings=[*SMALL, f"include '{file}'"], slice_name="v5e-1").build()
    assert again.model == FUSED.applied(run.experiment).model


@pytest.mark.slow
def test_after_a_step_that_fails_others_are_measured_and_an_earlier_file_is_deleted(
    made, monkeypatch, tmp_path, capsys
):
    run, config = made
    timed, calls = tuning._Trials._timed, []

    def failing(self, step):
        calls.append(step)
        seconds = timed(self, step)
        if len(calls) == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too much\nand details")
        return seconds

    (tmp_path / tuning.FILE).write_text("")
    monkeypatch.setattr(tuning._Trials, "_timed", failing)
    again = Candidate("again", {"fused_backward": True, "keys": 256})
    monkeypatch.setattr(tuning, "levers", lambda *_, **__: [[FUSED, again]])
    monkeypatch.setattr(tuning._Trials, "_ready", _without_comparison(tuning._Trials._ready))
    monkeypatch.setattr(tuning, "LEAST_GAIN", 1.0)  # nothing is faster by all of it
    assert tuning.tune(run, config, steps=1) == Candidate()
    said = capsys.readouterr().out
    assert "fused: RESOURCE_EXHAUSTED: too much\n" in said
    assert " s/step  again" in said
    assert not (tmp_path / tuning.FILE).exists()


def _without_comparison(ready):
    """The method, for candidates whose program is known."""

    def made(self, candidate):
        self._names.clear()
        return ready(self, candidate)

    return made


@pytest.mark.parametrize("flag", ["--check=smoke", "--steps=3"])
def test_other_ways_to_run_are_refused(flag, tmp_path, capsys):
    words = ["train", "gin/quickstart.gin", "--slice", "v4-8", "--run-dir", str(tmp_path / "run"), "--tune", flag]
    assert cli.main(words) == exit_codes.USER_ERROR
    assert f"--tune and {flag.partition('=')[0]} exclude each other" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_sigterm_ends_the_tuning(made, monkeypatch, tmp_path):
    monkeypatch.setattr(tuning.distributed, "preempted", lambda step: step == 2)
    with pytest.raises(PreemptedError, match="run the same command again"):
        tuning.tune(*made, steps=1)
    assert not (tmp_path / tuning.FILE).exists()


def test_a_remote_file_is_to_be_copied(made, monkeypatch, capsys):
    run, config = made
    run = dataclasses.replace(run, run_dir="gs://bucket/runs/7b/tune")
    monkeypatch.setattr(tuning.paths, "write_text_atomically", lambda *_: None)
    tuning._report(run, FUSED, 0.9, changes.Changes(config, run.experiment.model))
    said = capsys.readouterr().out
    assert "gcloud storage cp gs://bucket/runs/7b/tune/tuned.gin tuned.gin" in said
    assert "--gin \"include 'tuned.gin'\"" in said


@pytest.mark.parametrize("generation", ["cpu", "h100"])
def test_chips_without_settings_are_refused(generation):
    with pytest.raises(UserError, match=f"no settings to try on {generation}: expected a slice of TPUs"):
        tuning.refuse(generation=generation)


@pytest.mark.slow
def test_two_hosts_choose_alike_and_leave_the_run_directory_as_it_is(launch, tmp_path):
    run_dir = ["gin/quickstart.gin", "--simulate", "--run-dir", str(tmp_path)]
    small = [word for binding in SMALL for word in ("--gin", binding)]
    said = launch("pod", "v4-16", *run_dir, *small, "--tune")
    assert "48 MiB of scoped VMEM: the same program as" in said
    assert said.count(f" s/step  {AS_IT_IS}") in (1, 2)  # again if something was faster
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", tuning.FOLDER]
