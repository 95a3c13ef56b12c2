"""A host that cannot write ends the run on all hosts within seconds, and what was saved before is intact."""

import re
import resource
import shutil
import time

import jax
import numpy as np
import pytest

from core.checkpoints import inspection, orbax_writer, reading, steps, store, writing
from core.files import paths
from core.hosts import activity, distributed

TWO_HOSTS = """
import resource, time
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from core.hosts import distributed
from core.checkpoints import orbax_writer, store
distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=2)
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
value = np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)
state = {"w": jax.make_array_from_callback(value.shape, NamedSharding(mesh, PartitionSpec("fsdp")), lambda i: value[i])}
checkpoints = store.Checkpoints("checkpoints", keep=3)  # where hosts wait five minutes for one another
checkpoints.save(1, state=state, data={f"s{PROCESS}": b"1"}, meta={})
checkpoints.wait()
(cost,) = checkpoints.costs()
print("COST", cost.step, cost.bytes, 0 < cost.blocked_seconds < 60, 0 < cost.write_seconds < 60)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

def fail(checkpoints, step, name):
    if PROCESS == 1:  # what a full disk is to the others: one host's file ends early
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    began = time.monotonic()
    try:
        checkpoints.save(step, state=state, data={f"s{PROCESS}": b"2"}, meta={})
        for _ in range(300):
            checkpoints.check()
            time.sleep(0.1)
        print("NOTHING")
    except RuntimeError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        print(f"{name} AFTER {time.monotonic() - began:.1f} s: {error}")
        checkpoints.close()
        print(f"{name} CLOSED after {time.monotonic() - began:.1f} s")

fail(checkpoints, 2, "ONE")
distributed.barrier("both ended the first")
if PROCESS == 0:  # a full disk may stop another part of the step on each host

    def full(folder, content):
        raise OSError(28, "No space left on device")

    orbax_writer._write_files = full
fail(store.Checkpoints("others", keep=3), 3, "BOTH")
distributed.barrier("both ended the second")
time.sleep(0.5 * (PROCESS == 0))  # the coordinator ends last
distributed.exit_at_once(13)
"""


@pytest.mark.simulated(2)
@pytest.mark.covers("C05", "C12")
def test_a_full_disk_on_one_host_ends_all_hosts_soon(run_hosts, tmp_path):
    """Then hosts fail in different parts of a step, and do not wait for each other."""
    results = run_hosts(TWO_HOSTS, hosts=2)
    assert [result.returncode for result in results] == [13, 13], results
    for host, result in enumerate(results):
        assert "COST 1 1048576 True True" in result.output
        ended = re.search(r"ONE AFTER (\d+\.\d) s: (.*)", result.output)
        assert float(ended[1]) < 10, result.output
        assert float(re.search(r"ONE CLOSED after (\d+\.\d)", result.output)[1]) < 10
        assert ended[2].startswith("host 1: saving" if host == 0 else "saving"), ended[2]
        assert "the checkpoint of step 2 to " in ended[2]
        assert re.search(
            r"a checkpoint takes 0.000977 GiB, [\d.]+ GiB( and [\d,]+ inodes)? are free on this host's disk", ended[2]
        )
        assert "File too large" in ended[2]
        assert "earlier checkpoints are intact" in ended[2]
        seconds, said = re.search(r"BOTH AFTER (\d+\.\d) s: (.*)", result.output).groups()
        assert float(seconds) < 10, result.output
        assert "the checkpoint of step 3 to " in said
        assert "No space left on device" in said or "File too large" in said
    folder = paths.resolve(tmp_path / "checkpoints")
    assert steps.complete(folder) == [1]
    assert not inspection.verify(folder / "1").damaged


def test_an_old_step_that_cannot_be_removed_is_said_and_the_save_counts(tmp_path, monkeypatch, capsys):
    state = {"w": jax.device_put(np.zeros(3))}
    checkpoints = store.Checkpoints(str(tmp_path / "checkpoints"), keep=1)
    checkpoints.save(1, state=state, data={}, meta={})
    checkpoints.wait()

    def busy(folder):
        raise PermissionError(f"{folder} is busy")

    with monkeypatch.context() as patched:
        patched.setattr(steps, "remove", busy)
        checkpoints.save(2, state=state, data={}, meta={})
        checkpoints.wait()
    assert "that is no longer kept was not removed: PermissionError: " in capsys.readouterr().out
    assert steps.complete(paths.resolve(tmp_path / "checkpoints")) == [1, 2]
    checkpoints.save(3, state=state, data={}, meta={})
    checkpoints.close()
    assert steps.complete(paths.resolve(tmp_path / "checkpoints")) == [3]


def test_a_disk_with_room_again_takes_the_next_save(tmp_path):
    """What a failed save left is removed, or it would keep the disk full."""
    big = {"w": jax.device_put(np.random.default_rng(0).normal(size=(64, 1024)))}
    checkpoints = store.Checkpoints(str(tmp_path / "checkpoints"), keep=3)
    checkpoints.save(1, state=jax.tree.map(lambda x: x[:1], big), data={}, meta={})
    checkpoints.wait()
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, hard))
    try:
        checkpoints.save(2, state=big, data={}, meta={})
        with pytest.raises(writing.WriteFailedError, match=r"step 2 to .* failed: .*OUT_OF_RANGE|File too large"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    checkpoints.close()
    assert steps.complete(paths.resolve(tmp_path / "checkpoints")) == [1]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2  # and what was begun
    checkpoints = store.Checkpoints(str(tmp_path / "checkpoints"), keep=3)
    checkpoints.save(2, state=big, data={}, meta={})
    checkpoints.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]


