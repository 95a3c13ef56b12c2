"""A slice driven through gcloud, with gcloud_emulator.py: from shipping to stopping, and errors."""

import json
import re
import subprocess
import sys
import threading
import time

import pytest

from core import slices
from core.errors import UserError
from launch import environment
from launch.hosts import gcloud, host_output, logs, workstation

TPU = gcloud.Tpu("my-tpu", "us-central2-b", "proj")
SECOND = gcloud.Tpu("second", "us-central2-b", "proj")
V4_16 = slices.get("v4-16")
SECRET = "hf_abcdefghijkl"


def start(workspace, *arguments, directory="gs://b/run", dry_run=False):
    run = workstation.Run(["v4-16", *(arguments or ["gin/x.gin"])], directory)
    code = workstation.start([TPU], slice_=V4_16, run=run, workspace=workspace, dry_run=dry_run)
    for worker in range(2 if code == 0 and not dry_run else 0):
        wait_for(workspace.parent / f"cloud/worker_{worker}/.renga/run.log", "pod.sh got")
    return code


def test_an_action_before_the_first_start_says_so(cloud, capfd):
    assert act("status") == 1
    said = capfd.readouterr()
    assert "nothing was started here yet" in said.out + said.err


def act(action, **kwargs):
    return workstation.act([TPU], action=action, log_directory="runs", dry_run=False, **kwargs)


def calls(cloud):
    path = cloud / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(path, text):
    deadline = time.monotonic() + 10
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{text!r} never came into {path}"
        time.sleep(0.02)


