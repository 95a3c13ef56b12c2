"""Profiles of steps and memory: files of all hosts, windows of steps, and requests."""

import gzip
import json
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from core.hosts import distributed
from core.training import profile_request, profiling, trainer
from core.training.profiling import Requests, Window, window_of

PLANES = "tensorboard/plugins/profile"


def profile_one(run_dir, step):
    trace = profiling.Trace(str(run_dir), step)
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
        jax.jit(lambda x: x @ x)(jnp.ones((32, 32))).block_until_ready()
    return trace.stop()


@pytest.mark.covers("O01")
def test_a_window_is_one_readable_file_where_tensorboard_looks(tmp_path):
    (file,) = profile_one(tmp_path, 100)
    assert str(file.parent) == str(tmp_path / PLANES / "step_100")
    assert file.name.endswith("-p0of1.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    names = {event.name for plane in data.planes for line in plane.lines for event in line.events}
    assert any("train" in name for name in names)
    (second,) = profile_one(tmp_path, 200)
    assert second.parent.name == "step_200"


@pytest.mark.covers("O01")
def test_hosts_that_share_a_hostname_do_not_overwrite_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "process_count", lambda: 2)
    written = []
    for index in (0, 1):
        monkeypatch.setattr(distributed, "process_index", lambda index=index: index)
        written += profile_one(tmp_path, 7)
    assert [file.name.rsplit("-", 1)[1] for file in written] == ["p0of2.xplane.pb", "p1of2.xplane.pb"]
    assert len(list((tmp_path / PLANES / "step_7").iterdir())) == 2


def test_a_step_that_is_traced_again_on_other_machines_has_only_the_last_trace(tmp_path, monkeypatch):
    def traced(index, *, count, name):
        monkeypatch.setattr(distributed, "process_count", lambda: count)
        monkeypatch.setattr(distributed, "process_index", lambda: index)
        monkeypatch.setattr(profiling.socket, "gethostname", lambda: name)
        profile_one(tmp_path, 7)
        return sorted(file.name.partition(".")[0] for file in (tmp_path / PLANES / "step_7").iterdir())

    traced(0, count=4, name="old-0")
    assert traced(1, count=4, name="old-1") == ["old-0-p0of4", "old-1-p1of4"]
    assert traced(1, count=4, name="new-1") == ["new-1-p1of4", "old-0-p0of4"]
    assert traced(0, count=2, name="new-0") == ["new-0-p0of2"]


TWO_HOSTS_PROFILE = """
import jax, jax.numpy as jnp
from core.hosts import distributed
from core.training import profiling, trainer
from core.training.profiling import Requests, Window, window_of
distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=1)
trace = profiling.Trace("run", 10)
jnp.ones(8).sum().block_until_ready()
trace.stop()
distributed.shutdown()
"""


@pytest.mark.covers("O01")
@pytest.mark.simulated(2)
def test_every_host_writes_into_one_session(run_hosts, tmp_path):
    results = run_hosts(TWO_HOSTS_PROFILE, hosts=2)
    assert [result.returncode for result in results] == [0, 0], results
    files = list((tmp_path / "run" / PLANES / "step_10").iterdir())
    assert sorted(file.name.rsplit("-", 1)[1] for file in files) == ["p0of2.xplane.pb", "p1of2.xplane.pb"]


@pytest.mark.covers("O02")
def test_memory_that_is_exhausted_leaves_a_profile_of_it(tmp_path, capsys):
    memory = profiling.MemoryProfile(str(tmp_path), process_index=2)
    kept = jnp.ones((256, 1024))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"), memory.when_exhausted():
        jnp.zeros((2**46,), jnp.float32).block_until_ready()
    written = tmp_path / "memory" / "exhausted-host_2.pprof"
    assert gzip.decompress(written.read_bytes())  # what pprof reads: a gzipped protocol buffer
    said = capsys.readouterr().out
    assert said == f"host 2: memory is exhausted: what is in device memory is in {written}\n"
    assert kept.nbytes == 2**20


