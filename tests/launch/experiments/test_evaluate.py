"""Evaluating a run from its directory: means, votes of answers, and errors before anything starts."""

import functools
import json
import re
import shutil
from types import SimpleNamespace

import pytest

from core.checkpoints import steps as saved_steps
from core.errors import UserError
from core.files import paths
from core.training import scoring as scores
from launch.config import loader
from launch.experiments import evaluate, saved_run
from launch.runs import prepared_run
from tasks import synthetic
from tasks.chunked import ChunkedTask
from tests.launch.experiments.saved_configs import save_config

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
    assert "pass@k of 2 puzzles; 3 of their 3 tests have votes, 7 votes from the first checkpoint" in said
    assert not (parrot_run / "evaluation" / "cumulative.json").exists()


def test_the_ensemble_of_all_checkpoints_is_labeled(command, parrot_run, tmp_path):
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


def test_a_part_is_as_large_as_the_runs_own_evaluations(command, parrot_run, one_host, tmp_path):
    shutil.copytree(parrot_run, tmp_path / "run")
    few = [word for name in ("BATCH_SIZE = 4", "EVAL_BATCHES = 1") for word in ("--gin", name)]
    code, said = command("evaluate", tmp_path / "run", "--slice", "v4-8", *few)
    assert code == 0, said
    found = written(tmp_path / "run", "step_2.json")
    assert found["evaluated_on"] == "the first 4 of 7 held-out puzzles"
    assert (found["scored"], found["arc"]["votes"]) == (4, 4)
    code, said = command("evaluate", tmp_path / "run", "--slice", "v4-8", *few, "--rows", "all")
    assert code == 0, said
    found = written(tmp_path / "run", "step_2.json")
    assert (found["evaluated_on"], found["scored"]) == ("all 7 held-out puzzles", 7)


def test_an_evaluation_does_not_count_the_epochs_of_training(command, parrot_run, tmp_path):
    """Which would be counted from the first step, although a phase may begin later."""
    shutil.copytree(parrot_run, tmp_path / "run")
    few = ["--gin", "from launch import experiment", "--gin", "experiment.Experiment.max_epochs = 1e-3"]
    code, said = command("evaluate", tmp_path / "run", "--rows", "3", *few)
    assert code == 0, said


def test_a_checkpoint_removed_before_it_is_read_is_skipped(command, parrot_run, monkeypatch, tmp_path):
    shutil.copytree(parrot_run, tmp_path / "run")
    original = scores.Scores.evaluate

    def removing(results, program, checkpoints, step, *args, **kwargs):
        found = original(results, program, checkpoints, step, *args, **kwargs)
        if step == 1:
            shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
        return found

    monkeypatch.setattr(scores.Scores, "evaluate", removing)
    code, said = command("evaluate", tmp_path / "run", "--all-steps")
    assert code == 0, said
    assert "note: the checkpoint of step 2 was removed before it was read and is skipped" in said
    assert [found["steps"] for found in written(tmp_path / "run", "cumulative.json")["cumulative"]] == [[1]]
    assert not (tmp_path / "run" / "evaluation" / "step_2.json").exists()


