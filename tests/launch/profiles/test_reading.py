"""What is read out of traces: of a TPU's planes, written here as the profiler documents them, and what is refused."""

import json
import re
import subprocess
import sys

import jax
import pytest

from launch import __main__ as cli
from launch.environment import WORKSPACE as ROOT
from launch.profiles import asking, page, reading

MILLISECOND = 10**9  # picoseconds


def trace(*, began_seconds=1000, late_milliseconds=0, chips=2):
    """Three steps of 100 ms on each chip, of which 20 ms are an all-gather and 60 ms a fusion inside of a loop."""
    planes = []
    for chip in range(chips):
        steps, operations = [], []
        for number in range(3):
            at = 100 * number + late_milliseconds
            steps.append((str(7 + number), at, 95))
            operations += [("%while.3 = (f32[]) while(%x)", at, 65), ("%fusion.12 = bf16[8] fusion(%y)", at + 1, 60)]
            operations += [("%all-gather-done.4 = bf16[8] all-gather-done(%z)", at + 65, 20)]
        planes.append((f"/device:TPU:{chip}", {"Steps": steps, "XLA Ops": operations}))
    loop = [(text, 100 * n + late_milliseconds, ms) for n in range(3) for text, ms in [("wait for the batch", 25)]]
    planes.append(("/host:CPU", {"python": [*loop, ("hooks", 110 + late_milliseconds, 2)]}))
    began = (
        f'planes {{ name: "Task Environment" stats {{ metadata_id: 1 uint64_value: {began_seconds * 10**9} }} '
        'stat_metadata { key: 1 value { id: 1 name: "profile_start_time" } } }'
    )
    return "\n".join([*(plane(*p) for p in planes), began])


def plane(name, lines):
    names = sorted({text for events in lines.values() for text, _, _ in events})
    said = [f'planes {{ name: "{name}"']
    for number, (line, events) in enumerate(lines.items()):
        said.append(f'lines {{ id: {number} name: "{line}"')
        for text, at, long in events:
            said.append(
                f"events {{ metadata_id: {names.index(text) + 1} offset_ps: {at * MILLISECOND} "
                f"duration_ps: {long * MILLISECOND} }}"
            )
        said.append("}")
    for number, text in enumerate(names, 1):
        said.append(f'event_metadata {{ key: {number} value {{ id: {number} name: "{text}" }} }}')
    return " ".join([*said, "}"])


def write(run_dir, name, text, *, session="step_7"):
    file = run_dir.joinpath(*reading.PROFILES, session, f"{name}.xplane.pb")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))


def test_a_chips_own_planes_give_steps_and_operations(tmp_path):
    write(tmp_path, "t1v-w-0-p0", trace())
    session, (host,) = reading.read_session(str(tmp_path))
    assert (session, host.process, host.chips, host.from_chips) == ("step_7", 0, 2, True)
    assert host.starts == {7: pytest.approx(1000.0), 8: pytest.approx(1000.1), 9: pytest.approx(1000.2)}
    assert host.step_seconds == pytest.approx(0.1)
    assert host.input_wait_seconds == pytest.approx(0.025)
    assert host.hooks_seconds == pytest.approx(0.001)  # 2 ms in two steps
    fusion, gather = host.operations  # the loop around the fusion is not counted again
    assert (fusion.name, fusion.seconds, fusion.count) == ("fusion", pytest.approx(0.36), 6)
    assert (gather.name, gather.is_collective) == ("all-gather-done", True)
    assert host.collectives_share == pytest.approx(20 / 80)


def test_a_step_that_began_before_the_session_is_left_out(tmp_path):
    write(tmp_path, "t1v-w-0-p0", trace(), session="step_8")
    _, (host,) = reading.read_session(str(tmp_path))
    assert list(host.starts) == [8, 9]
    assert host.step_seconds == pytest.approx(0.1)


def test_a_single_step_has_its_own_time(tmp_path):
    write(tmp_path, "t1v-w-0-p0", trace(), session="step_9")
    _, (host,) = reading.read_session(str(tmp_path))
    assert list(host.starts) == [9]
    assert host.step_seconds == pytest.approx(0.095)
    assert host.input_wait_seconds == pytest.approx(0.025)


@pytest.mark.covers("O04")
def test_hosts_are_compared_by_when_they_begin_a_step(tmp_path, capsys):
    for process, late in ((0, 0), (1, 4), (3, 30)):
        write(tmp_path, f"t1v-w-{process}-p{process}", trace(late_milliseconds=late))
    session, hosts = reading.read_session(str(tmp_path))
    seconds, last = page.skew_seconds(hosts)
    assert (seconds, last.process) == (pytest.approx(0.03), 3)
    page.show(session, hosts, top=1)
    said = capsys.readouterr().out
    assert "step_7: steps 7 to 9 on 3 hosts" in said
    assert "skew: the last host begins a step 30 ms behind the first, mostly t1v-w-3-p3" in said
    assert "missing: host 2 wrote no file" in said
    assert "0.025 s (25%)" in said
    assert "fusion" in said
    assert "all-gather" not in said  # --top 1
    assert "of the CPU" not in said


