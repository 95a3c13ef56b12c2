"""MXFP4 against transformers, which `tests/models/fixtures/mxfp4/make.py` ran."""

import functools
import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from core import logical, parameters
from core.checkpoints import mxfp4, published, safetensors_files
from core.checkpoints.safetensors_files import Tensor
from core.errors import UserError
from core.files import paths
from models import pretrained
from models.decoder.published import families, family_tensors

HERE = pathlib.Path(__file__).parents[2] / "models" / "fixtures" / "mxfp4"
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def reference():
    return np.load(HERE / "reference.npz")


@pytest.fixture(scope="module")
def tensors():
    return mxfp4.dequantized(safetensors_files.tensors(paths.Path(HERE)), {})


def test_numbers_are_those_of_transformers_bit_for_bit(reference, tensors):
    for name, want in ((GATE_UP, reference["gate_up"]), (GATE_UP.replace("gate_up", "down"), reference["down"])):
        whole = tuple(slice(0, size) for size in want.shape)
        assert (tensors[name].shape, tensors[name].dtype) == (want.shape, ml_dtypes.bfloat16)
        found = tensors[name].reader([whole])(whole).astype(np.float32)
        np.testing.assert_array_equal(found, want)
        assert len(np.unique(np.abs(found))) > 12  # several scales of the 8 sizes
    assert not any(name.endswith(("_blocks", "_scales")) for name in tensors)


@pytest.mark.parametrize(
    "part",
    [
        (slice(1, 3), slice(0, 32), slice(5, 9)),
        (slice(2, 3), slice(7, 8), slice(127, 128)),
        (slice(0, 3), slice(31, 50), slice(0, 20)),
    ],
)
def test_a_part_is_read_without_the_rest(part, reference, tensors):
    name, whole = (GATE_UP, "gate_up") if part[1].stop <= 32 else (GATE_UP.replace("gate_up", "down"), "down")
    found = tensors[name].reader([part])(part)
    np.testing.assert_array_equal(found.astype(np.float32), reference[whole][part])


def test_a_scale_of_255_is_not_a_number(tmp_path):
    blocks, scales = np.full((1, 2, 2, 16), 0x20, np.uint8), np.array([[[127, 255], [126, 254]]], np.uint8)
    save_file({"a_blocks": blocks, "a_scales": scales}, tmp_path / "model.safetensors")
    tensor = mxfp4.dequantized(safetensors_files.tensors(paths.Path(tmp_path)), {})["a"]
    whole = tuple(slice(0, size) for size in tensor.shape)
    first, second = tensor.reader([whole])(whole)[0, :, :].astype(np.float32).T  # rows of [C, R]
    np.testing.assert_array_equal(first, np.r_[[0.0, 1.0] * 16, [np.nan] * 32].astype(np.float32))
    np.testing.assert_array_equal(second, np.r_[[0.0, 0.5] * 16, [0.0, 2.0**127] * 16].astype(np.float32))


def test_blocks_without_scales_or_of_another_shape_are_named():
    blocks = Tensor(paths.Path("f"), np.dtype(np.uint8), (2, 4, 3, 16), 0)
    scales = Tensor(paths.Path("f"), np.dtype(np.uint8), (2, 4, 3), 0)
    assert mxfp4.dequantized({"a_blocks": blocks, "a_scales": scales}, {})["a"].shape == (2, 96, 4)
    with pytest.raises(UserError, match="a_blocks has no a_scales beside it"):
        mxfp4.dequantized({"a_blocks": blocks}, {})
    for wrong in (scales._replace(shape=(2, 4, 2)), scales._replace(dtype=np.dtype(np.float32))):
        with pytest.raises(UserError, match=r"expected uint8 \[experts, rows, groups, 16\]"):
            mxfp4.dequantized({"a_blocks": blocks, "a_scales": wrong}, {})


def batch_of(ids):
    ones = np.ones(ids.shape, np.int32)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return {
        "inputs": ids,
        "targets": ids,
        "segment_ids": ones,
        "positions": positions,
        "weights": ones.astype(np.float32),
    }


@functools.cache
def described(model, shape):
    return logical.abstract_init(model.init, jax.random.key(0), batch_of(np.zeros(shape, np.int32)))


def load(folder, ids):
    model = pretrained.model(str(folder), dtype="float32", vocab_multiple=1)
    shapes, specs = described(model, ids.shape)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
    source = model.published(str(folder))
    assert source.problems(shapes, specs) == []
    return model, source.load(abstract, specs), specs


def test_a_folder_with_experts_in_mxfp4_has_the_logits_of_transformers_and_an_export_is_not_quantized(
    reference, tmp_path
):
    ids = reference["input_ids"]
    model, params, specs = load(HERE, ids)
    logits = np.asarray(jax.jit(model.logits)(params, batch_of(ids)), np.float64)
    assert np.abs(logits - reference["logits"]).max() < 5e-6 * np.abs(reference["logits"]).max()

    by_path = {parameters.path_name(path): np.asarray(a) for path, a in jax.tree_util.tree_leaves_with_path(params)}
    written = published.tensors_of(
        lambda path, layer: by_path[path] if layer is None else by_path[path][layer],
        params,
        specs,
        family_tensors.named_sources(model),
        limits={},
        dtype=ml_dtypes.bfloat16,
    )
    save_file(dict(written), tmp_path / "model.safetensors")
    config = families.config(model, "gpt_oss")
    assert "quantization_config" not in config
    (tmp_path / "config.json").write_text(json.dumps(config))
    exported = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(exported[GATE_UP].astype(np.float32), reference["gate_up"])
    _, again, _ = load(tmp_path, ids)
    for name in ("gate", "up", "down"):
        path = next(path for path in by_path if path.endswith(f"/{name}"))
        module, leaf = path.rpartition("/")[::2]
        np.testing.assert_array_equal(again[module][leaf], by_path[path])


def test_other_methods_of_quantization_stay_errors():
    config = json.loads((HERE / "config.json").read_text())
    for method in ("fp8", "gptq"):
        with pytest.raises(UserError, match=rf"the weights are quantized \({method}\)"):
            families.fields({**config, "quantization_config": {"quant_method": method}})
    plain = json.loads((HERE.parent / "families" / "llama2" / "config.json").read_text())
    with pytest.raises(UserError, match=r"the weights are quantized \(mxfp4\)"):
        families.fields({**plain, "quantization_config": {"quant_method": "mxfp4"}})