def test_a_save_that_cannot_start_is_reported(tmp_path, monkeypatch):
    state = {"w": jax.device_put(np.zeros(3))}

    def refuse(*_):
        raise PermissionError("read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(orbax_writer.ocp, "save_checkpointables_async", refuse)
        checkpoints = store.Checkpoints(str(tmp_path / "checkpoints"), keep=3)
        says = r"saving the checkpoint of step 1 to .* failed: PermissionError: read-only"
        with pytest.raises(writing.WriteFailedError, match=says):
            checkpoints.save(1, state=state, data={}, meta={})
    checkpoints.wait()  # nothing is under way
    checkpoints.close()


def test_a_missing_folder_is_reported_on_all_hosts(tmp_path):
    """As where a mount goes stale: what is free there cannot be asked for."""
    gone = paths.resolve(tmp_path / "gone")
    save = writing.Writing(4, gone, size_bytes=2**30, host_bytes=2**30, limit_seconds=60.0)

    def begin():
        raise OSError(116, "Stale file handle")

    said = (
        r"step 4 to .*gone failed: OSError: .*Stale file handle; a checkpoint takes 1 GiB; earlier checkpoints are in"
    )
    with pytest.raises(writing.WriteFailedError, match=said):
        save.start(begin)
    (told,) = distributed.posted("checkpoints/step_4/failed").values()
    assert re.search(said, told)


def test_the_time_that_a_save_may_take_grows_with_the_bytes_of_a_host():
    assert writing.limit_seconds(0) == 300.0
    assert writing.limit_seconds(75 * 10**9) == pytest.approx(300.0 + 20.0 * 69.85, abs=1.0)
    layout = jax.sharding.NamedSharding(jax.make_mesh((16,), ("fsdp",)), jax.sharding.PartitionSpec("fsdp"))
    state = {
        "split": jax.device_put(np.zeros((16, 4), np.float32), layout),
        "whole": jax.device_put(np.zeros(5, np.int8)),
    }
    assert reading.host_bytes(state) == 16 * 4 * 4 + 5


def test_the_watchdog_knows_the_limit_of_a_save(tmp_path):
    save = writing.Writing(4, paths.resolve(tmp_path), size_bytes=1, host_bytes=1, limit_seconds=5000.0)
    places = []

    def begin():
        places.append(activity.place())
        return finish

    def finish():
        until = time.monotonic() + 5.0
        while activity.place().activity != activity.SAVING and time.monotonic() < until:
            time.sleep(0.01)
        places.append(activity.place())

    with activity.enter(activity.TRAINING):
        save.start(begin)
        save.wait()
        assert (activity.place().activity, activity.place().limit_seconds) == (activity.TRAINING, 0.0)
    assert [(p.activity, p.limit_seconds) for p in places] == [(activity.SAVING, 5000.0)] * 2


def test_a_save_over_its_limit_fails_and_names_the_setting(tmp_path, monkeypatch):
    written = orbax_writer._write_files

    def slowly(*args):
        time.sleep(2.0)
        written(*args)

    monkeypatch.setattr(orbax_writer, "_write_files", slowly)
    checkpoints = store.Checkpoints(str(tmp_path / "checkpoints"), keep=3, timeout_seconds=1.0)
    checkpoints.save(3, state={"w": jax.device_put(np.zeros(3))}, data={"a": b"1"}, meta={})
    says = r"step 3 to .*: TooSlowError: it was not written within 1 s .*set save_limit_seconds of the experiment to 2,"
    with pytest.raises(writing.WriteFailedError, match=says):
        checkpoints.wait()
    checkpoints.close()


@pytest.mark.parametrize("pattern", ["state/*", "state/d", "meta", "data", "_CHECKPOINT_METADATA", "*"])
def test_a_step_that_was_half_removed_is_passed_over(tmp_path, pattern, monkeypatch):
    """Newest first: what is left of a step is put aside, and the one before restored."""
    monkeypatch.setattr(reading, "RETRY_SECONDS", 0.0)
    checkpoints = store.Checkpoints(str(tmp_path / "checkpoints"), keep=3)
    for step in (1, 2):
        state = {"w": jax.device_put(np.full(400, step))}
        checkpoints.save(step, state=state, data={"a": b"1"}, meta={})
    checkpoints.close()
    for path in (tmp_path / "checkpoints" / "2").glob(pattern):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    checkpoints = store.Checkpoints(str(tmp_path / "checkpoints"), keep=3)
    layout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    assert checkpoints.restore_newest(layout)[0] == 1
    checkpoints.close()


FULL = """
import logging, sys
import jax, numpy as np, resource
from core.hosts import distributed
hooks = lambda: (sys.unraisablehook, list(logging.getLogger("absl").filters))
before = hooks()
from core.checkpoints import store
assert hooks() == before  # importing changes nothing for others
distributed.exit_at_once_on_exception()
state = {f"w{i}": jax.numpy.asarray(np.random.default_rng(i).normal(size=(64, 1024))) for i in range(40)}
checkpoints = store.Checkpoints("checkpoints", keep=3)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
checkpoints.save(2, state=state, data={"s": b"2"}, meta={})
checkpoints.wait()
"""


def test_a_failed_write_prints_one_line_per_process(run_hosts):
    (result,) = run_hosts(FULL, hosts=1)
    assert result.returncode == 13
    (line,) = filter(None, result.output.splitlines())
    assert re.match(r"error: saving the checkpoint of step 2 to .* failed: .*File too large.*earlier checkpoints", line)
