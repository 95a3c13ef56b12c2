"""Prefix-LM attention: prefixes attend both ways, answers causally, segments apart; the kernel agrees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import slices
from core.errors import UserError
from models.decoder import prefix
from models.decoder.attention import attention
from models.decoder.attention.scores import Scores
from models.decoder.prefix import HIDDEN, Prefix
from parallel import strategies
from parallel.partitioner import Partitioner

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 4, 2, 32


@pytest.fixture(scope="module")
def inputs():
    """Row 0 has two segments with prefixes of 150 and 20 positions; row 1 one with a prefix of 40, then padding."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, weight = (jax.random.normal(key, (BATCH, LENGTH, HEADS, HEAD_DIM)) for key in (keys[0], keys[4]))
    k, v = (jax.random.normal(key, (BATCH, LENGTH, KV_HEADS, HEAD_DIM)) for key in keys[1:3])
    place = np.arange(LENGTH)
    segments = np.stack([1 + (place >= 180), np.where(place < 200, 1, 0)]).astype(np.int32)
    until = np.stack([place, place]).astype(np.int32)
    until[0, :150], until[0, 180:200], until[1, :40] = 149, 199, 39
    bias = np.asarray(jax.random.normal(keys[3], (BATCH, LENGTH)))
    bias = np.where(place % 7 == 3, HIDDEN, bias).astype(np.float32)
    return q, k, v, jnp.asarray(segments), jnp.asarray(until), jnp.asarray(bias), weight


def by_hand(inputs, row, query, head, *, window=None, biased=False):
    q, k, v, segments, until, bias, _ = (np.asarray(a, np.float64) for a in inputs)
    seen = [
        s
        for s in range(LENGTH)
        if s <= until[row, query] and segments[row, s] == segments[row, query] and (not window or query - s < window)
    ]
    scores = k[row, seen, head // 2] @ q[row, query, head] / HEAD_DIM**0.5 + biased * bias[row, seen]
    weights = np.exp(scores - scores.max())
    return weights @ v[row, seen, head // 2] / weights.sum()


@pytest.mark.parametrize(("window", "biased"), [(None, True), pytest.param(90, False, marks=pytest.mark.slow)])
def test_plain_and_kernel_equal_a_softmax_over_what_a_query_sees(inputs, window, biased):
    q, k, v, segments, until, bias, weight = inputs

    def attend(form, q, k, v, bias, **how):
        prefix = Prefix(until, bias if biased else None)
        return form(q, k, v, segments, prefix=prefix, scores=Scores(window=window), **how)

    def loss(form, *args, **how):
        out = attend(form, *args, **how)
        return jnp.sum(out * weight), out

    def run(form, **how):
        grad = jax.value_and_grad(lambda *a: loss(form, *a, **how), argnums=(0, 1, 2, 3), has_aux=True)
        return jax.jit(grad)(q, k, v, bias)

    (_, out), gradients = run(attention.plain)
    for place in [(0, 0, 0), (0, 149, 3), (0, 160, 1), (0, 185, 2), (0, 230, 1), (1, 3, 0), (1, 41, 3)]:
        np.testing.assert_allclose(out[place], by_hand(inputs, *place, window=window, biased=biased), atol=1e-5)
    (_, out2), gradients2 = run(attention.splash_attention, interpret=True)
    np.testing.assert_allclose(out2, out, atol=3e-5, rtol=0)
    for ours, want in zip(gradients2, gradients, strict=True):
        np.testing.assert_allclose(ours, want, atol=1e-4, rtol=0)


@pytest.mark.slow  # the interpreter
@pytest.mark.parametrize("window", [None, 90])
def test_the_kernel_over_sharded_positions(inputs, window):
    """Each of two chips has the queries of half a row, and their `until`; keys are gathered."""
    q, k, v, segments, until, _, weight = inputs

    def results(**how):
        def loss(*operands):
            out = attention.attend(*operands, segments, prefix=Prefix(until), scores=Scores(window=window), **how)
            return jnp.sum(out * weight), out

        return jax.device_get(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v))

    (_, want), gradients = results(choice="plain")
    whole = attention.splash_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "splash_attention", functools.partial(whole, interpret=True))
        with Partitioner(strategies.context(sequence=2), slice=slices.get("v4-8"), devices=jax.devices()).tracing():
            (_, out), found = results(choice="splash")
    np.testing.assert_allclose(out, want, atol=3e-5, rtol=0)
    for ours, theirs in zip(found, gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [1, 5, 90])
def test_the_mask_of_the_kernel_is_what_a_query_sees_in_a_window(inputs, window):
    """At every pair of positions, also at the last one that each query sees."""
    until = inputs[4]
    mask = prefix.PrefixMask(LENGTH, window=window, shard_count=1)
    packed = prefix.sequence(until, window=window)
    np.testing.assert_array_equal(
        mask.mask_function(packed[:, :, None], jnp.arange(LENGTH)), prefix.visible(until, window=window)
    )


def test_rows_too_long_for_two_positions_in_one_number_are_refused():
    until = jnp.zeros((1, 32769), jnp.int32)
    with pytest.raises(UserError, match="a prefix and a window: 32769 positions; expected at most 32768"):
        prefix.sequence(until, window=8)
    assert prefix.sequence(until, window=None) is until


def test_a_bound_of_scores_cannot_be_combined_with_a_bias(inputs):
    q, k, v, segments, until, bias, _ = inputs
    with pytest.raises(UserError, match=r"Attention\.softcap = 5"):
        attention.attend(q, k, v, segments, Scores(softcap=5.0), prefix=Prefix(until, bias))
