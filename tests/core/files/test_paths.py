import errno
import os
import pathlib
import resource
import uuid

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
        ("~nobody-of-this-name/runs", "begins with a home directory that this machine does not know"),
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


def test_files_that_vanish_while_they_are_listed_have_no_size(tmp_path, monkeypatch):
    for name in ("a/kept", "a/gone", "b/kept"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("12")
    stat = pathlib.Path.stat

    def removed_meanwhile(self, **how):
        if self.name == "gone":
            raise FileNotFoundError(self)
        return stat(self, **how)

    monkeypatch.setattr(pathlib.Path, "stat", removed_meanwhile)
    assert paths.sizes(paths.resolve(tmp_path)) == {"a/kept": 2, "b/kept": 2}


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    """A copy without its files would look complete."""
    (tmp_path / "a").mkdir()
    scandir = os.scandir

    def too_many_files(path):
        if str(path).endswith("/a"):
            raise OSError(errno.EMFILE, "too many open files")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", too_many_files)
    with pytest.raises(OSError, match="too many open files"):
        paths.sizes(paths.resolve(tmp_path))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_is_created_once_where_there_are_no_hard_links(tmp_path, monkeypatch, number):
    def refused(source, target):
        raise OSError(number, "no hard links")

    monkeypatch.setattr(os, "link", refused)
    path = paths.resolve(tmp_path / "lock.json")
    assert paths.write_if_unchanged(path, "one", version=None)
    assert not paths.write_if_unchanged(path, "two", version=None)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("lock.json", "one")]


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


@pytest.fixture(params=["disk", "bucket"])
def place(request, tmp_path, monkeypatch):
    """A folder that exists."""
    if request.param == "disk":
        return paths.resolve(tmp_path)
    for name, value in request.getfixturevalue("bucket").environment.items():
        monkeypatch.setenv(name, value)
    return paths.resolve(f"gs://bucket/{uuid.uuid4().hex}")


def test_a_file_is_replaced_and_removed_in_the_version_that_was_read_alone(place):
    file = place / "lock"
    assert paths.read_versioned(file) is None
    assert paths.write_if_unchanged(file, "one", version=None)
    assert not paths.write_if_unchanged(file, "another's first", version=None)
    first = paths.read_versioned(file)
    assert paths.write_if_unchanged(file, "two", version=first.version)
    assert not paths.write_if_unchanged(file, "late", version=first.version)
    paths.remove_if_unchanged(file, version=first.version)
    second = paths.read_versioned(file)
    assert (first.text, second.text) == ("one", "two")
    assert paths.sizes(place) == {"lock": 3}  # no part of a write is left
    paths.remove_if_unchanged(file, version=second.version)
    assert paths.read_versioned(file) is None
    assert not paths.write_if_unchanged(file, "late", version=second.version)


def test_brackets_in_the_name_of_a_folder_are_no_pattern(tmp_path, monkeypatch):
    folder = tmp_path / "a[1]"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "x.txt").write_text("x")
    monkeypatch.chdir(folder)
    wanted = [str(folder / "data" / "x.txt")]
    assert list(paths.listed("data/*.txt")) == list(paths.listed("./**/x.txt")) == wanted
    assert list(paths.listed(f"{paths.literal(folder)}/*/[x-z].txt")) == wanted
    assert paths.literal("gs://bucket/a[1]") == "gs://bucket/a[1]"


def test_files_of_a_pattern_are_listed_at_any_depth(place):
    for name in ("a/b/one.txt", "a/two.txt", "three.txt", "a/four.csv"):
        paths.write_text_atomically(place / name, name)
    found = {name.removeprefix(f"{place}/"): about.size_bytes for name, about in paths.listed(f"{place}/**/*").items()}
    assert found == {"a/b/one.txt": 11, "a/two.txt": 9, "three.txt": 9, "a/four.csv": 10}
    assert list(paths.listed(f"{place}/*.txt")) == [f"{place}/three.txt"]
    assert paths.sizes(place / "a") == {"b/one.txt": 11, "two.txt": 9, "four.csv": 10}
    assert paths.sizes(place / "absent") == {}


def test_a_range_of_a_file_has_its_length_or_is_an_error(place):
    paths.write_text_atomically(place / "f", "0123456789")
    assert [paths.read_range(place / "f", *span) for span in ((0, 10), (3, 5), (4, 4))] == [b"0123456789", b"34", b""]
    with pytest.raises(ValueError, match=r"ended after byte 10, expected 11 or more"):
        paths.read_range(place / "f", 3, 11)


def test_the_version_of_a_file_changes_with_it(place):
    versions = set()
    for text in ("one", "two"):
        paths.write_text_atomically(place / "f", text)
        versions.add(paths.file_version(str(place / "f")))
    assert len(versions) == 2
