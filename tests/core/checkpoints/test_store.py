import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.checkpoints import arrays, inspection, orbax_writer, reading, steps, store
from core.checkpoints.warm_start import SavedParameters
from core.errors import UserError
from core.files import paths
from core.hosts import activity
from core.hosts.failure_diagnosis import Limits


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any
    carry: Any


def sharded(shape, *spec):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return NamedSharding(Mesh(devices, ("fsdp", "tensor")[: len(shape)]), PartitionSpec(*spec))


def make_state(weights, plain):
    """A train state with two dtypes; arrays of two axes are laid out by `weights`, the others by `plain`."""
    params = {"decoder/linear": {"w": jnp.arange(48.0).reshape(8, 6) / 7, "b": jnp.arange(6.0).astype(jnp.bfloat16)}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = State(jnp.asarray(5, jnp.int32), params, optimizer.init(params), ())
    return jax.tree.map(lambda x: jax.device_put(x, weights if x.ndim == 2 else plain), state)


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.fixture
def state():
    return make_state(sharded((4, 2), "fsdp", "tensor"), sharded((4, 2)))


@pytest.fixture
def opened(tmp_path):
    made = []

    def open_at(folder=tmp_path / "checkpoints", keep=3, **kwargs):
        made.append(store.Checkpoints(str(folder), keep=keep, **kwargs))
        return made[-1]

    yield open_at
    for checkpoints in made:
        checkpoints.close()


def test_the_watchdog_waits_for_a_restore_as_long_as_for_a_save_of_the_same_bytes(opened, state, monkeypatch):
    limits = Limits(step_seconds=1.0, slow_seconds=10.0)
    seen, read = [], arrays.read_arrays

    def restore(*args):
        seen.append((activity.place().activity, limits.of(activity.place())))
        return read(*args)

    monkeypatch.setattr(arrays, "read_arrays", restore)
    writer = opened()
    writer.save(5, state=state, data={}, meta={})
    writer.wait()
    writer.restore(5, abstract(state))
    monkeypatch.setattr(store.reading, "host_bytes", lambda state: 400 * 2**30)
    writer.restore(5, abstract(state))
    opened(timeout_seconds=20000.0).restore_newest(abstract(state))
    assert [what for what, _ in seen] == [activity.RESTORING] * 3
    assert [seconds for _, seconds in seen] == pytest.approx([360.0, 300.0 + 400 * 20.0 + 60.0, 20060.0])


def test_bytes_of_a_host_are_the_same_before_and_after_a_restore(state):
    """A shard that several devices have counts once."""
    held = [{str(s.index): s.data.nbytes for s in leaf.addressable_shards} for leaf in jax.tree.leaves(state)]
    assert reading.host_bytes(state) == sum(sum(shards.values()) for shards in held) > 0
    assert reading.host_bytes(abstract(state)) == reading.host_bytes(state)


@pytest.mark.covers("C07")
@pytest.mark.parametrize(
    ("shape", "spec"), [((4, 2), ("fsdp", "tensor")), ((2, 4), ("tensor", "fsdp")), ((2,), ("fsdp",)), ((1,), ())]
)
def test_state_data_and_meta_return_under_any_mesh(opened, state, shape, spec):
    data = {"stream/0": bytes(range(256)), "stream 1": b""}
    meta = {"config": "LR = 1e-3\n# ünïcode", "seed": 7, "versions": {"jax": "x"}}
    writer = opened()
    writer.save(5, state=state, data=data, meta=meta)
    writer.close()
    spec_of = sharded(shape, *spec)
    wanted = make_state(spec_of, sharded(shape))
    restored, restored_data, restored_meta = opened().restore(5, abstract(wanted))
    assert_same(restored, state)
    assert restored.params["decoder/linear"]["w"].sharding == spec_of
    assert (restored_data, restored_meta) == (data, meta)


@pytest.mark.covers("C05")
def test_arrays_may_be_donated_as_soon_as_save_returns(opened, state):
    checkpoints = opened()
    expected = jax.tree.map(np.array, state)
    layout = abstract(state)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    checkpoints.save(5, state=state, data={}, meta={})
    jax.block_until_ready(overwrite(state))
    checkpoints.wait()
    assert_same(checkpoints.restore(5, layout)[0], expected)


@pytest.mark.covers("C04")
def test_the_latest_are_kept_and_found(opened, state, tmp_path):
    checkpoints = opened(keep=2)
    assert checkpoints.latest_step() is None
    for step in (1, 2, 10, 9):
        checkpoints.save(step, state=state, data={}, meta={"step": step})
    checkpoints.wait()
    assert checkpoints.latest_step() == 10
    assert sum(folder.name.isdigit() for folder in (tmp_path / "checkpoints").iterdir()) == 2
    with pytest.raises(RuntimeError, match="step 10 is already saved"):
        checkpoints.save(10, state=state, data={}, meta={})
    with pytest.raises(ValueError, match=r"no complete checkpoint of step 1 .*existing: \[9, 10\]"):
        checkpoints.restore(1, abstract(state))


@pytest.mark.covers("C15")
def test_parameters_alone_are_saved_between_steps_and_never_resumed_from(opened, state, tmp_path):
    checkpoints = opened(keep_params=2)
    checkpoints.save(10, state=state, data={}, meta={})
    for step in (11, 12, 13):
        checkpoints.save_params(step, state.params, {"averaged": False})
    checkpoints.wait()
    alone = paths.resolve(tmp_path / "params")
    assert steps.complete(alone) == [12, 13]
    assert checkpoints.restore_newest(abstract(state))[0] == 10
    found = steps.find(f"{tmp_path}@13")
    assert found == alone / "13"
    assert steps.find(str(tmp_path)).name == "10"
    assert inspection.verify(found).describe().startswith("step 13: intact (2 arrays, ")
    w = SavedParameters(found).load(abstract(state).params, None, progress=lambda *_: None)["decoder/linear"]["w"]
    np.testing.assert_array_equal(w, state.params["decoder/linear"]["w"])
    with pytest.raises(UserError, match=r"of step 11 .*existing steps: 10; with parameters alone: 12, 13"):
        steps.find(f"{tmp_path}@11")
    repeated = opened(keep_params=2)
    repeated.save_params(12, state.params, {"averaged": False})  # by a run that resumed from step 10
    repeated.wait()
    assert steps.complete(alone) == [12]
    with pytest.raises(ValueError, match="keep_params is 0"):
        opened(keep_params=0)


@pytest.mark.covers("C04")
def test_a_reader_gets_no_warning_that_it_only_reads(opened, state, caplog):
    writer = opened()
    writer.save(1, state=state, data={}, meta={})
    writer.close()
    caplog.clear()
    assert opened(read_only=True).latest_step() == 1
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_incomplete_steps_are_not_the_latest_and_do_not_block(opened, state, tmp_path):
    folder = tmp_path / "checkpoints"
    writer = opened()
    writer.save(100, state=state, data={}, meta={})
    writer.close()
    (folder / "300").mkdir()
    (folder / "200" / "state").mkdir(parents=True)
    leftover = folder / "150.orbax-checkpoint-tmp"
    leftover.mkdir()
    assert opened(read_only=True).latest_step() == 100
    assert (folder / "300").exists()
    assert leftover.exists()

    checkpoints = opened(keep=1)
    assert checkpoints.latest_step() == 100
    checkpoints.save(101, state=state, data={}, meta={})
    checkpoints.wait()
    assert checkpoints.latest_step() == 101
    assert not leftover.exists()
    assert not (folder / "300").exists()
    assert_same(checkpoints.restore(101, abstract(state))[0], state)


def test_reading_removes_nothing(opened, state, tmp_path):
    writer = opened(keep=3)
    for step in (1, 2, 3):
        writer.save(step, state=state, data={"a": b"1"}, meta={})
    writer.close()
    folder = tmp_path / "checkpoints"
    (folder / "4.orbax-checkpoint-tmp").mkdir()
    (folder / "5" / "state").mkdir(parents=True)
    before = sorted(folder.rglob("*"))
    reader = opened(keep=1, read_only=True)
    for step in (1, 3):
        assert_same(reader.restore(step, abstract(state))[0], state)
    reader.close()
    assert sorted(folder.rglob("*")) == before


def test_an_evaluation_does_not_read_the_carry_whatever_its_rows(opened, state):
    writer = opened()
    writer.save(3, state=state._replace(carry={"z": state.params["decoder/linear"]["w"]}), data={}, meta={})
    writer.close()
    reader = opened(read_only=True)
    assert_same(reader.restore_if_there(3, abstract(state), unread="carry")[0], state)
    with pytest.raises(ValueError, match="does not fit this model and optimizer"):
        reader.restore_if_there(3, abstract(state))


def test_a_removed_step_is_none_and_an_unreadable_one_an_error(opened, state, tmp_path, monkeypatch):
    writer = opened()
    for step in (1, 2, 3):
        writer.save(step, state=state, data={}, meta={})
    writer.close()
    reader, folder = opened(read_only=True), tmp_path / "checkpoints"
    monkeypatch.setattr(store, "REMOVAL_SECONDS", 0.0)
    monkeypatch.setattr(reading, "RETRY_SECONDS", 0.0)
    assert_same(reader.restore_if_there(3, abstract(state))[0], state)
    shutil.rmtree(folder / "3")
    assert reader.restore_if_there(3, abstract(state)) is None
    read = store._read_arrays_and_streams

    def vanishing(step_folder, abstract_state):
        shutil.rmtree(step_folder)
        return read(step_folder, abstract_state)

    with monkeypatch.context() as patched:
        patched.setattr(store, "_read_arrays_and_streams", vanishing)
        assert reader.restore_if_there(2, abstract(state)) is None
    with pytest.raises(ValueError, match="does not fit this model and optimizer"):
        reader.restore_if_there(1, abstract(state)._replace(carry=abstract(state).step))
    shutil.rmtree(folder / "1" / "state" / "d")
    with pytest.raises(UserError, match=r"damaged checkpoint, step 1 in .*: host 0: ValueError: NOT_FOUND: "):
        reader.restore_if_there(1, abstract(state))


def test_a_tree_that_differs_is_refused_by_leaf(opened, state):
    writer = opened()
    writer.save(5, state=state, data={}, meta={})
    writer.close()
    checkpoints = opened()
    wanted = abstract(state)
    linear = wanted.params["decoder/linear"]
    like = linear["w"]

    def restore(**leaves):
        return checkpoints.restore(5, wanted._replace(params={"decoder/linear": leaves}))

    with pytest.raises(ValueError, match=r"params/decoder/linear/b: bfloat16\[6\] in the checkpoint, not expected"):
        restore(w=like)
    with pytest.raises(ValueError, match=r"linear/scale: not in the checkpoint, expected float32\[8, 6\]"):
        restore(**linear, scale=like)
    with pytest.raises(ValueError, match=r"w: float32\[8, 6\] in the checkpoint, expected bfloat16\[8, 6\]"):
        restore(**linear | {"w": jax.ShapeDtypeStruct((8, 6), jnp.bfloat16, sharding=like.sharding)})
    with pytest.raises(ValueError, match=r"w: float32\[8, 6\] in the checkpoint, expected float32\[6, 8\]"):
        restore(**linear | {"w": jax.ShapeDtypeStruct((6, 8), jnp.float32, sharding=like.sharding)})
    with pytest.raises(ValueError, match=r"needs the sharding of every leaf; missing: params/decoder/linear/w"):
        restore(**linear | {"w": jax.ShapeDtypeStruct((8, 6), jnp.float32)})


def test_states_that_cannot_be_saved_or_opened_are_refused(opened, state, tmp_path):
    with pytest.raises(ValueError, match="keep is 0"):
        opened(keep=0)
    with pytest.raises(ValueError, match="no such folder"):
        opened(tmp_path / "nowhere", read_only=True)
    with pytest.raises(TypeError, match="'step': 'int'"):
        opened().save(1, state=state._replace(step=3), data={}, meta={})


def test_a_save_that_was_interrupted_before_it_was_handed_on_is_not_waited_for(opened, state, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    checkpoints = opened()
    checkpoints.save(1, state=state, data={}, meta={})
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(orbax_writer, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, state=state, data={}, meta={})
    checkpoints.save(3, state=state, data={}, meta={})
    checkpoints.wait()
    assert checkpoints.latest_step() == 3


def test_a_run_may_have_the_name_of_a_folder_of_steps(state, tmp_path):
    run = tmp_path / "checkpoints"
    made = store.Checkpoints(str(run / "checkpoints"), keep=2)
    made.save(3, state=state, data={}, meta={})
    made.close()
    assert [str(steps.find(str(place))) for place in (run, run / "checkpoints")] == [str(run / "checkpoints" / "3")] * 2


@pytest.mark.covers("C05")
def test_a_failed_write_surfaces_and_leaves_the_earlier_step(opened, state, tmp_path, monkeypatch):
    checkpoints = opened()
    checkpoints.save(1, state=state, data={"a": b"1"}, meta={})
    checkpoints.wait()

    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(orbax_writer, "_write_files", fail)
    checkpoints.save(2, state=state, data={"a": b"2"}, meta={})
    with pytest.raises(RuntimeError, match=r"step 2 to .* failed.*No space left"):
        checkpoints.save(3, state=state, data={"a": b"3"}, meta={})
    assert checkpoints.latest_step() == 1


TWO_HOSTS_SAVE = """
import shutil
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from core.hosts import distributed
from core.checkpoints import reading, store
distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=2)
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
def array(value, *spec):
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda i: value[i])
weights = np.arange(24.0, dtype=np.float32).reshape(8, 3)
state = {"w": array(weights, "fsdp"), "step": array(np.array(4, np.int32))}
checkpoints = store.Checkpoints("checkpoints", keep=2, timeout_seconds=30)
for step in (3, 4):
    checkpoints.save(step, state=state, data={f"stream_{PROCESS}": bytes([step, PROCESS])}, meta={"host": PROCESS})
checkpoints.wait()
print("latest", checkpoints.latest_step())
checkpoints.close()

reader = store.Checkpoints("checkpoints", keep=2, read_only=True)
layout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
reading.RETRY_SECONDS = 0.0
read, met = store._read_arrays_and_streams, set()
def vanishing(folder, abstract_state):
    if folder.name not in met:
        met.add(folder.name)
        if PROCESS == 0 and folder.name == "3":
            shutil.rmtree("checkpoints/3")
        distributed.barrier(f"{folder.name} removed")
    return read(folder, abstract_state)
store._read_arrays_and_streams = vanishing
read = [reader.restore_if_there(step, layout) for step in (3, 3, 4)]
print("read", [found and int(found[0]["step"]) for found in read])
reader.close()
distributed.shutdown()
"""


@pytest.mark.covers("C01", "C02", "C07")
@pytest.mark.simulated(2)
def test_two_hosts_save_and_read_and_one_restores(run_hosts, opened, tmp_path):
    results = run_hosts(TWO_HOSTS_SAVE, hosts=2)
    assert [result.returncode for result in results] == [0, 0], results
    assert all("latest 4" in result.output for result in results)
    assert all("read [None, None, 4]" in result.output for result in results)
    layout = sharded((4, 2), "fsdp", "tensor")
    wanted = {
        "w": jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=sharded((4, 2), "tensor")),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(layout.mesh, PartitionSpec())),
    }
    state, data, meta = opened().restore(4, wanted)
    np.testing.assert_array_equal(state["w"], np.arange(24.0).reshape(8, 3))
    assert int(state["step"]) == 4
    assert data == {"stream_0": b"\x04\x00", "stream_1": b"\x04\x01"}
    assert meta == {"host": 0}
    assert all(written_by_each_host(tmp_path / "checkpoints" / "4" / "state"))


def written_by_each_host(folder: pathlib.Path):
    return [any((folder / f"ocdbt.process_{host}").rglob("*")) for host in (0, 1)]
