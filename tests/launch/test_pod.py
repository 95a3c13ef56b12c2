"""The three places in which launch/pod.sh can start a run, and what it passes on."""

import os
import re
import subprocess
import sys

import pytest

from core.checkpoints import steps
from core.errors import UserError
from core.files import paths
from core.training import supervise
from launch import __main__ as cli
from launch import environment
from launch.check import chip_memory
from launch.cli import pod
from launch.hosts import gcloud, simulate, tpu_host, workstation
from launch.runs import continuation

ROOT = environment.WORKSPACE
NOWHERE = tpu_host.Place(False, None, ("environment: TPU_WORKER_ID is not set",))
TPU_HOST = tpu_host.Place(True, "v4-32", ())


_ESTIMATES = {}


@pytest.fixture(autouse=True)
def estimated_once(monkeypatch, laid_out_once):
    """Most of these tests check the same experiment."""
    estimate = chip_memory.estimate

    def once(program):
        if id(program) not in _ESTIMATES:
            _ESTIMATES[id(program)] = program, estimate(program)  # which keeps the program, and with it its id
        return _ESTIMATES[id(program)][1]

    monkeypatch.setattr(chip_memory, "estimate", once)


class Became(BaseException):
    """Ends the command where `os.execv` would replace the process."""


@pytest.fixture
def place(monkeypatch):
    """Where this machine is; `os.execv` raises instead, with what would have been run."""
    for name in ("TPU_NAME", "TPU_ZONE", "TPU_PROJECT", "RENGA_RUN_ROOT"):
        monkeypatch.delenv(name, raising=False)

    def execv(program, argv):
        assert argv[:3] == [sys.executable, "-m", "launch"]
        raise Became(argv[3:])

    monkeypatch.setattr(os, "execv", execv)

    def set_place(value):
        monkeypatch.setattr(tpu_host, "look", lambda: value)

    set_place(NOWHERE)
    return set_place


@pytest.fixture
def calls(monkeypatch):
    """What was asked of the two other places."""
    made = []

    def simulated(slice_, *, command, log_directory, requested, xla_flags):
        made.append(("simulate", slice_.name, command[3:], str(log_directory)))
        return 0

    def start(tpu, *, slice_, run, workspace, dry_run):
        made.append(("start", tpu, slice_.name, [*run.variables, *run.arguments], run.directory, dry_run))
        return 0

    monkeypatch.setattr(simulate, "run", simulated)
    monkeypatch.setattr(workstation, "start", start)
    monkeypatch.setattr(workstation, "shipped_path", lambda path, workspace: path)
    return made


@pytest.fixture
def a_bucket(bucket, monkeypatch):
    """An emulated bucket `gs://bucket`."""
    for key, value in bucket.environment.items():
        monkeypatch.setenv(key, value)
    bucket.write("gs://bucket/there", b"")


@pytest.mark.usefixtures("a_bucket")
@pytest.mark.parametrize(
    ("steps", "newest", "is_finished"), [((), 200, True), ((), 199, False), (("--steps", "30"), 30, True)]
)
@pytest.mark.parametrize("where", [("--simulate",), ("--tpu", "t", "--zone", "z")])
def test_a_finished_run_starts_no_host(place, calls, monkeypatch, tmp_path, steps, newest, is_finished, where):
    asked = []

    def has_ended(run_dir, config, spans, *, steps, is_elsewhere):
        asked.append((run_dir, "TOTAL_STEPS = 200" in config.text, is_elsewhere))
        return newest >= min(steps or spans[-1].last_step, spans[-1].last_step)

    monkeypatch.setattr(continuation, "has_ended", has_ended)
    run_dir = str(tmp_path) if where == ("--simulate",) else "gs://bucket/run"
    assert cli.main(["pod", "v4-8", "gin/quickstart.gin", *where, *steps, "--run-dir", run_dir]) == 0
    assert asked == [(run_dir, True, where != ("--simulate",))]
    assert (not calls) == is_finished