def test_checkpoints_are_listed_again_after_the_data_is_read(command, parrot_run, monkeypatch, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(parrot_run, run_dir)
    (run_dir / "checkpoints" / "2").rename(tmp_path / "later")
    ready, evaluate_one = prepared_run.prepare_run, scores.Scores.evaluate

    def while_training(*args, **kwargs):
        found = ready(*args, **kwargs)
        (tmp_path / "later").rename(run_dir / "checkpoints" / "2")
        shutil.rmtree(run_dir / "checkpoints" / "1")
        return found

    def too_late(*args, **kwargs):
        shutil.rmtree(run_dir / "checkpoints" / "2")
        return evaluate_one(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(prepared_run, "prepare_run", while_training)
        code, said = command("evaluate", run_dir)
    assert code == 0, said
    assert written(run_dir, "step_2.json")["step"] == 2
    monkeypatch.setattr(scores.Scores, "evaluate", too_late)
    code, said = command("evaluate", run_dir)
    assert code == 2
    assert "every checkpoint to evaluate (2) was removed meanwhile" in said


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        (("def evaluate(", "def other("), "Parrot lacks the ability Evaluates: add evaluate(params, rng, batch)"),
        (('("predicted", "q_halt")', '("predicted",)'), "the extras of Parrot.evaluate lack q_halt"),
    ],
)
def test_a_model_without_answers_is_not_judged(command, parrot, parrot_run, monkeypatch, tmp_path, change, lacks):
    name = f"mute_{len(lacks)}"
    (parrot / f"{name}.py").write_text((parrot / "parrot.py").read_text().replace(*change))
    shutil.copytree(parrot_run, tmp_path / "run")
    text = (parrot_run / "config.gin").read_text()
    save_config(tmp_path / "run", text.replace("import parrot", f"import {name}").replace("parrot.P", f"{name}.P"))
    monkeypatch.setattr(scores.Scores, "evaluate", None)  # not reached
    code, said = command("evaluate", tmp_path / "run", "--gin", f"import {name}")
    assert code == 2, said
    assert f"the model's answers, but {lacks}. Expected inputs, predicted, puzzle_ids, q_halt" in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{tmp}/nothing"], "no run in '{tmp}/nothing': there is no such folder"),
        (["{tmp}"], "no run in '{tmp}': it has no config.gin"),
        (["{published}"], "'{published}' is a published model, not a run"),
        (["hf://owner/name"], "'hf://owner/name' is a published model, not a run"),
        (["gin/quickstart.gin"], "is an experiment file; give the directory of its run, such as"),
        (["{run}", "--step", "7"], "--step 7: '{run}' has no complete checkpoint of that step; existing: 1, 2"),
        (["{run}@7"], "--step 7: '{run}' has no complete checkpoint of that step; existing: 1, 2"),
        (["{run}@1", "--step", "2"], "{run}@1 and --step 2 both name steps: give one of them"),
        (["{run}@1", "--all-steps"], "{run}@1 and --all-steps both name steps: give one of them"),
        (["{run}@last"], "{run}@last: expected RUN, RUN@STEP with a step number, or RUN@best"),
        (["{run}", "--gin", "BATCHSIZE = 3"], "did you mean 'BATCH_SIZE'"),
        (["{run}", "--gin", "DATA = 'nowhere'"], "no puzzles in 'nowhere'"),
        (["{run}", "--submission", "{run}/config.gin/x"], "cannot write to"),
        (["{run}", "--by-position"], "--by-position: rows of PuzzleTask have no positions and no weights; expected a"),
        (["{text}", "--by-position", "--lm-eval", "arc_easy"], "--by-position does not go with --lm-eval: leave one"),
        (["{text}", "--submission", "x.json"], "this run's task has no attempts to submit; expected an ARC dataset"),
        (["{text}", "--gin", "EVAL_BATCHES = 0"], "give --num-examples N or --num-examples all"),
        (["{run}", "--gin", "EVAL_BATCHES = 0"], "give --num-examples N or --num-examples all"),
    ],
)
def test_wrong_arguments_are_reported_before_anything_starts(command, monkeypatch, parrot_run, tmp_path, argv, message):
    monkeypatch.setattr(prepared_run, "prepare_run", None)  # not reached
    text = tmp_path / "text"
    (text / "checkpoints").mkdir(parents=True)
    shutil.copytree(parrot_run / "checkpoints", text / "checkpoints", dirs_exist_ok=True)
    save_config(text, loader.load("gin/quickstart.gin").text)
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text("{}")
    names = {"run": parrot_run, "tmp": tmp_path, "text": text, "published": tmp_path / "published"}
    code, said = command("evaluate", *(word.format(**names) for word in argv))
    assert code == 2
    assert message.format(**names) in said


def test_a_metric_without_weight_in_a_checkpoint_has_no_figure(capsys):
    of = {"by_step": {}, "share": None, "scored": 8}
    checkpoints = [{**of, "means": {"loss": 0.5}}, {**of, "means": {"loss": 0.25, "precision": 0.75}}]
    about = {"evaluated_on": "held-out rows"}
    evaluate._show_tables(SimpleNamespace(checkpoints=checkpoints, steps=[1, 2], about=about, judge=None))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["step", "1", "0.5000", "-"] in rows
    assert ["step", "2", "0.2500", "0.7500"] in rows


