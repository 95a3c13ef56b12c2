"""A slice that is created, preempted and recreated, with gcloud_emulator.py."""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import threading
import time

import pytest

from core import slices
from core.hosts import exit_codes
from launch import environment
from launch.hosts import gcloud, lifecycle, workstation

TPU = gcloud.Tpu("my-tpu", "us-central2-b", "proj")
V4_16 = slices.get("v4-16")
ON_DEMAND = lifecycle.Order(V4_16, False, False)


def tpu_is(cloud, **changes):
    """Changes what the stand-in plays; the processes of a slice that goes are killed with it."""
    if "state" in changes:
        for note in cloud.glob("worker_*/.renga/process"):
            pid = int(note.read_text().split()[0])
            if pathlib.Path(f"/proc/{pid}").exists():
                os.killpg(pid, signal.SIGKILL)
    tpu = json.loads((cloud / "tpu.json").read_text())
    (cloud / "tpu.json").write_text(json.dumps(tpu | changes))


def calls(cloud):
    return [json.loads(line) for line in (cloud / "calls.jsonl").read_text().splitlines()]


def watch(*, start, restarts=1, newest_step=lambda: None, **options):
    watched = lifecycle.Watch(tpus=[TPU], start=start, **options)
    return watched.run(restarts=restarts, newest_step=newest_step)


def wait_until(what, seconds=30):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def prints(folder, text):
    """Returns whether the log of a worker's run contains a text."""
    log = folder / ".renga/run.log"
    return log.exists() and text in log.read_text()


@pytest.mark.covers("L07")
@pytest.mark.parametrize("action", ["create", "queue"])
@pytest.mark.parametrize("is_spot", [False, True])
def test_a_tpu_is_created_and_deleted_with_valid_gcloud_flags(cloud, action, is_spot, capfd):
    tpu_is(cloud, state="ABSENT")
    order = lifecycle.Order(slices.get("v5e-16"), is_spot, action == "queue")
    assert lifecycle.act([TPU], action=action, order=order, dry_run=False) == 0
    (made,) = calls(cloud)
    assert made[2:4] == ["queued-resources" if action == "queue" else "tpu-vm", "create"]
    assert "--accelerator-type=v5litepod-16" in made
    assert ("--spot" in made) == is_spot
    assert gcloud.describe(TPU).state == "READY"
    assert lifecycle.act([TPU], action="delete", order=order._replace(slice_=None), dry_run=False) == 0
    assert gcloud.describe(TPU).state == "NOT_FOUND"
    assert lifecycle.act([TPU], action=action, order=order, dry_run=True) == 0
    assert shlex.split(capfd.readouterr().out.splitlines()[-1])[1:] == made


def test_every_generation_has_a_runtime():
    assert set(lifecycle.RUNTIMES) == {slice_.generation for slice_ in slices.SLICES.values()}


@pytest.fixture
def run(workspace):
    """Starts the stand-in of a run, which saves when it is told to stop; ends with CODE where end_CODE is in HOME."""
    (workspace / "launch/pod.sh").write_text(
        "#!/bin/bash\ntrap 'exit 143' TERM\necho \"pod.sh got $*\"\n"
        'while :; do for f in "$HOME"/end_*; do [ -e "$f" ] && exit "${f##*_}"; done; sleep 0.05; done\n'
    )
    started = workstation.Run(["v4-16", "gin/x.gin", "--restarts", "2"], "gs://b/run")

    def start():
        code = workstation.start([TPU], slice_=V4_16, run=started, workspace=workspace, dry_run=False)
        for worker in range(2 if code == 0 else 0):
            wait_until(lambda folder=workspace.parent / f"cloud/worker_{worker}": prints(folder, "pod.sh got"))
        return code

    return start


@pytest.mark.covers("C10", "L07")
def test_a_preempted_slice_is_recreated_and_the_run_finishes(cloud, run, capfd):
    assert run() == 0
    results, steps, requested = [], iter([4, 8, *[8] * 9]), []
    watching = threading.Thread(
        target=lambda: results.append(
            watch(
                order=lifecycle.Order(V4_16, True, False),
                start=run,
                newest_step=lambda: next(steps),
                requested=requested,
                poll_seconds=0.2,
            )
        )
    )
    watching.start()
    tpu_is(cloud, state="PREEMPTED", out_of_stock=1)
    wait_until(lambda: sum("start" in call[-1] and call[3] == "ssh" for call in calls(cloud)) == 2)
    wait_until(lambda: prints(cloud / "worker_1", "pod.sh got v4-16 gin/x.gin --restarts 2"))
    (cloud / "worker_0/end_0").touch()
    watching.join(30)
    assert results == [0]
    kinds = [call[3] for call in calls(cloud) if call[3] in ("create", "delete")]
    assert kinds == ["delete", "create", "create"]  # the first found none to be had
    assert "--spot" in next(call for call in calls(cloud) if call[3] == "create")
    said = capfd.readouterr().out
    assert "my-tpu is PREEMPTED\n" in said
    assert "from the checkpoint of step 8 (restart 1 of at most 1 without a new checkpoint)" in said
    assert "the run ended with exit code 0: done" in said


