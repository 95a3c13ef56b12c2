"""The gated delta rule against its recurrence step by step in float64, and what any recurrence must satisfy."""

import dataclasses
import functools
import math

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from models.decoder.layers import Attention
from models.mixers import gated_delta
from models.mixers.gated_delta import GatedDelta, Rows
from tests.models.decoder.test_layers import BATCH, PLAIN, check_generation, params_of

B, N, G, K, V = 2, 2, 3, 5, 4  # rows, key heads, value heads of each, sizes
DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=6, value_dim=10, kernel=3, chunk=4)
DEEP = dataclasses.replace(PLAIN, mixer=DELTA, feed_forward=None)
HYBRID = dataclasses.replace(PLAIN, mixer=(DELTA, Attention(output_gate=True)))


params = functools.cache(params_of)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def rows(length, *, seed=0, groups=None):
    rng = np.random.default_rng(seed)
    return Rows(
        rng.normal(size=(B, length, N, K)),
        unit(rng.normal(size=(B, length, N, K))),
        rng.normal(size=(B, length, N, G, V)),
        rng.uniform(size=(B, length, N, G)),
        -rng.exponential(size=(B, length, N, G)),
        np.zeros((B, length), int) if groups is None else groups,
    )


def recurrence(rows, memory):
    """The definition, in float64."""
    found = []
    for t in range(rows.groups.shape[1]):
        before = rows.groups[:, t - 1] if t else np.zeros(B, int)
        memory = memory * (rows.groups[:, t] == before)[:, None, None, None, None]
        memory = memory * np.exp(rows.log_decay[:, t])[..., None, None]
        recalled = np.einsum("bnk,bngkv->bngv", rows.key[:, t], memory)
        difference = (rows.value[:, t] - recalled) * rows.strength[:, t, ..., None]
        memory = memory + np.einsum("bnk,bngv->bngkv", rows.key[:, t], difference)
        found.append(np.einsum("bnk,bngkv->bngv", rows.query[:, t], memory))
    return np.stack(found, axis=1), memory


def narrow(rows):
    return Rows(*(jnp.asarray(a, jnp.float32) for a in rows[:-1]), jnp.asarray(rows.groups))


SCAN = jax.jit(gated_delta.scan, static_argnames="chunk")


def scanned(rows, memory, chunk):
    return SCAN(narrow(rows), jnp.asarray(memory, jnp.float32), chunk=chunk)


MEMORY = np.random.default_rng(9).normal(size=(B, N, G, K, V))


@pytest.mark.parametrize(("length", "chunk"), [(1, 1), (7, 64), (12, 4), (13, 4), (23, 5), (24, 1), (37, 12), (64, 64)])
def test_chunks_of_any_size_equal_the_recurrence(length, chunk):
    for seed in range(3):
        inputs = rows(length, seed=seed)
        for got, want in zip(scanned(inputs, MEMORY, chunk), recurrence(inputs, MEMORY), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)  # sums of up to 64 numbers of order 1, in float32


def test_equal_keys_without_decay_do_not_blow_up():
    """The powers of the triangular matrix grow as binomial coefficients; the inverse does not."""
    inputs = rows(64)
    inputs = inputs._replace(
        key=np.broadcast_to(inputs.key[:, :1], inputs.key.shape),
        strength=np.ones_like(inputs.strength),
        log_decay=np.zeros_like(inputs.log_decay),
    )
    for got, want in zip(scanned(inputs, MEMORY, 64), recurrence(inputs, MEMORY), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-5)


def test_groups_start_from_nothing_and_a_strong_decay_is_finite():
    groups = np.stack([np.repeat([0, 1, 2], [5, 3, 15]), np.repeat([0, 1], [11, 12])])
    inputs = rows(23, groups=groups)
    inputs = inputs._replace(log_decay=inputs.log_decay * np.where(np.arange(23) % 6 == 4, 200.0, 1.0)[:, None, None])
    for got, want in zip(scanned(inputs, MEMORY, 8), recurrence(inputs, MEMORY), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)  # sums of logarithms of up to 1e3
    alone = Rows(*(a[:, 8:] for a in inputs[:-1]), np.zeros((B, 15), int))
    np.testing.assert_allclose(scanned(inputs, MEMORY, 8)[0][0, 8:], recurrence(alone, 0 * MEMORY)[0][0], atol=1e-4)


