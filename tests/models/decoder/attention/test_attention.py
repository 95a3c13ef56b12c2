"""The two implementations of attention agree, forward and backward, with segments and grouped heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core import slices
from core.errors import UserError
from models.decoder import rotary
from models.decoder.attention import attention, kv_cache
from models.decoder.attention.scores import Scores
from models.decoder.attention.splash_tiles import Tiles
from parallel import partitioner, strategies
from parallel.compiled import compiling

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 4, 2, 32
SINKS = jnp.array([-1.0, 0.5, 3.0, 1.5])  # of the heads


@pytest.fixture(scope="module")
def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (BATCH, LENGTH, HEADS, HEAD_DIM))
    k, v = (jax.random.normal(key, (BATCH, LENGTH, KV_HEADS, HEAD_DIM)) for key in keys[1:3])
    position = np.arange(LENGTH)
    segments = np.stack([1 + (position >= 100) + (position >= 130), np.where(position < 200, 1, 0)])
    return q, k, v, jnp.asarray(segments, jnp.int32), jax.random.normal(keys[3], (BATCH, LENGTH, HEADS, HEAD_DIM))


def results(attend, inputs):
    q, k, v, segments, weight = inputs

    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def weighted(q, k, v):
        out = attend(q, k, v, segments)
        return jnp.sum(out * weight), out

    (value, out), gradients = jax.jit(weighted)(q, k, v)
    return out, value, gradients


@pytest.fixture(scope="module")
def plain_results(inputs):
    return results(attention.plain, inputs)


@pytest.mark.covers("T08")
@pytest.mark.parametrize(
    "tiles", [Tiles(), Tiles(queries=128, keys=256, fused_backward=True)], ids=["default", "fused"]
)
def test_splash_equals_plain_forward_and_backward(inputs, plain_results, tiles):
    out, value, gradients = plain_results
    splash = functools.partial(attention.splash_attention, tiles=tiles, interpret=True)
    out2, value2, gradients2 = results(splash, inputs)
    np.testing.assert_allclose(out2, out, atol=2e-5, rtol=0)
    np.testing.assert_allclose(value2, value, rtol=1e-4)
    for ours, want in zip(gradients2, gradients, strict=True):
        np.testing.assert_allclose(ours, want, atol=5e-5, rtol=0)


def test_tiles_are_the_largest_that_divide_the_positions():
    found = Tiles(queries=1024, keys=512).block_sizes(1536)
    assert (found.block_q, found.block_kv, found.block_q_dq, found.block_kv_dkv) == (768, 512, 768, 512)
    assert Tiles(queries=1024).block_sizes(128).block_q == 128
    assert Tiles(fused_backward=True).block_sizes(512).block_q_dq is None


@pytest.mark.parametrize("size", [64, 200, 256.0])
def test_a_size_of_tiles_is_a_multiple_of_128(size):
    with pytest.raises(UserError, match=r"Tiles\.keys = "):
        Tiles(keys=size)


def test_plain_is_softmax_over_visible_positions(inputs):
    """Written out for single queries, in float64."""
    q, k, v, segments, _ = (np.asarray(a, np.float64) for a in inputs)
    out = attention.plain(*inputs[:4])
    for row, t, head in [(0, 0, 0), (0, 99, 3), (0, 100, 1), (0, 140, 2), (1, 199, 0), (1, 250, 3)]:
        seen = [s for s in range(t + 1) if segments[row, s] == segments[row, t]]
        key_head = head // (HEADS // KV_HEADS)
        scores = np.array([q[row, t, head] @ k[row, s, key_head] for s in seen]) / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        want = weights @ v[row, seen, key_head]
        np.testing.assert_allclose(out[row, t, head], want, atol=1e-5)


def test_auto_is_plain_where_the_kernel_has_no_tiles(inputs):
    q, k, v, segments = (a[:, :100] for a in inputs[:4])
    np.testing.assert_array_equal(attention.attend(q, k, v, segments), attention.plain(q, k, v, segments))


@pytest.mark.parametrize("whole_key_heads", [False, True])
def test_the_kernel_under_a_split_of_heads_equals_plain(inputs, whole_key_heads, monkeypatch):
    """In a shard_map over rows and heads; key heads that are not split are given to each query head."""
    interpreted = attention.splash_attention
    monkeypatch.setattr(attention, "splash_attention", functools.partial(interpreted, interpret=True))
    tables = strategies.fsdp_tensor(tensor=2)
    if whole_key_heads:
        row = {"kv_heads": None}
        tables = strategies.override(tables, param_rules=row, activation_rules=row)
    bound = partitioner.Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices())
    with bound.tracing():
        out = jax.jit(lambda *a: attention.attend(*a, choice="splash"))(*inputs[:4])
    np.testing.assert_allclose(out, attention.plain(*inputs[:4]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("form", [attention.plain, functools.partial(attention.splash_attention, interpret=True)])
def test_a_scale_takes_the_place_of_the_root_of_the_head_dimension(inputs, form):
    q, k, v, segments = (a[:1, :128] for a in inputs[:4])
    shorter = HEAD_DIM**-0.25
    want = attention.plain(q, k, v, segments)
    np.testing.assert_allclose(
        form(q * shorter, k * shorter, v, segments, scores=Scores(scale=1.0)), want, atol=2e-5, rtol=0
    )
    np.testing.assert_allclose(
        form(q, k / 3, v, segments, scores=Scores(scale=3 * shorter**2)), want, atol=2e-5, rtol=0
    )


def test_rotary_turns_pairs_and_depends_on_distance_only():
    x = jax.random.normal(jax.random.key(1), (1, 8, 1, 6))
    positions = jnp.arange(8)[None]
    turned = rotary.rotate(x, positions, theta=100.0)
    angle = 3 * 100.0 ** (-1 / 3)
    a, b = x[0, 3, 0, 1], x[0, 3, 0, 4]
    np.testing.assert_allclose(turned[0, 3, 0, 1], a * np.cos(angle) - b * np.sin(angle), atol=1e-6)
    np.testing.assert_allclose(turned[0, 3, 0, 4], b * np.cos(angle) + a * np.sin(angle), atol=1e-6)
    shifted = rotary.rotate(x, positions + 5, theta=100.0)
    dots = jnp.einsum("btnk,bsnk->bts", turned, turned)
    np.testing.assert_allclose(jnp.einsum("btnk,bsnk->bts", shifted, shifted), dots, atol=1e-5)


def test_attention_none_does_not_mix_positions(inputs):
    q, k, v, segments = inputs[:4]
    changed = attention.attend(q, k.at[:, 7].add(1), v.at[:, 7].add(1), segments, choice="none")
    difference = np.abs(changed - attention.attend(q, k, v, segments, choice="none")).max(axis=(0, 2, 3))
    assert np.flatnonzero(difference).tolist() == [7]


@pytest.mark.parametrize(
    ("window", "entries", "block"),
    [
        (None, 24, 0),
        (5, 5, 0),
        (5, 7, 0),
        (40, 24, 0),
        (None, 24, 256),
        (None, 24, 7),
        (None, 24, 8),
        (5, 5, 4),
        (5, 7, 8),
    ],
)
def test_a_cache_gives_the_attention_of_all_positions(inputs, window, entries, block, monkeypatch):
    """In chunks and single slots, past the end of a cache of the window, with rows that begin in different slots.

    On a CPU in blocks; block 0: as elsewhere, all scores at once.
    """
    monkeypatch.setattr(attention, "BLOCK", block)
    if not block:
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *operands, cpu, default: default(*operands))
    q, k, v = (a[:, :24] for a in inputs[:3])
    padding = jnp.array([0, 9])
    segments = (jnp.arange(24) >= padding[:, None]).astype(jnp.int32)
    sinks = SINKS if window == 5 or block == 7 else None
    want = attention.plain(q, k, v, segments, sinks=sinks, scores=Scores(window=window, softcap=3.0))
    empty = jnp.zeros((BATCH, KV_HEADS, entries, HEAD_DIM))
    cache, start, outs = kv_cache.KeysAndValues(empty, empty), 0, []
    step = jax.jit(functools.partial(attention.cached, scores=Scores(window=window, softcap=3.0), sinks=sinks))
    for length in (8, 3, 8, 1, 1, 1, 1, 1):
        new = (a[:, start : start + length] for a in (q, k, v))
        out, cache = step(*new, cache, jnp.int32(start), padding)
        outs.append(out)
        start += length
    filled = segments[:, :, None, None] == 1
    out = jnp.concatenate(outs, axis=1)
    np.testing.assert_allclose(jnp.where(filled, out, 0), jnp.where(filled, want, 0), atol=2e-6, rtol=0)


def test_a_chunk_of_a_prompt_reads_only_the_filled_blocks_of_the_cache(inputs, monkeypatch):
    """The others may be anything. Time and memory of a chunk do not depend on the size of the cache."""
    monkeypatch.setattr(attention, "BLOCK", 8)
    q, k, v = (a[:, :16] for a in inputs[:3])
    want = attention.plain(q, k, v, jnp.ones((BATCH, 16), jnp.int32))
    empty = jnp.full((BATCH, KV_HEADS, 64, HEAD_DIM), jnp.nan).at[:, :, :16].set(0)
    cache = kv_cache.KeysAndValues(empty, empty)
    out, _ = jax.jit(lambda *a: attention.cached(*a))(q, k, v, cache, jnp.int32(0), jnp.zeros(BATCH, jnp.int32))
    np.testing.assert_allclose(out, want, atol=2e-6, rtol=0)


def with_sinks(form, inputs, sinks):
    """The result of attention with sinks, and its gradients, also those of the sinks."""

    @jax.jit
    def everything(q, k, v, segments, weight, sinks):
        out, back = jax.vjp(lambda q, k, v, sinks: form(q, k, v, segments, sinks=sinks), q, k, v, sinks)
        return out, *back(weight.astype(out.dtype))

    return everything(*inputs, sinks)


def test_a_sink_is_a_score_without_a_value(inputs):
    """Written out: one more key, whose score is the sink in every query, and whose value is 0."""
    out, usual = (attention.plain(*inputs[:4], sinks=sinks) for sinks in (SINKS, None))
    q, k, _, segments, _ = map(np.asarray, inputs)
    for row, t, head in [(0, 0, 0), (0, 99, 3), (0, 140, 2), (1, 250, 1)]:
        seen = [s for s in range(t + 1) if segments[row, s] == segments[row, t]]
        scores = [float(q[row, t, head] @ k[row, s, head // 2]) / np.sqrt(HEAD_DIM) for s in seen]
        total = np.sum(np.exp(scores))
        share = total / (total + np.exp(float(SINKS[head])))
        np.testing.assert_allclose(out[row, t, head], share * usual[row, t, head], atol=1e-5)


@pytest.mark.parametrize(
    "scores",
    # the kernel over all positions is quick without sinks, and with them under a split of heads
    [pytest.param(Scores(), marks=pytest.mark.slow), Scores(window=40, softcap=3.0)],
    ids=["all", "window"],
)
def test_the_kernel_with_sinks_equals_plain_with_all_gradients(inputs, scores):
    plain, splash = (
        functools.partial(form, scores=scores)
        for form in (attention.plain, functools.partial(attention.splash_attention, interpret=True))
    )
    for ours, want in zip(with_sinks(splash, inputs, SINKS), with_sinks(plain, inputs, SINKS), strict=True):
        np.testing.assert_allclose(ours, want, atol=5e-5 * max(1, np.abs(want).max()), rtol=0)


def test_the_kernel_with_sinks_under_a_split_of_heads_equals_plain_in_bfloat16(inputs, monkeypatch):
    """Sinks stay in float32; their gradients are summed over chips. The kernel rounds products for them to bfloat16."""
    narrow = *(a.astype(jnp.bfloat16) for a in inputs[:3]), *inputs[3:]
    want = with_sinks(attention.plain, inputs, SINKS)
    interpreted = attention.splash_attention
    monkeypatch.setattr(attention, "splash_attention", functools.partial(interpreted, interpret=True))
    bound = partitioner.Partitioner(strategies.fsdp_tensor(tensor=2), slice=slices.get("v4-8"), devices=jax.devices())
    with bound.tracing():
        found = with_sinks(functools.partial(attention.attend, choice="splash"), narrow, SINKS)
    assert [a.dtype for a in found] == [jnp.bfloat16] * 4 + [jnp.float32]
    for ours, theirs in zip(found, want, strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, atol=0.02 * np.abs(theirs).max(), rtol=0)


@pytest.mark.slow  # compiles for half a minute
def test_the_kernel_with_sinks_compiles_for_a_tpu_with_its_gradients():
    mesh = Mesh(np.asarray(compiling.devices_of(slices.get("v4-8"))).ravel()[:1], ("chip",))

    def gradients(q, k, v, segments, sinks):
        form = functools.partial(attention.splash_attention, segment_ids=segments, scores=Scores(window=128))
        out, back = jax.vjp(lambda q, k, v, sinks: form(q, k, v, sinks=sinks), q, k, v, sinks)
        return back(out)

    heads = [((2, 512, count, 64), jnp.bfloat16) for count in (16, 2, 2)]
    given = [*heads, ((2, 512), jnp.int32), ((16,), jnp.float32)]
    shapes = [jax.ShapeDtypeStruct(*each, sharding=NamedSharding(mesh, PartitionSpec())) for each in given]
    lowered = jax.jit(gradients).trace(*shapes).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 3  # the output, and two for the gradients
    assert [a.dtype for a in lowered.out_info] == [jnp.bfloat16] * 3 + [jnp.float32]
    lowered.compile()
