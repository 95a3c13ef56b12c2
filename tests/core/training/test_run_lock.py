"""One launch at a time in a run directory: the owner is named, and the lock of a dead owner is taken over."""

import concurrent.futures
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid

import pytest

from core.files import paths
from core.training import goodput, run_lock
from core.training.run_lock import Owner, RunLock

NOTHING = print
SLOW = itertools.count(0, 10).__next__  # ten seconds between two looks at it


def acquire(run_dir, *, say=NOTHING, silent_seconds=0.5, clock=SLOW):
    return RunLock.acquire(str(run_dir), say=say, silent_seconds=silent_seconds, look_seconds=0.05, clock=clock)


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "runs" / "first"


@pytest.fixture
def in_a_bucket(bucket, monkeypatch):
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return f"gs://bucket/{uuid.uuid4().hex}"


def written(run_dir, **changes):
    """A lock that somebody else has left."""
    owner = Owner.this()._replace(token="of another", **changes)
    run_dir.mkdir(parents=True)
    (run_dir / run_lock.FILE).write_text(json.dumps(owner._asdict()))
    return owner


def ended_process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ticks = goodput.start_ticks(process.pid)
        process.communicate(b"\n")
    return process.pid, ticks


def test_a_second_launch_is_refused_with_the_owner_of_the_directory(run_dir):
    lock = acquire(run_dir)
    said = rf"{run_dir} is in use by another launch: process {os.getpid()} on \S+, started 20\d\d-.* UTC.*rm {run_dir}"
    with pytest.raises(ValueError, match=said):
        acquire(run_dir)
    lock.check()
    assert run_lock.holder(str(run_dir)).pid == os.getpid()
    lock.release()
    assert run_lock.holder(str(run_dir)) is None
    assert not run_dir.exists()  # it was made for the lock, and nothing came of it
    acquire(run_dir).release()


def test_the_content_of_a_directory_stays_when_the_lock_is_removed(run_dir):
    lock = acquire(run_dir)
    (run_dir / "metrics.jsonl").touch()
    lock.release()
    assert [file.name for file in run_dir.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("reused", [False, True], ids=["ended", "its number is another process's now"])
def test_the_lock_of_an_ended_process_is_taken_over_with_a_message(run_dir, reused):
    pid, ticks = (os.getpid(), 1) if reused else ended_process()
    written(run_dir, pid=pid, ticks=ticks)
    said = []
    lock = acquire(run_dir, say=said.append, silent_seconds=60.0)
    assert len(said) == 1
    assert f"took over the lock of {run_dir} from process {pid} on " in said[0]
    lock.check()
    lock.release()


def test_a_zombie_is_dead(run_dir):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    written(run_dir, pid=process.pid, ticks=goodput.start_ticks(process.pid))
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    acquire(run_dir).release()
    process.wait()


def test_an_owner_on_another_machine_that_renews_nothing_is_dead(run_dir):
    written(run_dir, machine="another", host="other-machine")
    said = []
    acquire(run_dir, say=said.append).release()
    assert "cannot be looked up from here: watching for 0.5 s whether it renews its lock" in said[0]
    assert "took over" in said[1]


def test_an_owner_on_another_machine_that_renews_its_lock_is_alive(run_dir):
    written(run_dir, machine="another", host="other-machine")
    threading.Timer(0.3, os.utime, [run_dir / run_lock.FILE]).start()
    with pytest.raises(ValueError, match=r"other-machine.*, which renewed its lock while this one watched"):
        acquire(run_dir, silent_seconds=20.0)


GOOD = {"host": "h", "pid": 1, "started": 1.0, "ticks": 1, "machine": "m", "token": "t"}
BAD = ({"started": 1e300}, {"started": -1e18}, {"pid": True}, {"pid": "1"}, {"ticks": None}, {"host": ["h"]})
BAD_OWNERS = [json.dumps(GOOD | change) for change in BAD]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"host": 1}', "\0\xff", "[" * 200_000, *BAD_OWNERS])
def test_a_lock_without_an_owner_is_observed_and_taken_over(run_dir, text):
    run_dir.mkdir(parents=True)
    (run_dir / run_lock.FILE).write_text(text)
    acquire(run_dir).release()


def test_a_lock_is_renewed(run_dir, monkeypatch):
    monkeypatch.setattr(run_lock, "RENEW_SECONDS", 0.05)
    lock = acquire(run_dir)
    before = paths.read_versioned(run_dir / run_lock.FILE)
    time.sleep(0.3)
    now = paths.read_versioned(run_dir / run_lock.FILE)
    assert (now.text, now.version != before.version) == (before.text, True)
    lock.release()


