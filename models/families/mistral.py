"""Mistral (Jiang et al. 2023), and Mixtral with experts (Jiang et al. 2024)."""

import functools
from typing import Any

from models.decoder.config import DecoderConfig
from models.decoder.experts import Experts
from models.decoder.layers import Attention
from models.decoder.published import family
from models.decoder.published.family import Config, Family
from models.decoder.published.rope_settings import FULL, SLIDING


def _mistral(config: Config) -> dict[str, Any]:
    usual = FULL if config["sliding_window"] is None else SLIDING
    types = family.layer_types(config) or [usual] * config["num_hidden_layers"]
    return family.llama(config, mixer=family.attention_of_types(config, types))


def _mistral_config(model: DecoderConfig) -> dict[str, Any]:
    types, local = family.types_of_layers(model), family.windowed(model)
    kinds = {"layer_types": types} if FULL in types and local else {}
    return family.llama_config(model, sliding_window=local and local.window, **kinds)


def _mixtral(config: Config) -> dict[str, Any]:
    top_k = family.choices(config, "num_local_experts")
    experts = Experts(num_experts=config["num_local_experts"], top_k=top_k)
    return family.without_windows(config, mixer=Attention(window=config["sliding_window"]), feed_forward=experts)


def _mixtral_config(model: DecoderConfig) -> dict[str, Any]:
    local, (experts, keys) = family.windowed(model), family.experts_to_write(model)
    sizes = {"intermediate_size": experts.width(model), "num_local_experts": experts.num_experts}
    return family.llama_config(model, sliding_window=local and local.window) | sizes | keys


_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
FAMILIES = {
    "mistral": Family(
        title="Mistral",
        differs="a window",
        architecture="MistralForCausalLM",
        read=_mistral,
        write=_mistral_config,
        sources=family.llama_sources,
        keys={**family.LLAMA, "num_key_value_heads": 8, "sliding_window": 4096},
        nullable={*family.NULLABLE, "sliding_window"},
        others=family.ROPE,
    ),
    "mixtral": Family(
        title="Mixtral",
        differs="experts in place of feed-forward layers",
        architecture="MixtralForCausalLM",
        read=_mixtral,
        write=_mixtral_config,
        sources=functools.partial(
            family.llama_sources,
            feed_forward=functools.partial(family.mlp_sources, layer="block_sparse_moe", names=_MATRICES),
        ),
        keys={
            **family.LLAMA,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        nullable={*family.NULLABLE, "sliding_window"},
        others=family.ROPE,
        aliases={"num_experts": "num_local_experts"},
    ),
}
