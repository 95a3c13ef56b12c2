"""Generation where rotary factors change with the length of a row: cached, on whole rows, and as one row of several."""

import functools

import jax
import numpy as np
import pytest

from core import optimizers, slices
from models.decoder import rotary
from models.decoder.transformer import Transformer
from parallel import strategies
from parallel.generation import decoding
from parallel.generation.generating import Generator
from parallel.generation.sampling import Sampling
from parallel.partitioner import Partitioner
from tasks import streams

ADAMW = optimizers.adamw(learning_rate=optimizers.constant(1e-3))
LONG = rotary.LongRope(short=(1.0, 1.0), long=(3.0, 0.5), original_length=16, sharpening=1.5)


@pytest.fixture(scope="module")
def long_rope():
    """A decoder with other rotary factors for rows of more than 16 positions, and parameters."""
    model = Transformer(
        vocab_size=83, num_layers=2, embed_dim=8, mlp_dim=8, num_heads=2, num_kv_heads=2, rope_scaling=LONG
    )
    at = Partitioner(strategies.fsdp(), slice=slices.get("v4-8"), devices=jax.devices()[:4])
    program = at.program(model, ADAMW, streams.batch_spec(32, length=16), seed=0)
    params = jax.tree.map(lambda a: a * 8 if a.ndim > 1 else a, program.init().params)  # not almost uniform
    whole = jax.device_get(params)

    @jax.jit
    def logits(ids):
        return model.logits(whole, decoding.text_batch({}, ids))

    @functools.lru_cache
    def next_id(ids):
        ended = np.zeros((1, 16 if len(ids) <= 16 else 40), np.int32)  # two programs; later ids change nothing
        ended[0, : len(ids)] = ids
        return int(logits(ended)[0, len(ids) - 1].argmax())

    return Generator(program, params), params, next_id


def test_rows_cross_the_length_at_which_rotary_factors_change(long_rope):
    """Cached keys would keep the short factors of LongRoPE: short, crossing and long rows equal full passes."""
    generator, _, next_id = long_rope
    prompts = [list(range(2, 2 + count)) for count in (3, 9, 10, 16, 17, 30)]
    want = []
    for prompt in prompts:
        ids = tuple(prompt)
        for _ in range(8):
            ids += (next_id(ids),)
        want.append(list(ids[len(prompt) :]))
    told = []
    found = generator.generate(prompts, max_tokens=8, on_tokens=told.append)
    assert [one.ids for one in found] == want
    assert [[i for i in column if i is not None] for column in zip(*told, strict=True)] == want
    for one, prompt in zip(generator.generate(prompts[2:4], max_tokens=1), prompts[2:4], strict=True):
        assert one.ids == [next_id(tuple(prompt))]


class Outer:
    """A wrapper with logits of its own, so that generation runs it on whole rows."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.__dict__["model"], name)

    def logits(self, params, batch):
        return self.model.logits(params, batch)


def test_whole_rows_have_the_factors_of_their_own_ids(long_rope):
    generator, params, next_id = long_rope
    program = generator._program
    spec = streams.batch_spec(32, length=24)  # longer than the original length
    outer = program.partitioner.program(Outer(program.model), ADAMW, spec, seed=0)
    prompts = [list(range(2, 2 + count)) for count in (10, 15, 18)]
    for one, prompt in zip(Generator(outer, params).generate(prompts, max_tokens=3), prompts, strict=True):
        ids = tuple(prompt)
        for _ in range(3):
            ids += (next_id(ids),)
        assert one.ids == list(ids[len(prompt) :])


def test_the_end_of_a_row_before_and_after_factors_change(long_rope):
    generator, *_ = long_rope
    prompt = list(range(2, 12))
    [whole] = generator.generate([prompt], max_tokens=12)
    for place in (2, 10):
        stop = whole.ids[place]
        [found] = generator.generate([prompt], max_tokens=12, stop_ids=(stop,))
        assert (found.ids, found.ended) == (whole.ids[: whole.ids.index(stop)], True)
    seen = []

    def enough(ids):
        seen.append(ids)
        return True

    generator.generate([prompt, [5] * 20], max_tokens=12, on_tokens=enough)
    assert all(ids[0] is None for ids in seen)  # the long row ran first, and none after it


def test_draws_of_a_row_do_not_depend_on_where_factors_change(long_rope):
    generator, *_ = long_rope
    prompts, how = [[7] * 20, list(range(2, 12))], {"sampling": Sampling(temperature=1.0), "seed": 3}
    both = generator.generate(prompts, max_tokens=12, **how)
    [alone] = generator.generate(prompts[1:], max_tokens=12, first_row=1, **how)
    assert both[1].ids == alone.ids
