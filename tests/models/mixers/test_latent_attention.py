"""Multi-head latent attention against a direct computation in float64, and its compressed cache."""

import dataclasses
import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from core.errors import UserError
from models import lora
from models.decoder import rotary
from models.decoder.parts import Call, Side
from models.mixers.latent_attention import LatentAttention
from tests.models.decoder.test_layers import BATCH, PLAIN, check_generation, drawn_params

LATENT = LatentAttention(latent_dim=10, plain_dim=6, rotary_dim=4, value_dim=5, query_latent_dim=7)
SHALLOW = dataclasses.replace(PLAIN, mixer=LATENT, num_kv_heads=PLAIN.num_heads, num_layers=1, feed_forward=None)

params = drawn_params


def test_the_layer_is_its_definition():
    """Rotary pairs are dimensions 2i and 2i + 1."""
    block = {name: np.asarray(a[0], np.float64) for name, a in params(SHALLOW)["layers/block"].items()}
    x = np.random.default_rng(0).normal(size=(1, 9, PLAIN.embed_dim))
    eps = 1e-6

    def norm(a):
        return a / np.sqrt(np.mean(a**2, axis=-1, keepdims=True) + eps)

    def turned(a):  # [T, ..., P]
        angle = np.arange(9)[:, None] * 1e4 ** (-np.arange(2) / 2)
        angle = angle.reshape(9, *[1] * (a.ndim - 2), 2)
        even, odd = a[..., 0::2], a[..., 1::2]
        return np.concatenate(
            [even * np.cos(angle) - odd * np.sin(angle), odd * np.cos(angle) + even * np.sin(angle)], axis=-1
        )

    q = np.einsum("tq,qhk->thk", norm(x[0] @ block["query_down"]) * block["query_latent_norm"], block["query_up"])
    joined = x[0] @ block["latent_down"]
    both = np.einsum("tr,rhk->thk", norm(joined[:, :10]) * block["latent_norm"], block["latent_up"])
    scores = np.einsum("thn,shn->hts", q[..., :6], both[..., :6])
    scores += np.einsum("thp,sp->hts", turned(q[..., 6:]), turned(joined[:, 10:]))
    scores = np.where(np.tri(9, dtype=bool), scores * 10**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hts,shv->thv", weights, both[..., 6:])
    want = np.einsum("thv,hvd->td", mixed, block["output"])
    got = run(SHALLOW, x, block)
    np.testing.assert_allclose(got[0], want, atol=1e-5 * np.abs(want).max())  # measured: 2.6e-7 of the largest


def run(decoder, x, block):
    def layer(x):
        positions = jnp.arange(x.shape[1])[None]
        turns = tuple(rotary.tables(positions, one.width, theta=one.theta) for one in decoder.rotations)
        return decoder.mixer(decoder, x, Call(Side(jnp.ones((1, x.shape[1]), jnp.int32), turns))).y

    params = {"~": {name: a.astype(np.float32) for name, a in block.items()}}
    return jax.jit(hk.transform(layer).apply)(params, None, x.astype(np.float32))


@pytest.mark.parametrize(
    "part",
    [
        LATENT,
        pytest.param(dataclasses.replace(LATENT, query_latent_dim=None, interleaved=False), marks=pytest.mark.slow),
    ],
)
def test_generation_from_the_compressed_cache_equals_full_rows(part):
    model = dataclasses.replace(SHALLOW, mixer=part)
    check_generation(model, params(model))
    state = part.empty_state(model, 3, 8)
    assert state.shape == (3, 1, 8, 14)  # not 2 (10 + 5) numbers for each slot


@pytest.mark.slow
def test_an_adapter_of_the_matrix_that_generation_absorbs_is_applied():
    model = lora.adapted(model=SHALLOW, rank=2, targets=LATENT.matrices, base_dtype="float32")
    made = params(model)
    moved = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(jax.random.key(1), a.shape), made)
    check_generation(model, moved)
    assert not np.allclose(jax.jit(model.logits)(made, BATCH), jax.jit(model.logits)(moved, BATCH))


def test_scores_are_sharpened_by_the_factor_of_a_scaling():
    part = dataclasses.replace(LATENT, score_sharpening=0.5)
    scaling = rotary.Yarn(factor=8.0, original_length=16)
    assert part.score_scale(SHALLOW) == LATENT.score_scale(SHALLOW) == 10**-0.5
    found = part.score_scale(dataclasses.replace(SHALLOW, rope_scaling=scaling))
    assert found == pytest.approx(10**-0.5 * (1 + 0.05 * np.log(8.0)) ** 2)


def multiplications(jaxpr):
    """Counts those of all matrix products of a computation."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            count += eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
        count += sum(map(multiplications, jaxprs_in_params(eqn.params)))
    return count


@pytest.mark.parametrize("query_latent_dim", [7, None])
def test_work_is_that_of_the_products_of_the_layer(query_latent_dim):
    """Half of the plain products of attention are causal. Rotations are products with ones and zeros: not counted."""
    part = dataclasses.replace(LATENT, query_latent_dim=query_latent_dim, interleaved=False)
    model, length = dataclasses.replace(SHALLOW, mixer=part, attention="plain"), 12
    shapes = jax.eval_shape(model.init, jax.random.key(0), BATCH)["layers/block"]
    block, x = jax.tree.map(lambda a: np.zeros(a.shape[1:]), shapes), np.zeros((1, length, model.embed_dim))
    work = part.work(model, length)
    assert work.matrices == sum(block[name].size for name in part.matrices)
    found = multiplications(jax.make_jaxpr(lambda x: run(model, x, block))(x).jaxpr)
    turning = part.rotary_dim**2 * (model.num_heads + 1)
    assert found == length * (work.matrices + 2 * work.others + turning)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 1}, "num_kv_heads = 1: latent attention has a key for each of num_heads = 2"),
        ({"bias": "qkv"}, "needs Transformer.bias = 'none'"),
        ({"quantization": "int8"}, "quantization = 'int8': LatentAttention needs 'none'"),
    ],
)
def test_decoders_that_it_does_not_fit_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SHALLOW, **change)
    with pytest.raises(UserError, match="rotary_dim = 3: expected an even number"):
        dataclasses.replace(LATENT, rotary_dim=3)