@pytest.mark.parametrize(
    ("name", "is_collective"),
    [
        ("all-reduce", True),
        ("all-to-all", True),
        ("all-reduce-scatter", True),
        ("reduce-scatter-start", True),
        ("collective-permute-done", True),
        ("send-done", True),
        ("reduce", False),
        ("fusion", False),
        ("sender", False),
        ("copy-start", False),
    ],
)
def test_what_counts_as_a_collective(name, is_collective):
    (row,) = reading._summed([(f"%{name}.1 = f32[2] x(%y)", 1.0, "0")])
    assert (row.name, row.is_collective) == (name, is_collective)


def test_the_last_session_is_read_unless_one_is_named(tmp_path):
    for step in (7, 20, 100):
        write(tmp_path, "h-p0", trace(), session=f"step_{step}")
    assert reading.sessions(str(tmp_path)) == ["step_7", "step_20", "step_100"]
    assert reading.read_session(str(tmp_path))[0] == "step_100"
    assert reading.read_session(str(tmp_path), "step_7")[0] == "step_7"
    with pytest.raises(ValueError, match="no profile 'step_8'; there are step_7, step_20, step_100"):
        reading.read_session(str(tmp_path), "step_8")


def test_a_run_without_a_profile_says_how_to_make_one(tmp_path):
    with pytest.raises(ValueError, match=r"has no profile: launch/pod.sh profile .* --seconds 5 makes one"):
        reading.read_session(str(tmp_path))


def test_a_request_that_nobody_takes_is_withdrawn(tmp_path):
    with pytest.raises(ValueError, match=r"is no run directory: it has no config\.gin"):
        asking.ask(str(tmp_path), steps=1)
    (tmp_path / "config.gin").touch()
    with pytest.raises(ValueError, match=r"no run took the request within 0.2 s: is the run of .* training now"):
        asking.ask(str(tmp_path), seconds=5.0, taken_seconds=0.2)
    assert [file.name for file in tmp_path.iterdir()] == ["config.gin"]
    with pytest.raises(ValueError, match="either --seconds S or --steps N"):
        asking.ask(str(tmp_path))


@pytest.mark.parametrize("flag", ["--steps", "--seconds"])
@pytest.mark.parametrize("length", ["0", "-1"])
def test_no_length_is_no_request(tmp_path, capsys, flag, length):
    (tmp_path / "config.gin").touch()
    assert cli.main(["pod", "profile", str(tmp_path), flag, length]) == 2
    assert f"error: profile: {flag} {length}" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["config.gin"]


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_no_number_is_no_length(tmp_path, seconds):
    with pytest.raises(ValueError, match=r"--seconds (nan|inf) is no length: expected more than 0"):
        asking.ask(str(tmp_path), seconds=seconds)


def test_what_is_asked_reaches_the_run_as_json(tmp_path, monkeypatch):
    (tmp_path / "config.gin").touch()
    seen = []

    def nobody(folder, name, states, *, within_seconds):
        seen.append(json.loads((tmp_path / "profile_request.json").read_text()))
        assert seen[-1]["id"] == name

    monkeypatch.setattr(asking, "_answer", nobody)
    for length in ({"steps": 3}, {"seconds": 2.5}):
        with pytest.raises(ValueError, match="no run took"):
            asking.ask(str(tmp_path), **length)
    assert [{k: v for k, v in request.items() if k != "id"} for request in seen] == [{"steps": 3}, {"seconds": 2.5}]
    assert seen[0]["id"] != seen[1]["id"]


LOOP = """
import time
from core.training import profile_requests
profile_requests._BUCKET_SECONDS = 0.5  # between looks, so that the test is quick
requests = profile_requests.Requests("gs://bucket/run", last_step=100_000)
for step in range(100_000):
    time.sleep(0.02)
    if window := requests.asked(step):
        print("traced", window, flush=True)
        requests.done(window)
"""


@pytest.mark.slow
@pytest.mark.covers("O01")
def test_a_run_in_a_bucket_is_asked_through_the_bucket(bucket, launch_command):
    """The run's side, without its training, and the command, each a process that only knows the bucket."""
    bucket.write("gs://bucket/run/config.gin", b"")
    command, environment = launch_command("pod", "profile", "gs://bucket/run", "--steps", "2")
    environment |= bucket.environment | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-c", LOOP], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(2):  # the second finds what the first left
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            first, last = map(int, re.search(r"trace steps (\d+) to (\d+)", done.stdout).groups())
            assert run.stdout.readline() == f"traced Window(first_step={first}, last_step={last})\n"
            assert f"profile     gs://bucket/run/tensorboard/plugins/profile/step_{first}\n" in done.stdout
            assert "/profile_request.json" not in bucket.list("gs://bucket/run")
    finally:
        run.kill()
        run.wait()
