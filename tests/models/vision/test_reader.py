"""The reader: what its relevance depends on, gradients, its own answers, and wrong settings."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from models.vision.reader import Reader
from models.vision.selector import Selector
from tests.models.vision import subjects

READER = Reader(block=2, width=8)


def relevance(reader, patches, words, is_word):
    run = hk.transform(lambda *inputs: reader.glimpsed(*inputs).relevance)
    inputs = (jnp.asarray(patches), jnp.asarray(words), jnp.asarray(is_word))
    return np.asarray(run.apply(run.init(jax.random.key(0), *inputs), None, *inputs))


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


@pytest.mark.parametrize("reads", [True, False])
def test_the_control_without_the_question_chooses_the_same_for_every_question(reads):
    selector = Selector(num_chosen=4, method="gumbel", reader=READER, reads_question=reads, balancer_width=8)
    model = dataclasses.replace(subjects.model(), selector=selector)
    batch = subjects.batch(4, rows=2)
    params = jax.jit(model.init)(jax.random.key(0), batch)
    others = {**batch, "inputs": (batch["inputs"] + 1) % subjects.VOCAB}
    ask = jax.jit(lambda b: model.evaluate(params, jax.random.key(0), b).extras["chosen"])
    assert (np.asarray(ask(batch)) != np.asarray(ask(others))).any() == reads


@pytest.mark.slow  # about 10 CPU seconds
def test_every_parameter_of_the_reader_has_a_gradient_under_a_frozen_decoder():
    selector = Selector(num_chosen=4, method="gumbel", reader=READER, balancer_width=8)
    model = dataclasses.replace(subjects.model(freeze=("vision", "decoder")), selector=selector)
    batch = subjects.batch(4, rows=2)
    params = jax.jit(model.init)(jax.random.key(0), batch)
    names = [name for name in params["~"] if name.startswith("selector_reader")]

    def unreached(answers):
        reader = dataclasses.replace(READER, answers=answers)
        asked = dataclasses.replace(model, selector=dataclasses.replace(selector, reader=reader))

        def loss(own):
            whole = {**params, "~": {**params["~"], **own}}
            return asked.loss(whole, asked.init_carry(batch), jax.random.key(1), batch, is_training=True)[1].loss_sum

        grads = jax.jit(jax.grad(loss))({name: params["~"][name] for name in names})
        return {name for name, g in grads.items() if not np.abs(g).max() > 1e-9 and not name.endswith("_bias")}

    assert unreached(1.0) == set()
    own_answers = {f"selector_reader_{name}" for name in ("1_value", "seen", "answer")}
    assert unreached(0.0) == own_answers  # all else learns from the decoder's answers


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block": 0}, "Reader.block = 0: expected an integer of at least 1"),
        ({"width": 7}, "Reader.width = 7: expected an even number"),
        ({"answers": -1.0}, r"Reader.answers = -1.0"),
    ],
)
def test_wrong_settings_are_errors(changes, said):
    with pytest.raises(UserError, match=said):
        Reader(**{"block": 2, **changes})


def test_blocks_that_do_not_fit_the_image_are_errors():
    with pytest.raises(UserError, match=r"Reader\.block = 3 does not divide 4, the patches along the side of an image"):
        relevance(Reader(block=3), np.zeros((1, 16, 4)), np.zeros((1, 2, 4)), np.ones((1, 2)))
