"""Inputs of layers: a table by token and layer, and a projection of the embedded token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import flops, logical
from core.errors import UserError
from models.decoder.layer_inputs import LayerInputs
from models.decoder.planner_config import Planner
from parallel import strategies
from tests.models.decoder.test_layers import BATCH, SHALLOW, VOCAB, check_generation, drawn_params, logits_of

MODEL = dataclasses.replace(SHALLOW, layer_inputs=LayerInputs(width=6))


def test_each_layer_has_its_own_input_and_the_table_a_row_for_each_token():
    params = drawn_params(MODEL)
    assert params["~"]["layer_embedding"].shape == (128, 2 * 6)
    assert params["layers/block"]["layer_input_gate"].shape == (2, 16, 6)
    logits = logits_of(MODEL)(params, BATCH)
    columns = jnp.arange(2 * 6) // 6
    for layer in range(2):
        table = jnp.where(columns == layer, params["~"]["layer_embedding"] + 1, params["~"]["layer_embedding"])
        changed = {**params, "~": {**params["~"], "layer_embedding": table}}
        assert np.abs(logits_of(MODEL)(changed, BATCH) - logits).max() > 1e-3, layer
    token = BATCH["inputs"][0, 5]
    table = params["~"]["layer_embedding"].at[token].add(1.0)
    changed = logits_of(MODEL)({**params, "~": {**params["~"], "layer_embedding": table}}, BATCH)
    before = jnp.argmax(BATCH["inputs"][0] == token)
    np.testing.assert_array_equal(changed[0, :before], logits[0, :before])
    assert np.abs(changed[0, before] - logits[0, before]).max() > 1e-4


def test_without_outputs_the_decoder_is_as_without_inputs():
    params = drawn_params(MODEL)
    block = params["layers/block"]
    none = {**params, "layers/block": {**block, "layer_input_norm": jnp.zeros_like(block["layer_input_norm"])}}
    np.testing.assert_allclose(logits_of(MODEL)(none, BATCH), logits_of(SHALLOW)(params, BATCH), atol=1e-5)


def test_rows_are_extended_as_in_the_full_pass():
    check_generation(MODEL, drawn_params(MODEL))


def test_the_work_is_that_of_its_matrices_and_the_rows_of_padding_are_zero():
    params, specs = logical.abstract_init(MODEL.init, jax.random.key(0), BATCH)
    made = [params["~"]["layer_projection"], params["layers/block"]["layer_input_gate"]]
    made.append(params["layers/block"]["layer_input_output"])
    assert MODEL.layer_inputs.work(MODEL) == sum(a.size for a in made)
    assert MODEL.flops_per_token(8) == SHALLOW.flops_per_token(8) + 6 * MODEL.layer_inputs.work(MODEL)
    assert specs["~"]["layer_embedding"].axes == ("vocab", "layer_inputs")
    strategy = strategies.fsdp()
    assert logical.row(strategy.param_rules, "layer_inputs") == logical.row(strategy.param_rules, "embed")
    table = jax.jit(lambda key: MODEL.init(key, BATCH)["~"]["layer_embedding"])(jax.random.key(0))  # compiles quickly
    assert np.all(table[VOCAB:] == 0)
    assert np.all(np.any(table[:VOCAB] != 0, axis=1))


def test_a_frozen_table_saves_no_product():
    """Of a tied model, only the embedding is also the output matrix."""
    tied = dataclasses.replace(MODEL, tied=True)

    def counted(*frozen):
        return flops.per_token(tied, BATCH, length=8, frozen=frozen)

    assert counted("layer_embedding") == counted()
    assert counted("embedding", "layer_embedding") == counted() - 2 * 128 * 16


def test_settings_have_the_width():
    assert MODEL.settings()["layer_inputs"] == LayerInputs(width=6)
    assert SHALLOW.settings()["layer_inputs"] is None
    assert MODEL.shrink(dict.fromkeys(logical.all_axes(), 1)).layer_inputs == LayerInputs(width=8)


def test_wrong_values_are_errors():
    with pytest.raises(UserError, match=r"LayerInputs\.width = 0"):
        LayerInputs(width=0)
    with pytest.raises(UserError, match=r"layer_inputs and planner are not supported together"):
        dataclasses.replace(MODEL, planner=Planner(chunk=4))