def test_other_errors_leave_none(tmp_path):
    with pytest.raises(ValueError, match="other"), profiling.MemoryProfile(str(tmp_path)).when_exhausted():
        raise ValueError("other")
    assert not list(tmp_path.iterdir())


def recorded(events):
    """A trace that writes its start and its end to `events`."""

    class Trace:
        def __init__(self, step):
            events.append(f"start {step}")

        def stop(self):
            events.append("stop")

    return Trace


class NoRequests:
    def asked(self, step):
        return None


def report(step):
    return trainer.StepReport(step, {"loss": 2.0}, {}, 0.5, 0.1)


@pytest.mark.covers("O01")
def test_profile_windows_open_and_close_with_their_steps():
    events = []
    profile = profiling.Profile(recorded(events), NoRequests(), at=(2, 9), num_steps=3)
    for step in range(1, 11):
        profile.before_step(step)
        events.append(f"dispatch {step}")
        if step > 1:
            profile.after_step(report(step - 1))  # read one step late, as the trainer does
    assert events.index("start 2") < events.index("dispatch 2")
    assert events.index("stop") == events.index("dispatch 5") + 1  # step 4 has finished
    profile.close()  # the run ends inside the second window
    assert [e for e in events if not e.startswith("dispatch")] == ["start 2", "stop", "start 9", "stop"]
    profile.close()
    assert events[-1] == "stop"


def test_a_window_traces_exactly_its_steps():
    """Run by the training loop itself: the step after the window is dispatched when the trace has ended."""
    events = []

    class Program:
        def train_step(self, state, batch):
            events.append(f"dispatch {int(state.step) + 1}")
            return types.SimpleNamespace(step=state.step + 1), {}

    class Batches:
        input_wait_seconds = 0.0

        def __next__(self):
            return {}

    profile = profiling.Profile(recorded(events), NoRequests(), at=(3,), num_steps=2)
    trainer.train(Program().train_step, Batches(), types.SimpleNamespace(step=0), total_steps=6, hooks=[profile])
    steps = [f"dispatch {n}" for n in range(1, 7)]
    assert events == [*steps[:2], "start 3", *steps[2:4], "stop", *steps[4:]]


def test_a_requested_window_is_traced_like_a_planned_one():
    events = []
    wanted = [profiling.Window(5, 6)]
    requests = types.SimpleNamespace(
        asked=lambda step: wanted.pop() if wanted and step >= wanted[0].first_step else None,
        done=lambda failure: events.append(f"done {failure}".strip()),
    )
    profile = profiling.Profile(recorded(events), requests, at=(5, 9), num_steps=1)
    for step in range(1, 12):
        profile.before_step(step)
        if step > 1:
            profile.after_step(report(step - 1))
    assert events == ["start 5", "stop", "done", "start 9", "stop"]


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    """Its request is answered with the reason."""

    def full():
        raise OSError("No space left on device")

    def begun(step):
        return types.SimpleNamespace(stop=full) if step < 6 else full()

    answers, wanted = [], [profiling.Window(6, 7), profiling.Window(1, 2)]
    requests = types.SimpleNamespace(asked=lambda step: wanted.pop() if step in (1, 6) else None, done=answers.append)
    profile = profiling.Profile(begun, requests, at=(4,), num_steps=1)
    for step in range(1, 8):
        profile.before_step(step)
        profile.after_step(report(step))
    asked, planned, not_begun = (
        f"could not write the profile of steps {first} to {last}: OSError: No space left on device"
        for first, last in ((1, 2), (4, 4), (6, 7))
    )
    assert answers == [asked, not_begun]
    (tmp_path / "memory").write_text("a file where the folder would be")
    memory = profiling.MemoryProfile(str(tmp_path), at=(5,), process_index=2)
    memory.after_step(report(5))
    *said, last = capsys.readouterr().out.splitlines()
    assert said == [f"host 0 {failure}" for failure in (asked, planned, not_begun)]
    assert last.startswith("host 2 could not write a profile of device memory (step 5): FileExistsError")


