"""Runs with phases: data, row length, batch size and strategy change after given steps, and a resume is exact."""

import dataclasses
import json
import shutil
import subprocess

import numpy as np
import pytest

import renga
from core import optimizers
from core.errors import UserError
from core.hosts import exit_codes
from launch import __main__ as main
from launch import environment
from launch.check import preflight
from launch.config import loader
from launch.experiment import Experiment
from launch.experiments import saved_run
from launch.phases import Phase

BYTES = renga.vocabularies.bytes()
TINY = [
    "NUM_STREAMS = 4",
    "TOTAL_STEPS = 9",
    "WARMUP_STEPS = 2",
    "BATCH_SIZE = 16",
    "LENGTH = 32",
    "CHECKPOINT_INTERVAL = 2",
    "EVAL_BATCHES = 0",
    "LOG_INTERVAL = 1",
    "PROMPT = ''",
    "transformer.Transformer.num_layers = 2",
    "transformer.Transformer.embed_dim = 32",
    "transformer.Transformer.mlp_dim = 64",
]
PHASES = [
    "PHASES = (@longer/experiment.Phase(), @split/experiment.Phase())",
    "longer/experiment.Phase.after = 4",
    "longer/experiment.Phase.batch_size = 8",
    "longer/experiment.Phase.task = @longer/text.python_source()",
    "longer/text.python_source.length = 64",
    "split/experiment.Phase.after = 7",
    "split/experiment.Phase.strategy = @strategies.fsdp_tensor()",
    "strategies.fsdp_tensor.tensor = 2",
    "split/experiment.Phase.accum_steps = 2",
]


def experiment(*more) -> Experiment:
    return loader.load("gin/quickstart.gin", bindings=[*TINY, *PHASES, *more]).build()


def test_a_phase_keeps_what_it_does_not_change():
    spans = experiment().spans()
    assert [(s.number, s.count, s.first_step, s.last_step) for s in spans] == [(1, 3, 0, 4), (2, 3, 4, 7), (3, 3, 7, 9)]
    seen = [(s.experiment.batch_size, s.experiment.row_length, s.experiment.accum_steps) for s in spans]
    assert seen == [(16, 32, 1), (8, 64, 1), (8, 64, 2)]
    assert [s.experiment.strategy.name for s in spans] == ["fsdp", "fsdp", "fsdp_tensor"]
    assert {s.experiment.total_steps for s in spans} == {9}
    assert len({s.seed for s in spans}) == 3


@pytest.mark.parametrize(("step", "length"), [(4, 32), (5, 64), (None, 64)])
def test_a_saved_step_has_the_experiment_of_the_phase_that_trained_it(step, length):
    config = loader.load("gin/quickstart.gin", bindings=[*TINY, *PHASES])
    assert saved_run.SavedRun("unused", config, step).experiment().row_length == length


def test_a_command_can_name_one_phase():
    chosen = experiment("PHASE = 2")
    assert (chosen.batch_size, chosen.row_length, chosen.phases) == (8, 64, ())
    (span,) = chosen.spans()
    assert (str(span), span.experiment) == ("phase 2 of 3", chosen)
    assert (span.first_step, span.last_step) == experiment().spans()[1][2:4]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["split/experiment.Phase.after = 4"], "phases\\[1\\].after = 4: expected a step from 5 to 8"),
        (["longer/experiment.Phase.after = 0"], "phases\\[0\\].after = 0: expected a step from 1 to 8"),
        (["split/experiment.Phase.after = 9"], "phases\\[1\\].after = 9"),
        (["PHASE = 4"], "phase = 4: expected from 1 to 3"),
        (["longer/experiment.Phase.batch_size = 0"], "phase 2: Experiment: batch_size = 0"),
        (
            [
                "PHASES = (@longer/experiment.Phase(), @split/experiment.Phase(), @none/experiment.Phase())",
                "none/experiment.Phase.after = 8",
            ],
            "phases\\[2\\] changes nothing",
        ),
    ],
)
def test_phases_that_cannot_be_are_refused(more, message):
    with pytest.raises(UserError, match=message):
        experiment(*more)


def test_state_that_belongs_to_rows_needs_the_same_rows_in_all_phases():
    class Carries:
        def init_carry(self, batch):
            return np.zeros(batch["inputs"].shape)

    whole = experiment()
    whole.require_trainable()
    with pytest.raises(UserError, match="phase 2 has other rows than phase 1, and the model carries state"):
        _with_model(whole, Carries).require_trainable()


