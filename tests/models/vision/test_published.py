"""Published models of images and text equal transformers', whose results `fixtures/images/make.py` wrote."""

import copy
import json
import pathlib
import runpy

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from core import logical, parameters
from core.checkpoints import published as core_published
from core.errors import UserError
from models.decoder.published import published_keys
from models.vision import families, pretrained, published
from models.vision.selector import Selector
from tests.models.drawn import drawn

HERE = pathlib.Path(__file__).parents[1] / "fixtures" / "images"
FOLDERS = ("llava", "llava_siglip", "smolvlm", "idefics3")
CONFIGS = {name: json.loads((HERE / name / "config.json").read_text()) for name in FOLDERS}
CASES = runpy.run_path(str(HERE / "cases.py"))
TENSOR = runpy.run_path(str(HERE.parent / "configurations" / "cases.py"))["tensor"]
CHANGED = dict(CASES["cases"](CONFIGS))
QUICK = ("llava: vision_feature_layer -1", "llava: base", "llava_siglip: vision_config image_size 12")
QUICK += ("smolvlm: scale_factor 4",)
WHOLE = ("idefics3", "llava", "smolvlm")  # quick, with their gradients


def reference(name):
    return dict(np.load(HERE / name / "reference.npz"))


def batch(model, config, ids, frames):
    """One row: the ids, with slots where the image token is."""
    token = published.image_token(config)
    inputs, targets = ids[None], np.roll(ids, -1)[None]
    weights = (np.arange(len(ids)) < len(ids) - 1) & (targets != token)
    places = np.arange(len(ids), dtype=np.int32)[None]
    return {
        "images": frames[None],
        "slots": np.flatnonzero(ids == token)[None].astype(np.int32),
        "inputs": inputs.astype(np.int32),
        "targets": targets.astype(np.int32),
        "weights": weights.astype(np.float32),
        "segment_ids": np.ones_like(places),
        "positions": places,
        "until": places,
    }


def loaded(name, **changes):
    """A model, its parameters, its configuration and its folder's tensors."""
    folder, config = HERE / name, CONFIGS[name]
    model = pretrained.model(str(folder), dtype="float32", **changes)
    found = reference(name)
    data = batch(model, config, found["ids"], pixels_of(model, found["pixels"]))
    shapes, specs = logical.abstract_init(model.init, jax.random.key(0), data)
    source = model.published(str(folder))
    assert source.problems(shapes, specs) == []
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = source.load(jax.tree.map(lambda leaf: leaf.update(sharding=one), shapes), specs)
    return model, params, specs, data, config


def pixels_of(model, values):
    """The uint8 pixels that became these values."""
    mean, std = (np.asarray(each)[:, None, None] for each in (model.vision.mean, model.vision.std))
    return np.rint((values * std + mean) * 255).astype(np.uint8).transpose(0, 2, 3, 1)


# A change of a key of llava_siglip is quick below, and so are gradients of its tower in test_tower.py.
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in WHOLE)) for n in FOLDERS])
def test_logits_and_gradients_equal_transformers(name):
    model, params, specs, data, config = loaded(name)
    want = reference(name)

    def loss(params):
        _, out = model.loss(params, model.init_carry(data), jax.random.key(0), data)
        return out.loss_sum / out.weight_sum

    logits = jax.jit(model.logits)(params, data)[0]
    assert np.abs(logits - want["logits"]).max() <= 5e-6 * np.abs(want["logits"]).max()
    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, want["loss"], rtol=2e-6)
    theirs = {key.removeprefix("grad/"): grad for key, grad in want.items() if key.startswith("grad/")}
    names = published.names_in(published.FAMILIES[config["model_type"]].names, theirs)
    by_path = {parameters.path_name(path): g for path, g in jax.tree_util.tree_leaves_with_path(grads)}
    tensors = core_published.tensors_of(
        lambda path, layer: np.asarray(by_path[path] if layer is None else by_path[path][layer]),
        grads,
        specs,
        published.sources(model, names, config["text_config"]["model_type"]),
        limits={"vocab": model.vocab_size},
        dtype=np.float32,
    )
    ours = dict(tensors)
    assert ours.keys() == theirs.keys()
    for tensor, gradient in ours.items():
        if "vision" in tensor and tensor.endswith("k_proj.bias"):  # the same for all keys: softmax does not change
            assert max(np.abs(gradient).max(), np.abs(theirs[tensor]).max()) < 1e-6 * want["loss"], tensor
            continue
        assert np.abs(gradient - theirs[tensor]).max() <= 2e-5 * np.abs(theirs[tensor]).max(), tensor


def test_a_selector_reads_whole_patches_of_the_image():
    """The tower of `llava_siglip` leaves out two rows and columns of pixels."""
    folder, want = HERE / "llava_siglip", reference("llava_siglip")
    model = pretrained.model(str(folder), dtype="float32", selector=Selector(num_chosen=4))
    frames = pixels_of(model, want["pixels"])
    data = batch(model, CONFIGS["llava_siglip"], want["ids"], frames)
    other = {**data, "images": data["images"].copy()}
    other["images"][:, :, 12:], other["images"][:, :, :, 12:] = 7, 200
    params = drawn(model.init, data)
    evaluated = jax.jit(lambda batch: model.evaluate(params, jax.random.key(0), batch))
    found, again = evaluated(data), evaluated(other)
    assert found.extras["chosen"].sum() == 4
    assert (found.extras["chosen"] == again.extras["chosen"]).all()
    np.testing.assert_array_equal(found.loss_sum, again.loss_sum)


