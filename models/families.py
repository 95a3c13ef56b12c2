"""Published families of models: their `config.json`, and the names and layouts of their tensors.

A family is a choice of fields of `models.transformer.Transformer`. `fields` reads a configuration in the format of
published folders (transformers 4 and 5), and `config` writes one. `models.family_tensors` says where parameters are.

| family | `model_type` | differs from Llama by |
|---|---|---|
| GPT-2 | gpt2 | LayerNorm, learned positions, biases, no gate, tied |
| Llama 2, 3.x, SmolLM2 | llama | - |
| Mistral | mistral | a window |
| Qwen 2.5 | qwen2 | biases of queries, keys and values |
| Qwen 3 | qwen3 | norms of queries and keys |
| Gemma 2 | gemma2 | offset norms before and after, bounded scores and logits, alternating windows |
| Gemma 3 | gemma3_text, gemma3 | as Gemma 2, with norms of queries and keys, two rotary bases, five windows to one |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from core.errors import UserError
from models import rotary
from models.decoder_config import GLOBAL, LOCAL, DecoderConfig

Config = Mapping[str, Any]
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def fields(config: Config) -> dict[str, Any]:
    """Returns the fields of `Transformer` that a `config.json` describes.

    Raises:
      UserError: an unknown `model_type`, or a feature that the decoder does not have; all of them at once.
    """
    kind = config.get("model_type")
    if kind not in _READERS:
        raise UserError(f"config.json: model_type = {kind!r} is not known; known are {', '.join(_READERS)}")
    unsupported = {
        key: config[key] for key, neutral in _REFUSED.items() if config.get(key, neutral) not in (neutral, None)
    }
    if unsupported:
        found = ", ".join(f"{key} = {value!r} (expected {_REFUSED[key]!r})" for key, value in unsupported.items())
        raise UserError(f"config.json of {kind}: not supported: {found}")
    return _READERS[kind](config)


_REFUSED = {  # with the only supported value
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "use_bidirectional_attention": False,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "scale_attn_weights": True,
    "add_cross_attention": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def _gpt2(config: Config) -> dict[str, Any]:
    embed = config["n_embd"]
    return {
        "vocab_size": config["vocab_size"],
        "num_layers": config["n_layer"],
        "embed_dim": embed,
        "mlp_dim": config.get("n_inner") or 4 * embed,
        "num_heads": config["n_head"],
        "num_kv_heads": config["n_head"],
        "norm": "layer",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "bias": "all",
        "gated": False,
        "activation": _activation(config.get("activation_function", "gelu_new")),
        "positions": "learned",
        "max_positions": config.get("n_positions", 1024),
        "tied": config.get("tie_word_embeddings", True),
    }


def _llama(config: Config, **other: Any) -> dict[str, Any]:
    rope = _rope(config)
    return {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "embed_dim": config["hidden_size"],
        "mlp_dim": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_dim": config.get("head_dim"),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": _activation(config.get("hidden_activation") or config.get("hidden_act", "silu")),
        "max_positions": config.get("max_position_embeddings"),
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "rope_scaling": _scaling(rope),
        "tied": config.get("tie_word_embeddings", False),
        **other,
    }


def _mistral(config: Config) -> dict[str, Any]:
    return _llama(config, window=config.get("sliding_window"))


def _gemma(config: Config, *, period: int, **other: Any) -> dict[str, Any]:
    kinds = config.get("layer_types")
    kinds = [GLOBAL if kind == "full_attention" else LOCAL for kind in kinds] if kinds else None
    pattern = _shortest(kinds) if kinds else (LOCAL,) * (period - 1) + (GLOBAL,)
    return _llama(
        config,
        norm="rms_offset",
        post_norm=True,
        scaled_embedding=True,
        query_scale=config["query_pre_attn_scalar"] ** -0.5,
        window=config["sliding_window"],
        pattern=pattern,
        attention_softcap=config.get("attn_logit_softcapping"),
        logit_softcap=config.get("final_logit_softcapping"),
        **{"tied": config.get("tie_word_embeddings", True), "head_dim": config.get("head_dim", 256), **other},
    )


def _gemma3(config: Config) -> dict[str, Any]:
    if "rope_parameters" in config:
        local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    else:
        local = config.get("rope_local_base_freq", 10000.0)
    full = {"rope_theta": 1e6, **config}
    return _gemma(full, period=config.get("sliding_window_pattern", 6), qk_norm=True, local_rope_theta=float(local))


def _gemma3_with_images(config: Config) -> dict[str, Any]:
    defaults = {  # that published files leave out
        "vocab_size": 262208,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    return _gemma3({**defaults, **config["text_config"]})


_READERS: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": lambda config: _llama(config, bias="qkv"),
    "qwen3": lambda config: _llama(config, qk_norm=True),
    "gemma2": lambda config: _gemma(config, period=2),
    "gemma3_text": _gemma3,
    "gemma3": _gemma3_with_images,
}


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UserError(f"config.json: activation {name!r} is not known; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _shortest(kinds: list[str]) -> tuple[str, ...]:
    """Returns the shortest pattern of which these kinds are repetitions, the last one possibly incomplete."""
    length = next(n for n in range(1, len(kinds) + 1) if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    return tuple(kinds[:length])


def _rope(config: Config) -> dict[str, Any]:
    """Returns the settings of the rotary embedding of global layers."""
    if "rope_parameters" in config:  # as transformers 5 writes them
        return dict(config["rope_parameters"].get("full_attention", config["rope_parameters"]))
    return {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}


def _scaling(rope: Mapping[str, Any]) -> rotary.Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return rotary.Linear(factor=rope["factor"])
    if kind == "llama3":
        return rotary.Llama3(
            factor=rope["factor"],
            low_frequency_factor=rope["low_freq_factor"],
            high_frequency_factor=rope["high_freq_factor"],
            original_length=rope["original_max_position_embeddings"],
        )
    if kind == "yarn":
        return rotary.Yarn(
            factor=rope["factor"],
            original_length=rope["original_max_position_embeddings"],
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            sharpening=rope.get("attention_factor"),
            truncate=rope.get("truncate", True),
        )
    raise UserError(f"config.json: rope scaling {kind!r} is not known; known are default, linear, llama3, yarn")


def family(model: DecoderConfig) -> str:
    """Returns the `model_type` whose format can express a decoder.

    Raises:
      UserError: no family has these fields.
    """
    if model.positions == "learned":
        found = "gpt2"
    elif model.norm == "rms_offset":
        found = "gemma3_text" if model.qk_norm else "gemma2"
    elif model.bias == "qkv":
        found = "qwen2"
    elif model.qk_norm:
        found = "qwen3"
    else:
        found = "llama" if model.window is None else "mistral"
    again = DecoderConfig(**fields(config(model, found)))
    names = [field.name for field in dataclasses.fields(DecoderConfig) if field.name not in _OF_A_RUN]
    wrong = [name for name in names if _spelled_out(model, name) != _spelled_out(again, name)]
    if model.attention == "none":
        wrong.append("attention")
    if wrong:
        raise UserError(
            f"no published family has these fields; the nearest is {found}, which needs "
            + ", ".join(f"{name} = {getattr(again, name)!r} (here {getattr(model, name)!r})" for name in wrong)
        )
    return found


_OF_A_RUN = {"remat", "dtype", "attention", "vocab_multiple"}  # not part of a published configuration


def _spelled_out(model: DecoderConfig, name: str) -> Any:
    """Returns a field, with what its default stands for."""
    defaults = {"head_dim": model.head_width, "query_scale": model.score_scale, "pattern": model.kinds}
    return defaults.get(name, getattr(model, name))


def config(model: DecoderConfig, kind: str) -> dict[str, Any]:
    """Returns the `config.json` of a decoder as a model of type `kind`."""
    if kind == "gpt2":
        return _gpt2_config(model)
    result = {
        "model_type": kind,
        "architectures": [_ARCHITECTURES[kind]],
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.embed_dim,
        "intermediate_size": model.mlp_dim,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": _published(model.activation),
        "rope_theta": model.rope_theta,
        "rope_scaling": _published_scaling(model.rope_scaling),
        "tie_word_embeddings": model.tied,
    }
    if model.max_positions is not None:
        result["max_position_embeddings"] = model.max_positions
    if kind == "mistral":
        result["sliding_window"] = model.window
    if kind.startswith("gemma"):
        result |= {
            "hidden_activation": _published(model.activation),
            "query_pre_attn_scalar": _whole(model.score_scale**-2),
            "sliding_window": model.window,
            "layer_types": [_LAYER_TYPES[model.kinds[i % len(model.kinds)]] for i in range(model.num_layers)],
            "attn_logit_softcapping": model.attention_softcap,
            "final_logit_softcapping": model.logit_softcap,
        }
    if kind == "gemma3_text":
        result["rope_local_base_freq"] = model.local_rope_theta
    return result


_LAYER_TYPES = {GLOBAL: "full_attention", LOCAL: "sliding_attention"}
_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def _gpt2_config(model: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": [_ARCHITECTURES["gpt2"]],
        "vocab_size": model.vocab_size,
        "n_layer": model.num_layers,
        "n_embd": model.embed_dim,
        "n_inner": model.mlp_dim,
        "n_head": model.num_heads,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": _published(model.activation),
        "tie_word_embeddings": model.tied,
    }


def _published(activation: str) -> str:
    return {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[activation]


def _whole(value: float) -> int | float:
    return round(value) if abs(value - round(value)) < 1e-9 * value else value


def _published_scaling(scaling: rotary.Scaling | None) -> dict[str, Any] | None:
    if isinstance(scaling, rotary.Linear):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, rotary.Llama3):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    if isinstance(scaling, rotary.Yarn):
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            **({} if scaling.sharpening is None else {"attention_factor": scaling.sharpening}),
        }
    return None