def test_tensorboard_of_a_run_directory_is_the_command_of_that_name(place):
    with pytest.raises(Became) as became:
        cli.main(["pod", "tensorboard", "runs/quickstart-v4-16"])
    assert became.value.args == (["tensorboard", "runs/quickstart-v4-16"],)


def test_the_error_without_a_place_to_run_names_the_three_ways_and_the_evidence(place, capsys):
    assert cli.main(["pod", "v4-16", "gin/x.gin"]) == 2
    said = capsys.readouterr().err
    for words in ("on a host of a TPU slice", "--tpu NAME --zone ZONE", "--simulate", "TPU_WORKER_ID is not set"):
        assert words in said


@pytest.mark.covers("R06")
def test_a_tpu_host_becomes_its_train_process(place):
    place(TPU_HOST)
    with pytest.raises(Became) as became:
        cli.main(["pod", "v4-32", "x.gin", "--gin", "A = 1", "--gin", "B = 2", "--steps", "5"])
    (argv,) = became.value.args
    assert argv == ["train", "x.gin", "--slice", "v4-32", "--gin", "A = 1", "--gin", "B = 2", "--steps", "5"]


def test_a_tpu_host_of_another_slice_is_refused(place, capsys):
    place(TPU_HOST)
    assert cli.main(["pod", "v4-16", "x.gin"]) == 2
    assert "is a v4-32 (16 devices on 4 hosts), but SLICE is v4-16 (8 devices on 2 hosts)" in capsys.readouterr().err


@pytest.mark.covers("L06")
def test_simulation_gives_every_host_one_run_directory(place, calls, tmp_path):
    assert cli.main(["pod", "v4-16", "gin/quickstart.gin", "--simulate", "--run-dir", str(tmp_path)]) == 0
    expected = ["train", "gin/quickstart.gin", "--slice", "v4-16", "--run-dir", str(tmp_path)]
    assert calls == [("simulate", "v4-16", expected, str(tmp_path / "logs"))]


def test_a_simulated_smoke_run_has_a_directory_of_its_own_and_local_logs(place, calls, monkeypatch):
    monkeypatch.setenv("RENGA_RUN_ROOT", "gs://bucket/runs")
    monkeypatch.setattr(paths, "check_writable", lambda directory: directory)  # there is no such bucket
    monkeypatch.setattr(steps, "complete", lambda folder: [])
    assert cli.main(["pod", "v4-16", "gin/quickstart.gin", "--simulate", "--check", "smoke"]) == 0
    ((_, _, command, logs),) = calls
    assert command[-4:] == ["--run-dir", "gs://bucket/runs/quickstart-v4-16-smoke", "--check", "smoke"]
    assert logs == "runs/quickstart-v4-16-smoke/logs"


def test_a_simulation_with_mistakes_starts_no_host(place, calls, tmp_path, capsys):
    argv = ["pod", "v4-16", "gin/quickstart.gin", "--simulate", "--run-dir", str(tmp_path)]
    assert cli.main([*argv, "--gin", "BATCH_SIZE = 12", "--gin", "LENGHT = 3"]) == 2
    assert "did you mean 'LENGTH'" in capsys.readouterr().err
    assert cli.main([*argv, "--gin", "BATCH_SIZE = 12", "--gin", "NUM_STREAMS = 4"]) == 2
    assert (
        "batch_size = 12 does not divide over 8 groups of chips (strategy 'fsdp' on v4-16). Nearest that do: 8, 16"
        in capsys.readouterr().err
    )
    assert not calls


def test_a_model_larger_than_this_machine_is_not_simulated(place, calls, tmp_path, capsys):
    argv = ["pod", "v4-16", "gin/quickstart.gin", "--simulate", "--run-dir", str(tmp_path)]
    wide = ["--gin", "transformer.Transformer.embed_dim = 8192", "--gin", "transformer.Transformer.mlp_dim = 32768"]
    assert cli.main([*argv, *wide]) == 2
    said = capsys.readouterr().err
    assert re.search(
        r"state of v4-16: needs [\d.,]+ GiB of host memory .* this machine has [\d.]+ GiB\. Fix: .*--check smoke", said
    )
    assert not calls


