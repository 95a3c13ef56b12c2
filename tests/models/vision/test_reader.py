"""The reader: what its relevance depends on, gradients, its own answers, and wrong settings."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from models.vision import reader as reader_module
from models.vision.reader import Reader
from models.vision.selector import Selector
from tests.models.drawn import drawn
from tests.models.vision import subjects

READER = Reader(block=2, width=8)


def transformed(function):
    """A function with parameters, whose `apply` is compiled."""
    run = hk.transform(function)
    return hk.Transformed(run.init, jax.jit(run.apply))


@functools.cache
def relevance_of(reader):
    return transformed(lambda *inputs: reader.glimpsed(*inputs).relevance)


def relevance(reader, patches, words, is_word):
    run = relevance_of(reader)
    inputs = (jnp.asarray(patches), jnp.asarray(words), jnp.asarray(is_word))
    return np.asarray(run.apply(drawn(run.init, *inputs), None, *inputs))


def test_relevance_depends_on_the_words_and_their_order_and_on_other_patches_but_not_on_the_answer():
    rng = np.random.default_rng(0)
    patches, words = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 16, 12), (1, 5, 6)))
    is_word = np.array([[0, 1, 1, 1, 0]], np.float32)
    found = relevance(READER, patches, words, is_word)
    assert found.shape == (1, 16)

    def differs(patches, words):
        return np.abs(relevance(READER, patches, words, is_word) - found).max(axis=0) > 1e-6

    assert differs(patches, words[:, [0, 2, 1, 3, 4]]).any()  # words in another order
    assert not differs(patches, words + np.array([5, 0, 0, 0, 5])[:, None]).any()  # positions that are no question
    moved = patches.copy()
    moved[0, 15] += rng.normal(size=12)
    assert differs(moved, words)[:10].any()  # blocks without the patch


@pytest.mark.parametrize(
    ("reads", "points"),
    [
        (True, True),
        (False, False),
        *(pytest.param(*mixed, marks=pytest.mark.slow) for mixed in ((True, False), (False, True))),
    ],
)
def test_the_control_without_the_question_chooses_the_same_for_every_question(reads, points):
    reader = dataclasses.replace(READER, points=points)
    selector = Selector(num_chosen=4, method="gumbel", reader=reader, reads_question=reads, balancer_width=8)
    model = dataclasses.replace(subjects.model(), selector=selector)
    batch = subjects.batch(4, rows=2)
    params = drawn(model.init, batch)
    others = {**batch, "inputs": (batch["inputs"] + 1) % subjects.VOCAB}
    ask = jax.jit(lambda b: model.evaluate(params, jax.random.key(0), b).extras["chosen"])
    assert (np.asarray(ask(batch)) != np.asarray(ask(others))).any() == reads


POINTING = dataclasses.replace(READER, points=True)


def test_a_pointed_patch_has_the_sharpened_probability_of_its_block_times_that_within_the_block():
    rng = np.random.default_rng(0)
    block, within = rng.normal(size=(3, 2, 1, 2, 1)), rng.normal(size=(3, 2, 2, 2, 2))
    inputs = [jnp.asarray(np.broadcast_to(x, within.shape).reshape(3, 16), jnp.float32) for x in (block, within)]
    found = np.exp(POINTING.pointed(*inputs)).reshape(3, 2, 2, 2, 2)
    p = np.exp(block) / np.exp(block).sum((1, 2, 3, 4), keepdims=True)
    of_block = p**3 / (p**3).sum((1, 2, 3, 4), keepdims=True)
    in_block = np.exp(within) / np.exp(within).sum((2, 4), keepdims=True)
    np.testing.assert_allclose(found, of_block * in_block, rtol=1e-5)
    np.testing.assert_allclose(found.sum((1, 2, 3, 4)), 1, rtol=1e-5)


def test_the_gradient_of_a_choice_reaches_patches_within_a_block_and_not_where_the_reader_looks():
    block, within, weights = np.random.default_rng(0).normal(size=(3, 2, 16)).astype(np.float32)
    grads = jax.grad(lambda *scores: jnp.sum(weights * POINTING.pointed(*scores)), argnums=(0, 1))(block, within)
    assert not np.abs(grads[0]).max()
    assert np.abs(grads[1]).min() > 1e-6


@pytest.mark.parametrize("points", [True, False])
def test_choices_train_where_the_last_glimpse_looks_unless_the_reader_points(points):
    """They train what the earlier glimpses tell in both cases: it decides which patches of a block are chosen."""
    selector = Selector(num_chosen=4, reader=dataclasses.replace(READER, points=points), balancer_width=8)
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.integers(0, 256, (2, 16, 16, 3), dtype=np.uint8))
    patches, weights = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 16, 12), (2, 16)))
    words = jnp.asarray(rng.normal(size=(2, 3, 6)), jnp.float32)
    run = transformed(lambda: selector.scores(images, patches, words, jnp.ones((2, 1, 3)))[0])
    params = drawn(run.init)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(weights * run.apply(p, None))))(params)["~"]
    assert (np.abs(grads["selector_reader_1_query"]).max() == 0) == points
    assert np.abs(grads["selector_reader_0_query"]).max() > 0


def glimpsed(reader, patches, changes=None):
    """Returns a reader's result for patches [B, 16, 12], and its answers; `changes` replace some parameters."""
    run, words = glimpses_of(reader), np.random.default_rng(1).normal(size=(len(patches), 5, 6)).astype(np.float32)
    params = drawn(run.init, patches, words)
    return jax.tree.map(np.asarray, run.apply({"~": {**params["~"], **(changes or {})}}, None, patches, words))


