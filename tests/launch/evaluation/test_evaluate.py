"""A run is scored from its directory: the means of training, answers counted as votes, and nothing half asked for."""

import json
import shutil

import jax
import pytest

from core import paths
from launch import configuration, training
from launch.evaluation import portion, saved
from launch.pods.joining import Host

FIRST = {"1": 0.25, "2": 0.75, "5": 0.75, "10": 0.75, "100": 0.75, "1000": 0.75}


def written(run_dir, name):
    return json.loads((run_dir / "evaluation" / name).read_text())


def test_three_wrong_and_two_right_votes_of_one_checkpoint(command, parrot_run):
    code, said = command("evaluate", parrot_run, "--step", "1")
    assert code == 0, said
    found = written(parrot_run, "step_1.json")
    assert found["arc"] == {"pass_at": FIRST, "puzzles": 2, "tests": 3, "tests_with_votes": 3, "votes": 7}
    assert found["evaluated_on"] == "all 7 held-out puzzles"
    assert (found["step"], found["scored"], found["means"]["seen"]) == (1, 7, 1.0)  # and not the 9 rows that fill up
    assert found["same_data_as_in_training"]
    assert "pass@k of 2 puzzles; 3 of their 3 tests have votes, 7 of a checkpoint" in said
    assert not (parrot_run / "evaluation" / "cumulative.json").exists()


def test_the_ensemble_of_all_checkpoints_is_told_apart(command, parrot_run, tmp_path):
    shutil.copytree(parrot_run, tmp_path / "run")
    file = tmp_path / "attempts.json"
    code, said = command("evaluate", tmp_path / "run", "--all-steps", "--submission", file)
    assert code == 0, said
    alone = [written(tmp_path / "run", f"step_{step}.json")["arc"]["pass_at"] for step in (1, 2)]
    assert alone == [FIRST, FIRST]
    first, both = written(tmp_path / "run", "cumulative.json")["cumulative"]
    assert (first["steps"], first["pass_at"], first["votes"]) == ([1], FIRST, 7)
    assert (both["steps"], both["pass_at"], both["votes"]) == ([1, 2], dict.fromkeys(FIRST, 0.75), 14)
    assert "steps 1, 2 together (cumulative)" in said
    assert "from the votes of steps 1, 2 together" in said
    attempts = json.loads(file.read_text())
    assert attempts["p"] == [{"attempt_1": [[5, 6, 7]], "attempt_2": [[9]]}]  # 4 and 3 votes, these more confident
    assert attempts["r"][0]["attempt_1"] == attempts["r"][1]["attempt_1"] == [[1, 1]]


def test_a_submission_of_one_checkpoint(command, parrot_run, tmp_path):
    code, said = command("evaluate", parrot_run, "--step", "1", "--submission", tmp_path / "attempts.json")
    assert code == 0, said
    assert "from the votes of step 1" in said
    assert json.loads((tmp_path / "attempts.json").read_text())["p"] == [
        {"attempt_1": [[5, 6, 8]], "attempt_2": [[5, 6, 7]]}
    ]


def test_a_subset_says_its_size_and_seed(command, parrot_run, tmp_path):
    shutil.copytree(parrot_run, tmp_path / "run")
    code, said = command("evaluate", tmp_path / "run", "--rows", "3")
    assert code == 0, said
    found = written(tmp_path / "run", "step_2.json")
    assert found["evaluated_on"] == "3 of 7 held-out puzzles, drawn with seed 0"
    assert found["evaluated_on"] in said
    assert (found["scored"], found["arc"]["votes"]) == (3, 3)


TRM = """
from __gin__ import dynamic_registration
from models import trm
from parallel import strategies
include 'gin/defaults.gin'
include 'gin/models/trm_attention.gin'
include 'gin/optimizers/trm.gin'
include 'gin/tasks/arc.gin'
STRATEGY = @strategies.data_parallel()
COMPUTE_DTYPE = 'float32'
BATCH_SIZE = 4
SLICE = 'v4-8'
WARMUP_STEPS = 1
TOTAL_STEPS = 2
EVAL_INTERVAL = 1
CHECKPOINT_INTERVAL = 1
trm.TRM.num_puzzles = 7
trm.TRM.embed_dim = 16
trm.TRM.num_heads = 1
trm.TRM.num_layers = 1
trm.TRM.h_cycles = 1
trm.TRM.l_cycles = 1
trm.TRM.prefix_length = 1
trm.TRM.halt_max_steps = 2
"""


