"""Running a suite: finished experiments are not repeated, failures do not stop it, duplicates run once."""

import dataclasses
import importlib.util
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from core.hosts import exit_codes
from core.training import metrics
from launch import __main__ as main
from launch import environment, terminal
from launch.config import differences
from launch.experiment import OF_PYTHON
from launch.experiments import results, suites
from launch.experiments import results as command
from launch.experiments.suites import State
from launch.hosts import tpu_host

TINY = """from __gin__ import dynamic_registration
from models import trm
from tasks import puzzles
include 'gin/trm/sudoku4.gin'
BATCH_SIZE = 16
TOTAL_STEPS = 4
EVAL_INTERVAL = 2
LOG_INTERVAL = 2
CHECKPOINT_INTERVAL = 2
LEARNING_RATE = {rate}
trm.TRM.embed_dim = 32
trm.TRM.num_layers = 1
trm.TRM.h_cycles = 1
trm.TRM.halt_max_steps = 2
puzzles.sudoku.num_train = 40
puzzles.sudoku.num_test = 16
puzzles.sudoku.num_aug = 2
"""
FAKE = """
import json, pathlib, sys
folder, steps, code = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.gin").write_text(sys.argv[4])
line = json.dumps({"step": steps, "validation/exact_accuracy": 0.5})
(folder / "metrics.jsonl").write_text(line + chr(10))
print("the last words")
sys.exit(code)
"""


@dataclasses.dataclass(frozen=True)
class Fake(suites.Mode):
    """Fake runs that write what a run would write, and exit with a code chosen by name."""

    codes: tuple = ()

    def command(self, entry):
        code = dict(self.codes).get(entry.name, 0)
        steps = 2 if code else self.last_step(entry)
        return [sys.executable, "-c", FAKE, entry.run_dir, str(steps), str(code), entry.text]


@pytest.fixture
def folder(tmp_path):
    for name, rate in (("a", "1e-3"), ("b", "2e-3"), ("c", "1e-3")):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / f"{name}.gin").write_text(TINY.format(rate=rate))
    return tmp_path / "mine"


@pytest.fixture
def suite(folder, tmp_path):
    def make(mode=None, **options):
        root = str(tmp_path / "runs")
        entries = suites.load(suites.files(str(folder)), root=root, **options)
        made = suites.Suite(entries, mode=mode or Fake(), root=root, logs=tmp_path / "logs")
        made.find_done()
        return made

    return make


def texts(suite):
    return {name: status.text for name, status in suite.status.items()}


@pytest.mark.covers("E03")
def test_a_suite_continues_after_a_failure_and_resumes(suite, capsys):
    first = suite(Fake(codes=(("a", 3),)))
    assert first.run() == 1
    assert [status.state for status in first.status.values()] == [State.FAILED, State.DONE, State.WAITING]
    assert first.status["mine/a"].text.startswith("failed with exit code 3")
    assert first.status["mine/c"].text == "same as mine/a"
    assert [first.failed(entry) for entry in first.entries] == [True, False, True]
    assert first.last_lines(first.entries[0]) == ["the last words"]
    again = suite()
    assert texts(again) == {"mine/a": "waiting", "mine/b": "already done", "mine/c": "same as mine/a"}
    capsys.readouterr()
    assert again.run() == 0
    said = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert [(number, name) for number, name, status in said if status == "running"] == [("1/3", "mine/a")]
    assert ["2/3", "mine/b", "already done"] in said
    assert again.run_dirs["mine/c"] == again.run_dirs["mine/a"]


def test_an_experiment_done_in_another_group_is_not_repeated(suite, folder, tmp_path):
    suite().run()
    other = tmp_path / "other"
    other.mkdir()
    (other / "z.gin").write_text((folder / "b.gin").read_text())
    root = str(tmp_path / "runs")
    there = suites.Suite(suites.load(suites.files(str(other)), root=root), mode=Fake(), root=root, logs=tmp_path)
    there.find_done()
    assert there.status["other/z"].text == f"already done in {root}/mine/b"
    assert there.run_dirs["other/z"] == f"{root}/mine/b"
    (tmp_path / "runs/mine/b").rename(tmp_path / "runs/b-v4-8")  # the default of a run that was started alone
    there.find_done()
    assert there.status["other/z"].text == f"already done in {root}/b-v4-8"