def test_a_run_whose_directory_is_deleted_ends(run_dir):
    lock = acquire(run_dir)
    hook = run_lock.HoldsLock(lock)
    hook.before_step(1)
    shutil.rmtree(run_dir)
    with pytest.raises(run_lock.LockLostError, match=r"lock\.json is gone: the run directory was deleted, or its lock"):
        hook.before_step(2)
    with pytest.raises(run_lock.LockLostError), lock.explaining():
        raise FileNotFoundError(run_dir)  # whatever else came of it
    with pytest.raises(run_lock.LockLostError), lock.explaining():
        pass  # it was deleted behind the last step
    lock.release()
    assert not run_dir.exists()


def test_a_run_whose_directory_was_taken_over_ends_without_touching_the_other(run_dir):
    lock = acquire(run_dir)
    (run_dir / run_lock.FILE).unlink()
    other = acquire(run_dir)
    with pytest.raises(run_lock.LockLostError, match=r"was taken over by process \d+ on .*two launches cannot train"):
        lock.check()
    lock.release()
    other.check()
    other.release()


def test_a_lock_on_a_disk_is_read_at_most_once_a_second(run_dir, monkeypatch):
    seconds, read, reads = [100.0], paths.read_versioned, []
    lock = acquire(run_dir, clock=lambda: seconds[0])
    monkeypatch.setattr(paths, "read_versioned", lambda path: reads.append(seconds[0]) or read(path))
    for _ in range(25):  # steps of 0.1 s
        lock.check()
        seconds[0] += 0.125
    assert reads == [101.0, 102.0, 103.0]
    lock.release()


def test_a_lock_that_cannot_be_read_is_not_said_to_be_unwritable(run_dir, monkeypatch, capsys):
    lock = acquire(run_dir)
    with monkeypatch.context() as patched:

        def stale(path):
            raise OSError(116, "Stale file handle")

        patched.setattr(paths, "read_versioned", stale)
        for _ in range(3):
            lock.check()  # is not lost, as far as can be known
    said = capsys.readouterr().out
    assert said.count(f"warning: {run_dir / run_lock.FILE} could not be read (OSError: [Errno 116] Stale") == 1
    assert "written" not in said
    lock.release()


def test_a_failure_of_a_run_that_holds_its_lock_is_not_replaced(run_dir):
    lock = acquire(run_dir)
    with pytest.raises(KeyError), lock.explaining():
        raise KeyError
    lock.release()


@pytest.mark.parametrize("dead", [False, True], ids=["no lock there", "a dead owner's"])
@pytest.mark.parametrize("where", ["run_dir", "in_a_bucket"])
def test_one_of_many_simultaneous_launches_gets_the_lock(request, where, dead):
    place = request.getfixturevalue(where)
    owner = Owner.this()._replace(pid=ended_process()[0])
    if dead:
        file = paths.resolve(place) / run_lock.FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(owner._asdict()))

    def attempt(_):
        try:
            return acquire(place)
        except ValueError as error:
            assert "in use by another launch" in str(error)  # noqa: PT017 (most of many raise)
            return None

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        (lock,) = filter(None, pool.map(attempt, range(8)))
    lock.check()
    lock.release()


def test_in_a_bucket_a_lock_is_renewed_noticed_when_lost_and_removed(in_a_bucket, bucket, monkeypatch):
    monkeypatch.setattr(run_lock, "RENEW_SECONDS", 0.05)
    file = paths.resolve(in_a_bucket) / run_lock.FILE
    lock = acquire(in_a_bucket)
    first = paths.read_versioned(file)
    time.sleep(0.5)
    assert paths.read_versioned(file).version != first.version
    with pytest.raises(ValueError, match="gcloud storage rm gs://"):
        acquire(in_a_bucket)
    lock.release()
    assert bucket.list(f"{in_a_bucket}/") == {}
    lost = acquire(in_a_bucket)
    bucket.delete(f"{in_a_bucket}/{run_lock.FILE}")
    with pytest.raises(run_lock.LockLostError, match="is gone"), lost.explaining():
        pass
    time.sleep(0.2)
    with pytest.raises(run_lock.LockLostError, match="is gone"):
        lost.check()
    lost.release()
    assert bucket.list(f"{in_a_bucket}/") == {}


def test_an_unwritable_directory_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write to"):
        acquire(tmp_path / "file" / "run")