def test_check_starts_nothing_wherever_it_is(place, calls, monkeypatch):
    with pytest.raises(Became) as became:
        cli.main(["pod", "v4-16", "x.gin", "--check", "slice", "--simulate", "--gin", "A = 1"])
    assert became.value.args == (["check", "v4-16", "x.gin", "--level", "slice", "--gin", "A = 1", "--simulate"],)
    with pytest.raises(Became) as became:
        cli.main(["pod", "v4-16", "x.gin", "--check", "--tpu", "t", "--zone", "z"])
    assert became.value.args == (["check", "v4-16", "x.gin", "--level", "config", "--ship"],)
    monkeypatch.setenv("TPU_NAME", "t")
    monkeypatch.setenv("TPU_ZONE", "z")
    with pytest.raises(Became) as became:
        cli.main(["pod", "v4-16", "x.gin", "--check"])
    assert became.value.args == (["check", "v4-16", "x.gin", "--level", "config", "--ship"],)
    assert not calls


def test_a_workstation_passes_variables_to_the_hosts(place, calls, monkeypatch):
    monkeypatch.setenv("RENGA_RUN_ROOT", "gs://bucket/runs")
    argv = ["pod", "v4-16", "gin/quickstart.gin", "--tpu", "t", "--zone", "z", "--check", "smoke", "--dry-run"]
    assert cli.main(argv) == 0
    arguments = ["v4-16", "gin/quickstart.gin", "--check", "smoke"]
    directory = "gs://bucket/runs/quickstart-v4-16-smoke"
    assert calls == [("start", (gcloud.Tpu("t", "z"),), "v4-16", arguments, directory, True)]


SLICE_LEVEL = ("gin/quickstart.gin", "--check", "slice")


@pytest.mark.parametrize(
    ("slice_name", "more", "root", "directory"),
    [
        ("v4-16", ["gin/quickstart.gin", "--run-dir", "gs://bucket/x"], None, "gs://bucket/x"),
        ("v4-16", ["gin/quickstart.gin", "--run-dir=gs://bucket/x"], "gs://bucket/runs", "gs://bucket/x"),
        ("v4-8", ["gin/quickstart.gin"], None, "runs/quickstart-v4-8"),
        ("v4-16", [*SLICE_LEVEL], "gs://bucket/runs", "gs://bucket/runs/quickstart-v4-16-check"),
        ("v4-16", [*SLICE_LEVEL, "--run-dir=gs://bucket/x"], None, "gs://bucket/x"),
        ("v4-8", [*SLICE_LEVEL], None, "runs/quickstart-v4-8-check"),
    ],
)
def test_hosts_get_their_run_directory_in_every_form(place, calls, monkeypatch, slice_name, more, root, directory):
    if root:
        monkeypatch.setenv("RENGA_RUN_ROOT", root)
    assert cli.main(["pod", slice_name, *more, "--tpu", "t", "--zone", "z", "--dry-run"]) == 0
    ((*_, arguments, told, _),) = calls
    assert told == directory
    assert not any(word.startswith(("--run-dir", "RENGA_RUN_ROOT")) for word in arguments)


def test_a_mesh_in_the_environment_is_the_hosts_environment_too(place, calls, monkeypatch):
    """Not a --gin: one that the command line overrides would be refused there, and is left out here."""
    monkeypatch.setenv("RENGA_RUN_ROOT", "gs://bucket/runs")
    monkeypatch.setenv("TPU_MESH_CONFIG", "2,2,2")
    monkeypatch.setenv("TPU_AXIS_NAMES", "data,fsdp,tensor")
    argv = ["pod", "v4-16", "gin/quickstart.gin", "--tpu", "t", "--zone", "z", "--dry-run"]
    assert cli.main([*argv, "--gin", "STRATEGY = @strategies.fsdp()"]) == 0
    ((*_, sent, _, _),) = calls
    assert sent[:2] == ["TPU_MESH_CONFIG=2,2,2", "TPU_AXIS_NAMES=data,fsdp,tensor"]
    assert sent[-2:] == ["--gin", "STRATEGY = @strategies.fsdp()"]