def test_a_smoke_run_is_not_the_run_of_its_experiment(suite, tmp_path):
    suite().run()
    (tmp_path / "runs" / "mine" / "b").rename(tmp_path / "runs" / "b-v4-8")
    assert texts(suite())["mine/b"].startswith("already done in")
    (tmp_path / "runs" / "b-v4-8" / environment.REHEARSAL).write_text("")
    assert texts(suite())["mine/b"] == "waiting"


def test_a_run_before_its_last_step_is_not_done(suite):
    short = suite(Fake(steps=3))
    short.run()
    assert suite(Fake(steps=3)).status["mine/a"].text == "already done"
    assert suite().status["mine/a"].text == "waiting"


def test_a_run_that_ended_in_its_last_evaluation_or_save_is_not_done(suite, tmp_path):
    suite().run()
    run_dir = tmp_path / "runs" / "mine" / "a"
    line = json.loads((run_dir / "metrics.jsonl").read_text())
    assert texts(suite())["mine/a"] == "already done"
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": line["step"], "loss": 1.0}))
    assert texts(suite())["mine/a"] == "waiting"
    (run_dir / "metrics.jsonl").write_text(json.dumps(line))
    (run_dir / "checkpoints" / "2").mkdir(parents=True)  # the folder of a save that was not finished
    assert texts(suite())["mine/a"] == "waiting"
    gathered = suite()
    gathered.gather()
    assert texts(gathered)["mine/a"] == "step 4 of 4, without its last evaluation or checkpoint"


def test_a_directory_of_another_experiment_is_refused(suite):
    suite().run()
    changed = suite(bindings=["EVAL_INTERVAL = 3"])
    state, said = changed.status["mine/b"]
    assert state == State.REFUSED
    assert "contains another experiment (EVAL_INTERVAL = 3, was 2). Give another --run-root" in said
    assert changed.run() == 1


def test_a_run_on_another_slice_is_of_the_same_experiment(suite):
    suite(slice_name="v4-8").run()
    assert texts(suite(slice_name="v4-16"))["mine/b"] == "already done"


def test_experiments_on_other_data_are_others(suite, folder):
    for name in ("a", "b", "c"):
        (folder / f"{name}.gin").unlink()
    for name in ("easy", "hard"):
        (folder / f"{name}.gin").write_text(f"include 'gin/trm/exp01/exp01a.gin'\nDATA = 'x/{name}'\n")
    options = {"check_data": False, "slice_name": "v4-8"}
    first = suite(Fake(codes=(("hard", 1),)), **options)
    first.run()
    assert texts(suite(**options)) == {"mine/easy": "already done", "mine/hard": "waiting"}
    shutil.rmtree(first.run_dirs["mine/hard"])
    found = suite(**options)
    found.gather()
    assert texts(found) == {"mine/easy": "done", "mine/hard": "not run"}


def test_brackets_in_settings_are_shown(suite, folder, capsys):
    for name in ("a", "b", "c"):
        (folder / f"{name}.gin").unlink()
    for name in ("a-f", "g-z"):
        (folder / f"{name}.gin").write_text(f"include 'gin/trm/exp01/exp01a.gin'\nDATA = 'x/[{name}]*.csv'\n")
    made = suite(check_data=False, slice_name="v4-8")
    terminal.console(140, markup=False).print(results._table(made))
    assert "[a-f]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "why"),
    [("X = (1,", "its config.gin is no configuration: "), (OF_PYTHON + "\n", "it contains a run of renga.Trainer.")],
)
def test_a_directory_with_a_configuration_that_cannot_be_compared_is_refused_alone(suite, tmp_path, content, why):
    for name in ("a", "b"):
        (tmp_path / "runs" / "mine" / name).mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "a" / "config.gin").write_text(content)
    made = suite()
    assert [made.status[f"mine/{name}"].state for name in "ab"] == [State.REFUSED, State.WAITING]
    assert why in made.status["mine/a"].text
    made.gather()
    assert [made.status[f"mine/{name}"].state for name in "ab"] == [State.REFUSED, State.MISSING]


