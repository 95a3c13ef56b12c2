"""Layers that use the keys and values of earlier layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, stack
from core.errors import UserError
from models.decoder import transformer
from models.decoder.layers import Attention, Mlp
from tests.models.decoder.test_layers import BATCH, VOCAB, check_generation, drawn_params, logits_of

NEAR = Attention(window=4, rope_theta=100.0, qk_norm=True)
FAR = Attention(head_dim=12, num_kv_heads=1, value_norm=True)
SHARING = tuple(dataclasses.replace(part, shares_keys=True) for part in (NEAR, FAR))
MODEL = transformer.Transformer(
    vocab_size=VOCAB,
    num_layers=8,
    embed_dim=16,
    mlp_dim=24,
    num_heads=2,
    num_kv_heads=2,
    dtype="float32",
    first_mixer=(NEAR, FAR) * 2,
    first_feed_forward=(Mlp(),) * 4,
    mixer=SHARING,
    feed_forward=Mlp(mlp_dim=40),
)


def test_layers_that_share_keys_have_no_matrices_of_them_and_no_cache():
    params, _ = logical.abstract_init(MODEL.init, jax.random.key(0), BATCH)
    assert {"query", "output"} == set(params["layers/block_0"]) & set(Attention.matrices)
    assert params["layers/block_0"]["up"].shape == (2, 16, 40)
    assert params["first_layers/block_1"]["key"].shape == (2, 16, 1, 12)
    assert MODEL.empty_cache(2, 9)[4:] == ({},) * 4
    for kinds in (MODEL.first_kinds, MODEL.repeated_kinds):
        for kind in kinds:
            stacked = "first_layers" if kind.is_first else "layers"
            made = params[f"{stacked}/{kind.module}"]
            (part,) = kind.mixers
            assert part.adaptable_matrices() == tuple(name for name in part.matrices if name in made)
            assert part.work(MODEL, 4).matrices == sum(made[n].size // len(made[n]) for n in part.matrices if n in made)


# The longest prompt also passes through what the shorter ones do, so it is the quick one.
@pytest.mark.parametrize("first", [pytest.param(2, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow), 9])
def test_rows_are_extended_as_in_the_full_pass(first):
    """Prompts that are shorter and longer than the window, and longer than its cache."""
    check_generation(MODEL, drawn_params(MODEL), first=first)


def test_keys_are_those_of_the_last_layer_with_the_same_attention():
    """Keys that an earlier layer does not use itself change later layers, if it is the last one with them."""
    params = drawn_params(MODEL)

    def changed(block, layer):
        """The difference in logits from values of a layer that its own output ignores."""
        made = params[f"first_layers/{block}"]
        silent = {**made, "output": made["output"].at[layer].set(0)}
        other = {**silent, "value": made["value"].at[layer].add(1.0)}
        one, two = (logits_of(MODEL)({**params, f"first_layers/{block}": of}, BATCH) for of in (silent, other))
        return float(np.abs(one - two).max())

    for block in ("block_0", "block_1"):
        assert changed(block, 0) == 0
        assert changed(block, 1) > 1e-3


@functools.cache
def gradients(model, runner):
    def loss(params):
        with stack.use_runner(runner):
            return model.loss(params, (), None, BATCH)[1].loss_sum

    return jax.jit(jax.grad(loss))(drawn_params(model))


# "full" also recomputes all that "attention" does, so it is the quick one.
@pytest.mark.parametrize("remat", ["full", pytest.param("attention", marks=pytest.mark.slow)])
def test_gradients_do_not_depend_on_what_is_recomputed_or_on_the_loop(remat):
    want = gradients(MODEL, stack.unrolled_runner)
    found = gradients(dataclasses.replace(MODEL, remat=remat), stack.scan_runner)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), found, want)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(want))


def test_segments_do_not_see_one_another_through_shared_keys():
    params, at = drawn_params(MODEL), 10
    segments = jnp.where(jnp.arange(BATCH["inputs"].shape[1]) < at, 1, 2)
    positions = jnp.arange(len(segments)) - jnp.where(segments == 2, at, 0)
    row = {"segment_ids": segments, "positions": positions}
    batch = BATCH | {name: jnp.broadcast_to(a, BATCH["inputs"].shape) for name, a in row.items()}
    other = batch | {"inputs": batch["inputs"].at[:, :at].add(1) % VOCAB}
    found, changed = (logits_of(MODEL)(params, one)[:, at:] for one in (batch, other))
    np.testing.assert_allclose(found, changed, atol=1e-5)


def test_a_small_form_has_the_same_sharing():
    small = MODEL.shrink(dict.fromkeys(logical.all_axes(), 1))
    assert [part.shares_keys for kind in map(small.layer_kind, range(small.num_layers)) for part in kind.mixers] == [
        *(False, False),
        *(True,) * (small.num_layers - 2),
    ]
    assert set(small.key_sources) <= {part for kind in small.first_kinds for part in kind.mixers}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"first_mixer": (NEAR,)}, "first_mixer = .*: expected a tuple of 4 mixers"),
        ({"first_mixer": ()}, "first layers have keys of their own; set shares_keys = False"),
        ({"first_mixer": (NEAR,) * 4}, "no layer of first_mixer has the same attention with keys of its own: add"),
        ({"mixer": (SHARING[0], NEAR)}, "layers with keys of their own among layers that share the keys"),
        ({"attention": "none"}, "shares_keys = True: Transformer.attention = 'none' needs own values"),
        ({"feed_forward": 3}, "feed_forward = 3"),
    ],
)
def test_layers_that_do_not_fit_are_errors(changes, says):
    with pytest.raises(UserError, match=says):
        dataclasses.replace(MODEL, **changes)


def test_a_width_below_1_is_an_error():
    with pytest.raises(UserError, match=r"Mlp\.mlp_dim = 0"):
        Mlp(mlp_dim=0)
