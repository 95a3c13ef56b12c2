"""Gemma 4 (Gemma team 2026); of models with images or sound, the language model.

In 26B-A4B, experts stand beside the dense feed-forward of each layer. In E2B and E4B, each layer has an input of its
own, and the last layers use the keys and values of earlier ones.
"""

import dataclasses
import json
from typing import Any

from core.checkpoints.tensor_map import Source
from core.errors import UserError
from models.decoder.config import DecoderConfig, LayerKind
from models.decoder.experts import Experts, experts_of
from models.decoder.layer_inputs import LayerInputs
from models.decoder.layers import Attention, Mlp
from models.decoder.parts import Part
from models.decoder.published import family, rope_settings
from models.decoder.published.family import Check, Config, Family, Sources
from models.decoder.published.rope_settings import FULL, PARTIAL, SLIDING
from models.families import gemma

_SAME, _WIDTH, _HEADS = "attention_k_eq_v", "global_head_dim", "num_global_key_value_heads"
_HAS_EXPERTS, _EXPERTS, _CHOSEN, _INNER = "enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"
_INPUT, _INPUT_VOCAB = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
_SHARED, _DOUBLE = "num_kv_shared_layers", "use_double_wide_mlp"
_BY_LAYER, _OF_LAYER = "per_layer_config", ("head_dim", "num_key_value_heads")  # as transformers 5.24 writes these
_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", PARTIAL: 0.25, "rope_theta": 1e6},
}


def _read(config: Config) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    types = family.layer_types(config) or [FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(layers)]
    types = [*types[:-1], FULL]  # whatever the file says of the last one
    bases = {"rope_theta": None, "rope_local_base_freq": None if SLIDING in types else 1.0}  # which have no defaults
    rope = config["rope_parameters"] or _ROPE
    rope, local_theta = rope_settings.of_each_type({**config, **bases, "rope_parameters": rope})
    width, heads = _heads_of_full(config, types)
    usual: dict[str, Any] = {"scale": 1.0, "qk_norm": True, "value_norm": True}
    of_types = {
        SLIDING: Attention(**usual, window=config["sliding_window"], rope_theta=local_theta),
        FULL: Attention(**usual, head_dim=width, num_kv_heads=heads, values_are_keys=config[_SAME]),
    }
    return family.llama(
        config,
        rope=rope,
        activation="hidden_activation",
        post_norm=True,
        layer_scale=True,
        scaled_embedding=True,
        logit_softcap=config["final_logit_softcapping"],
        layer_inputs=_inputs(config),
        **_parts(config, types, [of_types[kind] for kind in types]),
    )


def _inputs(config: Config) -> LayerInputs | None:
    if not config[_INPUT]:
        return None
    if config[_INPUT_VOCAB] != config["vocab_size"]:
        raise UserError(
            f"{_INPUT_VOCAB} = {config[_INPUT_VOCAB]} (an absent key means {_KEYS[_INPUT_VOCAB]}): expected "
            f"vocab_size = {config['vocab_size']}"
        )
    return LayerInputs(width=config[_INPUT])


def _parts(config: Config, types: list[str], mixers: list[Attention]) -> dict[str, Any]:
    if not config[_SHARED]:
        return {
            "mixer": family.repeated(mixers),
            "feed_forward": _experts(config) if config[_HAS_EXPERTS] else Mlp(),
        }
    first = len(types) - config[_SHARED]
    if first < 1 or set(types[:first]) != set(types):
        raise UserError(
            f"{_SHARED} = {config[_SHARED]}: of {len(types)} layers, expected so many that those before them have all "
            f"types of layer_types, {' and '.join(sorted(set(types)))}"
        )
    if config[_HAS_EXPERTS]:
        raise UserError(f"{_SHARED} = {config[_SHARED]} and {_HAS_EXPERTS} = true are not supported together")
    sharing = [dataclasses.replace(part, shares_keys=True) for part in mixers[first:]]
    return {
        "first_mixer": tuple(mixers[:first]),
        "first_feed_forward": (Mlp(),) * first,
        "mixer": family.repeated(sharing, first=first),
        "feed_forward": Mlp(mlp_dim=2 * config["intermediate_size"] if config[_DOUBLE] else None),
    }