def sent_with(calls, monkeypatch, **variables):
    monkeypatch.setenv("RENGA_RUN_ROOT", "gs://bucket/runs")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = cli.main(["pod", "v4-16", "gin/quickstart.gin", "--tpu", "t", "--zone", "z", "--dry-run"])
    return code, dict(word.split("=", 1) for call in calls for word in call[3][: -len(["v4-16", "gin/quickstart.gin"])])


def test_hosts_get_the_variables_that_change_a_run_on_them(place, calls, monkeypatch):
    given = {
        "RENGA_JOIN_SECONDS": "900",
        "XLA_FLAGS": "--xla_disable_hlo_passes=x --xla_dump_to=gs://b/x",
        "LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=65536",
        "WANDB_MODE": "disabled",
    }
    assert sent_with(calls, monkeypatch, **given) == (0, given)


def test_flags_for_the_cpus_of_a_workstation_stay_there(place, calls, monkeypatch, capsys):
    flags = "--xla_cpu_x=1 --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    assert sent_with(calls, monkeypatch, XLA_FLAGS=flags, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8") == (0, {})
    assert f"# XLA_FLAGS that are not for TPUs are not sent to the hosts: {flags}\n" in capsys.readouterr().out
    calls.clear()
    code, sent = sent_with(calls, monkeypatch, XLA_FLAGS=f"{flags} --xla_disable_hlo_passes=x")
    assert (code, sent) == (0, {"XLA_FLAGS": "--xla_disable_hlo_passes=x"})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("RENGA_JOIN_SECONDS", "soon", "RENGA_JOIN_SECONDS='soon': expected a whole number from 1 up"),
        ("XLA_FLAGS", "/etc/flags", "XLA_FLAGS='/etc/flags' is a file, which the hosts do not have"),
    ],
)
def test_variables_that_would_fail_on_the_hosts_are_not_sent(place, calls, monkeypatch, capsys, name, value, says):
    assert sent_with(calls, monkeypatch, **{name: value}) == (2, {})
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.covers("L01")
@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--gin", "BATCHSIZE = 3"], "did you mean 'BATCH_SIZE'"),
        (["--gin", "BATCH_SIZE = 12", "--gin", "NUM_STREAMS = 4"], "batch_size = 12 does not divide over 8 groups"),
        (["--gin", "MODEL_EMBED_DIM = 3"], "MODEL_EMBED_DIM"),
        (
            ["--run-dir", "/tmp/x"],
            "all 2 hosts of v4-16 must see one run directory, and this is on a disk: give --run-dir",
        ),
        (["--run-dir", "s3://bucket/x"], "has scheme 's3'"),
    ],
)
@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_mistakes_are_found_before_anything_is_shipped(place, calls, capsys, monkeypatch, more, says, dry_run):
    monkeypatch.setattr(paths, "check_writable", lambda directory: directory)
    argv = ["pod", "v4-16", "gin/quickstart.gin", "--tpu", "t", "--zone", "z", *dry_run]
    assert cli.main([*argv, "--run-dir", "gs://bucket/x", *more]) == 2
    assert says in capsys.readouterr().err
    assert not calls


@pytest.mark.parametrize("level", ["hosts", "slice"])
def test_a_dry_run_of_a_check_that_is_not_sent_to_a_tpu_is_an_error(place, calls, capsys, level):
    assert cli.main(["pod", "cpu:16", "gin/quickstart.gin", "--check", level, "--dry-run"]) == 2
    assert "are devices of this machine" in capsys.readouterr().err
    assert not calls


