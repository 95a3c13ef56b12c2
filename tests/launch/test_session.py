"""Whole runs with real text and checkpoints, in one process and in several."""

import json
import re
import shutil
import signal
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.checkpoints import steps
from core.errors import UserError
from core.hosts import exit_codes
from core.training import compilation, metrics
from core.training.trainer import StatisticsStep
from launch import __main__ as cli
from launch import environment, session
from launch.hosts import cluster
from launch.hosts.cluster import Host
from launch.runs import prepared_run

ROOT = environment.WORKSPACE

AVERAGED = ["OPTIMIZER = @optimizers.averaged()", "optimizers.averaged.optimizer = @optimizers.adamw()"]
WHOLE = types.SimpleNamespace(first_step=0)  # the span of a run without phases
SMALL = [
    "NUM_STREAMS = 4",
    "TOTAL_STEPS = 12",
    "WARMUP_STEPS = 3",
    "LENGTH = 64",
    "CHECKPOINT_INTERVAL = 6",
    "EVAL_INTERVAL = 6",
    "EVAL_BATCHES = 2",
    "LOG_INTERVAL = 1",
    "transformer.Transformer.num_layers = 2",
    "transformer.Transformer.embed_dim = 32",
    "transformer.Transformer.mlp_dim = 64",
    "PROMPT = 'def '",
]


def small(*more):
    return [word for binding in (*SMALL, *more) for word in ("--gin", binding)]


def scalars(run_dir, name):
    """name's value by step, the last written where a step was written twice."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


@pytest.fixture(scope="module")
def undisturbed(launch, tmp_path_factory):
    """Twelve steps in one process, and what they printed."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    said = launch(
        "train", "gin/quickstart.gin", "--slice", "v4-16", "--run-dir", str(run_dir), *small(), slice_name="v4-16"
    )
    return run_dir, said


@pytest.fixture(scope="module")
def stopped(launch, tmp_path_factory):
    """The same run, stopped at its checkpoint of step 6."""
    run_dir = tmp_path_factory.mktemp("stopped")
    where = ["--slice", "v4-16", "--run-dir", str(run_dir), "--steps", "6"]
    launch("train", "gin/quickstart.gin", *where, *small(), slice_name="v4-16")
    return run_dir


def test_a_run_prints_its_summary_and_its_results(undisturbed):
    run_dir, said = undisturbed
    for words in ("v4-16: 8 chips on 2 hosts", "fsdp 8", "FLOP per step", str(run_dir), "fresh"):
        assert words in said
    for words in ("step     12/12  loss", "validation loss", "The model continues 'def '", "launch/run tensorboard"):
        assert words in said
    assert "TOTAL_STEPS = 12" in (run_dir / "config.gin").read_text()
    losses = scalars(run_dir, "loss")
    assert sorted(losses) == list(range(1, 13))
    assert scalars(run_dir, "compile/seconds")[1] > 0
    assert losses[12] < losses[1] - 1.0
    assert sorted(scalars(run_dir, "validation/loss")) == [6, 12]
    assert sorted(scalars(run_dir, "checkpoint/blocked_seconds")) == [6, 12]
    assert min(scalars(run_dir, "checkpoint/write_seconds").values()) > 0
    (state_bytes,) = set(scalars(run_dir, "checkpoint/bytes").values())
    assert state_bytes > 12 * 43_168  # parameters and two moments
    assert "every 6 steps, keeping the latest 3" in said
    assert re.search(r"checkpoints: 2 saved, [\d.]+ [KM]iB each; training waited [\d.]+ (ms|s) per save", said)


