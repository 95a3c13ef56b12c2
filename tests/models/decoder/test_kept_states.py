"""State-space layers that continue from the states of the training step before."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decoder.experts import Experts
from models.decoder.layers import Attention, Mlp
from models.decoder.planner_config import Planner
from models.mixers.block_sparse import BlockSparse
from models.mixers.s5 import S5
from models.ttt.config import TTTConfig
from models.ttt.mixer import TTTMixer
from tests.models.decoder.test_layers import PLAIN, params_of

CHUNK = 8
BATCH = {  # one row of three segments, the second over two chunks, and one of a single segment
    "inputs": np.arange(48).reshape(2, 24) % 59,
    "targets": np.arange(48).reshape(2, 24)[:, ::-1] % 59,
    "segment_ids": np.stack([np.repeat([1, 2, 3], [5, 14, 5]), np.ones(24, int)]),
    "positions": np.stack([np.r_[0:5, 0:14, 0:5], np.arange(24)]),
    "weights": np.ones((2, 24), np.float32),
}
STATES = S5(states=8, min_dt=0.05, max_dt=0.5, chunk=4)
MODEL = dataclasses.replace(PLAIN, num_layers=2, mixer=STATES, feed_forward=STATES, keeps_states=True)
PATTERN = dataclasses.replace(MODEL, mixer=(STATES, Attention()), feed_forward=(Experts(num_experts=2, top_k=1), Mlp()))


def chunks(batch, size=CHUNK):
    for start in range(0, 24, size):
        yield {name: jnp.asarray(a[:, start : start + size]) for name, a in batch.items()}


@functools.cache
def compiled_loss(model):
    return jax.jit(lambda params, carry, batch: model.loss(params, carry, None, batch))


def losses(model, params, carry=None):
    """The loss sum of each chunk, and the last carry."""
    found, step = [], compiled_loss(model)
    carry = model.init_carry(next(chunks(BATCH))) if carry is None else carry
    for batch in chunks(BATCH):
        carry, out = step(params, carry, batch)
        found.append(float(out.loss_sum))
    return np.asarray(found), carry


@pytest.mark.covers("N08", "D01")
def test_chunks_with_kept_states_have_the_loss_of_the_whole_row():
    params = params_of(MODEL)
    found, carry = losses(MODEL, params)
    whole = dataclasses.replace(MODEL, keeps_states=False)
    loss_sum = jax.jit(lambda params, batch: whole.loss(params, (), None, batch)[1].loss_sum)
    np.testing.assert_allclose(found.sum(), loss_sum(params, BATCH), rtol=1e-6)
    alone = [float(loss_sum(params, batch)) for batch in chunks(BATCH)]
    assert np.all(np.abs(found - alone)[1:] > 1e-3)
    assert found[0] == pytest.approx(alone[0], rel=1e-6)
    again, _ = losses(MODEL, params, carry)  # the first positions of the next rows are 0
    np.testing.assert_array_equal(again, found)


@pytest.mark.slow
def test_a_pattern_keeps_the_states_of_some_layers():
    params = params_of(PATTERN)
    first = PATTERN.init_carry(next(chunks(BATCH)))
    assert set(first) == {"s5"}
    _, carry = losses(PATTERN, params)
    assert jax.tree.map(jnp.shape, carry) == jax.tree.map(jnp.shape, first)
    assert np.all(carry["s5"].re[:, 1] == 0)  # of the layer with attention
    assert np.all(carry["s5"].re[:, 0] != 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mixer": Attention(), "feed_forward": Mlp()}, "keeps_states = True has no effect"),
        ({"mixer": (STATES, TTTMixer(TTTConfig(num_heads=2, head_dim=8)))}, "ttt_linear would start anew"),
        ({"planner": Planner(chunk=4)}, "a planner counts chunks from the start of a row"),
        ({"positions": "learned", "max_positions": 64}, "learned positions are counted from the start of a row"),
    ],
)
def test_what_cannot_keep_states_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(MODEL, **changes)


def test_attention_in_blocks_beside_kept_states_is_allowed():
    assert dataclasses.replace(MODEL, mixer=BlockSparse(block=4)).keeps_states
