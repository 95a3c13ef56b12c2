"""Gemma 2 and 3 (Gemma team 2024, 2025); of Gemma 3 with images, the language model."""

import dataclasses
import functools
from typing import Any

from models.decoder.config import DecoderConfig
from models.decoder.layers import Attention
from models.decoder.published import family, rope_settings
from models.decoder.published.family import Config, Family
from models.decoder.published.rope_settings import FULL, SLIDING


def _gemma(
    config: Config, *, period: int, usual: Attention, local_theta: float | None = None, **other: Any
) -> dict[str, Any]:
    usual = dataclasses.replace(usual, scale=config["query_pre_attn_scalar"] ** -0.5)
    layers = config["num_hidden_layers"]
    types = family.layer_types(config) or [SLIDING if (layer + 1) % period else FULL for layer in range(layers)]
    return family.llama(
        config,
        activation="hidden_activation",
        norm="rms_offset",
        post_norm=True,
        scaled_embedding=True,
        logit_softcap=config["final_logit_softcapping"],
        mixer=family.attention_of_types(config, types, usual=usual, local_theta=local_theta),
        **other,
    )


def _gemma2(config: Config) -> dict[str, Any]:
    return _gemma(config, period=2, usual=Attention(softcap=config["attn_logit_softcapping"]))


def _gemma3(config: Config) -> dict[str, Any]:
    rope, local_theta = rope_settings.of_each_type(config)
    period = config["sliding_window_pattern"]
    return _gemma(config, period=period, usual=Attention(qk_norm=True), local_theta=local_theta, rope=rope)


def _gemma3_with_images(config: Config) -> dict[str, Any]:
    return _gemma3({**config, "final_logit_softcapping": None})  # the model with images does not bound logits


def _config(model: DecoderConfig) -> dict[str, Any]:
    usual, local = family.attention_of(model), family.windowed(model)
    return family.llama_config(
        model,
        layer_types=family.types_of_layers(model),
        hidden_activation=family.published_activation(model.activation),
        query_pre_attn_scalar=_whole(usual.score_scale(model) ** -2),
        sliding_window=(local and local.window) or 4096,  # without a window in any layer: transformers needs a number
        final_logit_softcapping=model.logit_softcap,
    )


def _gemma2_config(model: DecoderConfig) -> dict[str, Any]:
    return {**_config(model), "attn_logit_softcapping": family.attention_of(model).softcap}


def _gemma3_config(model: DecoderConfig) -> dict[str, Any]:
    local = family.windowed(model)
    base = {} if local is None else {"rope_local_base_freq": local.rope_theta or model.rope_theta}
    return {**_config(model), **base}


def _whole(value: float) -> int | float:
    return round(value) if abs(value - round(value)) < 1e-9 * value else value


NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
TOKENS = {f"{token}_token_{kind}" for token in ("boi", "eoi", "image") for kind in ("id", "index")}  # of images
_sources = functools.partial(family.llama_sources, norms=NORMS)
_KEYS = {
    **{key: value for key, value in family.LLAMA.items() if key != "hidden_act"},
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {
    **_KEYS,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
}
_NULLABLE = {"final_logit_softcapping", "max_position_embeddings", "sliding_window"}
_CHECKS = dict.fromkeys(
    ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), family.NUMBER
)  # which need not be whole
_OTHERS = family.ROPE | {"hidden_act", "sliding_window_size"}  # not read: `hidden_activation`, `sliding_window` are
_GEMMA3_OTHERS = (_OTHERS - {"original_max_position_embeddings"}) | {
    "attn_logit_softcapping",
    "_sliding_window_pattern",
}
_TEXT = Family(
    title="Gemma 3 (text)",
    differs="as Gemma 2; norms of queries and keys; two rotary bases",
    architecture="Gemma3ForCausalLM",
    read=_gemma3,
    write=_gemma3_config,
    sources=_sources,
    keys=_GEMMA3,
    nullable=_NULLABLE,
    others=_GEMMA3_OTHERS,
    checks=_CHECKS,
)
_WITH_IMAGES = {
    **_GEMMA3,  # of the language model inside, published files leave out what is as in transformers
    **dict(zip(family.SIZES, (262208, 2304, 9216, 26, 8), strict=True)),
    "max_position_embeddings": 131072,
}
FAMILIES = {
    "gemma2": Family(
        title="Gemma 2",
        differs="offset norms on both sides, bounded logits, windows",
        architecture="Gemma2ForCausalLM",
        read=_gemma2,
        write=_gemma2_config,
        sources=_sources,
        keys={**_KEYS, "attn_logit_softcapping": 50.0},
        nullable={*_NULLABLE, "attn_logit_softcapping"},
        others=_OTHERS,
        checks=_CHECKS,
    ),
    "gemma3_text": _TEXT,
    "gemma3": _TEXT._replace(
        read=_gemma3_with_images,
        write=None,
        keys=_WITH_IMAGES,
        inside="gemma3_text",
        around={"vision_config", "mm_tokens_per_image", *TOKENS},
    ),
}
