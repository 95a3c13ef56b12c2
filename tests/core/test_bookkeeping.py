"""A file that is appended to has whole lines, also after its disk was full."""

import contextlib
import re
import resource

from core.bookkeeping import Appender


@contextlib.contextmanager
def room(size_bytes):
    """Inside, no file may grow beyond this size: a write is taken up to it, as by a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_the_disk_takes_in_part_is_completed_later(tmp_path, capsys):
    log = Appender(tmp_path / "log")
    with room(8):
        for line in (b"first\n", b"second\n", b"third\n"):
            log.write(line)
            log.flush()
    assert (tmp_path / "log").read_bytes() == b"first\nse"
    log.close()
    assert (tmp_path / "log").read_bytes() == b"first\nsecond\nthird\n"
    assert len(re.findall(r"could not be written \(.*\); the run goes on", capsys.readouterr().out)) == 1


def test_what_is_kept_has_a_limit_and_the_file_says_what_is_missing(tmp_path):
    log = Appender(tmp_path / "log", most_bytes=12)
    with room(0):
        for line in (b"first\n", b"second\n", b"third\n"):
            log.write(line)
            log.flush()
    log.close()
    assert (tmp_path / "log").read_bytes() == b"first\nthird\n(7 bytes are missing here: the disk was full)\n"


def test_a_line_that_a_killed_process_left_is_ended_first(tmp_path):
    (tmp_path / "log").write_bytes(b"whole\nha")
    log = Appender(tmp_path / "log")
    log.write(b"next\n")
    log.close()
    assert (tmp_path / "log").read_bytes() == b"whole\nha\nnext\n"


def test_a_folder_that_comes_later_is_no_loss(tmp_path, capsys):
    log = Appender(tmp_path / "gone" / "log")
    log.write(b"one\n")
    (tmp_path / "gone").mkdir()
    log.write(b"two\n")
    log.close()
    assert (tmp_path / "gone" / "log").read_bytes() == b"one\ntwo\n"
    assert "No such file" in capsys.readouterr().out
