"""Damaged checkpoints are never restored: the newest intact one is, and nothing is deleted."""

import contextlib
import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.checkpoints import inspection, reading, steps, store
from core.checkpoints.reading import Misfit
from core.files import paths

RNG = np.random.default_rng(1)
LAYOUT = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("fsdp",)), PartitionSpec())


def state_of(step):
    values = {"w": np.random.default_rng(step).normal(size=(32, 16)).astype(np.float32), "step": np.int32(step)}
    return jax.device_put(values, LAYOUT)


def data_of(step):
    return {"a": bytes([step]) * 40, "b": bytes([step, 1]) * 20}


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=LAYOUT), state_of(0))


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(reading, "RETRY_SECONDS", 0.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two steps, never touched."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = store.Checkpoints(str(folder), keep=3)
    for step in (3, 7):
        checkpoints.save(step, state=state_of(step), data=data_of(step), meta={"seed": step})
    checkpoints.close()
    return folder


@pytest.fixture
def newest(saved, tmp_path):
    """`newest(damage) -> (step, names in the folder)` of a copy that `damage(folder of step 7)` was done to."""

    def found(damage):
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved, folder)
        damage(folder / "7")
        checkpoints = store.Checkpoints(str(folder), keep=3)
        try:
            step, state, data, meta = checkpoints.restore_newest(ABSTRACT)
            want = jax.device_get(state_of(step))
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), want)
            assert (data, meta) == (data_of(step), {"seed": step})
            return step, {path.name for path in folder.iterdir()}
        finally:
            checkpoints.close()

    return found


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


@pytest.mark.covers("C04")
def test_a_bit_flipped_anywhere_is_never_used(newest, saved):
    """In every file, in its middle: what is read is right, of this step or the one before."""
    fell_back = []
    for name in (path.relative_to(saved / "7") for path in files(saved / "7")):

        def flip(folder, name=name):
            content = bytearray((folder / name).read_bytes())
            content[int(RNG.integers(len(content)))] ^= 1 << int(RNG.integers(8))
            (folder / name).write_bytes(content)

        step, there = newest(flip)
        if step == 3:
            fell_back.append(str(name))
            assert [n for n in there if n.startswith("damaged-7-")], there
    assert any("/d/" in name for name in fell_back), fell_back  # arrays
    assert any(name.startswith("data/") for name in fell_back)
    assert any(name.startswith("meta/") for name in fell_back)


@pytest.mark.covers("C04")
@pytest.mark.parametrize("pattern", ["state/d/*", "data/a.bin", "meta/metadata", "state/manifest.ocdbt"])
def test_a_truncated_file_is_never_used(newest, pattern):
    def truncate(folder):
        (file,) = folder.glob(pattern)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    assert newest(truncate)[0] == 3


def of_another_step(folder):
    shutil.rmtree(folder / "data")
    shutil.copytree(folder.parent / "3" / "data", folder / "data")


def swapped(folder):
    first, second = (folder / "data" / f"{name}.bin" for name in "ab")
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


def all_of_another_step(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "3", folder)


@pytest.mark.covers("C04")
@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (of_another_step, "data: DamagedError: 2 of 2 positions in the data are of another step or stream: a, b"),
        (swapped, "data: DamagedError: 2 of 2 positions in the data are of another step or stream: a, b"),
        (all_of_another_step, "meta: DamagedError: the description belongs to step 3"),
    ],
)
def test_a_position_of_another_step_or_stream_is_never_used(newest, saved, tmp_path, harm, says):
    step, there = newest(harm)
    assert step == 3
    (aside,) = (name for name in there if name.startswith("damaged-7-"))
    (tmp_path / "copy" / aside).rename(tmp_path / "7")
    assert inspection.verify(paths.resolve(tmp_path / "7")).damaged == (says,)


def as_saved_by_an_earlier_revision(folder):
    """Its metadata named the streams and neither their content nor the step."""
    file = folder / "meta" / "metadata"
    meta = json.loads(file.read_text())
    del meta["step"], meta["checksum"]
    meta["streams"] = sorted(meta["streams"])
    checksum = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({**meta, "checksum": checksum}))


@pytest.mark.covers("C04")
def test_a_checkpoint_of_an_earlier_revision_is_restored_and_verify_says_what_it_lacks(newest, tmp_path):
    assert newest(as_saved_by_an_earlier_revision) == (7, {"3", "7"})
    verdict = inspection.verify(paths.resolve(tmp_path / "copy" / "7"))
    assert not verdict.damaged
    assert "its data positions are not tied to their step and stream" in verdict.describe()
    assert "not tied" not in inspection.verify(paths.resolve(tmp_path / "copy" / "3")).describe()


def test_a_missing_folder_is_no_step(newest):
    assert newest(lambda folder: shutil.rmtree(folder / "state"))[0] == 3


