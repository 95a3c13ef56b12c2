"""Profiles asked for while a run goes: which steps they are, and what one process makes of a request."""

import json
import time

import pytest

from core.training import profile_requests
from core.training.profile_requests import Requests, Window, window


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
    assert window(**asked, step=10, step_seconds=step_seconds, end=50) == expected


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
    monkeypatch.setattr(profile_requests, "_AHEAD_SECONDS", 1.0)
    monkeypatch.setattr(profile_requests, "_LOCAL_SECONDS", 0.1)
    monkeypatch.setattr(profile_requests, "_LOOK_SECONDS", 0.05)


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
    loop.requests.done(found)
    loop.until(lambda _: answer(tmp_path)["state"] == "written")
    assert answer(tmp_path)["session"] == f"step_{found.first_step}"
    assert answer(tmp_path)["remarks"] == {}
    request(tmp_path, "two", seconds=0.2)  # and another
    again = loop.until(lambda asked: asked)
    assert again.first_step > found.last_step
    loop.requests.done(again)
    loop.requests.close()
    assert (answer(tmp_path)["id"], answer(tmp_path)["state"]) == ("two", "written")


def test_a_host_that_hears_of_it_late_says_so(tmp_path, quick):
    loop = Loop(tmp_path)
    request(tmp_path, "late", steps=50)
    loop.until(lambda _: answer(tmp_path))
    time.sleep(0.2)  # the thread knows the window; the loop was held up, and jumps
    loop.step = answer(tmp_path)["first_step"] + 4
    found = loop.turn()
    assert found.first_step == answer(tmp_path)["first_step"]
    loop.requests.done(found)
    loop.requests.close()
    assert answer(tmp_path)["remarks"] == {"0": "began 5 steps late"}


def test_a_run_that_ends_too_soon_says_so(tmp_path, quick):
    loop = Loop(tmp_path, last_step=12)
    request(tmp_path, "over", steps=1)
    loop.until(lambda _: answer(tmp_path))
    loop.requests.close()
    said = answer(tmp_path)
    assert (said["state"], said["last_step"]) == ("over", 12)
