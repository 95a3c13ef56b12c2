"""What a host says reaches the terminal and the last lines, whatever its log's disk takes."""

import os
import re

import pytest

from launch.pods import host_output


@pytest.mark.parametrize("where", ["full disk", "no folder"])
def test_a_log_that_cannot_be_written_hides_nothing(tmp_path, capfd, where):
    log = tmp_path / "host_0.log" if where == "full disk" else tmp_path / "gone" / "host_0.log"
    if where == "full disk":
        log.symlink_to("/dev/full")
    output = host_output.HostOutput(log, to_terminal=True)
    writer = os.dup(output.child_end)
    output.follow(title="--- host 0")
    os.write(writer, b"step 1\nerror: no room\nlast words")
    os.close(writer)
    output.finish()
    assert output.last_lines(9) == ["step 1", "error: no room", "last words"]
    said, warned = capfd.readouterr()
    assert said == "step 1\nerror: no room\nlast words"
    assert (
        len(re.findall(r"host_0.log cannot be written \(.*\); lines are left out of it until it can be", warned)) == 1
    )


def test_a_log_goes_on_when_it_can_be_written_again(tmp_path, capfd):
    log = host_output._Log(tmp_path / "gone" / "host_0.log")
    log.write("one\n")
    (tmp_path / "gone").mkdir()
    log.write("two\n")
    log.close()
    assert (tmp_path / "gone" / "host_0.log").read_text() == "two\n"
    assert "No such file" in capfd.readouterr().err