def test_a_group_is_not_a_folder_of_the_same_name(tmp_path, monkeypatch):
    for name in ("exp01", "all", "own"):  # as a suite makes them in its run root
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "a.gin").write_text("")
    monkeypatch.chdir(tmp_path)
    assert len(suites.files("all")) > len(suites.files("exp01")) > 1
    assert [file.name for file in suites.files("own")] == ["a.gin"]


def test_a_duplicate_of_a_refused_experiment_has_no_scores_of_another_one(suite):
    suite().run()
    changed = suite(bindings=["EVAL_INTERVAL = 3"])
    found = results.rows(changed.entries, status=changed.status, run_dirs=changed.run_dirs)
    assert {row["experiment"]: row["exact_accuracy"] for row in found} == {"a": None, "b": None, "c": None}


def test_a_duplicate_that_was_run_itself_has_the_status_of_its_own_run(suite):
    made = suite(seeds=range(2))
    for entry in made.entries:
        step, score = (2, 0.1) if entry.name.startswith("c") else (4, 0.9)
        mode = Fake(codes=((entry.name, 3),) if step == 2 else ())
        subprocess.run(mode.command(entry), capture_output=True, check=False)
        line = json.dumps({"step": step, "validation/exact_accuracy": score})
        (pathlib.Path(entry.run_dir) / "metrics.jsonl").write_text(line)
    made.gather()
    found = results.rows(made.entries, status=made.status, run_dirs=made.run_dirs)
    said = {row["experiment"]: (row["status"], row["exact_accuracy"], row["mean_of_seeds"]) for row in found}
    assert said["a"] == ("done", 0.9, 0.9)
    assert said["c"] == ("step 2 of 4", 0.1, None)
    assert [made.failed(entry) for entry in made.entries] == [False] * 4 + [True] * 2


def test_a_preempted_run_ends_the_suite(suite):
    stopped = suite(Fake(codes=(("a", exit_codes.PREEMPTED),)))
    assert stopped.run() == exit_codes.PREEMPTED
    state, said = stopped.status["mine/a"]
    assert state == State.UNFINISHED  # the same command resumes it
    assert said.startswith("stopped after ")
    assert stopped.status["mine/b"].text == "waiting"


def test_gathering_uses_the_configuration_of_the_runs(suite, folder):
    suite(bindings=["EVAL_INTERVAL = 3"]).run()
    (folder / "d.gin").write_text(TINY.format(rate="5e-3"))
    found = suite(slice_name="v4-16")  # which the runs did not have
    found.gather()
    assert texts(found) == {
        "mine/a": "done",
        "mine/b": "done",
        "mine/c": "same as mine/a: done in " + found.run_dirs["mine/a"],
        "mine/d": "not run",
    }
    assert found.entries[0].experiment.evaluation.eval_interval == 3
    assert found.entries[0].experiment.slice == "v4-8"


def test_the_command_of_an_experiment(suite):
    entry = suite(seeds=range(2)).entries[1]
    mode = suites.Mode(simulate=True, steps=7)
    assert mode.command(entry)[1:] == [
        *("-m", "launch", "pod", "v4-8", entry.path, "--run-dir", entry.run_dir),
        *("--gin", "SEED = 1", "--steps", "7", "--simulate"),
    ]
    assert suites.Mode(check="smoke").command(entry)[-2:] == ["--check", "smoke"]
    assert mode.last_step(entry) == 4


