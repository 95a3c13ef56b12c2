"""Decoders whose mixer learns at test time: causality, generation from the state, and agreement of strategies."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.agreement_subjects import random_batches
from models.decoder.transformer import Transformer
from models.ttt import TTTConfig
from models.ttt.mixer import TTTMixer
from parallel.generation import decoding
from parallel.verify import agreement
from tests.lab.subjects import bind

MODEL = Transformer(
    vocab_size=96,
    num_layers=4,
    embed_dim=32,
    mlp_dim=48,
    num_heads=4,
    num_kv_heads=4,
    dtype="float32",
    vocab_multiple=32,
    mixer=TTTMixer(TTTConfig(num_heads=4, head_dim=8, mini_batch=4)),
)
SHALLOW = dataclasses.replace(MODEL, num_layers=1)
MLP = dataclasses.replace(SHALLOW, mixer=TTTMixer(dataclasses.replace(SHALLOW.mixer.config, inner="mlp")))


def batch(rows=2):
    found = next(random_batches(MODEL.vocab_size, steps=1, rows=rows))
    return {name: jnp.asarray(value) for name, value in found.items()}


def whole_rows(rows=2):
    given = batch(rows)
    ones = jnp.ones_like(given["segment_ids"])
    return {**given, "segment_ids": ones, "positions": ones.cumsum(axis=1) - 1}


@pytest.mark.slow
@pytest.mark.covers("N04", "X16")
def test_no_position_depends_on_later_ones_or_on_other_segments():
    given = batch()
    params = jax.jit(SHALLOW.init)(jax.random.key(0), given)
    second = given["segment_ids"] == 2
    changed = {**given, "inputs": jnp.where(second, given["inputs"], (given["inputs"] + 1) % 96)}
    logits = jax.jit(SHALLOW.logits)
    ours, theirs = logits(params, given), logits(params, changed)
    np.testing.assert_array_equal(jnp.where(second[..., None], ours - theirs, 0), jnp.zeros_like(ours))
    later = {**given, "inputs": given["inputs"].at[:, 10].add(1) % 96}
    np.testing.assert_array_equal(logits(params, later)[:, :10], ours[:, :10])


@pytest.mark.covers("N04", "N13")
@pytest.mark.parametrize("model", [SHALLOW, pytest.param(MLP, marks=pytest.mark.slow)], ids=["linear", "mlp"])
def test_generation_from_the_state_equals_the_full_forward(model):
    """One row of 24 tokens, one of 21 after 3 empty slots; first 18 slots, then 6 one by one in one call."""
    given = whole_rows()
    params = jax.jit(model.init)(jax.random.key(0), given)
    padding = jnp.asarray([0, 3])
    shifted = given["inputs"].at[1].set(jnp.concatenate([jnp.full(3, 7), given["inputs"][1, :21]]))
    full = jax.jit(model.logits)(params, given)
    extend = jax.jit(model.extend)
    cache = model.empty_cache(2, 24)
    for begin, end in ((0, 18), (18, 24)):
        found, cache = extend(params, cache, shifted[:, begin:end], jnp.int32(begin), padding)
        for row, padded in enumerate((0, 3)):
            np.testing.assert_allclose(found[row], full[row, end - padded - 1], atol=2e-5)


def test_generation_keeps_the_initial_weights_in_the_dtype_of_training():
    narrow = dataclasses.replace(SHALLOW, dtype="bfloat16")
    found = decoding.dtypes(bind(narrow, agreement.ONE_DEVICE, batch(16)))
    names = {name: dtype for leaves in found.values() for name, dtype in leaves.items()}
    assert {names[name] for name in ("initial_0", "initial_0_bias")} == {jnp.dtype("float32")}
    assert {names[name] for name in ("query", "output", "up", "embedding")} == {jnp.dtype("bfloat16")}


@pytest.mark.slow
def test_reconstruction_losses_are_metrics():
    given = batch()
    params = jax.jit(SHALLOW.init)(jax.random.key(0), given)
    metrics = jax.jit(functools.partial(SHALLOW.loss, is_training=True))(params, (), jax.random.key(0), given)[
        1
    ].metrics
    for name in ("initial", "step_0", "step_1"):
        total, weight = metrics[f"ttt_linear/{name}"]
        assert 0 < total / weight < 10


def trained(example, inner):
    model = dataclasses.replace(MODEL, mixer=TTTMixer(dataclasses.replace(MODEL.mixer.config, inner=inner)))
    return agreement.run(bind(model, example, batch(16)), random_batches(model.vocab_size, steps=3))


@functools.cache
def on_one_device(inner):
    return trained(agreement.ONE_DEVICE, inner)


@pytest.mark.slow
@pytest.mark.covers("N04", "M02")
@pytest.mark.parametrize("inner", ["linear", "mlp"])
@pytest.mark.parametrize("name", ["fsdp", "fsdp_tensor", "pipeline", "pipeline_fsdp", "context_ring"])
def test_training_agrees_with_one_device(name, inner):
    found = agreement.compare(trained(agreement.EXAMPLES[name], inner), on_one_device(inner))
    # Inner models start near zero, and the norm of their outputs divides rounding errors by their size.
    assert max(difference.ulp for difference in found.values()) < 4000, found


def test_small_decoders_have_small_inner_models():
    small = MODEL.shrink(dict.fromkeys(("kv_heads", "layers", "embed", "mlp", "heads", "head_dim", "expert"), 2))
    assert (small.mixer.config.num_heads, small.mixer.config.head_dim) == (2, 8)


def test_settings_name_the_inner_model_by_the_mixer():
    settings = MLP.settings()
    assert settings["mixer"] == ("ttt_mlp",)
    assert settings["ttt_mlp.mini_batch"] == 4
    assert "ttt.inner" not in settings