@functools.cache
def glimpses_of(reader):
    def both(patches, words):
        found = reader.glimpsed(patches, words, jnp.ones((len(patches), 5)))
        return found, found.log_answers(7)

    return transformed(both)


def test_a_reader_that_points_answers_from_the_content_of_each_block_wherever_it_lies():
    blocks = np.random.default_rng(0).normal(size=(1, 2, 2, 4, 12)).astype(np.float32)

    def seen(blocks):
        patches = blocks.reshape(1, 2, 2, 2, 2, 12).transpose(0, 1, 3, 2, 4, 5).reshape(1, 16, 12)
        return glimpsed(POINTING, jnp.asarray(patches))[0].seen.reshape(2, 2, 8)

    found = seen(blocks)
    np.testing.assert_allclose(seen(blocks[:, ::-1]), found[::-1], atol=1e-5)
    np.testing.assert_allclose(seen(blocks[:, :, ::-1]), found[:, ::-1], atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-2


@pytest.mark.parametrize("points", [True, False])
def test_the_answer_is_the_mixture_of_answers_in_their_shares(points):
    reader = dataclasses.replace(READER, points=points)
    patches = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 12)), jnp.float32)
    weights = np.random.default_rng(2).normal(size=(8, 7)).astype(np.float32)
    found, log_answers = glimpsed(reader, patches, {"selector_reader_answer": weights})
    logits = found.seen @ weights
    each = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = (np.exp(found.log_shares)[..., None] * each).sum(1)
    np.testing.assert_allclose(np.exp(log_answers), expected, rtol=1e-4)
    np.testing.assert_allclose(expected.sum(-1), 1, rtol=1e-5)
    assert found.seen.shape == (3, 4 if points else 1, 8)


def test_no_block_loses_its_share_however_large_the_weights_are():
    """A reader that ruled out a block for good could not find that it has the answers."""
    patches = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 12)), jnp.float32)
    query = 1e3 * np.random.default_rng(2).normal(size=(16, 8)).astype(np.float32)
    found, _ = glimpsed(POINTING, patches, {"selector_reader_1_query": query})
    assert np.ptp(found.log_shares, axis=-1).max() <= 8 + 1e-4
    assert np.ptp(found.log_shares, axis=-1).min() > 1e-2


