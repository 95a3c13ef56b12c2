import errno
import os
import resource

import pytest

from core.files import paths


def test_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(paths.resolve("runs/../runs/a")) == str(tmp_path / "runs" / "a")
    assert str(paths.resolve("~/runs")) == "/home/somebody/runs"
    assert str(paths.resolve(tmp_path)) == str(tmp_path)


def test_a_bucket_stays_a_bucket_and_needs_no_tensorflow():
    path = paths.resolve("gs://bucket/runs/a/")
    assert os.fspath(path / "b") == "gs://bucket/runs/a/b"
    assert paths.is_remote(path)
    assert not paths.is_remote(paths.resolve("runs"))
    assert os.environ["EPATH_USE_TF"] == "0"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a path is empty"),
        ("  ", "a path is empty"),
        ("s3://bucket/a", "has scheme 's3'; expected gs://"),
        ("file:///tmp/a", "has scheme 'file'"),
        ("gs:/bucket/a", "names no bucket; expected gs://BUCKET"),
        ("gs:///a", "names no bucket"),
    ],
)
def test_invalid_places_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        paths.resolve(text)


def test_relative_in_a_folder_that_is_gone_is_refused(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match="the working directory no longer exists"):
        paths.resolve("runs")


def test_a_text_is_replaced_whole(tmp_path):
    path = tmp_path / "new" / "config.gin"
    paths.write_text_atomically(path, "one ü")
    before = path.stat().st_ino
    paths.write_text_atomically(path, "two")
    assert path.read_text() == "two"
    assert path.stat().st_ino != before  # Never written in place.
    assert [file.name for file in path.parent.iterdir()] == ["config.gin"]


def test_unwritable_folders_are_reported_early(tmp_path):
    assert str(paths.require_writable(tmp_path / "run")) == str(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*/file/run: NotADirectoryError.*choose another folder"):
        paths.require_writable(tmp_path / "file" / "run")
    assert str(paths.check_writable(tmp_path / "a" / "b")) == str(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match=r"cannot write to .*file/run: NotADirectoryError"):
        paths.check_writable(tmp_path / "file" / "run")


def test_a_copy_makes_its_folder(tmp_path):
    (tmp_path / "a").write_bytes(b"\x00\xff")
    copied = paths.copy_file(tmp_path / "a", to=paths.resolve(tmp_path / "deep" / "er" / "b"))
    assert copied.read_bytes() == b"\x00\xff"


def test_a_full_disk_is_found_before_a_run_with_the_free_space(tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # even one block is refused
    try:
        with pytest.raises(ValueError, match=r"cannot write to .*File too large"):
            paths.require_writable(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_the_fix_for_a_full_disk_is_free_space(tmp_path, monkeypatch, number):
    def full(self, text):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(type(paths.resolve(tmp_path)), "write_text", full)
    says = (
        r"cannot write to .*(No space left|quota|too large).* are free on this host's disk. "
        r"Make room, or raise the limit .*, then start again"
    )
    with pytest.raises(ValueError, match=says):
        paths.check_writable(tmp_path)
