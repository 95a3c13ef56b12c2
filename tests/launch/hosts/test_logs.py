"""Lines with a time prefix: formatting them, and merging logs."""

import datetime
import os
import signal
import subprocess
import sys

import pytest

from launch import environment
from launch.hosts import host_output, logs


def test_a_stamp_names_the_host_and_the_step_that_it_noted(tmp_path):
    log, step = tmp_path / "run.log", tmp_path / "step"
    text = f"echo a; sleep 0.3; printf 'host 2 step 17\\0\\0' > {step}; sleep 0.2; echo b"
    host = host_output.HostProcess(["bash", "-c", text], log_path=log, name="t1v-w-2", step_file=step)
    host.finish()
    _, first, second = log.read_text().splitlines()
    assert first[16:] == " t1v-w-2 | a"
    assert second[16:] == " host 2 step 17 | b"
    assert host_output.time_of(second) == second[:16]
    assert host_output.time_of("anything | else") is None


def written_at(folder, time):
    for file in folder.iterdir():
        os.utime(file, (time.timestamp(), time.timestamp()))


@pytest.mark.covers("O11")
def test_logs_are_merged_by_time_and_a_line_without_one_stays_with_its_own(tmp_path, capsys):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "host_0.log").write_text("11-22 00:00:01.0 host 0 | a\n  more of a\n11-22 00:00:03.0 host 0 | d\n")
    (folder / "host_1.log").write_text("11-22 00:00:02.5 host 1 | c\n11-22 00:00:02.5 host 1 | c2\n")
    (folder / "host_2.log").write_bytes(b"11-22 00:00:02.0 host 2 | b \xff\n12-01 00:00:00.0 host 2 step 9 | e\n")
    written_at(folder, datetime.datetime(2026, 12, 1))
    assert logs.show(str(tmp_path)) == 0
    said = [line.split(" | ")[-1] for line in capsys.readouterr().out.splitlines()]
    assert said == ["a", "  more of a", "b \N{REPLACEMENT CHARACTER}", "c", "c2", "d", "e"]
    with pytest.raises(ValueError, match=r"has no host_N\.log: a simulated run has them"):
        logs.show(str(tmp_path / "elsewhere"))


def test_logs_are_merged_in_order_over_new_year(tmp_path, capsys):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "host_0.log").write_text("12-31 23:59:59.0 host 0 | a\n01-01 00:00:01.0 host 0 | d\n")
    (folder / "host_1.log").write_text("12-31 23:59:59.5 host 1 | b\n01-01 00:00:00.5 host 1 | c\n")
    (folder / "host_2.log").write_text("01-01 00:00:02.0 host 2 | e\n")  # began in the new year
    written_at(folder, datetime.datetime(2027, 1, 1, 0, 1))
    assert logs.show(str(tmp_path)) == 0
    assert [line[-1] for line in capsys.readouterr().out.splitlines()] == ["a", "b", "c", "d", "e"]


def test_live_lines_are_sorted_and_a_failure_is_reported(capsys):
    def says(*lines, code=0):
        text = f"import sys, time; [print(line, flush=True) or time.sleep(0.1) for line in {lines!r}]; sys.exit({code})"
        return [sys.executable, "-c", text]

    written = []
    first = says("11-22 00:00:03.0 host 0 | c", "11-22 00:00:04.0 host 0 | d")
    second = says("11-22 00:00:01.0 host 1 | a", "11-22 00:00:02.0 host 1 | b", code=3)
    assert logs.follow([first, second], write=written.append) == 3
    assert [line[-1] for line in written] == ["a", "b", "c", "d"]
    assert "failed (exit code 3)" in capsys.readouterr().err


def test_a_signal_and_ctrl_c_have_the_codes_of_shells(capsys):
    assert logs.follow([["bash", "-c", "kill -TERM $$"]], write=lambda line: None) == 128 + signal.SIGTERM
    assert "failed (exit code 143)" in capsys.readouterr().err

    def stop(line):
        raise KeyboardInterrupt

    assert logs.follow([["bash", "-c", "echo a; exec sleep 60"]], write=stop) == 128 + signal.SIGINT
    assert capsys.readouterr().err == ""


def test_the_last_lines_of_a_command_are_logged_however_it_ends(tmp_path):
    """The group of on_host.sh gets the signal: the command acts on it, the one that writes its log waits for it."""
    log = tmp_path / "run.log"
    text = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    command = [sys.executable, "-m", "launch.hosts.host_output", str(log), "w-1", "bash", "-c", text]
    running = subprocess.Popen(command, cwd=environment.WORKSPACE, start_new_session=True)
    try:
        while not (log.exists() and "| ready" in log.read_text()):
            assert running.poll() is None
        subprocess.run(["kill", "-TERM", "--", f"-{running.pid}"], check=True)
        assert running.wait(timeout=10) == 143
    finally:
        running.kill()
    said = [line.split(" w-1 | ")[1] for line in log.read_text().splitlines()]
    assert said[0].startswith("--- w-1: bash -c")
    assert (said[1], said[-1]) == ("ready", "saved")
    killed = [*command[:-3], "bash", "-c", "echo begins; kill -KILL $$"]
    assert subprocess.run(killed, cwd=environment.WORKSPACE, check=False).returncode == 128 + signal.SIGKILL
    assert log.read_text().endswith(" w-1 | begins\n")
