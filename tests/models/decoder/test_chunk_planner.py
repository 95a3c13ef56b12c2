"""Plans of finished chunks: no position sees later tokens, and only the last step has a gradient."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from models.decoder import chunk_planner, layers
from models.decoder.planner_config import Planner
from models.decoder.published import families
from tests.models.decoder.test_layers import BATCH, PLAIN, check_generation, drawn_params, logits_of

MODEL = dataclasses.replace(PLAIN, num_layers=1, attention="none", planner=Planner(chunk=4, high_steps=2, low_steps=2))


@pytest.fixture(scope="module")
def params():
    return drawn_params(MODEL)


@pytest.mark.covers("N10")
def test_a_token_changes_nothing_before_it_and_later_chunks_of_its_segment(params):
    """Layers mix no positions here, so what changes elsewhere came through plans."""
    row = {name: a[:1] for name, a in BATCH.items()}
    row["segment_ids"] = jnp.where(jnp.arange(24) < 14, 1, 2)[None]
    logits = logits_of(MODEL)
    before = logits(params, row)
    for t, changed in ((5, [5, *range(8, 12), 12, 13]), (14, [14, *range(16, 24)]), (23, [23])):
        after = logits(params, {**row, "inputs": row["inputs"].at[0, t].add(1) % 59})
        found = np.flatnonzero(np.any(np.asarray(before != after)[0], axis=-1))
        # The chunk of positions 12 to 15 is summarized by its tokens of the second segment.
        assert found.tolist() == changed, t


@pytest.mark.covers("N10")
def test_generation_with_the_state_equals_the_full_pass(params):
    check_generation(MODEL, params)


def kept(params, high_steps, low_steps):
    """The shapes of what the backward pass of the loss reads."""
    model = dataclasses.replace(MODEL, planner=Planner(chunk=4, high_steps=high_steps, low_steps=low_steps))
    back = jax.eval_shape(lambda p: jax.vjp(lambda p: model.loss(p, (), None, BATCH)[1].loss_sum, p)[1], params)
    return sorted(leaf.shape for leaf in jax.tree.leaves(back))


@pytest.mark.covers("N10")
def test_only_the_last_step_has_a_gradient(params, monkeypatch):
    """The backward pass keeps nothing of the steps before; it would if these had a gradient."""
    one = kept(params, 1, 1)
    assert kept(params, 2, 2) == one
    monkeypatch.setattr(jax.lax, "stop_gradient", lambda x: x)
    assert len(kept(params, 2, 2)) > len(one)


def test_a_plan_that_sees_the_future_is_refused():
    with pytest.raises(ValueError, match="causal = False: a plan of whole rows shows a language model the tokens"):
        Planner(chunk=4, causal=False)
    with pytest.raises(ValueError, match=r"Planner.chunk = 0: expected an integer of at least 1"):
        Planner(chunk=0)


def test_its_attention_has_the_norms_scale_and_bound_of_the_decoder():
    usual = layers.Attention(qk_norm=True, scale=0.5, softcap=20.0)
    model = dataclasses.replace(MODEL, mixer=usual)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), BATCH))
    names = {name for module, arrays in params.items() if "planner" in module for name in arrays}
    assert {"query_norm", "key_norm"} <= names
    inner = []
    hk.transform(lambda: inner.append(chunk_planner.Plans(model, model.planner).config.mixer)).init(jax.random.key(0))
    assert inner == [usual]


def test_a_planner_goes_with_first_layers_and_no_published_family_has_one():
    first = dataclasses.replace(MODEL, num_layers=2, first_feed_forward=(layers.Mlp(mlp_dim=8),))
    params = jax.eval_shape(first.init, jax.random.key(0), BATCH)
    assert any("planner" in module for module in params)
    with pytest.raises(UserError, match=r"no published family has these fields; .* planner = None"):
        families.family(dataclasses.replace(PLAIN, planner=Planner(chunk=4)))


def test_an_odd_head_size_is_refused_before_anything_is_initialized():
    """The planner has rotary embeddings also where the decoder has learned positions."""
    learned = {"positions": "learned", "max_positions": 24, "head_dim": 7}
    dataclasses.replace(MODEL, **learned, planner=None)
    with pytest.raises(
        UserError, match=r"planner has rotary embeddings, also where positions = 'learned', .* 7 is odd"
    ):
        dataclasses.replace(MODEL, **learned)
    model = dataclasses.replace(MODEL, **{**learned, "head_dim": 8})
    jax.eval_shape(model.init, jax.random.key(0), BATCH)
