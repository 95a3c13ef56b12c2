"""A file that is appended to has complete lines, also after its disk was full."""

import contextlib
import re
import resource

from core.files.bookkeeping import Appender


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
    assert len(re.findall(r"could not be written \(.*\); the run continues", capsys.readouterr().out)) == 1


def test_pending_content_is_limited_and_the_file_records_the_loss(tmp_path):
    log = Appender(tmp_path / "log", most_bytes=12)
    with room(0):
        for line in (b"first\n", b"second\n", b"third\n"):
            log.write(line)
            log.flush()
    for line in (b"fourth\n", b"fifth\n"):
        log.write(line)
    log.close()
    note = b"(13 bytes are missing here: the disk was full)\n"
    assert (tmp_path / "log").read_bytes() == b"first\n" + note + b"fourth\nfifth\n"


def test_content_that_can_be_written_is_complete(tmp_path):
    log = Appender(tmp_path / "log", most_bytes=12)
    log.write(b"longer than 12 bytes\n")
    log.flush()
    for line in (b"first\n", b"second\n", b"third\n"):
        log.write(line)
    log.close()
    assert (tmp_path / "log").read_bytes() == b"longer than 12 bytes\nfirst\nsecond\nthird\n"


def test_a_line_that_was_begun_is_completed_whatever_the_limit_and_so_is_the_note(tmp_path):
    log = Appender(tmp_path / "log", most_bytes=12)
    line = b"longer than 12 bytes\n"
    with room(3):
        for more in (line, b"next\n"):
            log.write(more)
            log.flush()
    with room(len(line) + 7):  # a part of the note
        log.write(b"second but one\n")
        log.flush()
        log.write(b"last\n")
    log.close()
    note = b"(5 bytes are missing here: the disk was full)\n"
    missing = b"(15 bytes are missing here: the disk was full)\n"
    assert (tmp_path / "log").read_bytes() == line + note + missing + b"last\n"


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