def test_a_difference_is_named():
    assert suites.difference("A = 1\nB = 2", "A = 1\nB = 3") == "B = 3, was 2"
    assert suites.difference("A = 1", "A = 1\nC = 3") == "C = 3, was not bound"
    here, there = "A = 1\nDATA = 'x'\nSLICE = 'v4-8'\n", "A = 1\nDATA = 'y'\n"
    assert differences.is_same(here, there, ignoring=suites.LOCATION)
    assert not differences.is_same(here, there)
    assert not differences.is_same(here, there.replace("1", "2"), ignoring=suites.LOCATION)


@pytest.mark.parametrize(
    "seconds", [0, pytest.param(3, marks=pytest.mark.slow)]
)  # while its process starts; while it runs
def test_stopping_the_suite_stops_the_run(folder, tmp_path, launch_command, seconds):
    """On SIGTERM the suite stops the run, waits for it, and writes the table."""
    options = ("--simulate", "--run-root", str(tmp_path / "runs"), "--out", str(tmp_path / "out"))
    command, env = launch_command("suite", str(folder), *options)
    process = subprocess.Popen(command, cwd=suites.environment.WORKSPACE, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().split()[-1] == "running"
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "results.csv" in output
    assert "stopped after" in output
    time.sleep(1)  # a process that was left behind would have come so far as to show its arguments
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path / "runs") not in left


def test_chips_are_left_to_the_runs(launch_command, folder, tmp_path):
    """The suite itself uses the CPU, whatever platform its runs are to use; they inherit its environment."""
    command, env = launch_command("suite", str(folder), "--analyze", "--out", str(tmp_path / "out"))
    root = {"RENGA_RUN_ROOT": str(tmp_path / "runs"), "JAX_PLATFORMS": "tpu"}
    done = subprocess.run(command, cwd=suites.environment.WORKSPACE, env=env | root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "results.csv").read_text().count("not run") == 3