def test_parameters_whose_shape_follows_the_rows_are_refused_before_the_first_phase():
    class Follows(type(experiment().model)):
        def init(self, rng, batch):
            return {**super().init(rng, batch), "~rows": {"w": np.zeros(batch["inputs"].shape[1], np.float32)}}

    whole = experiment()
    fields = {f.name: getattr(whole.model, f.name) for f in dataclasses.fields(whole.model)}
    with pytest.raises(UserError, match="phase 2 has other rows than phase 1, and the model's parameters have other"):
        dataclasses.replace(whole, model=Follows(**fields)).require_trainable()


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        ({"batch_size": 20}, "phase 2 of 2: batch_size = 20 does not divide over 16 groups of chips"),
        ({"task": renga.text.files(train=("nowhere/*.txt",), length=32, num_streams=4, vocabulary=BYTES)}, "nowhere"),
    ],
)
def test_a_later_phase_that_does_not_fit_is_refused_before_the_first_step(tmp_path, phase, said):
    trainer = renga.Trainer(
        model=renga.transformer.Transformer(
            vocab_size=BYTES.size, dtype="float32", num_layers=1, embed_dim=16, mlp_dim=32, num_heads=2, num_kv_heads=2
        ),
        task=renga.text.python_source(length=32, num_streams=4, vocabulary=BYTES),
        optimizer=renga.optimizers.adamw(learning_rate=renga.optimizers.constant(1e-3)),
        strategy=renga.strategies.data_parallel(),
        run_dir=str(tmp_path / "run"),
        batch_size=16,
        phases=(Phase(after=2, **phase),),
    )
    with pytest.raises(UserError, match=said):
        trainer.fit(3)
    assert not (tmp_path / "run" / "checkpoints").exists()


def _with_model(whole, carries):
    class Model(type(whole.model)):
        init_carry = carries.init_carry

    fields = {f.name: getattr(whole.model, f.name) for f in dataclasses.fields(whole.model)}
    return dataclasses.replace(whole, model=Model(**fields))


def test_epochs_are_counted_by_phase_where_the_size_of_the_data_is_known():
    class Sized(type(experiment().task)):
        def train_tokens(self):
            return 1024  # two steps of either phase

    task = experiment().task
    sized = Sized(*(getattr(task, f.name) for f in dataclasses.fields(task)))
    assert experiment().spans()[0].epochs is None
    own = dataclasses.replace(experiment(), phases=(), task=sized)
    [span] = own.spans()
    assert span.epochs == 9 * 512 / 1024
    assert span.step_of_epoch(1) == 2
    assert span.repeats() == []
    [span] = dataclasses.replace(own, max_epochs=2.0).spans()
    assert "read 4.50 times by step 9, and max_epochs = 2: end after step 4" in span.repeats()[0]
    assert "read 2.50 times by step 5," in span.repeats(5)[0]
    assert span.repeats(4) == []


@pytest.mark.covers("T16")
def test_schedules_follow_one_another():
    rate = optimizers.joined(schedules=(optimizers.constant(1.0), lambda step: 2.0 + step), boundaries=(3,))
    assert [float(rate(step)) for step in range(6)] == [1, 1, 1, 2, 3, 4]
    for wrong in ((), (3, 2), (0,)):
        with pytest.raises(UserError, match="2 schedules and boundaries"):
            optimizers.joined(schedules=(rate, rate), boundaries=wrong)


def losses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.slow
@pytest.mark.covers("D12", "T16")
def test_a_run_that_stops_in_a_phase_or_at_its_end_continues_bit_for_bit(launch, tmp_path):
    flags = [word for binding in (*TINY, *PHASES) for word in ("--gin", binding)]

    def train(run_dir, *more):
        told = ["train", environment.WORKSPACE / "gin/quickstart.gin", "--slice", "v4-16", "--run-dir", run_dir]
        return launch(*map(str, told), *flags, *more, slice_name="v4-16")

    said = train(tmp_path / "whole")
    for words in ("16 rows x 32 tokens", "8 rows x 64 tokens", "2 of 3, after step 4", "fsdp 4 x tensor 2"):
        assert words in said
    want = losses(tmp_path / "whole")
    assert sorted(want) == list(range(1, 10))
    said = train(tmp_path / "first", "--steps", "4")
    assert f"run         {tmp_path / 'first'}" in said  # the lines at the end
    assert "nothing to train: " in train(tmp_path / "first", "--steps", "3")
    for steps in (4, 6):  # at the boundary, and within the second phase
        folder = tmp_path / f"stopped after {steps}"
        shutil.copytree(tmp_path / "first", folder)
        if steps > 4:
            train(folder, "--steps", str(steps))
        train(folder)
        assert losses(folder) == want