@pytest.mark.parametrize(
    ("run_says", "state", "code", "starts"),
    [
        ("ended 17", "READY", 17, 0),  # no start can help
        ("ended 13", "READY", 13, 0),  # its host tried all that it may
        ("ended 143", "READY", 143, 2),
        ("gone", "READY", 143, 2),
        ("", "PREEMPTED", 143, 2),
    ],
)
def test_reactions_of_the_watch_to_states(monkeypatch, run_says, state, code, starts):
    started, made = [], []
    monkeypatch.setattr(gcloud, "describe", lambda tpu: gcloud.Description(state="READY" if made else state))
    monkeypatch.setattr(lifecycle, "run_state", lambda tpu: run_says)
    monkeypatch.setattr(gcloud, "perform", lambda steps, **_: made.append(steps[0].argv[4]) or 0)

    def start():
        started.append(made.copy())
        made.clear()
        return 0

    same = {"newest_step": lambda: None, "requested": [], "poll_seconds": 0.01}
    assert watch(order=ON_DEMAND, restarts=2, start=start, **same) == code
    assert len(started) == starts
    assert all(("create" in steps) == (state == "PREEMPTED") for steps in started)


@pytest.mark.parametrize("state", ["NOT_FOUND", "STOPPED"])
def test_a_tpu_that_somebody_deleted_or_stopped_is_not_made_again(monkeypatch, state, capsys):
    monkeypatch.setattr(gcloud, "describe", lambda tpu: gcloud.Description(state=state))
    monkeypatch.setattr(gcloud, "perform", lambda steps, **_: pytest.fail(f"performed {steps}"))
    ends = watch(order=ON_DEMAND, start=lambda: pytest.fail("started"), requested=[], poll_seconds=0.01)
    assert ends == exit_codes.FAILED
    assert f"my-tpu is {state}: somebody deleted or stopped it, so the watch ends" in capsys.readouterr().out


def test_the_watch_says_once_why_it_has_no_answer(monkeypatch, capsys):
    ready, failed = gcloud.Description(state="READY"), gcloud.Description(problem="ERROR: Reauthentication failed.")
    described, runs = iter([failed, failed, ready, ready, failed, ready]), iter(["", "", "ended 0"])
    monkeypatch.setattr(gcloud, "describe", lambda tpu: next(described))
    monkeypatch.setattr(lifecycle, "run_state", lambda tpu: next(runs))
    assert watch(order=ON_DEMAND, start=lambda: pytest.fail("started"), requested=[], poll_seconds=0.01) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "the watch asks again" in line]
    failed_line = "my-tpu: ERROR: Reauthentication failed.; the watch asks again every 0.01 s"
    assert said == [failed_line, "my-tpu: no answer from host 0 by ssh; the watch asks again every 0.01 s", failed_line]


@pytest.mark.slow
def test_a_failed_start_is_retried_and_does_not_count_as_a_restart(cloud, run, capfd):
    """A slice that is taken away tells its hosts to stop first: they end, and it still says READY."""
    assert run() == 0
    for worker in (0, 1):
        (cloud / f"worker_{worker}/end_143").touch()
    wait_until(lambda: on_host(cloud, "state") == "ended 143")
    starts = []

    def start():
        starts.append(gcloud.describe(TPU).state)
        if len(starts) == 1:
            tpu_is(cloud, state="PREEMPTED")  # between the look and the start
        if len(starts) == 2:
            return 255  # as ssh that did not get through
        code = run()
        (cloud / "worker_0/end_0").touch()
        return code

    bounds = {"order": ON_DEMAND, "restarts": 1, "newest_step": lambda: None, "requested": [], "poll_seconds": 0.2}
    assert watch(start=start, **bounds) == 0
    assert starts == ["READY"] * 3
    said = capfd.readouterr().out
    assert "not started (try 1 of 30): TPU my-tpu is PREEMPTED (health HEALTHY), not READY" in said
    assert "not started (try 2 of 30): a step of the start failed (exit code 255)" in said
    assert said.count("restart 1 of at most 1") == 1
    assert "restart 2" not in said