def test_a_run_directory_that_the_next_start_would_delete_is_refused(place, calls, capsys):
    """A start replaces the workspace on the host, in which relative directories are."""
    refused = "this is in the shipped workspace, which each start replaces"
    argv = ["pod", "v4-8", "gin/quickstart.gin", "--tpu", "t", "--zone", "z", "--dry-run", "--run-dir"]
    assert cli.main([*argv, "first"]) == 2
    assert f"--run-dir first: {refused}" in " ".join(capsys.readouterr().err.split())
    assert not calls
    for directory in ("./first/runs", "runs/../first", "~/renga/first", "~/renga"):
        with pytest.raises(UserError, match=f"--run-dir {re.escape(directory)}: {refused}"):
            pod._require_kept(directory)


def test_run_directories_outside_the_shipped_workspace_are_kept(place, calls):
    kept = ["runs/first", "~/renga/runs/first", "~/first", "/disk/first", "../first"]
    for directory in kept:
        pod._require_kept(directory)
    argv = ["pod", "v4-8", "gin/quickstart.gin", "--tpu", "t", "--zone", "z", "--dry-run", "--run-dir"]
    assert cli.main([*argv, kept[-1]]) == 0
    assert [told for *_, told, _ in calls] == kept[-1:]


def test_hosts_with_disks_of_their_own_need_a_run_directory(place, calls, capsys):
    argv = ["--tpu", "t", "--zone", "z", "--dry-run"]
    assert cli.main(["pod", "v4-16", "gin/quickstart.gin", *argv]) == 2
    assert "RENGA_RUN_ROOT to gs://BUCKET/" in capsys.readouterr().err
    assert cli.main(["pod", "v4-8", "gin/quickstart.gin", *argv]) == 0  # one host
    assert "# run directory: " in capsys.readouterr().out