@pytest.mark.covers("C06", "C14", "E11", "E12", "O09")
def test_stop_and_start_again_continues_bit_for_bit(launch, undisturbed, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    where = ["--slice", "v4-16", "--run-dir", str(tmp_path / "run")]
    said = launch("train", "gin/quickstart.gin", *where, *small(), slice_name="v4-16")
    assert "resumed from 6" in said
    assert re.search(r"compiled 0 programs and read [1-9]", said)
    assert re.search(r"programs +[1-9]\d* compiled before this start, kept in ", said)
    for name in ("loss", "gradient_norm", "validation/loss"):
        assert scalars(tmp_path / "run", name) == scalars(undisturbed[0], name)
    meta = json.loads(next((tmp_path / "run" / "checkpoints" / "12" / "meta").glob("*")).read_text())
    assert {"config", "git_revision", "versions", "seed", "data"} <= set(meta)


@pytest.mark.slow
@pytest.mark.simulated(2)
@pytest.mark.covers("D15", "T11", "L06", "C07", "C09")
def test_another_number_of_hosts_and_another_strategy_continue_the_run(launch, undisturbed, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    where = ["--simulate", "--run-dir", str(tmp_path / "run")]
    swap = small("STRATEGY = @strategies.fsdp_tensor()", "strategies.fsdp_tensor.tensor = 2")
    said = launch("pod", "v4-16", "gin/quickstart.gin", *where, *swap)
    assert "fsdp 4 x tensor 2" in said
    assert "resumed from 6" in said
    ours, want = scalars(tmp_path / "run", "loss"), scalars(undisturbed[0], "loss")
    np.testing.assert_allclose([ours[s] for s in range(7, 13)], [want[s] for s in range(7, 13)], atol=1e-5, rtol=0)
    assert (tmp_path / "run" / "logs" / "host_1.log").exists()


@pytest.mark.parametrize("index", [0, 1])
def test_a_host_has_an_hour_for_the_data_and_the_others_say_that_they_wait(monkeypatch, capsys, index):
    done = []

    def prepare(run_dir, *, is_host_zero):
        done.append(f"{run_dir} {is_host_zero}")

    monkeypatch.setattr(session.distributed, "barrier", lambda name, timeout_seconds: done.append(timeout_seconds))
    experiment = types.SimpleNamespace(task=types.SimpleNamespace(prepare=prepare))
    prepared_run._prepare_data(types.SimpleNamespace(experiment=experiment), "run", Host(index, 2, simulated=True))
    assert done == (["run True", 3600, 3600] if index == 0 else [3600, "run False", 3600])
    said = "host 1 of 2: waits for host 0 to build or read the data, 60 minutes at most\n"
    assert capsys.readouterr().out == (said if index else "")


COMPILING = {"meeting_seconds": 50.0, "statistics_step": None}


@pytest.mark.parametrize(
    ("count", "done"), [(1, []), (2, ["lowered", "compiled", ("run/compiled after step 8", 50.0)])]
)
def test_no_host_runs_a_step_before_all_have_compiled_it(monkeypatch, count, done):
    did = []
    lowered = types.SimpleNamespace(compile=lambda: did.append("compiled"))
    program = types.SimpleNamespace(lower_train_step=lambda: did.append("lowered") or lowered, train_step=None)
    monkeypatch.setattr(
        session.distributed, "barrier", lambda name, timeout_seconds: did.append((name, timeout_seconds))
    )
    run = types.SimpleNamespace(host=Host(0, count, True), program=program, last_step=9, **COMPILING)
    session.compile_together(run, 8)
    session.compile_together(run, 9)  # nothing is left to train
    assert did == done


def test_the_step_that_hosts_compiled_together_is_not_compiled_again(monkeypatch):
    """Compiled with options, as on a TPU, a program is not remembered by JAX."""
    x = jnp.arange(3.0)
    jitted = jax.jit(lambda state, batch: (state * batch, {}), compiler_options={"xla_embed_ir_in_executable": True})
    program = types.SimpleNamespace(lower_train_step=lambda: jitted.lower(x, x), train_step=jitted)
    monkeypatch.setattr(session.distributed, "barrier", lambda name, timeout_seconds: None)
    run = types.SimpleNamespace(host=Host(0, 2, True), program=program, last_step=9, **COMPILING)
    before = compilation.totals().programs
    step, _ = session.compile_together(run, 0)
    np.testing.assert_array_equal(step(x, x)[0], [0.0, 1.0, 4.0])
    assert compilation.totals().programs == before + 1


@pytest.mark.covers("X12")
def test_the_step_of_statistics_is_compiled_before_training():
    """Even on one host, where the usual step is compiled by its first call."""
    x, names = jnp.arange(3.0), {False: jnp.add, True: jnp.multiply}
    program = types.SimpleNamespace(
        lower_train_step=lambda with_statistics: jax.jit(names[with_statistics]).lower(x, x),
        train_step=jax.jit(names[False]),
    )
    about = {"meeting_seconds": 50.0, "statistics_step": StatisticsStep(None, 5)}
    run = types.SimpleNamespace(host=Host(0, 1, True), program=program, last_step=9, **about)
    before = compilation.totals().programs
    step, statistics = session.compile_together(run, 0)
    assert compilation.totals().programs == before + 1
    np.testing.assert_array_equal(statistics.run(x, x), [0.0, 1.0, 4.0])
    assert statistics.interval == 5
    assert compilation.totals().programs == before + 1
    np.testing.assert_array_equal(step(x, x), [0.0, 2.0, 4.0])


def random_tokens(*more):
    return small("TASK = @synthetic.random_tokens()", "PROMPT = ''", *more)


ENDLESS = random_tokens("TOTAL_STEPS = 100000", "CHECKPOINT_INTERVAL = 100000", "EVAL_INTERVAL = 100000")


def signaled(launch_command, tmp_path, number):
    """Sends a signal to two hosts after step 4; returns the exit code, what they printed, and the step they saved."""
    where = ["pod", "v4-16", "gin/quickstart.gin", "--simulate", "--run-dir", str(tmp_path)]
    command, env = launch_command(*where, *ENDLESS)
    running = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in running.stdout:
        if line.startswith("step      4/"):
            running.send_signal(number)
            break
    said = running.communicate(timeout=60)[0]
    (saved,) = (int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    return running.returncode, said, saved


@pytest.mark.parametrize(
    ("number", "code", "how"),
    [
        (signal.SIGTERM, 143, "preempted (SIGTERM)"),
        pytest.param(signal.SIGINT, 130, "interrupted (Ctrl-C)", marks=pytest.mark.slow),
    ],
)
@pytest.mark.simulated(2)
@pytest.mark.covers("C08")
def test_a_signal_saves_at_one_step_of_all_hosts(launch_command, tmp_path, number, code, how):
    returned, said, saved = signaled(launch_command, tmp_path, number)
    assert returned == code, said
    assert f"host 0 of 2: {how}: saved a checkpoint at step" in said
    assert "failed first" not in said
    assert saved >= 4
    assert f"host 1 of 2: {how}: saved a checkpoint at step {saved}" in (tmp_path / "logs" / "host_1.log").read_text()
    assert max(scalars(tmp_path, "loss")) >= 4


@pytest.mark.slow  # test_stop_and_start_again is quick
@pytest.mark.simulated(2)
@pytest.mark.covers("C08")
def test_a_run_continues_from_the_step_that_a_signal_saved(launch, launch_command, tmp_path):
    _, _, saved = signaled(launch_command, tmp_path, signal.SIGTERM)
    one_process = ["train", "gin/quickstart.gin", "--slice", "v4-16", "--run-dir", str(tmp_path)]
    said = launch(*one_process, *ENDLESS, "--steps", str(saved + 2), slice_name="v4-16")
    assert f"resumed from {saved}" in said


@pytest.mark.slow  # SIGTERM to hosts is quick; tests/core/hosts/test_interrupt.py
def test_ctrl_c_in_a_local_run_saves_what_it_has_trained(launch, launch_command, tmp_path):
    endless = random_tokens("TOTAL_STEPS = 100000", "CHECKPOINT_INTERVAL = 100000", "EVAL_BATCHES = 0")
    command, env = launch_command("pod", "local", "gin/quickstart.gin", "--run-dir", str(tmp_path), *endless)
    running = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in running.stdout:
        if line.startswith("step      4/"):
            running.send_signal(signal.SIGINT)
            break
    said = running.communicate(timeout=60)[0]
    assert running.returncode == exit_codes.INTERRUPTED, said
    (saved,) = steps.complete(tmp_path / "checkpoints")
    assert saved == max(scalars(tmp_path, "loss"))
    assert saved >= 4
    assert re.search(r"Interrupted at step \d+\. The run saves a checkpoint", said)
    assert f"interrupted (Ctrl-C): saved a checkpoint at step {saved}; run the same command to resume" in said
    assert not (tmp_path / "lock.json").exists()


@pytest.mark.slow
@pytest.mark.simulated(2)
@pytest.mark.covers("C15", "X12", "O12", "R09")
def test_parameters_are_saved_alone_averaged_and_exported_and_their_statistics_are_written(launch, tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    every = [f"settings.Checkpointing.{name} = 2" for name in ("params_checkpoint_interval", "keep_params_checkpoints")]
    every.append("settings.Logging.statistics_interval = 4")
    bindings = small(*every, *AVERAGED, "transformer.Transformer.num_kv_heads = 4", "PROMPT = ''")
    said = launch("pod", "v4-16", "gin/quickstart.gin", "--simulate", "--run-dir", str(run_dir), *bindings)
    card = " ".join(said.replace("│", " ").split())
    assert "the parameters alone every 2 steps and at the end, keeping the latest 2, 177 KiB each" in card
    assert re.search(r"checkpoints: 8 saved, [\d.]+ [KM]iB or less each", said)
    query = {kind: scalars(run_dir, f"statistics/{kind}/layers/block/query") for kind in ("param_rms", "update_ratio")}
    assert [sorted(values) for values in query.values()] == [[4, 8, 12]] * 2
    assert all(0.001 < ratio < 1 for ratio in query["update_ratio"].values())  # LEARNING_RATE over the size of weights
    verified = launch("checkpoints", "verify", str(run_dir))
    found = re.findall(r"step (\d+): intact \((\d+) arrays.*", verified)
    assert [int(step) for step, _ in found] == [12, 6, 12, 10]
    assert int(found[0][1]) > 3 * int(found[2][1])
    for index in (0, 1):
        line = rf"host {index}( of 2)?: process \d+ on \S+, 4 of 8 devices: cpu device \d+, \d+, \d+, \d+"
        assert re.search(line, (run_dir / "logs" / f"host_{index}.log").read_text())
        assert re.search(line.replace("( of 2)?", ""), card)
    tags = {tag for values in metrics.read(str(run_dir)).by_step.values() for tag in values}
    empty = [
        title
        for charts in metrics.DASHBOARD.values()
        for title, patterns in charts.items()
        if not any(re.search(pattern, tag) for pattern in patterns for tag in tags)
    ]
    assert empty == ["skipped updates and rollbacks", "MFU", "GiB of HBM by chip"]  # another policy; a TPU
    for name, text in {"tenth": f"{run_dir}@10", "last": str(run_dir)}.items():
        launch("export", text, "--out", str(out / name), "--dtype", "float32")
        assert (out / name / "model.safetensors").exists()
    refused = launch("export", f"{run_dir}@6", "--out", str(tmp_path / "none"), code=exit_codes.USER_ERROR)
    assert "a step of the parameters alone (params_checkpoint_interval) is" in refused


@pytest.mark.covers("T10", "O07")
@pytest.mark.slow
def test_a_non_finite_loss_ends_the_run_and_metrics_are_kept(launch, tmp_path):
    where = ["--slice", "v4-8", "--run-dir", str(tmp_path)]
    bindings = random_tokens("LEARNING_RATE = 1e38", "TOTAL_STEPS = 100", "CHECKPOINT_INTERVAL = 100")
    said = launch("train", "gin/quickstart.gin", *where, *bindings, slice_name="v4-8", code=exit_codes.NON_FINITE)
    assert re.search(r"step \d+: .*(loss|gradient_norm) = (nan|inf)", said)
    assert scalars(tmp_path, "loss")[1] > 0
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


@pytest.mark.covers("D09")
@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("VOCAB_SIZE = 100", "VOCAB_SIZE: "),
        ("text.seqio.num_streams = 3", "must divide over NUM_STREAMS = 3"),
        ("METRIC_EXAMPLES = 4", "METRIC_EXAMPLES = 4: needs a seqio task of your own"),
    ],
)
@pytest.mark.usefixtures("no_cache_of_the_user")
def test_every_start_checks_that_data_and_model_fit(monkeypatch, tmp_path, capsys, binding, message):
    monkeypatch.setenv("RENGA_SIMULATE", "v4-32")  # which the devices of every test play
    monkeypatch.setattr(cluster, "join", lambda slice_, **_: Host(0, 1, True))
    where = ["--slice", "v4-32", "--run-dir", str(tmp_path)]
    assert cli.main(["train", "gin/quickstart.gin", *where, "--gin", binding]) == exit_codes.USER_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_finished_run_ends_at_once(launch, undisturbed):
    where = ["--slice", "v4-16", "--run-dir", str(undisturbed[0])]
    said = launch("train", "gin/quickstart.gin", *where, *small(), slice_name="v4-16")
    assert "nothing to train: " in said
    assert "validation loss" not in said
    said = launch("train", "gin/quickstart.gin", *where, *small("LENGTH = 32"), slice_name="v4-16", code=2)
    assert "nothing would be trained: " in said
    assert "LENGTH = 32, was 64" in said


@pytest.mark.covers("T13", "L06")
@pytest.mark.slow
@pytest.mark.simulated(4)
def test_v4_32_in_four_processes_has_the_losses_of_one(launch, tmp_path):
    bindings = ["--gin", "LOG_INTERVAL = 1", "--gin", "EVAL_BATCHES = 0", "--steps", "20"]
    where = ["--run-dir", str(tmp_path / "four")]
    launch("pod", "v4-32", "gin/quickstart.gin", "--simulate", *where, *bindings)
    where = ["--slice", "v4-32", "--run-dir", str(tmp_path / "one")]
    launch("train", "gin/quickstart.gin", *where, *bindings, slice_name="v4-32")
    four, one = scalars(tmp_path / "four", "loss"), scalars(tmp_path / "one", "loss")
    assert sorted(four) == list(range(1, 21))
    np.testing.assert_allclose([four[s] for s in sorted(four)], [one[s] for s in sorted(one)], atol=1e-5, rtol=0)


@pytest.mark.covers("C07", "L06")
@pytest.mark.slow
@pytest.mark.simulated(4)
def test_a_run_with_a_pipeline_resumes_under_fsdp(launch, tmp_path):
    often = ["--gin", "LOG_INTERVAL = 1", "--gin", "CHECKPOINT_INTERVAL = 10", "--gin", "EVAL_INTERVAL = 10"]
    pipeline = [
        "STRATEGY = @strategies.pipeline()",
        "from parallel.pipeline import schedules",
        "strategies.pipeline.schedule = @schedules.one_f_one_b()",
        "schedules.one_f_one_b.num_microbatches = 2",
        "strategies.pipeline.stage = 2",  # of two layers
    ]
    here = ["pod", "v4-32", "gin/quickstart.gin", "--simulate", "--run-dir", str(tmp_path / "run"), *often]
    said = launch(*here, "--steps", "10", *(word for binding in pipeline for word in ("--gin", binding)))
    assert "stage 2 x data 8" in said
    assert "bubble" in said
    saved_at = scalars(tmp_path / "run", "validation/loss")[10]
    said = launch(*here, "--steps", "20")
    assert "fsdp 16" in said
    assert "resumed from 10" in said
    where = ["--slice", "v4-32", "--run-dir", str(tmp_path / "fsdp")]
    launch("train", "gin/quickstart.gin", *where, *often, "--steps", "20", slice_name="v4-32")
    ours, want = scalars(tmp_path / "run", "loss"), scalars(tmp_path / "fsdp", "loss")
    assert sorted(ours) == list(range(1, 21))
    np.testing.assert_allclose([ours[s] for s in sorted(ours)], [want[s] for s in sorted(want)], atol=1e-5, rtol=0)
    assert saved_at == pytest.approx(scalars(tmp_path / "fsdp", "validation/loss")[10], abs=1e-5)


@pytest.mark.slow
@pytest.mark.simulated(2)
def test_the_quickstart_learns_and_attention_is_why(launch, tmp_path):
    told = ["pod", "v4-16", "gin/quickstart.gin", "--simulate"]
    launch(*told, "--run-dir", str(tmp_path / "run"), timeout=1200, optimized=True)
    assert scalars(tmp_path / "run", "validation/loss")[200] < 2.0
    control = ["--gin", "transformer.Transformer.attention = 'none'", "--run-dir", str(tmp_path / "control")]
    launch(*told, *control, timeout=1200, optimized=True)
    assert scalars(tmp_path / "control", "validation/loss")[200] > 2.1


def test_a_checkpoint_of_other_data_is_refused_also_if_the_newest_one_was_damaged():
    meta = {"data": "0" * 64, "data_source": "text.files: train a.txt (1 file, 9 bytes)"}
    found = 3, None, {}, {"data": "1" * 64, "data_source": "text.files: train a.txt (1 file, 8 bytes)"}
    run = types.SimpleNamespace(
        program=types.SimpleNamespace(abstract_state=None), meta=meta, span=WHOLE, config=meta.get("config", "")
    )
    with pytest.raises(UserError, match="trained on other data") as error:
        session.restore_or_init(run, types.SimpleNamespace(restore_newest=lambda state: found))
    assert "then: text.files: train a.txt (1 file, 8 bytes)" in str(error.value)
    assert "now:  text.files: train a.txt (1 file, 9 bytes)" in str(error.value)
    assert "0000" not in str(error.value)


def test_a_resumed_run_keeps_in_its_metadata_what_it_was_initialized_from():
    meta = {"data": "0", "config": "A = 1"}
    run = types.SimpleNamespace(
        program=types.SimpleNamespace(abstract_state=None), meta=meta, span=WHOLE, config=meta.get("config", "")
    )
    for then, kept in (({"init_from": "step 7 of a"}, {"init_from": "step 7 of a"}), ({}, {})):
        found = 3, "state", {}, {"data": "0", "config": "A = 2", **then}
        start = session.restore_or_init(run, types.SimpleNamespace(restore_newest=lambda _, found=found: found))
        assert start == ("state", {}, 3, kept, [("A", "2", "1")])


@pytest.mark.slow
@pytest.mark.covers("C07")
def test_every_checkpoint_says_what_its_run_started_from(launch, stopped, tmp_path):
    """Also one that is saved after a resume, which reads nothing of the other run."""
    where = ["--slice", "v4-16", "--run-dir", str(tmp_path / "tuned")]
    more = small(f"INIT_FROM = '{stopped}@6'", "CHECKPOINT_INTERVAL = 1", "FROZEN = ('*embedding',)")
    for last in ("1", "2"):
        said = launch("train", "gin/quickstart.gin", *where, "--steps", last, *more, slice_name="v4-16")
        assert "parameters of step 6 of" in said
        assert "the others are frozen, in bfloat16" in said
    folders = [tmp_path / "tuned/checkpoints" / step for step in ("1", "2")]
    descriptions = [steps.read(folder) for folder in folders]
    assert {found.meta["init_from"] for found in descriptions} == {f"step 6 of {stopped}/checkpoints"}
    frozen = [found.content["params/~/embedding"] for found in descriptions]
    assert frozen[0] == frozen[1]  # dtype, shape and the fingerprint of the bits
    assert frozen[0][0].startswith("bfloat16[")
    trained = [found.content["params/layers/block/query"] for found in descriptions]
    assert trained[0] != trained[1]
