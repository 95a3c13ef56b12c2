"""OLMo 2 and 3 (Team OLMo 2024, 2025): norms after layers' parts, and of all queries and all keys together."""

import dataclasses
import functools
from typing import Any

from models.decoder.config import DecoderConfig
from models.decoder.layers import Attention
from models.decoder.published import family, rope_settings
from models.decoder.published.family import Config, Family
from models.decoder.published.rope_settings import FULL, SLIDING

_ATTENTION = Attention(qk_norm="all_heads")
_THETA3 = 500000.0


def _olmo2(config: Config) -> dict[str, Any]:
    return family.without_windows(config, post_norm="only", mixer=_ATTENTION)


def _olmo3(config: Config) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    types = family.layer_types(config) or [SLIDING if (layer + 1) % 4 else FULL for layer in range(layers)]
    rope, local_theta = rope_settings.of_each_type({**config, "rope_local_base_freq": _THETA3})
    mixer = family.attention_of_types(config, types, usual=_ATTENTION, local_theta=local_theta)
    if isinstance(mixer, Attention) and mixer.window is not None:  # layers of one type: theirs is the decoder's
        rope, mixer = rope_settings.Rope(local_theta, None), dataclasses.replace(mixer, rope_theta=None)
    return family.llama(config, rope=rope, post_norm="only", mixer=mixer)


def _olmo3_config(model: DecoderConfig) -> dict[str, Any]:
    local, found = family.windowed(model), family.llama_config(model)
    full = {"rope_theta": found.pop("rope_theta"), **(found.pop("rope_scaling") or {"rope_type": "default"})}
    theta = model.rope_theta if local is None or local.rope_theta is None else local.rope_theta
    return found | {
        "pad_token_id": None,
        "layer_types": family.types_of_layers(model),
        "sliding_window": (local and local.window) or 4096,  # without a window: transformers needs a number
        "rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": theta}},
    }


_NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_sources = functools.partial(family.llama_sources, norms=_NORMS)
_KEYS = {**family.LLAMA, "rms_norm_eps": 1e-5}
FAMILIES = {
    "olmo2": Family(
        title="OLMo 2",
        differs="norms after the parts, of all queries and of all keys",
        architecture="Olmo2ForCausalLM",
        read=_olmo2,
        write=functools.partial(family.llama_config, pad_token_id=None),
        sources=_sources,
        keys=_KEYS,
        nullable=family.NULLABLE,
        others=family.ROPE,
    ),
    "olmo3": Family(
        title="OLMo 3",
        differs="as OLMo 2; windows; rotary scaling without a window",
        architecture="Olmo3ForCausalLM",
        read=_olmo3,
        write=_olmo3_config,
        sources=_sources,
        keys={**_KEYS, "rope_theta": _THETA3, "sliding_window": 4096},
        nullable=family.NULLABLE,
        others=family.ROPE - {"original_max_position_embeddings"},
    ),
}