def _experts(config: Config) -> Experts:
    """Returns the experts of each layer; the dense feed-forward beside them is their shared expert."""
    if missing := [key for key in (_EXPERTS, _CHOSEN, _INNER) if config[key] is None]:
        raise UserError(f"{_HAS_EXPERTS} = true, but {missing[0]} is null or missing: expected a whole number")
    if config[_CHOSEN] > config[_EXPERTS]:
        raise UserError(f"{_CHOSEN} = {config[_CHOSEN]}: expected at most {_EXPERTS} = {config[_EXPERTS]}")
    return Experts(
        num_experts=config[_EXPERTS],
        top_k=config[_CHOSEN],
        mlp_dim=config[_INNER],
        shared_mlp_dim=config["intermediate_size"],
        separate_norms=True,
        output_scales=True,
    )


def _heads_of_full(config: Config, types: list[str]) -> tuple[int, int]:
    width, heads = (config[key] for key in _OF_LAYER)
    if (given := config[_BY_LAYER]) is None:
        width, heads = config[_WIDTH], (config[_HEADS] if config[_SAME] else None) or heads
    elif given:
        of_layers = {int(layer): of_layer for layer, of_layer in given.items()}
        full = [layer for layer, kind in enumerate(types) if kind == FULL]
        if of_layers != dict.fromkeys(full, of_layers.get(full[0])):
            raise UserError(
                f"{_BY_LAYER} = {json.dumps(given)}: expected the same for all layers with {FULL} "
                f"({', '.join(map(str, full))}, counted from 0), and nothing for others"
            )
        width, heads = (of_layers[full[0]].get(key, config[key]) for key in _OF_LAYER)
    if width % 2 or config["num_attention_heads"] % heads:
        raise UserError(
            f"layers with {FULL} have {heads} key/value heads of {width} ({_HEADS}, {_WIDTH}, {_BY_LAYER}): "
            f"expected a divisor of num_attention_heads = {config['num_attention_heads']}, and an even size"
        )
    return width, heads


def _are_by_layer(value: Any) -> bool:
    return isinstance(value, dict) and all(
        layer.isdecimal()
        and isinstance(of, dict)
        and of.keys() <= set(_OF_LAYER)
        and all(map(family.WHOLE.fits, of.values()))
        for layer, of in value.items()
    )


def _write(model: DecoderConfig) -> dict[str, Any]:
    local, full = family.windowed(model), family.attentions(model)[-1]
    scaling = rope_settings.written(model.rope_scaling) or {"rope_type": "default"}
    found = family.llama_config(
        model,
        layer_types=family.types_of_layers(model),
        hidden_activation=family.published_activation(model.activation),
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": (local and local.rope_theta) or model.rope_theta},
            FULL: {**scaling, "rope_theta": model.rope_theta},
        },
        sliding_window=(local and local.window) or 512,  # without a window in any layer: transformers needs a number
        final_logit_softcapping=model.logit_softcap,
        **{_SAME: full.values_are_keys, _WIDTH: full.width(model), _HEADS: full.kv_heads(model)},
        **{_INPUT: 0, _SHARED: sum(part.shares_keys for part in family.attentions(model))},
    )
    if model.layer_inputs is not None:
        found |= {_INPUT: model.layer_inputs.width, _INPUT_VOCAB: model.vocab_size}
    last = model.layer_kind(model.num_layers - 1).feed_forward
    if found[_SHARED] and isinstance(last, Mlp):
        found[_DOUBLE] = last.mlp_dim == 2 * model.mlp_dim
    if (experts := experts_of(model)) is not None:
        found |= {
            _HAS_EXPERTS: True,
            _EXPERTS: experts.num_experts,
            _CHOSEN: experts.top_k,
            _INNER: experts.width(model),
            "intermediate_size": experts.shared_mlp_dim,
        }
    return {key: value for key, value in found.items() if key not in ("hidden_act", "rope_theta", "rope_scaling")}


def _attention(model: DecoderConfig, kind: LayerKind) -> Sources:
    found = {**family.attention_sources(model, kind), "layer_scale": Source("layers.{}.layer_scalar", "_")}
    if model.layer_inputs is None:
        return found
    return found | {
        "layer_input_gate": Source("layers.{}.per_layer_input_gate.weight", "_ embed"),
        "layer_input_output": Source("layers.{}.per_layer_projection.weight", "embed _"),
        "layer_input_norm": Source("layers.{}.post_per_layer_input_norm.weight", "norm"),
    }


def _sources(model: DecoderConfig) -> Sources:
    found = family.llama_sources(model, norms=gemma.NORMS, attention=_attention, feed_forward=_feed_forward)
    if model.layer_inputs is None:
        return found
    return found | {
        "layer_embedding": Source("embed_tokens_per_layer.weight", "vocab layer_inputs"),
        "layer_projection": Source("per_layer_model_projection.weight", "_ embed"),
        "layer_projection_norm": Source("per_layer_projection_norm.weight", "norm"),
    }


