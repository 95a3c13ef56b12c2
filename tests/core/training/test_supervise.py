"""Restarts of a failed run: when, how often, and when not."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from unittest.mock import ANY

import pytest

from core.hosts import exit_codes
from core.training import supervise

ROOT = pathlib.Path(__file__).resolve().parents[3]


def supervised(codes, *, restarts, steps=(), requested=()):
    """What an attempt returns by turns, the newest step before each; (exit code, attempts made)."""
    codes, made = iter(codes), []
    steps = iter([*steps, *[None] * 20])

    def attempt():
        made.append(time.monotonic())
        return next(codes)

    def newest_step():
        found = next(steps)
        return found() if callable(found) else found

    look = {"newest_step": newest_step, "requested": requested, "first_pause_seconds": 0.01}
    return supervise.supervise(attempt, restarts=restarts, **look), made


@pytest.mark.covers("C10")
def test_endings_that_a_restart_can_help_are_restarted(capsys):
    code, made = supervised([exit_codes.PEER_LOST, 137, exit_codes.PREEMPTED, 0], restarts=3)
    assert (code, len(made)) == (0, 4)
    assert made[3] - made[2] > 2 * 0.01  # pauses grow
    said = capsys.readouterr().out
    assert "ended with exit code 15: another host was lost" in said
    assert f"ended with exit code 137: {exit_codes.ending(137).meaning}. Starts again in 0.02 s" in said


@pytest.mark.parametrize(
    "code", [0, exit_codes.USER_ERROR, exit_codes.NON_FINITE, exit_codes.DIVERGED, exit_codes.INTERRUPTED, 77]
)
def test_endings_that_a_restart_cannot_help_are_not_restarted(code):
    assert supervised([code], restarts=3)[0] == code


def test_restarts_without_a_new_checkpoint_are_counted_and_one_starts_the_count_anew(capsys):
    steps = [None, None, 5, 5, 9, 9, 9]  # before the first attempt, and behind each
    code, made = supervised([13] * 20, restarts=2, steps=steps)
    assert (code, len(made)) == (13, 6)
    assert "given up, 2 restarts brought no checkpoint" in capsys.readouterr().out
    assert len(supervised([13], restarts=0)[1]) == 1


def unreachable():
    raise OSError("503")


@pytest.mark.parametrize(
    ("looks", "failures", "resumes"),
    [
        ([5, unreachable, 5], [1, 2], "from the checkpoint of step 5"),
        ([unreachable, 5, 5], [1, 2], "from the checkpoint of step 5"),
        ([5, 5, unreachable], [1, 2], "from its newest checkpoint"),
        ([5, unreachable, 9], [1, 1], "from the checkpoint of step 9"),
        ([9, 5, 9], [1, 2], "from the checkpoint of step 9"),  # one was damaged, and made again
        ([None, None, None], [1, 2], "from the start"),
    ],
)
def test_a_look_for_checkpoints_that_fails_is_no_progress(capsys, looks, failures, resumes):
    assert supervised([13, 13, 0], restarts=5, steps=looks) == (0, ANY)
    said = capsys.readouterr().out
    assert [int(n) for n in re.findall(r"restart (\d) of at most 5", said)] == failures
    assert f"{resumes} (restart {failures[-1]} of" in said
    assert ("cannot list checkpoints: OSError: 503" in said) == (unreachable in looks)


def test_nothing_starts_after_a_stop_request():
    """Neither behind an attempt that was stopped, nor out of a pause."""
    requested = []

    def attempt():
        threading.Timer(0.2, requested.append, [143]).start()
        return 13

    look = {"newest_step": lambda: None, "requested": requested}
    started = time.monotonic()
    assert supervise.supervise(attempt, restarts=3, first_pause_seconds=60, **look) == 143
    assert time.monotonic() - started < 20
    assert supervised([143], restarts=3, requested=[143])[0] == 143


def test_a_stopped_child_ends_with_the_code_of_its_signal():
    saves = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print('up', flush=True)\n"
    command = [sys.executable, "-c", saves + "time.sleep(60)"]
    with supervise.stop_requests() as requested:
        threading.Timer(2.0, os.kill, [os.getpid(), signal.SIGTERM]).start()
        assert supervise.run_child(command, requested) == 143
    assert requested == [143]
    assert supervise.run_child([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], []) == 137


def test_the_newest_step_is_that_of_a_complete_checkpoint(tmp_path):
    assert supervise.newest_step(str(tmp_path)) is None
    for step, parts in ((3, ("state", "meta", "_CHECKPOINT_METADATA")), (7, ("state",))):
        for part in parts:
            (tmp_path / "checkpoints" / str(step) / part).mkdir(parents=True)
    assert supervise.newest_step(str(tmp_path)) == 3


def test_a_child_ends_with_a_supervisor_that_is_killed(tmp_path):
    """The kernel sends it SIGTERM, as a stop would."""
    said = tmp_path / "said"
    child = f"""
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(said)!r}).write_text("saved"), os._exit(0)))
pathlib.Path({str(said)!r}).write_text("ready")
time.sleep(60)
"""
    program = (
        f"import sys; from core.training import supervise; supervise.run_child([sys.executable, '-c', {child!r}], [])"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    for wanted in ("ready", "saved"):
        deadline = time.monotonic() + 20
        while not said.exists() or said.read_text() != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        supervisor.kill()
    supervisor.wait()