def test_a_run_in_a_folder_that_may_not_be_entered_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_run.os, "access", lambda folder, mode: False)
    with pytest.raises(UserError, match="you may not enter this folder"):
        saved_run.read(str(tmp_path))


def test_positions_count_through_the_chunks_of_a_row():
    whole = synthetic.random_tokens(vocab_size=3, length=512, num_streams=2)
    assert evaluate._positions(whole)[-1] == range(256, 512)
    assert evaluate._positions(ChunkedTask(whole, 64)) == evaluate._positions(whole)


def test_a_run_without_a_checkpoint(command, parrot_run, tmp_path):
    shutil.copy(parrot_run / "config.gin", tmp_path)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)  # begun, and never finished
    code, said = command("evaluate", tmp_path)
    assert code == 2
    assert "has no complete checkpoint: one is saved every CHECKPOINT_INTERVAL steps" in said


def test_rows_that_are_no_number_are_refused(command, parrot_run):
    code, said = command("evaluate", parrot_run, "--rows", "0")
    assert code == 2
    assert "--num-examples: 0: expected a whole number, at least 1" in said


def test_text_is_evaluated_in_whole_batches():
    experiment = loader.load("gin/quickstart.gin").build()
    batch = experiment.batch_size
    sizes = {"batch_size": batch, "eval_batches": experiment.evaluation.eval_batches}
    chosen = functools.partial(scores.select, experiment.task, **sizes)
    assert chosen(rows=None).batches == experiment.evaluation.eval_batches
    asked = chosen(rows=batch + 1)
    assert asked.batches == 2
    assert asked.describe() == f"the validation data, at most {2 * batch} rows"
    assert chosen(rows="all").batches is None
    drawn = functools.partial(scores.select, synthetic.random_tokens(vocab_size=3, length=4, num_streams=1), **sizes)
    assert drawn(rows=batch).describe() == f"the first {batch} rows of the validation data"
    with pytest.raises(UserError, match="has no end"):
        drawn(rows="all")


def test_the_configuration_of_a_run_in_a_bucket_is_read(monkeypatch, parrot_run):
    monkeypatch.setattr(paths, "is_remote", lambda path: True)
    found = saved_run.read(str(parrot_run), bindings=["import parrot", "BATCH_SIZE = 32"], slice_name="v4-16")
    assert saved_steps.select(found.run_dir, step=None, every=True) == [1, 2]
    experiment = found.config.build()
    assert (experiment.batch_size, experiment.slice) == (32, "v4-16")


@pytest.mark.slow
@pytest.mark.simulated(2)
def test_one_process_and_two_hosts_score_alike(launch, parrot, parrot_run, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(parrot))
    found = []
    for name, how in (("one", {"slice_name": "v4-16"}), ("two", {})):
        shutil.copytree(parrot_run, tmp_path / name)
        where = [str(tmp_path / name), "--all-steps", "--slice", "v4-16", "--gin", "import parrot"]
        where += ["--simulate"] if name == "two" else []
        said = launch("evaluate", *where, **how)
        assert "steps 1, 2 together (cumulative)" in said
        found.append([written(tmp_path / name, f) for f in ("step_1.json", "step_2.json", "cumulative.json")])
    assert found[0] == found[1]
    assert found[0][0]["arc"]["pass_at"] == FIRST
    assert (tmp_path / "two" / "logs" / "host_1.log").exists()


def test_the_strategy_of_the_example_fits_the_quickstart(tpu_topology):
    (binding,) = re.findall(r'quickstart-v4-16 .*--gin "(.*)"', evaluate.EXAMPLE)
    experiment = loader.load("gin/quickstart.gin", bindings=[binding]).build()
    assert experiment.strategy.name in binding
    assert experiment.bind(tpu_topology(experiment.slice)).abstract_state.params