@pytest.mark.parametrize(("failed", "is_shown"), [("1", True), ("01", False)])
def test_a_request_whose_profile_hosts_could_not_write_fails(tmp_path, capsys, failed, is_shown):
    """The profiles of the other hosts are shown."""
    plan = {"id": "one", "hosts": 2, "first_step": 3, "last_step": 4, "starts_in_seconds": 0.0, "step_seconds": 0.1}
    failures = dict.fromkeys(failed, "could not write it")
    answered = {**plan, "state": "written", "remarks": {}, "failures": failures, "session": "step_3"}
    (tmp_path / profiling.ANSWER_NAME).write_text(json.dumps(answered))
    with pytest.raises(UserError, match=r"host 1 could not write it$"):
        profile_request._wait(tmp_path, plan)
    assert ("profile     " in capsys.readouterr().out) == is_shown


@pytest.mark.parametrize(
    ("asked", "step_seconds", "expected"),
    [
        ({"steps": 4, "seconds": None}, 10.0, Window(13, 16)),  # three steps ahead, where a step is long
        ({"steps": 4, "seconds": None}, 0.1, Window(30, 33)),  # two seconds ahead, where it is short
        ({"steps": None, "seconds": 5.0}, 0.5, Window(14, 23)),
        ({"steps": None, "seconds": 5.0}, 60.0, Window(13, 13)),
        ({"steps": 40, "seconds": None}, 1.0, Window(13, 50)),  # the run ends
        ({"steps": 1, "seconds": None}, 0.01, None),  # the run ends before
    ],
)
def test_the_window_is_ahead_of_all_hosts_and_inside_the_run(asked, step_seconds, expected):
    assert window_of(**asked, step=10, step_seconds=step_seconds, end=50) == expected


class Loop:
    """A training loop of one process: steps of 20 ms, with the requests as the only hook."""

    def __init__(self, run_dir, *, last_step=100_000):
        self.requests = Requests(str(run_dir), last_step=last_step)
        self.step = 0

    def until(self, condition):
        deadline = time.monotonic() + 20
        while not (found := condition(self.turn())):
            assert time.monotonic() < deadline
        return found

    def turn(self):
        self.step += 1
        time.sleep(0.02)
        return self.requests.asked(self.step)


def answer(run_dir):
    path = run_dir / "profile_answer.json"
    return json.loads(path.read_text()) if path.exists() else {}


def request(run_dir, name, **length):
    (run_dir / "profile_request.json").write_text(json.dumps({"id": name, **length}))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(profiling, "_AHEAD_SECONDS", 1.0)
    monkeypatch.setattr(profiling, "_LOCAL_SECONDS", 0.1)
    monkeypatch.setattr(profiling, "_LOOK_SECONDS", 0.05)


def test_a_request_after_a_rollback_is_taken(tmp_path, quick, monkeypatch):
    """The seconds of a step follow from the steps since then, not from numbers that went back."""
    monkeypatch.setattr(profiling, "_CLOSING_SECONDS", 0.1)  # nothing is traced that would be waited for
    loop = Loop(tmp_path)
    assert not any(loop.turn() for _ in range(14))
    loop.step -= 10
    request(tmp_path, "after a rollback", steps=3)
    found = loop.until(lambda asked: asked)
    assert found.first_step < 500
    loop.requests.close()


def test_a_pause_between_steps_does_not_shorten_a_profile(tmp_path, quick, monkeypatch):
    """Steps take 20 ms; a pause, such as a compilation or an evaluation, is not the length of a step."""
    monkeypatch.setattr(profiling, "_CLOSING_SECONDS", 0.1)
    loop = Loop(tmp_path)
    loop.turn()
    time.sleep(2.0)
    assert not any(loop.turn() for _ in range(5))
    request(tmp_path, "after a pause", seconds=0.5)
    found = loop.until(lambda asked: asked)
    assert found.last_step - found.first_step + 1 > 3  # 25, or fewer on a busy machine; with the pause, 2
    loop.requests.close()


