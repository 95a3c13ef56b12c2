"""Ctrl-C as a process answers it, also while its main thread runs C code, in which Python handles no signal."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from core.hosts import exit_codes

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent
PROGRAM = """
import hashlib, os, sys, time
from core.hosts import interrupt

def save():
    print("asked to save", flush=True)

def end(code, why):
    print(f"ended: {{why}}", flush=True)
    os._exit(code)

def in_c(millions):
    hashlib.pbkdf2_hmac("sha256", b"", b"", millions * 1_000_000)

try:
    with interrupt.Interrupts({save}, end=end, name=lambda: "host 1 of 2"):
        {steps}
        print("ready", flush=True)
        {work}
        print("worked", flush=True)
except KeyboardInterrupt:
    print("unwound", flush=True)
    sys.exit(130)
"""
IN_PYTHON, IN_C, BRIEFLY_IN_C = "time.sleep(60)", "in_c(200)", "in_c(2)"
NOTHING, SAVES, LAST, LOSES, LOSES_NOTHING = (
    "host 1 of 2: Interrupted. The run ends now: there is no new step to save.",
    "host 1 of 2: Interrupted at step 0. The run saves a checkpoint after the current step, then ends.",
    "host 1 of 2: Interrupted at step 0. It is the last one: the run ends after its evaluation and its checkpoint.",
    "host 1 of 2: Interrupted again. The run ends now. Steps since the last checkpoint are lost.",
    "host 1 of 2: Interrupted again. The run ends now. All steps are saved.",
)


def started(*, steps="", work=IN_PYTHON, save="save", before=""):
    text = before + PROGRAM.format(steps=steps or "pass", work=work, save=save)
    process = subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    return process


def interrupted(process):
    """Sends Ctrl-C; returns the line that is the answer."""
    process.send_signal(signal.SIGINT)
    return process.stdout.readline()


def rest(process):
    """Waits for the end of the process; returns the remaining lines of its output."""
    lines = process.stdout.read().splitlines()
    process.wait(timeout=60)
    return lines


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ({}, ["unwound"]),
        ({"work": IN_C}, ["ended: stopped by Ctrl-C"]),
        ({"steps": "interrupt.trained(1); interrupt.saved(1); interrupt.ending()"}, ["unwound"]),
        ({"steps": "interrupt.trained(1)", "save": "None"}, ["unwound"]),
    ],
    ids=["before the first step", "while it compiles", "all steps are saved", "a run that saves nothing"],
)
def test_with_nothing_to_save_the_process_ends_right_away(start, said):
    process = started(**start)
    began = time.monotonic()
    assert interrupted(process).startswith(NOTHING)
    assert rest(process) == said
    assert process.returncode == exit_codes.INTERRUPTED
    assert time.monotonic() - began < 10


def test_the_answer_comes_at_once_and_the_loop_is_asked_to_save():
    process = started(steps="interrupt.saved(1); interrupt.trained(1)", work=BRIEFLY_IN_C)  # trained once more
    assert interrupted(process).startswith(SAVES)
    assert rest(process) == ["asked to save", "worked"]
    assert process.returncode == 0


@pytest.mark.parametrize("work", [IN_PYTHON, IN_C])
def test_a_second_one_ends_the_process_without_saving(work):
    process = started(steps="interrupt.trained(1)", work=work)
    assert interrupted(process).startswith(SAVES)
    assert process.stdout.readline() == "asked to save\n"
    began = time.monotonic()
    assert interrupted(process).startswith(LOSES)
    assert rest(process) == ["ended: stopped by a second Ctrl-C"]
    assert process.returncode == exit_codes.INTERRUPTED
    assert time.monotonic() - began < 5


def test_after_the_last_step_the_run_is_left_to_end():
    process = started(steps="interrupt.trained(7); interrupt.ending()", work=BRIEFLY_IN_C)
    assert interrupted(process).startswith(LAST)
    assert rest(process) == ["worked"]
    assert process.returncode == 0


def test_a_second_one_after_the_save_says_that_nothing_is_lost():
    process = started(steps="interrupt.trained(1)", save="lambda: interrupt.saved(1)")
    assert interrupted(process).startswith(SAVES)
    time.sleep(0.1)
    assert interrupted(process).startswith(LOSES_NOTHING)
    assert rest(process) == ["ended: stopped by a second Ctrl-C"]


def test_other_signals_are_not_taken_for_ctrl_c():
    before = "import signal; signal.signal(signal.SIGUSR1, lambda *_: print('other', flush=True))\n"
    process = started(work="time.sleep(0.5)", before=before)
    process.send_signal(signal.SIGUSR1)
    assert rest(process) == ["other", "worked"]


def test_a_process_that_a_script_started_in_the_background_goes_on():
    process = started(work="time.sleep(0.5)", before="import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n")
    process.send_signal(signal.SIGINT)
    assert rest(process) == ["worked"]
    assert process.returncode == 0