def test_without_charts_there_is_a_table_and_the_command_for_charts(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    options = ("--run-root", str(tmp_path / "runs"), "--out", str(tmp_path / "out"))
    assert main.main(["suite", str(folder), "--analyze", *options]) == 0
    assert (tmp_path / "out" / "results.csv").read_text().count("not run") == 3
    assert not (tmp_path / "out" / "results.html").exists()
    said = capsys.readouterr().out
    assert "results.html: needs the package matplotlib; launch/setup.sh --extra plots; then run this command" in said


def test_an_analysis_has_every_seed_that_was_run(folder, tmp_path, capsys):
    root = tmp_path / "runs"

    def analyzed(*more):
        options = ("--run-root", str(root), "--out", str(tmp_path / "out"), *more)
        assert main.main(["suite", str(folder), "--analyze", *options]) == 0
        rows = (tmp_path / "out" / "results.csv").read_text().splitlines()[1:]
        return [row.split(",")[1] for row in rows]

    assert analyzed() == ["a", "b", "c"]
    for name in ("a_seed1", "b_seed20261128", "other_seed5", "a_seed", "a_seedx"):
        (root / "mine" / name).mkdir(parents=True)
    (root / "elsewhere" / "a_seed7").mkdir(parents=True)
    assert analyzed() == ["a", "b", "c"]  # no run began there
    for run in root.glob("*/*"):
        (run / "config.gin").write_text(suites.load([folder / "b.gin"])[0].text)
    assert analyzed() == [f"{name}{seed}" for name in "abc" for seed in ("", "_seed1", "_seed20261128")]
    assert analyzed("--seeds", "1") == ["a", "b", "c"]
    capsys.readouterr()
    malformed = [root / "elsewhere" / f"a_seed{seed}" for seed in (7, 8, 9, 10)]
    for run, content in zip(malformed, (b"this is (no gin", b"\xff", b"X = (1,", b"X = {[]: 1}"), strict=True):
        run.mkdir(exist_ok=True)
        (run / "config.gin").write_bytes(content)
    assert analyzed("--seeds", "1") == ["a", "b", "c"]
    said = capsys.readouterr().err
    assert all(f"left out: {run}: its config.gin is no configuration: " in said for run in malformed)


def test_wrong_arguments_are_refused(folder, capsys):
    def said(*arguments):
        assert main.main(["suite", *arguments]) == exit_codes.USER_ERROR
        return capsys.readouterr().err

    assert "is not a host of a TPU" in said(str(folder))
    assert "expected a local folder" in said(str(folder), "--list", "--out", "gs://bucket/x")
    assert "did you mean 'exp10'" in said("exp1x", "--list")
    assert "did you mean 'exp10'" in said("exp1x")


def test_mistakes_that_fail_on_every_host_are_reported_before_anything_starts(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tpu_host, "look", lambda: tpu_host.Place(True, "v4-64", ()))
    started = []
    monkeypatch.setattr(suites.Suite, "run", lambda suite, requested: started.append(suite) or 0)

    def said(*more):
        code = main.main(["suite", *more, "--out", str(tmp_path / "out"), "--gin", "DATA = 'gs://bucket/set'"])
        return code, capsys.readouterr().err

    local = ("--run-root", str(tmp_path / "runs"))
    code, error = said("exp07", *local)
    assert code == exit_codes.USER_ERROR
    assert f"runs would go to {tmp_path}/runs, on a disk of this host, but all 8 hosts of v4-64 must see one" in error
    assert "give --run-root gs://BUCKET/runs" in error
    code, error = said("control", *local)
    assert code == exit_codes.USER_ERROR
    assert "v4-8 (control/paper_attention) and v4-64 (control/short_warmup), but these hosts belong to one" in error
    assert "give --slice" in error
    assert not started
    assert said("exp07", *local, "--slice", "v4-8")[0] == 0  # one host
    assert len(started) == 1
    assert said("exp07", *local, "--list")[0] == 0
    entries = suites.load(suites.files("exp07"), root="gs://bucket/runs", check_data=False)
    command._check_places(entries, "gs://bucket/runs")


@pytest.mark.slow
@pytest.mark.simulated(2)
@pytest.mark.covers("E03")
def test_two_hosts_run_a_suite(launch, folder, tmp_path):
    options = ("--slice", "v4-16", "--run-root", str(tmp_path / "runs"), "--out", str(tmp_path / "out"))
    output = launch("suite", str(folder), "--simulate", *options)
    assert "3 experiments, 2 of them distinct; 3 done" in output
    for name in "ab":
        run = tmp_path / "runs" / "mine" / name
        assert metrics.read(str(run)).last(results.SCORE) is not None
        assert "host 1 of 2: from step 0 to 4" in (run / "logs" / "host_1.log").read_text()
    assert "held-out puzzles" in (tmp_path / "out" / "results.csv").read_text()
    assert "3 done" in launch("suite", str(folder), "--simulate", *options)


@pytest.mark.slow
@pytest.mark.covers("E03", "E04")
def test_two_experiments_are_trained(launch, folder, tmp_path):
    """Trained, then gathered again without running; the third is a duplicate of the first."""
    options = ("--run-root", str(tmp_path / "runs"), "--out", str(tmp_path / "out"))
    output = launch("suite", str(folder), "--simulate", *options)
    assert "3 experiments, 2 of them distinct; 3 done" in output
    began = time.monotonic()
    again = launch("suite", str(folder), "--analyze", *options)
    assert time.monotonic() - began < 30
    assert "2 of them distinct; 3 done" in again
    rows = (tmp_path / "out" / "results.csv").read_text().splitlines()
    assert len(rows) == 4
    assert "Accuracy by step" in (tmp_path / "out" / "results.html").read_text()
    assert metrics.read(str(tmp_path / "runs" / "mine" / "a")).last(results.SCORE) is not None
    assert not (tmp_path / "runs" / "mine" / "c").exists()