def test_a_run_whose_steps_are_all_damaged_does_not_start_afresh(saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    for step in (3, 7):
        meta = folder / str(step) / "meta" / "metadata"
        meta.write_text(meta.read_text().replace('"seed":', '"sead":'))
    checkpoints = store.Checkpoints(str(folder), keep=3)
    said = r"no checkpoint in .* can be restored, and none was renamed:\n  step 7: host 0: Dam.*\n  step 3: host 0: Dam"
    for _ in range(2):  # the second start says it too
        with pytest.raises(RuntimeError, match=said + r"(.|\n)*give another run_dir"):
            checkpoints.restore_newest(ABSTRACT)
    checkpoints.close()
    assert {path.name for path in folder.iterdir()} == {"3", "7"}


@pytest.mark.parametrize("text", ["[]", "null", "7", '"x"', "{}", "", "[" * 200_000, '{"a": 1e400}'])
def test_a_description_of_another_shape_is_damage(newest, text):
    assert newest(lambda folder: (folder / "meta" / "metadata").write_text(text))[0] == 3


def test_a_folder_in_the_place_of_the_description_is_damage(newest):
    def replaced(folder):
        (folder / "meta" / "metadata").unlink()
        (folder / "meta" / "metadata").mkdir()

    assert newest(replaced)[0] == 3


def test_a_damaged_step_can_be_saved_again(newest, tmp_path):
    newest(lambda folder: [path.write_bytes(b"") for path in files(folder / "data")])
    checkpoints = store.Checkpoints(str(tmp_path / "copy"), keep=3)
    checkpoints.save(7, state=state_of(7), data={"a": b"7"}, meta={})
    checkpoints.close()
    checkpoints = store.Checkpoints(str(tmp_path / "copy"), keep=3)
    assert checkpoints.restore_newest(ABSTRACT)[0] == 7
    checkpoints.close()


def test_another_model_is_no_damage(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    checkpoints = store.Checkpoints(str(tmp_path / "copy"), keep=3)
    other = ABSTRACT | {"w": jax.ShapeDtypeStruct((32, 8), jnp.float32, sharding=LAYOUT)}
    with pytest.raises(Misfit, match=r"w: float32\[32, 16\] in the checkpoint, expected float32\[32, 8\]"):
        checkpoints.restore_newest(other)
    checkpoints.close()
    assert (tmp_path / "copy" / "7").exists()


@pytest.fixture
def untouched(saved, tmp_path):
    """`untouched(when, match)`: while `when` is entered a restore says so; afterwards it finds what it should."""

    def see(when, match, *, error=reading.UnreadableError):
        folder = tmp_path / "copy"
        shutil.copytree(saved, folder)
        checkpoints = store.Checkpoints(str(folder), keep=3)
        with when, pytest.raises(error, match=match):
            checkpoints.restore_newest(ABSTRACT)
        assert {path.name for path in folder.iterdir()} == {"3", "7"}
        assert checkpoints.restore_newest(ABSTRACT)[0] == 7
        checkpoints.close()

    return see


FAILURES = [
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4294967296 bytes."),
    OSError(5, "Input/output error"),
    PermissionError(13, "Permission denied"),
    MemoryError("no more"),
    ValueError('UNAVAILABLE: Error reading "gs://bucket/7/state/d/1": HTTP response code: 503'),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_no_step_is_renamed_if_reading_fails_without_damage(untouched, error):
    tries = []

    @contextlib.contextmanager
    def failing():
        def fails(*_):
            tries.append(1)
            raise Exception("Encountered error while reading array index") from error  # as orbax does

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(store, "_read_arrays_and_streams", fails)
            yield

    untouched(failing(), match=f"step 7 .* could not be read.*{type(error).__name__}.*left as it is")
    assert len(tries) == 2


def read_by(reads):
    """For as long as it is entered arrays and streams are read by `reads(read, folder, abstract_state)`."""
    read = store._read_arrays_and_streams

    @contextlib.contextmanager
    def reading_so():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "_read_arrays_and_streams", lambda *asked: reads(read, *asked))
            yield

    return reading_so()


def test_no_step_is_renamed_if_the_library_can_read_none(untouched):
    def fails(*_):
        raise TypeError("restore() got an unexpected keyword argument 'x'")

    untouched(read_by(fails), r"none was renamed(.|\n)*unexpected keyword(.|\n)*libraries", error=RuntimeError)


def test_no_step_is_renamed_if_the_step_before_a_damaged_one_does_not_fit(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    (tmp_path / "copy" / "7" / "meta" / "metadata").write_text("{}")
    checkpoints = store.Checkpoints(str(tmp_path / "copy"), keep=3)
    with pytest.raises(Misfit, match="of step 3"):
        checkpoints.restore_newest(ABSTRACT | {"more": ABSTRACT["step"]})
    checkpoints.close()
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"3", "7"}


NOT_LISTED = [
    FileNotFoundError(2, "No such file or directory"),
    ValueError('NOT_FOUND: Error opening "zarr" driver: Metadata does not exist'),
]


@pytest.mark.parametrize("error", NOT_LISTED, ids=lambda error: type(error).__name__)
def test_a_file_that_is_listed_late_is_no_damage(newest, error):
    tries = []

    def late(read, *asked):
        tries.append(1)
        if len(tries) == 1:
            raise Exception("Encountered error while reading array index") from error
        return read(*asked)

    with read_by(late):
        assert newest(lambda folder: None) == (7, {"3", "7"})
    assert len(tries) == 2


def test_a_position_that_is_listed_late_is_no_damage(newest, monkeypatch):
    found, tries = steps.read_streams, []

    def late(*asked):
        tries.append(1)
        return found(*asked) if len(tries) > 1 else {}

    monkeypatch.setattr(steps, "read_streams", late)
    assert newest(lambda folder: None) == (7, {"3", "7"})


TWO_HOSTS = """
import pathlib
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from core.hosts import distributed
from core.checkpoints import store
distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=2)
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
def state_of(step):
    value = np.random.default_rng(step).normal(size=(256, 1024)).astype(np.float32)
    layout = NamedSharding(mesh, PartitionSpec("fsdp"))
    return {"w": jax.make_array_from_callback(value.shape, layout, lambda i: value[i])}
checkpoints = store.Checkpoints("checkpoints", keep=3, timeout_seconds=30)
for step in (1, 2, 3):
    checkpoints.save(step, state=state_of(step), data={}, meta={})
checkpoints.close()
distributed.barrier("saved")
if PROCESS == 0:
    for step, harm in ((3, lambda b: b[:len(b) // 2]), (2, lambda b: b[:999] + bytes([b[999] ^ 1]) + b[1000:])):
        folder = pathlib.Path(f"checkpoints/{step}/state/ocdbt.process_1/d")  # what host 1 wrote
        for path in folder.iterdir():
            path.write_bytes(harm(path.read_bytes()))
distributed.barrier("harmed")
checkpoints = store.Checkpoints("checkpoints", keep=3, timeout_seconds=30)
layout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(1))
step, state, _, _ = checkpoints.restore_newest(layout)
print("FOUND", step)
checkpoints.close()
distributed.shutdown()
"""


@pytest.mark.covers("C04")
@pytest.mark.simulated(2)
def test_hosts_agree_on_what_is_damaged(run_hosts, tmp_path):
    results = run_hosts(TWO_HOSTS, hosts=2)
    assert [result.returncode for result in results] == [0, 0], results
    assert all("FOUND 1" in result.output for result in results), results
    assert "checkpoint 3 is damaged (host" in results[0].output
    folder = paths.resolve(tmp_path / "checkpoints")
    assert not inspection.verify(folder / "1").damaged  # read by one process, without the model
    shutil.copytree(next(tmp_path.glob("checkpoints/damaged-2-*")), folder / "2")
    assert inspection.verify(folder / "2").damaged


ONE_HOST_ALONE = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from core.hosts import distributed
from core.checkpoints import store
distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=2)
layout = NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), PartitionSpec())
def state_of(step, added=0):
    return {"w": jax.make_array_from_callback((8,), layout, lambda i: np.full(8, step + added, np.float32)[i])}