def _ignored(config: Config) -> list[str]:
    found = ["*embed_vision.*", "*embed_audio.*", "*audio_tower.*", "*vision_embedder.*"]
    layers = config["num_hidden_layers"]
    for layer in range(layers - config[_SHARED], layers):
        found += [f"*layers.{layer}.self_attn.{name}.*" for name in ("k_proj", "v_proj", "k_norm", "v_norm")]
    return found


def _feed_forward(part: Part | None) -> Sources:
    if not isinstance(part, Experts):
        return family.mlp_sources(part)
    experts, router = "layers.{}.experts.", "layers.{}.router."
    norms = {"expert_norm": "pre_{}_2", "expert_post_norm": "post_{}_2", "shared_post_norm": "post_{}_1"}
    return {
        **{f"shared_{ours}": source for ours, source in family.mlp_sources(None).items()},
        **{
            ours: Source(f"layers.{{}}.{name.format('feedforward_layernorm')}.weight", "norm")
            for ours, name in norms.items()
        },
        "router": Source(f"{router}proj.weight", "_ embed"),
        "router_scale": Source(f"{router}scale", "norm"),
        "output_scales": Source(f"{router}per_expert_scale", "_"),
        "gate": Source(f"{experts}gate_up_proj", "expert (0/2 mlp) embed"),
        "up": Source(f"{experts}gate_up_proj", "expert (1/2 mlp) embed"),
        "down": Source(f"{experts}down_proj", "expert embed mlp"),
    }


_FROM_0 = Check(lambda value: type(value) is int and 0 <= value < 2**31, "a whole number of at least 0")
_KEYS = {key: value for key, value in family.LLAMA.items() if key not in ("hidden_act", "rope_theta")} | {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "rope_parameters": None,
    "use_bidirectional_attention": None,
    _INPUT: 256,
    _INPUT_VOCAB: 262144,
    _SHARED: 0,
    _DOUBLE: False,
    _HAS_EXPERTS: False,
    **dict.fromkeys((_EXPERTS, _CHOSEN, _INNER)),
    _SAME: False,
    _WIDTH: 512,
    _HEADS: None,
    _BY_LAYER: None,
}


def _only(value: Any, expected: str) -> Check:
    return Check(lambda found: found == value and type(found) is type(value), f"{expected} supported")


_TEXT = Family(
    title="Gemma 4 (text)",
    differs="as Gemma 3; two sizes of heads; experts; shared keys",
    architecture="Gemma4ForCausalLM",
    read=_read,
    write=_write,
    sources=_sources,
    keys=_KEYS,
    nullable={key for key, value in _KEYS.items() if value is None} - {"use_bidirectional_attention"},
    others={"layer_types"},
    ignored=_ignored,
    checks={
        "final_logit_softcapping": family.NUMBER,
        "rope_parameters": Check(lambda value: isinstance(value, dict), "an object or null"),
        "use_bidirectional_attention": Check(lambda value: value in (None, "vision"), '"vision" (of images) or null'),
        _BY_LAYER: Check(_are_by_layer, f"numbers of layers, each with {' and '.join(_OF_LAYER)}"),
        **dict.fromkeys((_INPUT, _SHARED), _FROM_0),
    },
)
_OTHER_DEFAULTS = {"sliding_window": 1024, _INPUT: 0}
_UNIFIED = _TEXT._replace(
    title="Gemma 4 Unified (text)",
    differs="as Gemma 4, without experts and inputs of layers",
    write=None,
    keys={**_KEYS, **_OTHER_DEFAULTS},
    checks={
        **_TEXT.checks,
        _HAS_EXPERTS: _only(False, "false; experts, which transformers ignores here, are not"),
        _INPUT: _only(0, "0; inputs of layers, which transformers ignores here, are not"),
    },
)
_AROUND = {*gemma.TOKENS, "vision_config", "audio_config", "vision_soft_tokens_per_image"}
_AROUND |= {"video_token_id", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"}
FAMILIES = {
    "gemma4_text": _TEXT,
    "gemma4": _TEXT._replace(write=None, inside="gemma4_text", around=_AROUND),
    "gemma4_unified_text": _UNIFIED,
    "gemma4_unified": _UNIFIED._replace(inside="gemma4_unified_text", around=_AROUND),
}