@pytest.mark.covers("O01")
def test_a_request_is_taken_traced_once_and_answered(tmp_path, quick):
    loop = Loop(tmp_path)
    assert not any(loop.turn() for _ in range(5))
    request(tmp_path, "one", steps=3)
    found = loop.until(lambda asked: asked)
    assert loop.step == found.first_step
    assert found.last_step == found.first_step + 2
    said = answer(tmp_path)
    assert (said["state"], said["id"], said["hosts"]) == ("planned", "one", 1)
    assert not (tmp_path / "profile_request.json").exists()
    assert not any(loop.turn() for _ in range(5))
    loop.requests.done()
    loop.until(lambda _: answer(tmp_path)["state"] == "written")
    assert answer(tmp_path)["session"] == f"step_{found.first_step}"
    assert answer(tmp_path)["remarks"] == {}
    request(tmp_path, "two", seconds=0.2)  # and another
    again = loop.until(lambda asked: asked)
    assert again.first_step > found.last_step
    loop.requests.done()
    loop.requests.close()
    assert (answer(tmp_path)["id"], answer(tmp_path)["state"]) == ("two", "written")


@pytest.mark.covers("O01")
def test_a_window_of_an_earlier_run_of_the_process_is_not_traced(tmp_path, quick, monkeypatch):
    """As in a notebook, whose first run was interrupted before the window."""
    monkeypatch.setattr(profiling, "_CLOSING_SECONDS", 0.1)
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = Loop(tmp_path / "first")
    request(tmp_path / "first", "of the first", steps=100_000)
    first.until(lambda _: answer(tmp_path / "first"))
    first.requests.close()
    second = Loop(tmp_path / "second")
    second.step = answer(tmp_path / "first")["first_step"]  # inside the window
    assert not any(second.turn() for _ in range(20))
    request(tmp_path / "second", "of the second", steps=3)
    assert second.until(lambda asked: asked).first_step == answer(tmp_path / "second")["first_step"]
    second.requests.close()


def test_a_host_that_learns_of_a_window_late_reports_it(tmp_path, quick):
    loop = Loop(tmp_path)
    request(tmp_path, "late", steps=50)
    loop.until(lambda _: answer(tmp_path))
    time.sleep(0.2)  # the thread knows the window; the loop was held up, and jumps
    loop.step = answer(tmp_path)["first_step"] + 4
    found = loop.turn()
    assert found.first_step == answer(tmp_path)["first_step"]
    loop.requests.done()
    loop.requests.close()
    assert answer(tmp_path)["remarks"] == {"0": "began 5 steps late"}


def test_a_run_that_ends_before_the_profile_is_reported(tmp_path, quick):
    loop = Loop(tmp_path, last_step=12)
    request(tmp_path, "over", steps=1)
    loop.until(lambda _: answer(tmp_path))
    loop.requests.close()
    said = answer(tmp_path)
    assert (said["state"], said["last_step"]) == ("over", 12)


class SlowToArrive:
    """A metric for which the host waits, as for that of a step that the devices still compute."""

    def __array__(self, dtype=None, copy=None):
        time.sleep(0.05)
        return np.zeros((), dtype or np.float32)


@pytest.mark.covers("O01")
def test_the_annotated_steps_last_as_long_as_the_steps(tmp_path):
    """Profilers show the duration of these annotations as the step time; dispatching takes almost none of it."""

    class Batches:
        input_wait_seconds = 0.0

        def __next__(self):
            return {}

    def train_step(state, batch):
        return types.SimpleNamespace(step=state.step + 1), {"loss": SlowToArrive()}

    requests = types.SimpleNamespace(asked=lambda step: None)
    profile = profiling.Profile(lambda step: profiling.Trace(str(tmp_path), step), requests, at=(3,))
    trainer.train(train_step, Batches(), types.SimpleNamespace(step=0), total_steps=8, hooks=[profile])
    (file,) = (tmp_path / PLANES / "step_3").iterdir()
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    seconds = {dict(e.stats)["step_num"]: e.duration_ns / 1e9 for e in events if e.name == trainer.STEP}
    assert sorted(seconds) == [3, 4, 5]
    assert min(seconds.values()) >= 0.05
    assert sum(seconds.values()) >= 4 * 0.05  # that of step 2, which had begun, and those of 3 to 5
