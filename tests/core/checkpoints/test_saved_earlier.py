"""Checkpoints of an earlier format are read, and a run continues from them.

`saved_run.tar.xz` is what two hosts of two devices wrote with the `CheckpointManager` of orbax-checkpoint 0.12.8:
`checkpoints/2`, `checkpoints/4`, which leaves out a frozen parameter, and `params/6`.
"""

import pathlib
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.checkpoints import inspection, steps, store, warm_start
from core.files import paths
from core.parameters import ParamSpec

MESH = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tensor"))
FROZEN = ParamSpec((None, None), trainable=False)
SPECS = {"decoder/linear": {"w": ParamSpec((None, None)), "b": ParamSpec((None,)), "frozen": FROZEN}}


def state_of(step):
    w = np.arange(24, dtype=np.float32).reshape(8, 3) / 7 + step
    b = np.arange(3).astype(jnp.bfloat16) + step
    params = {"decoder/linear": {"w": w, "b": b, "frozen": np.full((4, 2), 0.5, np.float32)}}
    return {"params": params, "opt_state": (w * 2,), "step": np.int32(step)}


def data_of(step):
    return {f"stream/{host}": bytes([step, host]) * 9 for host in (0, 1)}


def placed(leaf):
    return NamedSharding(MESH, PartitionSpec("fsdp") if np.ndim(leaf) == 2 else PartitionSpec())


LAYOUT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=placed(x)), state_of(0))
META = {"seed": 7, "config": "LR = 1e-3\n"}


@pytest.fixture
def run(tmp_path):
    with tarfile.open(pathlib.Path(__file__).with_name("saved_run.tar.xz")) as file:
        file.extractall(tmp_path, filter="data")
    return paths.resolve(tmp_path)


def opened(run, **kwargs):
    origin = warm_start.Origin(lambda _: warm_start.SavedParameters(run / "params" / "6"), SPECS)
    return store.Checkpoints(str(run / "checkpoints"), keep=2, origin=origin, **kwargs)


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)


@pytest.mark.covers("C04")
def test_a_run_continues_from_checkpoints_of_an_earlier_format(run):
    checkpoints = opened(run, keep_params=2)
    step, state, data, meta = checkpoints.restore_newest(LAYOUT)
    assert (step, data, meta) == (4, data_of(4), META)
    assert_same(state, state_of(4))
    restored = checkpoints.restore(2, LAYOUT)
    assert_same(restored[0], state_of(2))
    assert checkpoints.left_out is None
    checkpoints.restore(4, LAYOUT)
    state = jax.tree.map(jax.device_put, state_of(5), jax.tree.map(placed, state_of(5)))
    checkpoints.save(5, state=state, data=data_of(5), meta=META)
    checkpoints.save_params(5, state["params"], {"averaged": False})
    checkpoints.close()
    assert (steps.complete(run / "checkpoints"), steps.complete(run / "params")) == ([4, 5], [5])
    assert steps.read(run / "checkpoints" / "5").left_out == steps.read(run / "checkpoints" / "4").left_out


def test_checkpoints_of_an_earlier_format_are_listed_and_verified(run):
    rows = inspection.table(run / "checkpoints")
    assert [(row[0], row[3]) for row in rows] == [("2", "5"), ("4", "4")]
    assert "complete, without 1 frozen arrays of /published/folder" in rows[1]
    folders = [run / "checkpoints" / "2", run / "checkpoints" / "4", run / "params" / "6"]
    assert [inspection.verify(folder).damaged for folder in folders] == [()] * 3