@pytest.mark.covers("L01", "L03", "L04", "L08", "L09", "O11")
def test_ship_set_up_start_follow_and_stop(cloud, workspace, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(sys, "prefix", str(workspace / "data"))
    (workspace / "data/renga.extras").write_text("arc int8 dev\n")
    assert start(workspace, "gin/x.gin", "--gin", "A = 'it''s; $HOME'") == 0
    for worker in range(2):
        home = cloud / f"worker_{worker}"
        there = [p for p in (home / "renga").rglob("*") if p.is_file() and p.suffix != ".pyc"]
        shipped = {str(p.relative_to(home / "renga")) for p in there}
        assert shipped == {
            ".gitignore",
            ".revision",
            "gin/x.gin",
            *(str(path.relative_to(workspace)) for path in workspace.glob("*/**/*.py")),
            "launch/hosts/on_host.sh",
            "launch/pod.sh",
            "launch/setup.sh",
            "new file.py",
        }
        wait_for(
            home / ".renga/run.log",
            "pod.sh got v4-16 gin/x.gin --gin A = 'it''s; $HOME' --run-dir gs://b/run; token 15",
        )
        assert not (home / ".renga/HF_TOKEN").exists()
        assert (home / "set_up").read_text() == "--extra arc --extra int8\n"  # those of this environment
        assert len((home / "renga/.revision").read_text().strip()) == 40
    assert SECRET not in (cloud / "calls.jsonl").read_text()

    capfd.readouterr()
    assert act("status") == 0
    status = capfd.readouterr().out
    assert "v4-16\tREADY\tHEALTHY" in status
    assert all(f"w-{worker}: running, process" in status for worker in range(2))

    followed = []
    argv = workstation.action_step(TPU, "logs").argv
    follower = threading.Thread(target=logs.follow, args=([argv],), kwargs={"write": followed.append})
    follower.start()
    assert act("stop") == 0
    follower.join(timeout=20)  # ends by itself, since the run did
    times = [host_output.time_of(line) for line in followed]
    assert times == sorted(times)
    for worker in range(2):
        assert any(f" w-{worker} | pod.sh got v4-16" in line for line in followed)
        wait_for(cloud / f"worker_{worker}/.renga/run.log", "saved")
    assert act("status") == 0
    assert re.search(
        r"w-1: not running, ended with exit code 130; last line of its log: \S+ \S+ w-1 \| saved",
        capfd.readouterr().out,
    )


def test_a_run_in_progress_is_neither_replaced_nor_doubled(cloud, workspace, capfd):
    assert start(workspace) == 0
    before = (cloud / "worker_0/.renga/process").read_text()
    assert start(workspace) == 1
    assert "w-0: a run is in progress" in capfd.readouterr().err
    assert (cloud / "worker_0/.renga/process").read_text() == before


def test_nothing_starts_if_one_host_cannot_be_set_up(cloud, workspace, capfd):
    (cloud / "worker_1").mkdir()
    (cloud / "worker_1/no_setup").touch()
    assert start(workspace) == 1
    assert "no python" in capfd.readouterr().err
    assert not list(cloud.glob("worker_*/.renga/run.log"))


def test_a_run_that_ends_at_once_shows_its_last_lines(cloud, workspace, capfd):
    on_host = "launch/hosts/on_host.sh"
    (workspace / on_host).write_text((environment.WORKSPACE / on_host).read_text())  # which waits for the end
    assert start(workspace, "bad.gin") == 1
    assert "w-0: the run ended at once" in (errors := capfd.readouterr().err)
    assert "pod.sh got v4-16 bad.gin" in errors


def test_shipping_again_removes_old_files_and_keeps_environment_and_runs(cloud, workspace):
    assert start(workspace) == 0
    assert act("stop") == 0
    remote = cloud / "worker_0/renga"
    (remote / "runs").mkdir()
    (remote / "gin/gone.gin").touch()
    assert start(workspace) == 0
    assert (remote / "runs").is_dir()
    assert (remote / ".venv").is_dir()
    assert not (remote / "gin/gone.gin").exists()


def test_more_than_the_hosts_need_is_refused_with_the_largest(cloud, workspace, monkeypatch):
    """Sizes of files with holes, which take no room on the disk."""

    def large(name, mebibytes):
        (workspace / name).parent.mkdir(exist_ok=True)
        with (workspace / name).open("wb") as file:
            file.truncate(mebibytes * 2**20)

    large("gin/x.gin", 2)  # tracked, and changed
    large("weights/a.safetensors", 40)
    large("weights/b.safetensors", 7)
    large("data/large.bin", 400)  # git ignores it
    before = workstation.require_small(workspace)
    assert {"gin/x.gin", "new file.py", "weights/a.safetensors"} <= set(before.files)
    assert 49 * 2**20 < before.size_bytes < 50 * 2**20
    large("own.bin", 1)
    for dry_run in (True, False):
        with pytest.raises(UserError) as refused:
            start(workspace, dry_run=dry_run)
    assert not calls(cloud)
    lines = [line.split() for line in str(refused.value).splitlines() if line.startswith("  ")]
    assert lines[:3] == [
        ["47", "MiB", "weights/", "(untracked)"],
        ["2", "MiB", "gin/x.gin"],
        ["1", "MiB", "own.bin", "(untracked)"],
    ]
    assert not any("data/" in word for line in lines for word in line)


@pytest.mark.covers("L01")
def test_dry_run_prints_commands_that_gcloud_takes_and_runs_none(cloud, workspace, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert start(workspace, dry_run=True) == 0
    assert not calls(cloud)
    lines = capfd.readouterr().out.splitlines()
    printed = [line for line in lines if not line.startswith("#")]
    assert re.search(r"^# ARCHIVE: \d+ files .*; [\d.]+ KiB before compression$", lines[0])
    assert len(printed) == 5
    assert SECRET not in "".join(printed)
    assert [word for line in printed for word in line.split() if word.isupper() and word != "-C"] == [
        "ARCHIVE",
        "FILE_WITH_HF_TOKEN",
        "RENGA_JOIN_SECRET=RANDOM_TEXT",
    ]
    assert subprocess.run(["bash", "-c", printed[0]], check=False).returncode == 0
    assert calls(cloud) == [
        ["compute", "tpus", "tpu-vm", "describe", "my-tpu", "--zone=us-central2-b", "--project=proj"]
        + ["--format=value(acceleratorType,state,health,networkEndpoints[0].ipAddress)"]
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"type": "v4-32"}, "is a v4-32 (16 devices on 4 hosts), but SLICE is v4-16 (8 devices on 2 hosts)"),
        ({"state": "CREATING"}, "is CREATING (health HEALTHY), not READY: wait until it is, or create it anew"),
        ({"state": "STOPPED"}, "not READY: start it"),
        ({"state": "PREEMPTED"}, "is PREEMPTED (health HEALTHY), not READY: delete it and create it anew"),
        ({"zone": "elsewhere"}, "finds no TPU 'my-tpu' in us-central2-b"),
    ],
)
def test_a_tpu_that_cannot_be_used_is_refused_before_anything_is_shipped(cloud, workspace, change, says):
    tpu = json.loads((cloud / "tpu.json").read_text())
    (cloud / "tpu.json").write_text(json.dumps(tpu | change))
    with pytest.raises(ValueError, match="TPU") as error:
        start(workspace)
    assert says in str(error.value)
    assert [call[3] for call in calls(cloud)] == ["describe"]


