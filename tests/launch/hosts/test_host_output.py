"""A host's output reaches the terminal at once and the log completely, also when the log's disk is full."""

import os
import pty
import re
import select
import sys

import pytest

from launch.hosts import host_output


def start(tmp_path, text, *, log):
    options = {"name": "host 0", "step_file": tmp_path / "step", "to_terminal": True}
    return host_output.HostProcess(["bash", "-c", text], log_path=log, **options)


@pytest.mark.parametrize("where", ["full disk", "no folder"])
def test_output_is_shown_if_the_log_cannot_be_written(tmp_path, capfd, where):
    log = tmp_path / "host_0.log" if where == "full disk" else tmp_path / "gone" / "host_0.log"
    if where == "full disk":
        log.symlink_to("/dev/full")
    host = start(tmp_path, "printf 'step 1\\nerror: no room\\nlast words'", log=log)
    host.finish()
    assert list(host.last_lines) == ["step 1", "error: no room", "last words"]
    said = capfd.readouterr().out
    warned = re.findall(r"warning: \S*host_0.log could not be written \(.*\); the run continues\n", said)
    assert len(warned) == 1
    assert said.replace(warned[0], "") == "step 1\nerror: no room\nlast words"


def test_a_redrawn_line_is_on_the_terminal_before_the_next_one(tmp_path, monkeypatch):
    """A progress bar ends nothing with a line break: each redraw begins with a carriage return."""
    ours, theirs = pty.openpty()
    monkeypatch.setattr(sys, "stdout", os.fdopen(theirs, "w"))
    os.mkfifo(tmp_path / "go")
    host = start(tmp_path, f"printf '\\rstep 1'; cat {tmp_path}/go; printf '\\rstep 2'", log=tmp_path / "host_0.log")
    shown = b""
    for step in (b"\rstep 1", b"\rstep 2"):
        while not shown.endswith(step):
            assert select.select([ours], [], [], 5)[0], f"{step!r} is not on the terminal, only {shown!r}"
            shown += os.read(ours, 99)
        if step == b"\rstep 1":
            (tmp_path / "go").write_text("")
    host.finish()
    assert (tmp_path / "host_0.log").read_text().endswith("step 2\n")