@pytest.mark.parametrize(
    ("is_queued", "change", "says"),
    [
        (False, {"makes": ["FAILED", "PREEMPTED"]}, ["my-tpu is FAILED, and will not be READY", "PREEMPTED, and will"]),
        (
            True,
            {"requests": ["WAITING_FOR_RESOURCES", "FAILED", "FAILED", "PROVISIONING"]},
            ["my-tpu is WAITING_FOR_RESOURCES", "my-tpu is FAILED, and will not be READY", "my-tpu is PROVISIONING"],
        ),
    ],
)
def test_a_tpu_that_can_no_longer_come_is_asked_for_again(cloud, capfd, is_queued, change, says):
    tpu_is(cloud, state="PREEMPTED", **change)
    requested = []
    bounds = {"restarts": 1, "newest_step": lambda: None, "requested": requested, "poll_seconds": 0.01}
    order = lifecycle.Order(V4_16, True, is_queued)
    assert watch(order=order, start=lambda: requested.append(143) or 0, **bounds) == 143
    assert gcloud.describe(TPU).state == "READY"
    said = capfd.readouterr().out
    assert [text for text in says if text not in said] == []
    assert sum(call[3] == "create" for call in calls(cloud)) == (2 if is_queued else 3)


def crontab(cloud):
    path = cloud / "worker_0/.crontab"
    return path.read_text() if path.exists() else ""


def on_host(cloud, *action):
    home = cloud / "worker_0"
    env = {"HOME": str(home), "PATH": f"{home}/.bin:/usr/bin:/bin"}
    command = ["bash", str(home / "renga/launch/hosts/on_host.sh"), *action]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_a_run_survives_a_reboot_of_its_host_until_it_ends_or_is_stopped(cloud, run):
    (cloud / "worker_0").mkdir()
    (cloud / "worker_0/.crontab").write_text("5 4 * * * somebody elses\n")
    assert run() == 0
    line = f"@reboot bash {cloud}/worker_0/renga/launch/hosts/on_host.sh after_reboot"
    assert crontab(cloud) == f"5 4 * * * somebody elses\n{line}\n"
    assert on_host(cloud, "state") == "running"
    tpu_is(cloud, state="READY")  # every process dies, as when the power goes
    wait_until(lambda: on_host(cloud, "state") == "gone")
    on_host(cloud, "after_reboot")
    assert on_host(cloud, "state") == "running"
    wait_until(lambda: prints(cloud / "worker_0", "--restarts 2"))
    on_host(cloud, "stop")
    assert on_host(cloud, "state") == "ended 130"
    assert crontab(cloud) == "5 4 * * * somebody elses\n"
    on_host(cloud, "after_reboot")
    assert on_host(cloud, "state") == "ended 130"


@pytest.mark.covers("L07")
def test_a_start_after_a_reboot_has_the_variables_of_the_first(cloud, workspace, monkeypatch):
    """Without the same secret, the other hosts would not let it join. Nobody else can read the secrets."""
    secrets = {name: f"own {name}" for name in environment.SECRETS}
    given = {name: f"value of {name}" for name in environment.SENT} | {"MEGASCALE_X": "1 2"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    pod = '#!/bin/bash\nenv >"$HOME/new" && mv "$HOME/new" "$HOME/env"\nwhile :; do sleep 0.05; done\n'
    (workspace / "launch/pod.sh").write_text(pod)
    command = ["v4-16", "gin/x.gin", "--restarts", "2"]
    started = workstation.Run(command, "gs://b/run", [f"{name}={value}" for name, value in given.items()])
    assert workstation.start([TPU], slice_=V4_16, run=started, workspace=workspace, dry_run=False) == 0
    home = cloud / "worker_0"

    def taken():
        wait_until((home / "env").exists)
        lines = dict(line.split("=", 1) for line in (home / "env").read_text().splitlines())
        (home / "env").unlink()
        return {name: lines.get(name) for name in (*secrets, *given, "RENGA_JOIN_SECRET")}

    first = taken()
    assert first == secrets | given | {"RENGA_JOIN_SECRET": first["RENGA_JOIN_SECRET"]}
    assert len(first["RENGA_JOIN_SECRET"]) > 40
    tpu_is(cloud, state="READY")  # every process dies
    on_host(cloud, "after_reboot")
    assert taken() == first
    hidden = {*secrets.values(), first["RENGA_JOIN_SECRET"]}
    texts = {path: path.read_text() for path in (home / ".renga").iterdir()}
    (keeps,) = (path for path, text in texts.items() if any(secret in text for secret in hidden))
    assert (keeps.name, keeps.stat().st_mode & 0o777) == ("command", 0o600)
    assert keeps.parent.stat().st_mode & 0o777 == 0o700
    on_host(cloud, "stop")
    assert not keeps.exists()


def test_a_run_that_ended_is_not_started_by_a_reboot(cloud, run):
    assert run() == 0
    (cloud / "worker_0/end_17").touch()
    wait_until(lambda: on_host(cloud, "state") == "ended 17")
    assert crontab(cloud) == ""
    assert "ended with exit code 17" in on_host(cloud, "status")