def test_a_block_that_a_reader_is_certain_of_has_all_chosen_patches():
    """The power of shares does that: without it, the best patches of other blocks come before its worst."""
    block = np.full((1, 4, 4), -4.0, np.float32)
    block[:, 2:, 2:] = 4.0  # the least and the most that a logit can be
    within = 3 * np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    block = np.broadcast_to(block.reshape(1, 16), within.shape)

    def chosen(power):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader_module, "_POWER", power)
            return np.sort(np.argsort(POINTING.pointed(jnp.asarray(block), jnp.asarray(within)))[:, -4:])

    assert (chosen(3.0) == [10, 11, 14, 15]).all()
    assert not (chosen(1.0) == [10, 11, 14, 15]).all(axis=1).all()


def test_blocks_that_a_reader_points_at_come_first_among_equal_patches():
    selector = Selector(num_chosen=4, reader=POINTING, balancer_width=8)
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.integers(0, 256, (6, 16, 16, 3), dtype=np.uint8))
    patches, words = jnp.asarray(rng.normal(size=(6, 16, 12)), jnp.float32), jnp.zeros((6, 3, 6))
    run = transformed(lambda: selector.scores(images, patches, words, jnp.ones((6, 1, 3)))[0])
    params = drawn(run.init)["~"]
    only_blocks = {**params, "selector_gain": jnp.full((1,), -20.0)}  # patches of a block have equal scores
    scores = np.asarray(run.apply({"~": only_blocks}, None))
    best = np.sort(np.argsort(scores)[:, -4:])
    blocks = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert all(row.tolist() in blocks for row in best)


@pytest.mark.slow  # about 10 CPU seconds
@pytest.mark.parametrize("points", [True, False])
def test_every_parameter_of_the_reader_has_a_gradient_under_a_frozen_decoder(points):
    reader = dataclasses.replace(READER, points=points)
    selector = Selector(num_chosen=4, method="gumbel", reader=reader, balancer_width=8)
    model = dataclasses.replace(subjects.model(freeze=("vision", "decoder")), selector=selector)
    batch = subjects.batch(4, rows=2)
    params = drawn(model.init, batch)
    names = [name for name in params["~"] if name.startswith("selector_reader")]

    def unreached(answers):
        answering = dataclasses.replace(reader, answers=answers)
        asked = dataclasses.replace(model, selector=dataclasses.replace(selector, reader=answering))

        def loss(own):
            whole = {**params, "~": {**params["~"], **own}}
            return asked.loss(whole, asked.init_carry(batch), jax.random.key(1), batch, is_training=True)[1].loss_sum

        grads = jax.jit(jax.grad(loss))({name: params["~"][name] for name in names})
        return {name for name, g in grads.items() if not np.abs(g).max() > 1e-9 and not name.endswith("_bias")}

    assert unreached(1.0) == set()
    if points:
        return
    own_answers = {f"selector_reader_{name}" for name in ("1_value", "seen", "answer")}
    assert unreached(0.0) == own_answers  # all else learns from the decoder's answers


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block": 0}, "Reader.block = 0: expected an integer of at least 1"),
        ({"width": 7}, "Reader.width = 7: expected an even number"),
        ({"answers": -1.0}, r"Reader.answers = -1.0"),
        ({"answers": 0.0, "points": True}, r"Reader.points = True and answers = 0: .* expected answers above 0"),
    ],
)
def test_wrong_settings_are_errors(changes, said):
    with pytest.raises(UserError, match=said):
        Reader(**{"block": 2, **changes})


def test_blocks_that_do_not_fit_the_image_are_errors():
    with pytest.raises(UserError, match=r"Reader\.block = 3 does not divide 4, the patches along the side of an image"):
        relevance(Reader(block=3), np.zeros((1, 16, 4)), np.zeros((1, 2, 4)), np.ones((1, 2)))