@pytest.mark.covers("T17")
def test_the_means_are_those_of_training(command, dataset, monkeypatch, tmp_path):
    chips = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda: chips)
    run_dir, file = tmp_path / "run", tmp_path / "tiny.gin"
    file.write_text(TRM)
    config = configuration.load(str(file), bindings=[f"DATA = '{dataset[0]}'"])
    run = training.ready(
        config.build(), config_text=config.text, revision="", run_dir=str(run_dir), last_step=2, host=Host(0, 1, True)
    )
    training.train(run)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = {row["step"]: row for row in rows if "validation/loss" in row}
    code, said = command("evaluate", run_dir, "--all-steps")
    assert code == 0, said
    for step in (1, 2):
        found = written(run_dir, f"step_{step}.json")
        by_step = {f"exact_accuracy_step_{i:02d}": v for i, v in enumerate(found["by_step"]["exact_accuracy"], 1)}
        assert len(by_step) == 2
        theirs = {name.removeprefix("validation/"): v for name, v in logged[step].items() if "/" in name}
        assert {**found["means"], **by_step} == pytest.approx(theirs, rel=1e-6)
        assert found["arc"]["tests"] == 3
    assert "exact_accuracy after so many steps on a puzzle" in said
    assert found["means"]["loss"] != written(run_dir, "step_1.json")["means"]["loss"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{tmp}/nothing"], "no run in '{tmp}/nothing': there is no such folder"),
        (["{tmp}"], "no run in '{tmp}': it has no config.gin"),
        (["gin/quickstart.gin"], "is an experiment; give the directory of its run, such as"),
        (["{run}", "--step", "7"], "--step 7: '{run}' has no complete checkpoint of it; there are 1, 2"),
        (["{run}", "--gin", "BATCHSIZE = 3"], "did you mean 'BATCH_SIZE'"),
        (["{run}", "--gin", "DATA = 'nowhere'"], "no puzzles in 'nowhere'"),
        (["{run}", "--submission", "{run}/config.gin/x"], "cannot write to"),
        (["{text}", "--submission", "x.json"], "this run's task has no attempts to submit; expected an ARC dataset"),
        (["{text}", "--rows", "all"], "(that of text starts again there): give a number of rows"),
        (["{text}", "--gin", "EVAL_BATCHES = 0"], "say how many rows to take, --rows N"),
    ],
)
def test_what_cannot_be_had_is_said_before_anything_starts(command, monkeypatch, parrot_run, tmp_path, argv, message):
    monkeypatch.setattr(training, "ready", None)  # nothing comes that far
    text = tmp_path / "text"
    (text / "checkpoints").mkdir(parents=True)
    shutil.copytree(parrot_run / "checkpoints", text / "checkpoints", dirs_exist_ok=True)
    (text / "config.gin").write_text(configuration.load("gin/quickstart.gin").text)
    names = {"run": parrot_run, "tmp": tmp_path, "text": text}
    code, said = command("evaluate", *(word.format(**names) for word in argv))
    assert code == 2
    assert message.format(**names) in said


def test_a_run_without_a_checkpoint(command, parrot_run, tmp_path):
    shutil.copy(parrot_run / "config.gin", tmp_path)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)  # begun, and never finished
    code, said = command("evaluate", tmp_path)
    assert code == 2
    assert "has no complete checkpoint: it saves one every CHECKPOINT_INTERVAL steps" in said


def test_rows_that_are_no_number_are_refused(command, parrot_run, capsys):
    with pytest.raises(SystemExit):
        command("evaluate", parrot_run, "--rows", "0")
    assert "expected all, or a number from 1 up" in capsys.readouterr().err


def test_text_is_evaluated_in_whole_batches():
    experiment = configuration.load("gin/quickstart.gin").build()
    batch = experiment.batch_size
    assert portion.portion(experiment, rows=None).batches == experiment.eval_batches
    asked = portion.portion(experiment, rows=batch + 1)
    assert asked.batches == 2
    assert asked.describe() == f"the first {2 * batch} rows of the validation data"


def test_the_configuration_of_a_run_in_a_bucket_is_read(monkeypatch, parrot_run):
    monkeypatch.setattr(paths, "is_remote", lambda path: True)
    found = saved.read(str(parrot_run), bindings=["BATCH_SIZE = 32"], slice_name="v4-16")
    assert found.steps == (1, 2)
    experiment = found.config.build()
    assert (experiment.batch_size, experiment.slice) == (32, "v4-16")


@pytest.mark.simulated(2)
def test_one_process_and_two_hosts_score_alike(launch, parrot, parrot_run, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(parrot))
    found = []
    for name, how in (("one", {"slice_name": "v4-16"}), ("two", {})):
        shutil.copytree(parrot_run, tmp_path / name)
        where = [str(tmp_path / name), "--all-steps", "--slice", "v4-16", *(["--simulate"] if name == "two" else [])]
        said = launch("evaluate", *where, **how)
        assert "steps 1, 2 together (cumulative)" in said
        found.append([written(tmp_path / name, f) for f in ("step_1.json", "step_2.json", "cumulative.json")])
    assert found[0] == found[1]
    assert found[0][0]["arc"]["pass_at"] == FIRST
    assert (tmp_path / "two" / "logs" / "host_1.log").exists()
