"""Log-likelihoods of continuations: those of the model's logits, under every layout, in batches of few shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import optimizers, slices
from core.errors import UserError
from models.decoder import rotary
from models.decoder.transformer import Transformer
from parallel import strategies
from parallel.generation import likelihood
from parallel.partitioner import Partitioner
from tasks import streams

SIZES = {"num_layers": 2, "embed_dim": 16, "mlp_dim": 24, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 50}
PAIRS = [([3], [7]), ([1, 2, 3, 4], [5, 6]), ([9] * 5, [8]), (list(range(40)), list(range(30))), ([7, 7], [1, 2, 3])]


def program_of(tables=None, *, length=16, **changes):
    model = Transformer(**{**SIZES, "vocab_multiple": 8, "dtype": "float32", **changes})
    at = Partitioner(tables or strategies.data_parallel(), slice=slices.get("v4-8"), devices=jax.devices()[:4])
    rule = optimizers.adamw(learning_rate=optimizers.constant(0.0))
    return at.program(model, rule, streams.batch_spec(16, length=length), seed=0)


def expected(model, params, pairs):
    """The likelihood of each pair, from logits, and the most likely ids in place of its continuation."""
    ids = jnp.asarray([([*context, *continuation] + [0] * 96)[:96] for context, continuation in pairs])
    batch = {name: jnp.ones_like(ids) for name in ("segment_ids", "weights", "targets")}
    batch |= {"inputs": ids, "positions": jnp.broadcast_to(jnp.arange(96), ids.shape)}
    log_p = jax.jit(lambda params: jax.nn.log_softmax(model.logits(params, batch)))(jax.device_get(params))
    for row, (context, continuation) in zip(np.asarray(log_p), pairs, strict=True):
        own = row[len(context) - 1 : len(context) - 1 + len(continuation)]
        total = sum(float(own[i, token]) for i, token in enumerate(continuation))
        yield total, np.argmax(own, axis=1).tolist()


@pytest.mark.covers("N13")
@pytest.mark.parametrize(
    "tables",
    [
        strategies.data_parallel(),
        pytest.param(strategies.fsdp_tensor(tensor=2), marks=pytest.mark.slow),
        pytest.param(strategies.sequence_tensor(tensor=2), marks=pytest.mark.slow),
        pytest.param(strategies.pipeline(stage=2), marks=pytest.mark.slow),
    ],
    ids=lambda tables: tables.name,
)
def test_likelihoods_are_those_of_the_logits(tables, monkeypatch):
    monkeypatch.setattr(likelihood, "_LOGITS_BYTES", 4 * 96 * 50)  # one row of each shard at a time
    program = program_of(tables)
    params = program.init_params()
    scorer = likelihood.Scorer(program, params)
    found, wanted = scorer.score(PAIRS), list(expected(program.model, params, PAIRS))
    for pair, one, (total, greedy) in zip(PAIRS, found, wanted, strict=True):
        np.testing.assert_allclose(one.log_likelihood, total, rtol=2e-6)
        assert one.is_greedy == (greedy == pair[1])
    [first] = wanted[0][1]
    best = scorer.score([([3], [first])])[0]
    assert best.is_greedy
    assert best.log_likelihood > found[0].log_likelihood


def test_few_shapes_are_compiled_and_long_contexts_lose_their_beginning(monkeypatch):
    monkeypatch.setattr(likelihood, "_LOGITS_BYTES", 4 * 96 * 50 * 8)
    scorer = likelihood.Scorer(program_of(max_positions=96), {})
    assert scorer.max_length == 96
    batches = []

    def sums(params, ids, begin, end):
        batches.append(np.asarray(ids))
        return np.zeros(len(ids)), np.ones(len(ids), bool)

    scorer._sums = sums
    many = [([1 + n % 40] * (1 + n % 60), [3]) for n in range(200)]
    scorer.score([*many, ([5] * 70, [6])])
    assert {ids.shape[1] for ids in batches} == {65, 97}
    assert all(len(ids) & (len(ids) - 1) == 0 for ids in batches)
    scorer.score([([9] * 50 + [4] * 95, [1, 2]), ([4] * 95, [1, 2])])
    assert batches[-1][:2].tolist() == [[4] * 95 + [1, 2]] * 2


@pytest.mark.parametrize(("length", "most"), [(16, 2048), (4096, 4096)])
def test_a_model_without_a_limit_scores_rows_as_long_as_it_was_trained_on(length, most):
    assert likelihood.Scorer(program_of(length=length), None).max_length == most


def test_rows_have_whole_tiles_where_the_splash_kernel_is_chosen():
    lengths = {}
    for choice in ("splash", "auto"):
        scorer = likelihood.Scorer(program_of(attention=choice, length=128), None)
        lengths[choice] = [scorer._length(([1] * n, [1])) for n in (10, 100, 130, 200, 300)]
    assert lengths == {"splash": [128, 128, 256, 256, 384], "auto": [64, 128, 192, 256, 384]}
    for ring, unit in ((False, 256), (True, 512)):  # a tile in each shard of a row, in a ring in both chunks
        tables = strategies.context(sequence=2, ring=ring)
        scorer = likelihood.Scorer(program_of(tables, attention="splash", length=512), None)
        assert scorer._length(([1] * 10, [1])) == unit


def test_a_text_is_split_into_windows_that_score_each_id_once():
    assert likelihood.windows(range(10), prefix=99, length=4) == [
        ([99], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert likelihood.windows([1, 2], prefix=0, length=4) == [([0], [1, 2])]
    assert likelihood.windows([], prefix=0, length=4) == []


def test_pairs_that_cannot_be_scored_are_refused():
    scorer = likelihood.Scorer(program_of(max_positions=96), {})
    for pair, says in {((), (1,)): "0 ids of context", ((1,), ()): "0 of", ((1,), (2,) * 97): "97 of"}.items():
        with pytest.raises(UserError, match=f"pair 2 has .*{says}"):
            scorer.score([([1], [2]), pair])


def test_padding_does_not_choose_the_factors_of_a_short_row():
    """A row of 22 ids has the short factors of LongRoPE, also if it is padded beyond the original length."""
    scaling = rotary.LongRope(short=(1.0, 1.0), long=(4.0, 9.0), original_length=48)
    program, plain = program_of(rope_scaling=scaling), program_of()
    params = program.init_params()
    short, long = ([*range(20)], [7, 8, 9]), ([*range(50)], [3])
    (wanted,) = likelihood.Scorer(plain, params).score([short])
    scorer = likelihood.Scorer(program, params)
    for pairs in ([short], [short, long]):
        np.testing.assert_allclose(scorer.score(pairs)[0].log_likelihood, wanted.log_likelihood, rtol=1e-5)


@pytest.mark.parametrize("layout", [strategies.context(sequence=3), strategies.context(sequence=3, fsdp=1)])
def test_rows_are_padded_to_a_length_that_the_layout_divides(layout):
    model = Transformer(vocab_size=96, num_layers=1, embed_dim=48, mlp_dim=48, num_heads=3, num_kv_heads=3)
    at = Partitioner(layout, slice=slices.get("cpu:3"), devices=jax.devices()[:3])
    adamw = optimizers.adamw(learning_rate=optimizers.constant(1e-3))
    made = likelihood.Scorer(at.program(model, adamw, streams.batch_spec(3, length=96), seed=0), None)
    lengths = {made._length(([1] * context, [2])) for context in (5, 70, 90)}
    assert len(lengths) > 1
    assert {length % 3 for length in lengths} == {0}