def test_gcloud_s_own_error_is_quoted(cloud, workspace, tmp_path):
    (tmp_path / "tools" / "gcloud").write_text("#!/bin/sh\necho 'ERROR: Reauthentication failed.' >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"cannot describe TPU 'my-tpu' .*Reauthentication failed.*`gcloud auth list`"):
        start(workspace)


def test_tensorboard_is_tunneled_on_loopback_from_host_0(cloud):
    step = workstation.tensorboard_step(TPU, "gs://b/runs")
    assert "--worker=0" in step.argv
    assert "--ssh-flag=-L 127.0.0.1:6006:127.0.0.1:6006" in step.argv
    assert step.argv[-1].endswith("on_host.sh tensorboard 6006 gs://b/runs")


def test_tensorboard_follows_the_directory_of_the_run(cloud, workspace, monkeypatch, capfd):
    assert start(workspace, directory="gs://b/first run") == 0
    monkeypatch.setenv("RENGA_RUN_ROOT", "gs://of/whoever/looks")
    python = cloud / "worker_0/renga/.venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text('#!/bin/bash\necho "python $*"\n')
    python.chmod(0o755)
    assert workstation.act([TPU], action="tensorboard", dry_run=False) == 0
    assert "python -m launch tensorboard gs://b/first run --port 6006" in capfd.readouterr().out
    assert workstation.act([TPU], action="tensorboard", log_directory="gs://b/other", dry_run=False) == 0
    assert "python -m launch tensorboard gs://b/other --port 6006" in capfd.readouterr().out
    assert workstation.act([TPU], action="stop", dry_run=False) == 0


def test_tensorboard_without_a_run_is_refused_with_the_fix(cloud, workspace, capfd):
    assert start(workspace) == 0
    assert act("stop") == 0
    (cloud / "worker_0/.renga/run_directory").unlink()
    assert workstation.act([TPU], action="tensorboard", dry_run=False) == 1
    assert "w-0: no run was started here; name a directory: launch/pod.sh tensorboard --run-dir DIR" in (
        capfd.readouterr().err
    )


def test_a_secret_that_an_earlier_start_left_is_not_used(cloud, workspace):
    (left := cloud / "worker_0/.renga/HF_TOKEN").parent.mkdir(parents=True)
    left.write_text(SECRET)
    assert start(workspace) == 0
    wait_for(cloud / "worker_0/.renga/run.log", "token 0")
    assert not left.exists()


def test_a_host_refuses_a_run_directory_that_the_next_start_would_delete(cloud, workspace, capfd):
    home = cloud / "worker_0" / "renga"  # the same on a real TPU: a host's own path of the shipped workspace
    assert start(workspace, directory=str(home / "first")) == 1
    assert f"the run directory {home}/first is in the shipped workspace, which each start" in capfd.readouterr().err
    assert not (home.parent / ".renga/process").exists()


def test_only_what_git_would_keep_can_be_an_experiment(workspace, tmp_path, monkeypatch):
    assert workstation.shipped_path(str(workspace / "gin/x.gin"), workspace=workspace) == "gin/x.gin"
    monkeypatch.chdir(tmp_path)
    assert workstation.shipped_path("gin/x.gin", workspace=workspace) == "gin/x.gin"  # as other commands find it
    with pytest.raises(ValueError, match="would not be copied to the hosts"):
        workstation.shipped_path(str(workspace / "data/large.bin"), workspace=workspace)
    with pytest.raises(ValueError, match="no such experiment file"):
        workstation.shipped_path(str(workspace / "gin/y.gin"), workspace=workspace)
    with pytest.raises(ValueError, match="not a git work tree"):
        workstation.workspace_files(tmp_path)


def test_the_tpu_comes_from_flags_then_environment(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "env-tpu")
    monkeypatch.setenv("TPU_ZONE", "z")
    assert gcloud.find_tpus(None, None, "p") == (gcloud.Tpu("env-tpu", "z", "p"),)
    assert gcloud.find_tpus("flag", "y", None) == (gcloud.Tpu("flag", "y", None),)
    assert [tpu.name for tpu in gcloud.find_tpus("b,a", "y", None)] == ["b", "a"]
    monkeypatch.delenv("TPU_ZONE")
    with pytest.raises(ValueError, match="TPU 'flag' has no zone"):
        gcloud.find_tpus("flag", None, None)
    for names in ("user@flag:", "a,,b", "a, b"):
        with pytest.raises(ValueError, match="expected letters, digits"):
            gcloud.find_tpus(names, "z", None)
    with pytest.raises(ValueError, match="every slice needs its own TPU"):
        gcloud.find_tpus("a,a", "z", None)
    monkeypatch.delenv("TPU_NAME")
    assert gcloud.find_tpus(None, "z", None) == ()


@pytest.fixture
def two_slices(cloud):
    """The stand-in has two equal TPUs."""
    tpu = json.loads((cloud / "tpu.json").read_text())
    (cloud / "tpu.json").write_text(json.dumps({**tpu, "also": ["second"]}))
    return cloud


def test_two_tpus_are_one_job(two_slices, workspace, capfd):
    """Every host of either slice has the same command line, and is told of which slice it is."""
    (workspace / "launch/pod.sh").write_text(
        (workspace / "launch/pod.sh").read_text().replace("token", "${!MEGASCALE_*} $MEGASCALE_SLICE_ID; token")
    )
    run = workstation.Run(["2xv4-16", "gin/x.gin"], "gs://b/run", ["MEGASCALE_X=1 2"])
    job = {"slice_": slices.get("2xv4-16"), "run": run, "workspace": workspace}
    assert workstation.start([TPU, SECOND], **job, dry_run=False) == 0
    names = "MEGASCALE_COORDINATOR_ADDRESS MEGASCALE_NUM_SLICES MEGASCALE_SLICE_ID MEGASCALE_X"
    for index, prefix in enumerate(("", "second_")):
        for worker in range(2):
            log = two_slices / f"{prefix}worker_{worker}/.renga/run.log"
            wait_for(log, f"pod.sh got 2xv4-16 gin/x.gin --run-dir gs://b/run; {names} {index}; token 0")
    started = [call[-1] for call in calls(two_slices) if call[3] == "ssh" and " start " in call[-1]]
    (secret,) = {word for call in started for word in call.split() if word.startswith("RENGA_JOIN_SECRET=")}
    assert len(secret) > 40  # the same for all hosts, and nobody can guess it
    assert [f"MEGASCALE_SLICE_ID={i} MEGASCALE_COORDINATOR_ADDRESS=10.130.0.4" in c for i, c in enumerate(started)] == [
        True,
        True,
    ]
    assert "--tpu my-tpu,second --zone us-central2-b" in capfd.readouterr().out
    kinds = [call[3] for call in calls(two_slices)]
    assert kinds == ["describe"] * 2 + ["scp"] * 2 + ["ssh"] * 4  # each step reaches both before the next begins
    both = {"log_directory": "runs", "dry_run": False}
    assert workstation.act([TPU, SECOND], action="status", **both) == 0
    status = capfd.readouterr().out
    assert all(f"{name}: running" in status for name in ("w-0", "w-1", "second_w-0", "second_w-1"))
    assert workstation.act([TPU, SECOND], action="stop", **both) == 0
    assert "second_w-1: stopped" in capfd.readouterr().out


@pytest.mark.parametrize(("tpus", "name"), [([TPU], "2xv4-16"), ([TPU, SECOND], "v4-16")])
def test_a_job_has_a_tpu_for_each_slice(two_slices, workspace, tpus, name):
    run = workstation.Run([name], "gs://b/run")
    with pytest.raises(ValueError, match=rf"{name} is \d slices?, but {len(tpus)} TPUs? (is|are) named \(my-tpu"):
        workstation.start(tpus, slice_=slices.get(name), run=run, workspace=workspace, dry_run=False)
    assert not calls(two_slices)


def test_a_dry_run_of_two_slices_says_what_only_gcloud_knows(two_slices, workspace, capfd):
    run = workstation.Run(["2xv4-16", "gin/x.gin"], "gs://b/run")
    job = {"slice_": slices.get("2xv4-16"), "run": run, "workspace": workspace}
    assert workstation.start([TPU, SECOND], **job, dry_run=True) == 0
    printed = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(printed) == 8
    assert sum("MEGASCALE_COORDINATOR_ADDRESS=ADDRESS_OF_my-tpu" in line for line in printed) == 2
    assert sum("RENGA_JOIN_SECRET=RANDOM_TEXT" in line for line in printed) == 2
    assert not calls(two_slices)


@pytest.mark.parametrize(
    "argv",
    [
        "compute tpus describe my-tpu --zone=us-central2-b",
        "compute tpus tpu-vm ssh my-tpu --zone=us-central2-b --workers=all --command=true",
        "compute tpus tpu-vm ssh my-tpu --zone=us-central2-b --worker=all",
        "compute tpus tpu-vm ssh my-tpu --zone=us-central2-b --worker=5 --command=true",
        "compute tpus tpu-vm ssh my-tpu --zone=us-central2-b --batch-size=2 --command=true",
        "compute tpus tpu-vm scp x node-1://remote --zone=us-central2-b",
        "compute tpus tpu-vm scp x my-tpu:y --zone=us-central2-b --tunnel-through-iap",
    ],
)
def test_the_emulator_refuses_undocumented_requests(cloud, argv):
    result = subprocess.run(["gcloud", *argv.split()], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "ERROR: (gcloud emulator)" in result.stderr