def test_gradients_do_not_depend_on_the_chunk():
    """A chunk of one position is the recurrence itself; the rule of the inverse is one of ours."""
    inputs = narrow(rows(19, groups=np.stack([np.repeat([0, 1], [8, 11])] * 2)))
    weights = jax.random.normal(jax.random.key(1), inputs.value.shape)

    def total(floats, memory, chunk):
        y, last = gated_delta.scan(Rows(*floats, inputs.groups), memory, chunk=chunk)
        return jnp.sum(y * weights) + jnp.sum(last**2)

    of = jax.jit(jax.grad(total, (0, 1)), static_argnums=2)
    step, chunks = (of(tuple(inputs[:-1]), jnp.asarray(MEMORY, jnp.float32), chunk) for chunk in (1, 8))
    for one, other in zip(jax.tree.leaves(step), jax.tree.leaves(chunks), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * float(jnp.max(jnp.abs(one))))


def test_a_packed_row_is_as_its_segments_alone():
    ids = BATCH["inputs"][:1, :17]
    full_pass, ones = jax.jit(DEEP.logits), jnp.ones(ids.shape, jnp.float32)
    parts = ((0, 5), (5, 7), (7, 17))  # one is shorter than the convolution
    segments = jnp.concatenate([jnp.full((1, end - start), i + 1) for i, (start, end) in enumerate(parts)], axis=1)
    positions = jnp.concatenate([jnp.arange(end - start)[None] for start, end in parts], axis=1)

    def logits(*arrays):  # padded to one length, so that one program serves all
        ids, segments, positions = (jnp.pad(a, ((0, 0), (0, 17 - a.shape[1]))) for a in arrays)
        sides = {"segment_ids": segments, "positions": positions, "weights": ones}
        return full_pass(params(DEEP), {"inputs": ids, "targets": ids, **sides})[:, : arrays[0].shape[1]]

    packed = logits(ids, segments, positions)
    for start, end in parts:
        alone = logits(ids[:, start:end], jnp.ones((1, end - start), int), jnp.arange(end - start)[None])
        np.testing.assert_allclose(packed[:, start:end], alone, atol=5e-6)  # 2.5e-6 on an AMD EPYC, of logits up to 2


def test_generation_with_empty_slots_is_as_the_full_pass():
    check_generation(DEEP, params(DEEP))


@pytest.mark.slow  # gradients in float32 have quick tests here and among the published families
def test_gradients_in_bfloat16_are_finite_and_near_those_in_float32():
    start = params(HYBRID)

    def of(dtype):
        model = dataclasses.replace(HYBRID, dtype=dtype)
        return jax.jit(jax.grad(lambda p: model.loss(p, (), None, BATCH)[1].loss_sum))(start)

    exact, rounded = of("float32"), of("bfloat16")
    assert all(jnp.any(gradient != 0) for gradient in exact["layers/block_0"].values())
    apart = jax.tree.map(lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), rounded, exact)
    # Keys are divided by their norm, which enlarges the rounding of short ones: 0.18 for the kernel of the keys.
    assert max(jax.tree.leaves(apart)) < 0.25, apart  # NaN is not less
    (whole, _), (near, _) = map(jax.flatten_util.ravel_pytree, (exact, rounded))
    assert jnp.linalg.norm(near - whole) < 0.1 * jnp.linalg.norm(whole)


def test_work_counts_the_matrices_of_the_layer():
    matrices = sum(
        math.prod(a.shape[1:])
        for name, a in jax.eval_shape(HYBRID.init, jax.random.key(0), BATCH)["layers/block_0"].items()
        if (name.startswith("delta_") and name != "delta_norm") or name in ("strength", "step")
    )
    assert DELTA.work(HYBRID, 8).matrices == matrices
    assert DELTA.work(HYBRID, 8) == DELTA.work(HYBRID, 8000)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"value_heads": 3}, "GatedDelta.value_heads = 3: expected a multiple of key_heads = 2"),
        ({"kernel": 0}, "GatedDelta.kernel"),
        ({"chunk": 1.5}, "GatedDelta.chunk"),
    ],
)
def test_wrong_settings_are_errors(change, says):
    with pytest.raises(UserError, match=says):
        dataclasses.replace(DELTA, **change)


def test_an_output_gate_needs_a_decoder_without_biases():
    with pytest.raises(UserError, match=r"output_gate = True needs Transformer.bias = 'none', and it is 'qkv'"):
        dataclasses.replace(HYBRID, bias="qkv")
