"""A model of images and text continues text without images as its decoder does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import optimizers, slices
from core.batches import Field
from models.vision.model import VisionLanguageModel
from parallel import strategies
from parallel.generation import decoding, text_part
from parallel.generation.generating import Generator
from parallel.partitioner import Partitioner
from tests.models.vision import subjects

PROMPTS = [[3, 5, 8, 13, 21], [7, 7]]


def program_of(model, tables, optimizer=None):
    batch = subjects.batch(subjects.CHOSEN if isinstance(model, VisionLanguageModel) else subjects.PATCHES)
    spec = {name: Field(array.shape, array.dtype, subjects.AXES[name]) for name, array in batch.items()}
    at = Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices()[:4])
    return at.program(model, optimizer or optimizers.adamw(learning_rate=optimizers.constant(1e-3)), spec, seed=0)


@pytest.mark.parametrize("freeze", [pytest.param((), marks=pytest.mark.slow), ("decoder", "vision")])
def test_text_without_images_is_that_of_the_decoder(freeze):
    program = program_of(subjects.model(freeze=freeze), strategies.fsdp())
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: jax.device_put(rng.normal(0, 0.3, s.shape).astype(s.dtype), s.sharding), program.abstract_state.params
    )
    text, own = text_part.of(program, params)
    assert text.model is program.model.decoder
    assert jax.tree.structure(own) == jax.tree.structure(text.abstract_state.params)
    assert all(params[module][name] is leaf for module, leaves in own.items() for name, leaf in leaves.items())
    found = Generator(text, own).generate(PROMPTS, max_tokens=1)
    ids = jnp.asarray([prompt + [0] * (5 - len(prompt)) for prompt in PROMPTS])  # ids behind a prompt change nothing
    logits = jax.jit(subjects.DECODER.logits)(jax.device_get(own), decoding.text_batch({}, ids))
    for prompt, row, continuation in zip(PROMPTS, np.asarray(logits), found, strict=True):
        assert continuation.ids == [row[len(prompt) - 1].argmax()]


def test_a_model_of_text_is_its_own_text_part():
    program = program_of(subjects.DECODER, strategies.fsdp())
    params = program.abstract_state.params
    assert text_part.of(program, params) == (program, params)


def test_an_optimizer_may_name_parameters_of_the_other_parts():
    rate = optimizers.constant(1e-3)
    named = optimizers.adamw(learning_rate=rate, no_decay=("norm", "bias", "vision*"))
    text = text_part.program_of(program_of(subjects.model(), strategies.fsdp(), optimizer=named))
    assert text.model == subjects.DECODER


def test_a_report_before_parameters_are_read_needs_none():
    text = text_part.program_of(program_of(subjects.model(), strategies.fsdp()))
    assert text.model == subjects.DECODER
    assert set(text.spec) == {"inputs", "targets", "weights", "segment_ids", "positions"}
