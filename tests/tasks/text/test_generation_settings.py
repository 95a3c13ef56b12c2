"""Settings of generation of exported folders: those of the source are kept."""

import json

import pytest

from core.errors import UserError
from core.files.paths import Path
from tasks.text import generation_settings

MODEL = {"model_type": "llama", "hidden_size": 16, "rope_theta": 5.0, "torch_dtype": "float32"}


def written(folder, config, generation):
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return Path(folder)


@pytest.mark.parametrize(
    ("config", "generation", "stops", "ids", "settings"),
    [
        (  # both of config.json alone
            {**MODEL, "eos_token_id": [2, 4], "pad_token_id": 3, "bos_token_id": None, "temperature": 0.6},
            None,
            (2,),
            {"bos_token_id": 1, "eos_token_id": [2, 4], "pad_token_id": 3},
            {"bos_token_id": 1, "eos_token_id": [2, 4], "pad_token_id": 3, "temperature": 0.6},
        ),
        (  # each file has its own
            {**MODEL, "bos_token_id": 7, "eos_token_id": 2, "top_k": 5},
            {"bos_token_id": 8, "eos_token_id": [2, 4], "top_p": 0.9, "do_sample": True, "of_our_own": {"a": None}},
            (2, 9),
            {"bos_token_id": 7, "eos_token_id": [2, 9]},
            {"bos_token_id": 8, "eos_token_id": [2, 4, 9], "top_p": 0.9, "do_sample": True, "of_our_own": {"a": None}},
        ),
        (  # ids that one of them lacks
            MODEL,
            {"eos_token_id": 4, "pad_token_id": 0},
            (4,),
            {"bos_token_id": 1, "eos_token_id": 4, "pad_token_id": 0},
            {"bos_token_id": 1, "eos_token_id": 4, "pad_token_id": 0},
        ),
        ({**MODEL, "text_config": {"eos_token_id": 6}}, {"top_k": 3}, (6,), {"eos_token_id": 6}, {"top_k": 3}),
        (None, None, (2,), {"bos_token_id": 1, "eos_token_id": 2}, {"bos_token_id": 1, "eos_token_id": 2}),
    ],
)
def test_settings_of_the_source_are_kept_and_ends_of_texts_added(tmp_path, config, generation, stops, ids, settings):
    found = generation_settings.exported(written(tmp_path, config, generation), bos_id=1, stop_ids=stops)
    assert found[0] == {"bos_token_id": 1, **ids}
    assert found[1] == {**found[0], **settings}


def test_a_malformed_file_is_an_error(tmp_path):
    (tmp_path / "generation_config.json").write_text("[1")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        generation_settings.exported(Path(tmp_path), bos_id=1, stop_ids=(2,))
