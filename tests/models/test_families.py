"""Tiny models of every published family against transformers, which `fixtures/families/make.py` ran."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, parameters
from core.checkpoints import published
from models import families, pretrained, rotary, transformer

HERE = pathlib.Path(__file__).parent / "fixtures" / "families"
FAMILIES = sorted(folder.name for folder in HERE.iterdir() if folder.is_dir())


def batch_of(ids):
    """A batch that predicts every next token of `ids` [B, T]; the last position is not supervised."""
    ids = jnp.asarray(ids, jnp.int32)
    weights = jnp.ones(ids.shape, jnp.float32).at[:, -1].set(0)
    return {
        "inputs": ids,
        "targets": jnp.roll(ids, -1, axis=1),
        "weights": weights,
        "segment_ids": jnp.ones(ids.shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
    }


def loaded(name, **changes):
    """The model, its parameters, their axes and the reference of a family."""
    model = pretrained.model(str(HERE / name), dtype="float32", vocab_multiple=8, **changes)
    reference = np.load(HERE / name / "reference.npz")
    shapes, axes = logical.abstract_init(model.init, jax.random.key(0), batch_of(reference["input_ids"]))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
    return model, pretrained.folder(model, str(HERE / name)).load(abstract, axes), axes, reference


def relative_error(ours, want):
    return float(np.max(np.abs(np.asarray(ours, np.float64) - want)) / np.max(np.abs(want)))


@pytest.mark.covers("N01", "N02", "N03", "C16")
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_every_gradient_equal_those_of_transformers(name):
    model, params, axes, reference = loaded(name)
    batch = batch_of(reference["input_ids"])
    logits = jax.jit(model.logits)(params, batch)
    # transformers in float32 differs from its own float64 by 3e-7 to 2e-6 of the largest logit.
    assert relative_error(logits, reference["logits"]) < 5e-6

    def mean_loss(params):
        _, out = model.loss(params, (), None, batch)
        return out.loss_sum / out.weight_sum

    loss, grads = jax.jit(jax.value_and_grad(mean_loss))(params)
    np.testing.assert_allclose(loss, reference["loss"], rtol=2e-6)
    by_path = {parameters.path_name(path): g for path, g in jax.tree_util.tree_leaves_with_path(grads)}
    tensors = published.tensors_of(
        lambda path, layer: np.asarray(by_path[path] if layer is None else by_path[path][layer]),
        grads,
        axes,
        families.named_sources(model),
        limits={"vocab": model.vocab_size},
        dtype=np.float32,
    )
    ours = dict(tensors)
    assert {f"grad/{tensor}" for tensor in ours} == {key for key in reference if key.startswith("grad/")}
    for tensor, gradient in ours.items():
        assert relative_error(gradient, reference[f"grad/{tensor}"]) < 2e-5, tensor
