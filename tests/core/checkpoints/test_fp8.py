"""FP8 against transformers, which `tests/models/fixtures/fp8/make.py` ran."""

import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from core import logical
from core.checkpoints import fp8, safetensors_files
from core.checkpoints.safetensors_files import Tensor
from core.errors import UserError
from core.files import paths
from models import pretrained
from models.decoder.published import families

HERE = pathlib.Path(__file__).parents[2] / "models" / "fixtures" / "fp8"
UP = "model.layers.0.mlp.up_proj.weight"
SETTINGS = {"weight_block_size": [8, 16]}


@pytest.fixture(scope="module")
def reference():
    return np.load(HERE / "reference.npz")


@pytest.fixture(scope="module")
def tensors():
    return fp8.dequantized(safetensors_files.tensors(paths.Path(HERE)), SETTINGS)


def test_numbers_are_those_of_transformers_bit_for_bit(reference, tensors):
    for name, want in ((UP, reference["up"]), ("model.layers.0.self_attn.kv_b_proj.weight", reference["latent_up"])):
        whole = tuple(slice(0, size) for size in want.shape)
        assert (tensors[name].shape, tensors[name].dtype) == (want.shape, np.float32)
        np.testing.assert_array_equal(tensors[name].reader([whole])(whole), want)
    assert not any(name.endswith("_scale_inv") for name in tensors)


@pytest.mark.parametrize(
    "part", [(slice(5, 9), slice(0, 32)), (slice(47, 48), slice(15, 17)), (slice(8, 16), slice(16, 32))]
)
def test_a_part_is_read_without_the_rest(part, reference, tensors):
    np.testing.assert_array_equal(tensors[UP].reader([part])(part), reference["up"][part])


def test_the_last_blocks_may_be_smaller(tmp_path):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(19, 33)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 2.0, size=(3, 3)).astype(np.float32)
    save_file({"a": weight, "a_scale_inv": scales}, tmp_path / "model.safetensors")
    found = fp8.dequantized(safetensors_files.tensors(paths.Path(tmp_path)), SETTINGS)["a"]
    want = weight.astype(np.float32) * np.repeat(np.repeat(scales, 8, 0)[:19], 16, 1)[:, :33]
    for part in ((slice(0, 19), slice(0, 33)), (slice(17, 19), slice(30, 33))):
        np.testing.assert_array_equal(found.reader([part])(part), want[part])


def test_numbers_without_scales_or_with_others_are_named():
    weight = Tensor(paths.Path("f"), fp8.E4M3, (24, 33), 0)
    scales = Tensor(paths.Path("f"), np.dtype(np.float32), (3, 3), 0)
    assert fp8.dequantized({"a": weight, "a_scale_inv": scales}, SETTINGS)["a"].shape == (24, 33)
    with pytest.raises(UserError, match="a has no a_scale_inv beside it"):
        fp8.dequantized({"a": weight}, SETTINGS)
    for wrong in (scales._replace(shape=(3, 2)), scales._replace(dtype=np.dtype(np.int8)), scales._replace(shape=())):
        with pytest.raises(UserError, match=r"expected a matrix, and \[3, 3\] scales in blocks of \[8, 16\]"):
            fp8.dequantized({"a": weight, "a_scale_inv": wrong}, SETTINGS)
    for settings in ({}, {"weight_block_size": None}, {"weight_block_size": [8]}):
        with pytest.raises(UserError, match=r"weight_block_size = .*expected the rows and columns of a block"):
            fp8.dequantized({"a": weight, "a_scale_inv": scales}, settings)


def batch_of(ids):
    ones = np.ones(ids.shape, np.int32)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    every = {"inputs": ids, "targets": ids, "segment_ids": ones, "positions": positions}
    return {**every, "weights": ones.astype(np.float32)}


def published(folder, ids):
    model = pretrained.model(str(folder), dtype="float32", vocab_multiple=1)
    return model, model.published(str(folder)), logical.abstract_init(model.init, jax.random.key(0), batch_of(ids))


def test_a_folder_in_fp8_has_the_logits_of_transformers(reference):
    ids = reference["input_ids"]
    model, source, (shapes, specs) = published(HERE, ids)
    assert source.problems(shapes, specs) == []
    assert source.notes == ("not read: 1 tensor *layers.2.*, such as model.layers.2.eh_proj.weight",)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
    logits = np.asarray(jax.jit(model.logits)(source.load(abstract, specs), batch_of(ids)), np.float64)
    assert np.abs(logits - reference["logits"]).max() < 5e-6 * np.abs(reference["logits"]).max()
    assert "quantization_config" not in families.config(model, "deepseek_v3")


def test_fp8_without_a_description_is_not_read_as_it_is(tmp_path):
    config = json.loads((HERE / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((HERE / "model.safetensors").read_bytes())
    _, source, wanted = published(tmp_path, np.zeros((1, 2), np.int32))
    assert any("dtype float8_e4m3fn, the model needs" in line for line in source.problems(*wanted))
