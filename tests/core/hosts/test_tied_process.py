"""Children that end with their parent, and are started without a fork of Python's."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from core.hosts import tied_process

PARENT = """
import os, subprocess, sys, time
os.register_at_fork(before=lambda: print("forked", flush=True))
from core.hosts import tied_process
child = subprocess.Popen(tied_process.tied(["sleep", "100"]))
print(child.pid, flush=True)
time.sleep(100)
"""


def is_running(pid):
    try:
        return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_child_ends_with_its_killed_parent_and_nothing_forks_python():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())  # `forked` would be another first line
    assert is_running(child)
    time.sleep(0.3)  # it has become `sleep`
    parent.kill()
    assert parent.wait() == -signal.SIGKILL
    end = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_command_gets_its_arguments_environment_and_usual_signals():
    show = "import os, signal, sys; print(sys.argv[1:], os.environ['A'], signal.getsignal(signal.SIGINT) is not None)"
    done = subprocess.run(
        tied_process.tied(
            ["bash", "-c", f'"{sys.executable}" -c "$0" "$@"; yes | head -1; kill -TERM $$', show, "x y", "-z"]
        ),
        env={**os.environ, "A": "ü"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['x y', '-z'] ü True\ny\n"
    assert "Broken pipe" not in done.stderr  # SIGPIPE ends `yes` in silence
    assert done.returncode == -signal.SIGTERM


def test_a_program_that_is_not_there_is_an_error_before_a_process_starts():
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        tied_process.tied(["no-such-program", "x"])
