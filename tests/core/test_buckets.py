"""The check that gs:// can be reached, with ports of this machine in place of the service."""

import socket
import time

import pytest

from core import buckets, paths
from core.errors import UnreachableError


@pytest.fixture
def closed_port(monkeypatch):
    """The number of a port on which nobody listens, where gs:// is expected to be."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{port}")
    monkeypatch.setattr(buckets, "REACH_SECONDS", 0.3)
    monkeypatch.setattr(buckets, "_failed", {})
    monkeypatch.setattr(buckets, "_reached", set())
    buckets.Buckets.clear_instance_cache()
    yield port
    buckets.Buckets.clear_instance_cache()


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
