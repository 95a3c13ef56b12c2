"""Rotary settings in `config.json`: what is written is read as the same scaling."""

import dataclasses

import pytest

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
