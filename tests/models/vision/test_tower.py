"""Tiny vision towers against transformers, which `tests/models/fixtures/vision/make.py` ran."""

import json
import pathlib
import shutil

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from core import logical, parameters
from core.checkpoints import published, warm_start
from core.errors import UserError
from models import pretrained
from models.decoder.transformer import Transformer
from models.vision import families, tower
from models.vision.model import VisionLanguageModel
from models.vision.selector import Selector

HERE = pathlib.Path(__file__).parents[1] / "fixtures" / "vision"
LIKE = Transformer(num_layers=1, embed_dim=16, mlp_dim=16, num_heads=2, num_kv_heads=2, dtype="float32")


def features(vision, images, like=LIKE):
    return vision.encoded(vision.embedded(images, dtype=like.dtype), like)


@pytest.mark.covers("N11")
# test_published.py has a quick test of the gradients of LLaVA, whose tower is CLIP's.
@pytest.mark.parametrize("name", ["siglip", pytest.param("clip", marks=pytest.mark.slow)])
def test_features_and_every_gradient_equal_those_of_transformers(name):
    folder = str(HERE / name)
    vision = families.pretrained(folder)
    run = hk.transform(lambda images: features(vision, images))
    reference = np.load(HERE / name / "reference.npz")
    shapes, specs = logical.abstract_init(run.init, jax.random.key(0), reference["images"])
    source = families.published_folder(vision, folder, json.loads((HERE / name / "config.json").read_text()))
    assert source.problems(shapes, specs) == []
    unread = "not read: 2 tensors *post_layernorm.*, such as vision_model.post_layernorm.bias"  # of the class token
    assert source.notes == ((unread,) if name == "clip" else ())
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = source.load(jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes), specs)

    def total(params):
        found = run.apply(params, None, reference["images"])
        return jnp.sum(found * reference["weight"]), found

    (_, found), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    np.testing.assert_allclose(found, reference["features"], atol=2e-5 * np.abs(reference["features"]).max())
    by_path = {parameters.path_name(path): g for path, g in jax.tree_util.tree_leaves_with_path(grads)}
    tensors = published.tensors_of(
        lambda path, layer: np.asarray(by_path[path] if layer is None else by_path[path][layer]),
        grads,
        specs,
        {path: source.prefixed("vision_model.") for path, source in families.sources(vision).items()},
        limits={},
        dtype=np.float32,
    )
    for tensor, gradient in tensors:
        want = reference[f"grad/{tensor}"]
        np.testing.assert_allclose(gradient, want, atol=2e-4 * max(np.abs(want).max(), 1), err_msg=tensor)


def test_a_tower_and_a_decoder_are_read_from_two_folders():
    """Connector and selector are in neither, and the model says so."""
    decoder, vision = HERE.parent / "families" / "llama2", HERE / "siglip"
    model = VisionLanguageModel(
        decoder=pretrained.model(str(decoder), dtype="float32", vocab_multiple=1),
        vision=families.pretrained(str(vision)),
        selector=Selector(num_chosen=3),
        vision_folder=str(vision),
    )
    source = model.published(str(decoder))
    row = {name: np.zeros((1, 12), np.int32) for name in ("inputs", "targets", "segment_ids", "positions", "until")}
    batch = {**row, "weights": np.zeros((1, 12), np.float32), "slots": np.arange(9)[None]}
    batch["images"] = np.zeros((1, 12, 12, 3), np.uint8)
    trees = logical.abstract_init(model.init, jax.random.key(0), batch)
    read = [warm_start.read_from(source, tree, ("*",), optional=model.added_parameters) for tree in trees]
    assert source.problems(*read) == []
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), read[0])
    found = source.load(abstract, read[1])
    stored = [load_file(folder / "model.safetensors") for folder in (vision, decoder)]
    np.testing.assert_array_equal(
        found["~"]["vision_positions"], stored[0]["vision_model.embeddings.position_embedding.weight"]
    )
    np.testing.assert_array_equal(found["~"]["embedding"], stored[1]["model.embed_tokens.weight"])
    assert jax.tree.structure(found) == jax.tree.structure(abstract)
    assert not any(source.has(path) for path in ("connector_down", "selector_gain"))
    assert "siglip and the published folder" in source.describe()


def test_rotary_positions_tell_a_patch_from_one_at_another_place():
    """Rotations by rows and columns: products of queries and keys depend on differences alone."""
    tables = tower.rotary_2d(3, 8, theta=100.0, length=1.0)
    x = jax.random.normal(jax.random.key(0), (8,))
    turned = tower.rotary.apply(jnp.broadcast_to(x, (1, 9, 1, 8)), tables)[0, :, 0]
    products = np.asarray(turned @ turned.T)
    np.testing.assert_allclose(products[0, 4], products[4, 8], rtol=1e-5)  # one down, one right
    np.testing.assert_allclose(products[0, 1], products[7, 8], rtol=1e-5)
    assert abs(products[0, 1] - products[0, 3]) > 1e-3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patch_size": 5}, "not a multiple of patch_size = 5; nearest sizes that are: 10, 15"),
        ({"positions": "none"}, "positions = 'none'"),
        ({"num_heads": 3}, "does not divide over num_heads = 3"),
        ({"positions": "rotary", "class_token": True}, "no class token"),
        ({"norm_eps": -1.0}, "norm_eps = -1.0: expected a finite number above 0"),
        ({"activation": "x"}, "activation = 'x': expected one of "),
        ({"embed_dim": 16.0}, "embed_dim = 16.0: expected an integer of at least 1"),
        ({"num_layers": -1}, "num_layers = -1: expected an integer of at least 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, said):
    sizes = {"image_size": 12, "patch_size": 4, "num_layers": 1, "embed_dim": 16, "mlp_dim": 16, "num_heads": 2}
    with pytest.raises(UserError, match=said):
        tower.VisionTower(**{**sizes, **changes})


@pytest.mark.parametrize("name", ["siglip", "clip"])
def test_a_folder_whose_images_have_pixels_after_the_last_patch_is_read(name, tmp_path):
    """As google/siglip-so400m-patch14-384."""
    config = json.loads((HERE / name / "config.json").read_text())
    inner = config.get("vision_config", config)
    whole = families.pretrained(str(HERE / name))
    inner["image_size"] += inner["patch_size"] - 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(HERE / name / "model.safetensors", tmp_path)
    found = families.pretrained(str(tmp_path))
    assert (found.cut, whole.cut) == (True, False)
    assert (found.image_size, found.num_patches) == (whole.image_size + whole.patch_size - 1, whole.num_patches)
    notes = families.published_folder(found, str(tmp_path), config).notes
    assert not any("cut" in note or "image_size" in note for note in notes)


def test_an_unknown_vision_model_is_refused():
    with pytest.raises(UserError, match="model_type = 'vit_mae' is not a supported vision model; supported: siglip"):
        families.fields({"model_type": "vit_mae"})
    with pytest.raises(UserError, match=r"config\.json: layer_norm_eps = '1e-6': expected a finite number above 0"):
        families.fields({"model_type": "siglip", "layer_norm_eps": "1e-6"})