@pytest.mark.covers("C16")
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in QUICK)) for c in CHANGED])
def test_every_change_of_a_key_has_the_logits_of_transformers(case, tmp_path):
    config, frame = CHANGED[case], CASES["frame"](CHANGED[case])
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = dict.fromkeys(("height", "width"), len(frame))
    processor = {"image_processor_type": "SiglipImageProcessor", "size": size}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    model = pretrained.model(str(tmp_path), dtype="float32")
    data = batch(model, config, np.asarray(CASES["ids"](config), np.int32), frame[None])
    shapes, specs = logical.abstract_init(model.init, jax.random.key(0), data)
    names = published.FAMILIES[config["model_type"]].names
    names = published.names_in(names, IN_MEMORY)
    sources = published.sources(model, names, config["text_config"]["model_type"])
    limits = {"vocab": model.vocab_size}
    tensors = core_published.tensors_of(
        lambda path, layer: zeros(shapes, path, layer), shapes, specs, sources, limits=limits, dtype=np.float32
    )
    save_file({name: TENSOR(name, list(array.shape)) for name, array in tensors}, tmp_path / "model.safetensors")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    source = model.published(str(tmp_path))
    assert source.problems(shapes, specs) == []
    params = source.load(jax.tree.map(lambda leaf: leaf.update(sharding=one), shapes), specs)
    want = np.load(HERE / "changes.npz")[case]
    found = jax.jit(model.logits)(params, data)[0, -len(want) :]
    assert np.abs(found - want).max() <= 5e-6 * np.abs(want).max()


# Names of tensors as transformers has them in memory, which newer folders of LLaVA may have.
IN_MEMORY = {
    "model.vision_tower.embeddings.patch_embedding.weight",
    "model.language_model.embed_tokens.weight",
    "model.multi_modal_projector.linear_2.weight",
    "lm_head.weight",
}


def zeros(shapes, path, layer):
    leaves = {parameters.path_name(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    shape = leaves[path].shape
    return np.zeros(shape if layer is None else shape[1:], np.float32)


def test_every_key_of_transformers_is_known():
    """Each is read, has no effect, or has one value; `make.py` recorded the keys of the classes."""
    record = json.loads((HERE / "record.json").read_text())["keys"]
    known = published_keys.WITHOUT_EFFECT | published_keys.ONLY.keys()
    for kind, one in published.FAMILIES.items():
        around = {*one.keys, "vision_config", "text_config", "tie_word_embeddings"} | published.AROUND
        assert set(record[kind]) <= known | around, kind
    for kind in families.INSIDE:
        assert set(record[kind]) <= known | families.keys(kind) | published.OF_TOWER, kind


@pytest.mark.parametrize(
    ("name", "part", "key", "value", "says"),
    [
        ("llava", "", "model_type", "llava_next", "model_type = 'llava_next' is not a supported"),
        ("llava", "", "vision_feature_layer", [-2, -5], "vision_feature_layer = [-2, -5]"),
        ("llava", "", "vision_feature_layer", 0, "vision_feature_layer = 0: expected one of 3 layers"),
        ("llava", "", "vision_feature_select_strategy", "full", 'vision_feature_select_strategy = "full"'),
        ("llava_siglip", "", "vision_feature_select_strategy", "default", '(expected "full")'),
        ("llava", "", "projector_hidden_act", "relu", "activation 'relu' is not known"),
        ("llava", "", "image_grid_pinpoints", [[336, 672]], "image_grid_pinpoints = [[336, 672]] is not known"),
        ("llava", "", "quantization_config", {"quant_method": "awq"}, "quantized (awq)"),
        ("llava", "", "text_config", None, "text_config = None: expected an object"),
        ("llava", "text_config", "model_type", "phi3", "text_config: model_type = 'phi3' is not supported"),
        ("llava", "text_config", "model_type", ["llama"], "text_config: model_type = ['llama'] is not supported"),
        ("llava", "", "image_token_id", 5, "image_token_id = 5 and image_token_index = 258, which both name the image"),
        ("llava", "text_config", "attention_bias", True, "attention_bias = True is not supported"),
        ("llava", "vision_config", "model_type", "dinov2", "vision_config: model_type = 'dinov2' is not supported"),
        ("llava", "vision_config", "hidden_act", ["gelu"], "['gelu']"),
        ("llava", "vision_config", "window_size", 7, "window_size = 7 is not known"),
        ("llava", "vision_config", "image_size", [12, 12], "image_size"),
        ("smolvlm", "", "scale_factor", 0, "scale_factor = 0"),
        ("smolvlm", "", "scale_factor", 3, "connector_square = 3 does not divide 4"),
        ("smolvlm", "vision_config", "image_size", 100, "25 patches along a side"),
        ("smolvlm", "vision_config", "image_size", 24, "prepares images of 16x16; expected 24x24"),
    ],
)
def test_what_cannot_be_read_is_named(name, part, key, value, says, tmp_path):
    config = copy.deepcopy(CONFIGS[name])
    (config[part] if part else config)[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_bytes((HERE / name / "preprocessor_config.json").read_bytes())
    with pytest.raises(UserError) as caught:
        pretrained.model(str(tmp_path))
    assert says in str(caught.value)


def test_a_changed_name_that_is_no_field_is_an_error():
    with pytest.raises(UserError, match=r"has no frezee: expected fields .*, such as freeze"):
        pretrained.model(str(HERE / "llava"), frezee=("vision",))
    assert pretrained.model(str(HERE / "llava"), remat="full", freeze=("vision",)).decoder.remat == "full"
