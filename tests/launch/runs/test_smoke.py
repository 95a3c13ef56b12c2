"""Every experiment file rehearses its slice."""

import pytest

from core.hosts import exit_codes
from launch import __main__ as cli
from launch import environment
from launch.config import loader
from launch.runs import smoke

ROOT = environment.WORKSPACE


NO_RUNS = ("defaults.gin", "valkyrie_128b.gin")  # one has 512 chips, more than a process here can play
NO_RUNS += ("finetune.gin", "finetune_chats.gin")  # need a folder
SMALLER = {  # as in their headers: logits of large vocabularies take minutes
    name: ("--gin", "transformer.preset.vocab_size = 1024")
    for name in ("llama_3_1_8b.gin", "llama_3_1_8b_lora.gin", "gemma_3_27b.gin")
}


def experiments():
    return sorted(path.name for path in (ROOT / "gin").glob("*.gin") if path.name not in NO_RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", experiments())
def test_every_experiment_file_smokes_on_its_slice(launch, experiment, tmp_path):
    slice_name = loader.load(f"gin/{experiment}").build().slice
    where = ["--check", "smoke", "--run-dir", str(tmp_path), *SMALLER.get(experiment, ())]
    said = launch("train", f"gin/{experiment}", *where, slice_name=slice_name)
    assert "PASS  20 steps; restored at step 10, 10 steps repeated bit for bit" in said


@pytest.mark.slow
def test_a_smoke_run_can_be_repeated(launch, tmp_path):
    where = ["--check", "smoke", "--run-dir", str(tmp_path), "--gin", "KEEP_CHECKPOINTS = 1"]
    for _ in range(2):
        said = launch("train", "gin/own_text.gin", *where, slice_name="v4-8")
        assert "PASS" in said
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.simulated(4)
def test_valkyrie_7b_smokes_on_four_hosts(launch, tmp_path):
    said = launch("pod", "v4-32", "gin/valkyrie_7b.gin", "--simulate", "--check", "smoke", "--run-dir", str(tmp_path))
    assert "PASS  20 steps" in said


def test_a_smoke_run_of_other_steps_is_refused(tmp_path, capsys):
    words = ["--slice", "v4-8", "--run-dir", str(tmp_path / "run"), "--check", "smoke", "--steps", "2"]
    assert cli.main(["train", "gin/quickstart.gin", *words]) == exit_codes.USER_ERROR
    assert "--check and --steps exclude each other: a smoke run has 20 steps" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_phases_of_a_smoke_run_differ_as_those_of_the_experiment():
    whole = loader.load("gin/quickstart_phases.gin").build()
    spans = smoke.shrink_phases(whole)
    assert [(span.number, span.count, span.first_step, span.last_step) for span in spans] == [
        (1, 2, 0, 20),
        (2, 2, 20, 40),
    ]
    first, second = (span.experiment for span in spans)
    assert first.model == second.model
    assert first.batch_size == 2 * second.batch_size
    assert 2 * first.row_length == second.row_length
    assert {first.total_steps, second.total_steps} == {40}
    (only,) = smoke.shrink_phases(loader.load("gin/quickstart.gin").build())
    assert (only.last_step, only.experiment.total_steps) == (20, 20)


@pytest.mark.slow
def test_a_smoke_run_crosses_the_boundaries_of_phases(launch, tmp_path):
    where = ["--check", "smoke", "--run-dir", str(tmp_path)]
    said = launch("train", "gin/quickstart_phases.gin", *where, slice_name="v4-16")
    for words in ("phase 1 of 2: steps 1 to 20", "PASS  phase 1 of 2, 20 steps; restored at step 10", "phase 2 of 2"):
        assert words in said
    assert "PASS  phase 2 of 2, 20 steps; continued from the checkpoint of step 20; restored at step 30" in said
