"""`verify` and restores agree on whether a checkpoint is intact, whichever file is damaged."""

import shutil

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.checkpoints import inspection, reading, steps, store
from core.checkpoints.steps import DamagedError
from core.files import paths

LAYOUT = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("fsdp",)), PartitionSpec("fsdp"))
WHOLE = NamedSharding(LAYOUT.mesh, PartitionSpec())
VALUES = {"block/mlp": {"w": np.arange(64, dtype=np.float32).reshape(8, 8) / 7}, "pair": (np.zeros(4), np.int32(7))}
STATE = jax.tree.map(lambda x: jax.device_put(x, LAYOUT if np.ndim(x) else WHOLE), VALUES)
ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE)
DATA, META = {"a": b"7" * 40}, {"seed": 7}
STEP = 7


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = store.Checkpoints(str(folder), keep=3)
    checkpoints.save(STEP, state=STATE, data=DATA, meta=META)
    checkpoints.close()
    return folder


@pytest.fixture
def verdicts(saved, tmp_path, monkeypatch):
    """`verdicts() -> (what verify says, what a restore does)` of a copy of the step, in the folder `verdicts.step`."""
    monkeypatch.setattr(reading, "RETRY_SECONDS", 0.0)
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)

    def both():
        if steps.complete(paths.resolve(folder)) != [STEP]:
            return "no step", "no step"
        verdict = inspection.verify(paths.resolve(folder) / str(STEP))
        checkpoints = store.Checkpoints(str(folder), keep=3)
        try:
            state, data, meta = checkpoints.restore(STEP, ABSTRACT)
        except DamagedError:
            return ("damaged" if verdict.damaged else "sound"), "damaged"
        finally:
            checkpoints.close()
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(STATE))
        assert (data, meta) == (DATA, META)
        return ("damaged" if verdict.damaged else "sound"), "sound"

    both.step = folder / str(STEP)
    return both


def bit(content, at, which=0):
    return content[:at] + bytes([content[at] ^ (1 << which)]) + content[at + 1 :]


HARMS = {
    "missing": None,
    "cut in half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "a bit in its middle": lambda content: bit(content, len(content) // 2, 2),
    "its first bit": lambda content: bit(content, 0),
}


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


@pytest.mark.covers("C04", "C12")
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_verify_and_restore_agree_whichever_file_is_harmed(verdicts, harm):
    came = {}
    for path in files(verdicts.step):
        whole = path.read_bytes()
        if harm:
            path.write_bytes(harm(whole))
        else:
            path.unlink()
        came[str(path.relative_to(verdicts.step))] = verdicts()
        path.write_bytes(whole)
    assert verdicts() == ("sound", "sound")
    assert not {name: both for name, both in came.items() if both[0] != both[1]}
    for name in ("meta/metadata", "data/a.bin", "state/manifest.ocdbt"):
        assert came[name] == ("damaged", "damaged")
    for name in ("state/_METADATA", "state/_sharding", "state/array_metadatas/process_0"):  # for orbax's own tools
        assert came[name] == ("sound", "sound")


TEXTS = (
    "meta/metadata",
    "_CHECKPOINT_METADATA",
    "state/_METADATA",
    "state/_sharding",
    "state/array_metadatas/process_0",
)


@pytest.mark.parametrize("name", TEXTS)
def test_verify_and_restore_agree_on_a_bit_anywhere_in_a_text(verdicts, name):
    path = verdicts.step / name
    whole = path.read_bytes()
    stride = max(1, len(whole) // 30)
    for at in range(0, len(whole), stride):
        path.write_bytes(bit(whole, at, at // stride % 8))
        verified, restored = verdicts()
        assert verified == restored, (at, whole[at : at + 1])
