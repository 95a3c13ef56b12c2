"""What errors of libraries mean, by the words with which the libraries raise them."""

import errno
import os

import pytest

from core import library_errors


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3 GiB"), True),
        (MemoryError(), True),
        (ValueError("RESOURCE_EXHAUSTED: the quota of requests"), False),
        (RuntimeError("INTERNAL: a bug"), False),
    ],
)
def test_exhausted_memory(error, expected):
    assert library_errors.is_out_of_memory(error) == expected


def test_a_reader_in_trouble_is_told_from_what_is_not_there():
    away, gone, damaged = ValueError("UNAVAILABLE: 503"), ValueError("NOT_FOUND: no object"), ValueError("bad zarr")
    assert list(map(library_errors.is_of_reader, (away, gone, damaged))) == [True, False, False]
    assert list(map(library_errors.is_not_found, (away, gone, damaged))) == [False, True, False]
    assert library_errors.is_not_found(FileNotFoundError())


@pytest.mark.parametrize(
    ("number", "mending"),
    [
        (errno.ENOSPC, "quota, ulimit -f"),
        (errno.EDQUOT, "quota, ulimit -f"),
        (errno.EFBIG, "quota, ulimit -f"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "ulimit -n"),
    ],
)
def test_what_is_exhausted_is_known_with_its_mending(number, mending):
    """TensorStore raises a ValueError with the system's words."""
    for error in (OSError(number, "elsewhere"), ValueError(f"Failed writing: [OS error: {os.strerror(number)}]")):
        found = library_errors.shortage(error)
        assert found
        assert os.strerror(number).startswith(found.said)
        assert mending in found.mending
    assert library_errors.shortage(OSError(errno.EACCES, os.strerror(errno.EACCES))) is None
    assert library_errors.shortage(ValueError("shape")) is None


def test_hosts_that_did_not_come_to_a_barrier():
    said = (
        "DEADLINE_EXCEEDED: Barrier timed out. timed out task names:\n/job:jax_worker/replica:0/task:11\n/job/task:2\n"
    )
    assert library_errors.absent_tasks(RuntimeError(said)) == [2, 11]
    assert library_errors.absent_tasks(RuntimeError("another reason")) == []
