"""The check that gs:// can be reached, with ports of this machine in place of the service."""

import socket
import threading
import time

import pytest

from core.errors import UnreachableError
from core.files import buckets, paths


@pytest.mark.parametrize(
    "use",
    [
        lambda path: path.exists(),
        lambda path: path.read_text(),
        lambda path: paths.sizes(path),
        lambda path: paths.matching(f"{path}/*.txt"),
        paths.require_writable,
        paths.check_writable,
    ],
)
def test_every_use_of_an_unreachable_bucket_is_one_error_within_the_limit(closed_port, use):
    started = time.monotonic()
    with pytest.raises(UnreachableError, match=f"127.0.0.1:{closed_port}: Connection refused"):
        use(paths.resolve("gs://bucket/first"))
    assert time.monotonic() - started < 5


def test_the_limit_is_waited_for_once_and_a_server_is_found_again_later(closed_port, monkeypatch):
    with pytest.raises(UnreachableError):
        buckets.require_reachable(buckets.address())
    monkeypatch.setattr(buckets, "REACH_SECONDS", 60)
    with pytest.raises(UnreachableError):  # at once
        buckets.require_reachable(buckets.address())
    monkeypatch.setattr(buckets, "_REMEMBERED_SECONDS", 0)
    with socket.create_server(("127.0.0.1", closed_port)):
        buckets.require_reachable(buckets.address())
    buckets.require_reachable(buckets.address())  # a server that was reached may go: requests are repeated


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_name_that_no_host_can_have_is_the_same_error(closed_port, monkeypatch):
    monkeypatch.undo()  # the guard of the tests would look at the name first
    monkeypatch.setattr(buckets, "REACH_SECONDS", 0.3)
    with pytest.raises(UnreachableError, match="label empty or too long"):
        buckets.require_reachable("http://storage..invalid")


def test_a_name_that_is_looked_up_forever_does_not_keep_the_process(monkeypatch):
    ended, before = threading.Event(), set(threading.enumerate())

    def never(*_, **__):
        ended.wait()
        raise OSError("ended")

    monkeypatch.setattr(socket, "create_connection", never)
    monkeypatch.setattr(buckets, "REACH_SECONDS", 0.05)
    with pytest.raises(UnreachableError, match=r"no answer within 0\.05 s"):
        buckets.require_reachable("http://looked-up-forever.invalid")
    (looking,) = set(threading.enumerate()) - before
    assert looking.daemon
    ended.set()
    looking.join()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "https://storage.googleapis.com"),
        ({"STORAGE_EMULATOR_HOST": "default"}, "https://storage.googleapis.com"),
        ({"STORAGE_EMULATOR_HOST": "localhost:4443"}, "http://localhost:4443"),
        ({"STORAGE_EMULATOR_HOST": "https://storage.example"}, "https://storage.example"),
        ({"GOOGLE_CLOUD_UNIVERSE_DOMAIN": "example.org"}, "https://storage.example.org"),
    ],
)
def test_the_address_is_that_of_the_library(monkeypatch, variables, expected):
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_UNIVERSE_DOMAIN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert buckets.address() == expected