def test_a_home_directory_is_that_of_the_launcher_not_of_a_host(place, calls, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    argv = ["pod", "v4-16", "gin/quickstart.gin", "--simulate"]
    assert cli.main([*argv, "--run-dir", "~/x"]) == 0
    monkeypatch.setenv("RENGA_RUN_ROOT", "~/y")
    assert cli.main(argv) == 0
    for (_, _, command, logs), run in zip(calls, ("x", "y/quickstart-v4-16"), strict=True):
        assert command[-2:] == ["--run-dir", str(tmp_path / run)]
        assert logs == str(tmp_path / run / "logs")


@pytest.mark.usefixtures("a_bucket")
def test_a_tpu_host_wins_over_the_environment_but_not_over_the_flag(place, calls, monkeypatch):
    monkeypatch.setattr(paths, "check_writable", lambda directory: directory)
    place(TPU_HOST)
    monkeypatch.setenv("TPU_NAME", "other")
    monkeypatch.setenv("TPU_ZONE", "z")
    argv = ["pod", "v4-32", "gin/quickstart.gin", "--run-dir", "gs://bucket/x"]
    with pytest.raises(Became):
        cli.main(argv)
    assert cli.main([*argv, "--tpu", "flag"]) == 0
    place(NOWHERE)
    assert cli.main(argv) == 0
    assert [tpu.name for call in calls for tpu in call[1]] == ["flag", "other"]


OWN_DISK = "/no-such-folder/run"


@pytest.mark.parametrize(
    ("where", "argv", "says"),
    [
        (NOWHERE, ["v4-16", "--tpu", "t", "--run-dir", OWN_DISK], "a recreated TPU has empty disks"),
        (
            NOWHERE,
            ["v4-8", "--tpu", "t", "--run-dir", OWN_DISK],
            "there would be no checkpoint to resume from. Give --run-dir",
        ),
        (NOWHERE, ["v4-8", "--tpu", "t"], "runs/quickstart-v4-8: a recreated TPU"),
    ],
)
def test_restarts_that_would_find_no_checkpoint_are_refused(place, calls, capsys, where, argv, says):
    place(where)
    assert cli.main(["pod", argv[0], "gin/quickstart.gin", *argv[1:], "--zone", "z", "--restarts", "2"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "--run-dir gs://BUCKET/" in said
    assert not calls


@pytest.mark.parametrize(("type_", "run_dir"), [("v4-8", OWN_DISK), ("v4-32", "gs://bucket/x")])
def test_a_host_starts_its_process_again(place, monkeypatch, type_, run_dir):
    place(tpu_host.Place(True, type_, ()))
    started = []
    monkeypatch.setattr(supervise, "run_child", lambda command, requested: started.append(command[3:]) or 0)
    monkeypatch.setattr(supervise, "newest_step", lambda directory: None)
    monkeypatch.setenv("RENGA_ALERT", "true")
    assert cli.main(["pod", type_, "x.gin", "--run-dir", run_dir, "--restarts", "2"]) == 0
    assert started == [["train", "x.gin", "--slice", type_, "--run-dir", run_dir]]


def test_a_dry_run_needs_somebody_to_send_to(place, calls, capsys):
    for where, why in ((NOWHERE, "no TPU is named"), (TPU_HOST, "this is a host of a TPU slice")):
        place(where)
        assert cli.main(["pod", "v4-32", "x.gin", "--dry-run"]) == 2
        assert f"--dry-run prints what a workstation would send to a TPU, and {why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["v4-33", "x.gin", "--simulate"], "unknown TPU slice 'v4-33'"),
        (["v4-32"], "no experiment given"),
        (["v4-32", "x.gin", "--simulate", "--steps", "0"], "--steps: 0: expected a whole number, at least 1"),
        (["v4-32", "x.gin", "--tpu", "t"], "TPU 't' has no zone"),
        (["v4-32", "x.gin", "--simulate", "--tpu", "t"], "--simulate and --tpu exclude each other"),
        (["v4-32", "x.gin", "--simulate", "--dry-run"], "--simulate and --dry-run exclude each other"),
        (["v4-32", "x.gin", "--check", "--dry-run"], "--check config and --dry-run exclude each other"),
        (["v4-32", "x.gin", "--simulate", "--tune", "--steps", "9"], "--tune and --steps exclude each other"),
        (["v4-32", "x.gin", "--simulate", "--tune", "--restarts", "1"], "--tune and --restarts exclude each other"),
        (["v4-32", "x.gin", "--simulate", "--tune", "--check", "smoke"], "--tune and --check exclude each other"),
        (
            ["v4-32", "x.gin", "--simulate", "--check", "smoke", "--steps", "9"],
            "--check smoke and --steps exclude each other",
        ),
        (["v4-32", "x.gin", "--check", "--tune"], "--tune and --check exclude each other"),
        (["v4-32", "x.gin", "--tpu", "t", "--zone", "z", "--seconds", "5"], "v4-32 x.gin does not use --seconds"),
        (["v4-32", "x.gin", "--tpu", "t", "--zone", "z", "--spot"], "does not use --spot"),
        (["v4-32", "x.gin", "--simulate", "--zone", "z", "--queued"], "--simulate does not use --zone, --queued"),
        (["v4-32", "x.gin", "--check", "hosts", "--restarts", "1"], "--check hosts and --restarts exclude each other"),
        (["v4-32", "x.gin", "--check=all"], "--check: invalid choice: 'all'"),
        (["logs", "run", "--tpu", "t"], "logs run does not use --tpu"),
        (["stop", "--gin", "A = 1", "--tpu", "t", "--zone", "z"], "stop does not use --gin"),
        (["create", "v4-8", "--tpu", "t", "--zone", "z", "--queued"], "create v4-8 does not use --queued"),
        (["create", "v4-8", "more", "--tpu", "t", "--zone", "z"], "unrecognized arguments: more"),
        (
            ["create", "h100:8", "--tpu", "t", "--zone", "z"],
            "h100:8 is not a TPU slice, and create and queue are for TPU",
        ),
        (["queue", "cpu:4", "--tpu", "t", "--zone", "z"], "cpu:4 is not a TPU slice"),
        (["create", "2xv4-32", "--tpu", "a", "--zone", "z"], "2xv4-32 is 2 slices, but 1 TPU is named (a)"),
        (["queue", "v4-32", "--tpu", "a,b", "--zone", "z"], "v4-32 is 1 slice, but 2 TPUs are named (a, b)"),
        (["create", "v4-31", "--tpu", "a", "--zone", "z"], "unknown TPU slice 'v4-31'"),
        (["logs"], "expected: launch/pod.sh logs --tpu NAME --zone ZONE"),
        (["stop", "x.gin", "--tpu", "t", "--zone", "z"], "expected: launch/pod.sh stop --tpu NAME"),
    ],
)
def test_mistakes_are_named(place, calls, capsys, argv, says):
    assert cli.main(["pod", *argv]) == 2
    assert says in capsys.readouterr().err
    assert not calls


def test_the_scripts_set_up_and_pass_everything_on(tmp_path):
    """launch/pod.sh and launch/run from another folder, with a stand-in for the set-up and for Python."""
    launch = tmp_path / "launch"
    (tmp_path / ".venv/bin").mkdir(parents=True)
    launch.mkdir()
    stand_ins = {
        launch / "setup.sh": "#!/bin/sh\necho set up\n",
        tmp_path
        / ".venv/bin/python": '#!/bin/sh\necho "$PYTHONPATH" "$PYTHONSAFEPATH"; for a in "$@"; do echo "[$a]"; done\n',
    }
    for name in ("run", "pod.sh"):
        stand_ins[launch / name] = (environment.WORKSPACE / "launch" / name).read_text()
    for path, text in stand_ins.items():
        path.write_text(text)
        path.chmod(0o755)
    command = [str(launch / "pod.sh"), "v4-16", "my file.gin", "--gin", "A = 'b'"]
    out = subprocess.run(command, cwd="/", env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True)
    words = ["-m", "launch", "pod", "v4-16", "my file.gin", "--gin", "A = 'b'"]
    assert out.stdout.splitlines() == ["set up", f"{tmp_path} 1", *[f"[{word}]" for word in words]]


def test_a_user_s_folders_do_not_shadow_our_modules(tmp_path):
    for name in ("core", "launch", "models", "parallel", "tasks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')\n")
    (tmp_path / "mine.py").write_text(
        "from parallel import strategies\n\n\ndef spread():\n    return strategies.data_parallel()\n"
    )
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x.gin").write_text(
        "from __gin__ import dynamic_registration\nimport mine\n"
        f"include '{ROOT}/gin/quickstart.gin'\nSTRATEGY = @mine.spread()\n"
    )
    where = ["--simulate", "--run-dir", str(tmp_path / "run")]
    command = [str(ROOT / "launch/pod.sh"), "v4-8", "deep/x.gin", "--check", *where]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data_parallel on v4-8" in done.stdout
    assert done.stdout.endswith("READY\n")


@pytest.mark.covers("R12")
def test_local_is_this_machine(place, capsys, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(Became) as became:
        cli.main(["pod", "local", "x.gin", "--steps", "5"])
    devices = os.environ["JAX_NUM_CPU_DEVICES"]
    assert became.value.args == (["train", "x.gin", "--slice", f"cpu:{devices}", "--steps", "5"],)
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert cli.main(["pod", "local", "x.gin", "--simulate"]) == 2
    assert "SLICE local means the devices of this machine" in capsys.readouterr().err


def test_gpus_are_used_on_their_hosts_or_simulated(place, calls, tmp_path, capsys):
    with pytest.raises(Became) as became:
        cli.main(["pod", "h100:8x2", "x.gin"])
    assert became.value.args == (["train", "x.gin", "--slice", "h100:8x2"],)
    assert cli.main(["pod", "h100:8", "x.gin", "--tpu", "t", "--zone", "z"]) == 2
    assert "h100:8 are no TPUs: run the command on their hosts, without --tpu" in capsys.readouterr().err
    assert cli.main(["pod", "h100:4x2", "gin/quickstart.gin", "--simulate", "--run-dir", str(tmp_path)]) == 0
    assert [call[:2] for call in calls] == [("simulate", "h100:4x2")]