checkpoints = store.Checkpoints("checkpoints", keep=3, timeout_seconds=30)
for step in (1, 2):
    checkpoints.save(step, state=state_of(step), data={}, meta={})
checkpoints.close()
checkpoints = store.Checkpoints("checkpoints", keep=3, timeout_seconds=30)
read = store._read_arrays_and_streams
def otherwise(folder, abstract_state):
    state, data = read(folder, abstract_state)
    return (state_of(2, added=9) if PROCESS == 1 and folder.name == "2" else state), data
store._read_arrays_and_streams = otherwise
abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(1))
step, state, _, _ = checkpoints.restore_newest(abstract)
print("FOUND", step, state["w"].addressable_data(0)[0])
checkpoints.close()
distributed.shutdown()
"""


@pytest.mark.slow  # agreement on what is damaged is quick
@pytest.mark.covers("C04")
@pytest.mark.simulated(2)
def test_hosts_agree_on_the_one_with_other_numbers(run_hosts):
    """Of a leaf that every device has whole, each host knows its own copy alone."""
    results = run_hosts(ONE_HOST_ALONE, hosts=2)
    assert [result.returncode for result in results] == [0, 0], results
    assert all("FOUND 1 1.0" in result.output for result in results), results
    assert "checkpoint 2 is damaged (host 1: 1 of 1 arrays are not what was saved: w)" in results[0].output
