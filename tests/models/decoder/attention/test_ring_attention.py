"""Attention around a ring of chips against plain attention: packed rows, grouped heads, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from core import jax_internals, slices
from core.errors import UserError
from models.decoder.attention import attention, ring_attention
from models.decoder.attention.scores import Scores
from models.decoder.transformer import Transformer
from parallel import strategies
from parallel.partitioner import Partitioner

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def inputs(rows, length):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, weight = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    position, first = jnp.arange(length), length // 3 + jnp.arange(rows)[:, None]
    segments = jnp.where(position < length - 3, 1 + (position >= first) + (position >= first + 2), 0)
    return (q, k, v), segments.astype(jnp.int32), weight


def ring(sequence, slice_name, **options):
    tables = strategies.context(sequence=sequence, ring=True, **options)
    return Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())


def results(form, given, *sinks):
    heads, segments, weight = given

    @jax.jit
    def both(heads, sinks):
        names = ["sinks"] * len(sinks)
        out, back = jax.vjp(
            lambda heads, sinks: form(*heads, segments, **dict(zip(names, sinks, strict=True))), heads, sinks
        )
        return jax.tree.leaves((out, back(weight)))

    return jax.device_get(both(tuple(heads), sinks))


def assert_equal(ours, theirs, *, atol=2e-6):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=atol * np.abs(b).max(), rtol=0)


@pytest.mark.covers("M13", "T09")
@pytest.mark.parametrize(
    ("sequence", "slice_name"),
    [(4, "v4-8"), pytest.param(2, "v4-8", marks=pytest.mark.slow), pytest.param(4, "v4-32", marks=pytest.mark.slow)],
)
def test_a_ring_gives_the_attention_of_whole_rows(sequence, slice_name):
    given = inputs(4, 24)
    with ring(sequence, slice_name).tracing():
        found = results(functools.partial(attention.attend, scores=Scores(softcap=3.0)), given)
    assert_equal(found, results(functools.partial(attention.plain, scores=Scores(softcap=3.0)), given))


SINKS = jnp.array([-1.0, 0.5, 3.0, 1.5])  # of the heads


def test_sinks_are_added_after_the_ring_with_their_gradient():
    given = inputs(4, 24)
    with ring(2, "v4-8").tracing():
        found = results(attention.attend, given, SINKS)
    assert_equal(found, results(attention.plain, given, SINKS))


@pytest.mark.covers("T08")
@pytest.mark.slow  # the interpreter takes its time
def test_the_kernel_in_a_ring():
    """In Pallas's interpreter: two chips with two chunks of 128 positions each."""
    given = inputs(2, 512)
    around = functools.partial(attention._around_ring, scores=Scores(), choice="splash", interpret=True)
    with ring(2, "v4-8").tracing():
        (q, k, v), segments, weight = given
        arranged = [ring_attention.arrange(a, "batch", "length", None, None) for a in (q, k, v, weight)]
        rows = ring_attention.arrange(segments, "batch", "length")
        found = results(around, (arranged[:3], rows, arranged[3]), SINKS)
    order = np.argsort([*range(128), *range(384, 512), *range(128, 384)])
    found = [a[:, order] if a.ndim > 1 else a for a in found]
    assert_equal(found, results(attention.plain, given, SINKS), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "choice"), [(24, "plain"), (1024, "splash")])
def test_a_window_sees_gathered_keys(length, choice, monkeypatch):
    given = inputs(2, length)
    interpreted = functools.partial(attention.splash_attention, interpret=True)
    monkeypatch.setattr(attention, "splash_attention", interpreted)
    with ring(2, "v4-8").tracing():
        found = results(functools.partial(attention.attend, scores=Scores(window=5), choice=choice), given)
    assert_equal(found, results(functools.partial(attention.plain, scores=Scores(window=5)), given), atol=1e-5)


@pytest.mark.parametrize("replacement", [None, lambda res, do: None])
def test_another_private_derivative_of_the_kernel_is_named(replacement, monkeypatch):
    monkeypatch.setattr(splash_attention_kernel, "_splash_attention_bwd", replacement)
    with pytest.raises(RuntimeError, match=r"_splash_attention_bwd has the parameters .* adapt core/jax_internals\.py"):
        jax_internals.splash_gradients(*[None] * 8)


def test_zig_zag_order():
    with ring(4, "v4-32").tracing():
        assert ring_attention.order(16).tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
        x = jnp.arange(4 * 16).reshape(4, 16)
        moved = ring_attention.arrange(x, "batch", "length")
        assert moved[1].tolist() == (16 + ring_attention.order(16)).tolist()
        np.testing.assert_array_equal(ring_attention.arrange(moved, "batch", "length", back=True), x)
    assert ring_attention.arrange(x, "batch", "length") is x


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (20, {}, "20 positions do not divide into two chunks for each of 4 chips; nearest lengths that do: 16, 24"),
        (24, {"choice": "splash"}, "24 positions are not a multiple of 1024: .* Nearest lengths that fit: 1024;"),
    ],
)
def test_what_a_ring_refuses(length, options, message):
    (q, k, v), segments, _ = inputs(4, length)
    with ring(4, "v4-32").tracing(), pytest.raises(UserError, match=message):
        attention.attend(q, k, v, segments, **options)


def test_keys_and_queries_sharded_differently_are_refused():
    tables = strategies.override(strategies.context(sequence=4), activation_rules={"kv_length": "fsdp", "batch": None})
    bound = Partitioner(tables, slice=slices.get("v4-32"), devices=jax.devices())
    with bound.tracing(), pytest.raises(UserError, match="kv_length over 'fsdp' and length over 'sequence'"):
        ring_attention.order(32)


@pytest.mark.slow  # the agreement of `context` with a ring covers the loss
def test_logits_are_in_the_order_of_the_row():
    model = Transformer(
        vocab_size=50, num_layers=2, embed_dim=16, mlp_dim=24, num_heads=2, num_kv_heads=1, dtype="float32"
    )
    ids = jax.random.randint(jax.random.key(1), (4, 16), 0, 50)
    zeros = jnp.zeros_like(ids)
    positions = jnp.broadcast_to(jnp.arange(16), ids.shape)
    batch = {"inputs": ids, "targets": zeros, "segment_ids": zeros, "positions": positions, "weights": zeros + 1.0}
    params = model.init(jax.random.key(0), batch)
    want = jax.jit(model.logits)(params, batch)
    with ring(4, "v4-32").tracing():
        assert_equal([jax.jit(model.logits)(params, batch)], [want], atol=1e-5)
