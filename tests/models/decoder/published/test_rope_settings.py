"""Rotary settings in `config.json`: what is written is read as the same scaling."""

import dataclasses
import math

import pytest

from core.errors import UserError
from models.decoder import rotary
from models.decoder.published import rope_settings

EVERY = {  # each field with a value that is not its default
    rotary.Linear: {"factor": 2.5},
    rotary.Llama3: {
        "factor": 3.0,
        "low_frequency_factor": 1.5,
        "high_frequency_factor": 5.0,
        "original_length": 48,
    },
    rotary.Yarn: {
        "factor": 4.0,
        "original_length": 24,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "sharpening": 1.7,
        "truncate": False,
    },
    rotary.LongRope: {
        "short": (1.5, 2.0),
        "long": (3.0, 4.0),
        "original_length": 24,
        "sharpening": 1.7,
    },
    rotary.Proportional: {"fraction": 0.3, "factor": 2.0},
}


@pytest.mark.parametrize("kind", EVERY)
def test_every_field_is_written_and_read_again(kind):
    fields = [field for field in dataclasses.fields(kind) if field.init]
    assert {field.name for field in fields} == EVERY[kind].keys()
    assert not [field.name for field in fields if field.default == EVERY[kind][field.name]]
    needed = {f.name: EVERY[kind][f.name] for f in fields if f.default is dataclasses.MISSING}
    changed = [{name: value} for name, value in EVERY[kind].items()]
    for values in (EVERY[kind], *({**needed, **one} for one in changed)):
        scaling = kind(**values)
        config = {"rope_theta": 500.0, "max_position_embeddings": 96, "rope_scaling": rope_settings.written(scaling)}
        assert rope_settings.of_all_layers(config) == (500.0, scaling)


@pytest.mark.parametrize(
    ("settings", "sharpening"),
    [
        ({"mscale": 1.5, "mscale_all_dim": 0.5}, (1 + 0.15 * math.log(4)) / (1 + 0.05 * math.log(4))),
        ({"mscale": 1.5, "mscale_all_dim": 0.5, "attention_factor": 1.7}, 1.7),
        ({"mscale": 1.5}, None),
        ({"mscale_all_dim": 0.5}, None),
        ({}, None),
    ],
)
def test_the_scales_of_yarn_give_a_factor_if_both_are_there_and_none_is_given(settings, sharpening):
    scaling = {"rope_type": "yarn", "factor": 4.0, rope_settings.ORIGINAL: 24, **settings}
    config = {"rope_theta": 500.0, "max_position_embeddings": 96, "rope_scaling": scaling}
    found = rope_settings.of_all_layers(config).scaling
    assert found.sharpening == (sharpening if sharpening is None else pytest.approx(sharpening))


def test_settings_of_two_types_of_layers_are_read_and_those_of_a_third_are_an_error():
    full = {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.5}
    parameters = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 90.0}}
    config = {"rope_theta": 1.0, "rope_local_base_freq": 2.0, "max_position_embeddings": 96}
    read = rope_settings.of_each_type({**config, "rope_parameters": parameters})
    assert read == ((700.0, rotary.Linear(factor=2.5)), 90.0)
    with pytest.raises(
        UserError, match=r"rope_parameters has chunked_attention = \{\}: expected an object for each of"
    ):
        rope_settings.of_each_type({**config, "rope_parameters": {**parameters, "chunked_attention": {}}})