PREEMPTED = """
import os, signal, sys
from core.hosts import distributed
from launch import __main__ as main
from launch.runs import prepared_run

at, calls = sys.argv.pop(1), {"prepare": 0}
asked, prepare = distributed.preempted, prepared_run.prepare_run

def preempted(step):
    if at == f"step {step}":
        os.kill(os.getpid(), signal.SIGTERM)
    return asked(step)

def prepare_run(*args, **options):
    calls["prepare"] += 1
    if at == f"phase {calls['prepare']}":
        os.kill(os.getpid(), signal.SIGTERM)
    return prepare(*args, **options)

distributed.preempted, prepared_run.prepare_run = preempted, prepare_run
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.covers("T16", "C08")
def test_a_run_that_is_preempted_at_a_boundary_continues_bit_for_bit(launch, launch_command, tmp_path):
    """SIGTERM comes in the last step of a phase, between two phases, and in the first step of one."""
    flags = [word for binding in (*TINY, *PHASES) for word in ("--gin", binding)]

    def told(run_dir):
        return ["train", "gin/quickstart.gin", "--slice", "v4-16", "--run-dir", str(run_dir), *flags]

    launch(*told(tmp_path / "whole"), slice_name="v4-16")
    want = losses(tmp_path / "whole")
    for at, saved in {"step 4": 4, "phase 2": 5, "step 5": 5}.items():
        folder = tmp_path / at.replace(" ", "_")
        (python, *_), env = launch_command(*told(folder), slice_name="v4-16")
        command = [python, "-c", PREEMPTED, at, *told(folder)]
        stopped = subprocess.run(command, cwd=environment.WORKSPACE, env=env, capture_output=True, text=True)
        assert stopped.returncode == exit_codes.PREEMPTED, stopped.stdout + stopped.stderr
        assert f"preempted (SIGTERM): saved a checkpoint at step {saved};" in stopped.stdout
        assert losses(folder) == {step: loss for step, loss in want.items() if step <= saved}
        launch(*told(folder), slice_name="v4-16")
        assert losses(folder) == want


def test_the_check_before_a_start_covers_every_phase(tmp_path):
    wrong = ["split/experiment.Phase.batch_size = 12"]
    where = {"slice_name": "v4-16", "run_dir": str(tmp_path), "hosts": "simulated"}
    found = preflight.check("gin/quickstart.gin", bindings=[*TINY, *PHASES, *wrong], **where).findings
    named = {(finding.name, finding.phase): finding for finding in found}
    assert named["layout", 2].ok
    assert named["memory", 2].ok
    assert not named["layout", 3].ok
    assert "12" in named["layout", 3].detail


@pytest.mark.slow
def test_a_damaged_checkpoint_at_a_boundary_sends_the_run_back_to_the_phase_before(launch, tmp_path):
    flags = [word for binding in (*TINY, *PHASES) for word in ("--gin", binding)]
    told = ["train", "gin/quickstart.gin", "--slice", "v4-16", "--run-dir", str(tmp_path / "run"), *flags]
    launch(*told, "--steps", "4", slice_name="v4-16")
    want = losses(tmp_path / "run")
    largest = max((tmp_path / "run/checkpoints/4").rglob("d/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(b"\0" * largest.stat().st_size)
    said = launch(*told, "--steps", "5", slice_name="v4-16")
    assert "checkpoint 4 cannot be restored" in said
    assert "resumed from 2" in said
    assert {step: loss for step, loss in losses(tmp_path / "run").items() if step <= 4} == want


@pytest.mark.slow
@pytest.mark.simulated(2)
def test_phases_do_not_depend_on_the_number_of_hosts(launch, tmp_path):
    flags = [word for binding in (*TINY, *PHASES) for word in ("--gin", binding)]
    launch("pod", "v4-16", "gin/quickstart.gin", "--simulate", "--run-dir", str(tmp_path / "two"), *flags)
    where = ["--slice", "v4-16", "--run-dir", str(tmp_path / "one")]
    launch("train", "gin/quickstart.gin", *where, *flags, slice_name="v4-16")
    ours, want = losses(tmp_path / "two"), losses(tmp_path / "one")
    np.testing.assert_allclose([ours[s] for s in range(1, 10)], [want[s] for s in range(1, 10)], atol=1e-5, rtol=0)


def test_a_run_cannot_train_one_phase_alone(capsys):
    told = ["train", "gin/quickstart.gin", "--slice", "v4-16", "--run-dir", "unused"]
    flags = [word for binding in (*TINY, *PHASES, "PHASE = 2") for word in ("--gin", binding)]
    assert main.main([*told, *flags]) == exit_codes.USER_ERROR
    assert "PHASE names the phase to report or plan" in " ".join(capsys.readouterr().err.split())
