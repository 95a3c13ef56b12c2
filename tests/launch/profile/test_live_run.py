"""A simulated run of two hosts that is profiled while it trains."""

import json
import re
import signal
import statistics
import subprocess

import jax
import pytest

from core.training import profile_reader
from launch import environment
from launch.hosts import host_output

# What these find on two hosts has quick tests of its own: tests/core/training/test_profiling.py, test_host_metrics.py.
pytestmark = pytest.mark.slow

TINY = [
    "TASK = @synthetic.random_tokens()",
    "PROMPT = ''",
    "NUM_STREAMS = 4",
    "LENGTH = 32",
    "TOTAL_STEPS = 100000",
    "EVAL_BATCHES = 0",
    "LOG_INTERVAL = 5",
    "settings.Logging.memory_profile_steps = (3,)",
    "transformer.Transformer.num_layers = 2",
    "transformer.Transformer.embed_dim = 32",
    "transformer.Transformer.mlp_dim = 64",
]


class Lived:
    """What is known of the run behind its end."""

    def __init__(self, run_dir, said, asked):
        self.run_dir, self.said, self.asked = run_dir, said, asked
        self.session = re.search(r"--session (step_\d+)", asked)[1]
        self.first, self.last = map(int, re.search(r"2 hosts trace steps (\d+) to (\d+)", asked).groups())


@pytest.fixture(scope="module")
def lived(launch, launch_command, tmp_path_factory):
    """The run: asked for four steps of profile as it goes, then told to stop."""
    run_dir = tmp_path_factory.mktemp("lived")
    bindings = [word for binding in TINY for word in ("--gin", binding)]
    command, env = launch_command(
        "pod", "v4-16", "gin/quickstart.gin", "--simulate", "--run-dir", str(run_dir), *bindings
    )
    running = subprocess.Popen(
        command, cwd=environment.WORKSPACE, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = ""
    try:
        for line in running.stdout:
            said += line
            if line.startswith("step     10/"):
                break
        asked = launch("pod", "profile", str(run_dir), "--steps", "4")
        running.send_signal(signal.SIGTERM)
        said += running.communicate(timeout=60)[0]
    finally:
        running.kill()
    assert running.returncode == 143, said
    return Lived(run_dir, said, asked)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.simulated(2)
@pytest.mark.covers("O01")
def test_all_hosts_of_a_running_job_trace_the_same_steps(lived):
    assert lived.last == lived.first + 3
    assert lived.session == f"step_{lived.first}"
    assert "late" not in lived.asked
    folder = lived.run_dir / "tensorboard" / "plugins" / "profile"
    assert [session.name for session in folder.iterdir()] == [lived.session]
    _, hosts = profile_reader.read_session(str(lived.run_dir))
    assert [host.process for host in hosts] == [0, 1]
    for host in hosts:
        assert set(range(lived.first, lived.last + 1)) == set(host.starts)
    assert not (lived.run_dir / "profile_request.json").exists()


@pytest.mark.simulated(2)
@pytest.mark.covers("O04")
def test_a_profile_is_read_without_tensorboard(lived, launch):
    said = launch("profile", str(lived.run_dir))
    assert f"{lived.session}: steps {lived.first} to {lived.last} on 2 hosts" in said
    assert re.search(r"-p1of2 +4 .* s \(\d+%\)", said)
    assert re.search(r"skew: the last host starts a step [\d.e-]+ ms after the first, mostly .*-p[01]", said)
    assert re.search(r"all-(gather|reduce) .* collective", said)
    assert "This run used CPU devices" in said


@pytest.mark.simulated(2)
@pytest.mark.covers("O02")
def test_memory_is_profiled_at_a_chosen_step_on_every_host(lived):
    written = sorted(file.name for file in (lived.run_dir / "memory").iterdir())
    assert written == ["step_3-host_0.pprof", "step_3-host_1.pprof"]
    assert all((lived.run_dir / "memory" / name).stat().st_size > 1000 for name in written)
    assert f"host 0: step 3: what is in device memory is in {lived.run_dir}/memory/step_3-host_0.pprof" in lived.said


@pytest.mark.simulated(2)
@pytest.mark.covers("O03", "O06", "O07")
def test_every_host_is_seen_in_the_figures_of_host_0_and_writes_its_own(lived):
    own = {index: rows(lived.run_dir / "metrics" / f"host_{index}.jsonl") for index in (0, 1)}
    for lines in own.values():
        assert [line["step"] for line in lines][:3] == [1, 5, 10]
        parts = ("input_wait_seconds", "device_seconds", "host_seconds")
        ratios = [sum(line[part] for part in parts) / line["step_seconds"] for line in lines]
        assert min(ratios) > 0.999
        assert statistics.median(ratios) < 1.1  # a wait at a line's edge may count to its neighbor
    seen = [row for row in rows(lived.run_dir / "metrics.jsonl") if "hosts/step_seconds/host_1" in row]
    told = [{line["step"]: line["step_seconds"] for line in own[index]} for index in (0, 1)]
    assert len(seen) > 3
    for row in seen:
        assert [row[f"hosts/step_seconds/host_{index}"] for index in (0, 1)] == [t[row["step"]] for t in told]
    assert all(row["hosts/slowest"] in (0, 1) for row in seen)
    texts = {row["tag"]: row["text"] for row in rows(lived.run_dir / "metrics.jsonl") if "tag" in row}
    assert "params/" in texts["sharding"]
    assert "fsdp" in texts["sharding"]


@pytest.mark.simulated(2)
@pytest.mark.covers("X09", "O11")
def test_log_lines_carry_time_host_and_step_and_are_merged_by_time(lived, launch):
    log = (lived.run_dir / "logs" / "host_1.log").read_text().splitlines()
    assert all(host_output.time_of(line) for line in log)
    assert log[0].split(" | ")[0].endswith(" host 1")
    assert re.search(r" host 1 step \d+ \| host 1 of 2: preempted", log[-1])
    assert not any(host_output.time_of(line) for line in lived.said.splitlines())  # the terminal is as it was
    merged = launch("pod", "logs", str(lived.run_dir)).splitlines()
    times = [host_output.time_of(line) for line in merged]
    assert times == sorted(times)
    assert {line.split()[3] for line in merged} == {"0", "1"}


@pytest.mark.simulated(2)
def test_a_trace_has_what_the_training_loop_does(lived):
    file = next((lived.run_dir / "tensorboard").rglob("*-p0of*.xplane.pb"))
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    names = {
        event.name for plane in planes if plane.name == "/host:CPU" for line in plane.lines for event in line.events
    }
    assert {"train", "wait for the batch", "wait for the step", "hooks"} <= names
