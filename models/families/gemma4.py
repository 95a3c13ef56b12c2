"""Gemma 4 (Gemma team 2026), such as 12B, 31B and 26B-A4B; of models with images or sound, the language model.

Layers with full attention have heads of another size, and may take their values from their keys. In 26B-A4B, experts
stand beside the dense feed-forward of each layer. Inputs of each layer and keys shared by layers (E2B, E4B) are not
supported.
"""

import functools
import json
from typing import Any

from core.checkpoints.tensor_map import Source
from core.errors import UserError
from models.decoder.config import DecoderConfig, LayerKind
from models.decoder.experts import Experts, experts_of
from models.decoder.layers import Attention, Mlp
from models.decoder.parts import Part
from models.decoder.published import family, rope_settings
from models.decoder.published.family import Check, Config, Family, Sources
from models.decoder.published.rope_settings import FULL, PARTIAL, SLIDING
from models.families import gemma

_SAME, _WIDTH, _HEADS = "attention_k_eq_v", "global_head_dim", "num_global_key_value_heads"
_HAS_EXPERTS, _EXPERTS, _CHOSEN, _INNER = "enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"
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
        mixer=family.repeated([of_types[kind] for kind in types]),
        feed_forward=_experts(config) if config[_HAS_EXPERTS] else Mlp(),
    )


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
    """Returns the width of the heads of layers with full attention, and the number of their key/value heads.

    Raises UserError if the layers' own settings differ, the width is odd, or the numbers of heads do not divide.
    """
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
        **{key: without for key, (without, _) in _NONE.items()},
    )
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
    return {**family.attention_sources(model, kind), "layer_scale": Source("layers.{}.layer_scalar", "_")}


def _feed_forward(part: Part | None) -> Sources:
    """Returns the tensors of a layer: with experts, each gate is followed by its up matrix in one tensor of all."""
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


_NONE = {  # what is not supported, with the value of a model without it, and what is said of others
    "hidden_size_per_layer_input": (0, "0 (an absent key means 256); inputs of each layer, as in E2B and E4B, are not"),
    "num_kv_shared_layers": (0, "0; keys and values that layers share, as in E2B and E4B, are not"),
}
_OF_OTHERS = {"vocab_size_per_layer_input", "use_double_wide_mlp"}  # of models that are not supported
_KEYS = {key: value for key, value in family.LLAMA.items() if key not in ("hidden_act", "rope_theta")} | {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "rope_parameters": None,
    "use_bidirectional_attention": None,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
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
    differs="as Gemma 3; two sizes of heads; experts beside an MLP",
    architecture="Gemma4ForCausalLM",
    read=_read,
    write=_write,
    sources=functools.partial(
        family.llama_sources, norms=gemma.NORMS, attention=_attention, feed_forward=_feed_forward
    ),
    keys=_KEYS,
    nullable={key for key, value in _KEYS.items() if value is None} - {"use_bidirectional_attention"},
    others={"layer_types", *_OF_OTHERS},
    ignored=lambda config: ("*embed_vision.*", "*embed_audio.*", "*audio_tower.*", "*vision_embedder.*"),
    checks={
        "final_logit_softcapping": family.NUMBER,
        "rope_parameters": Check(lambda value: isinstance(value, dict), "an object or null"),
        "use_bidirectional_attention": Check(lambda value: value in (None, "vision"), '"vision" (of images) or null'),
        _BY_LAYER: Check(_are_by_layer, f"numbers of layers, each with {' and '.join(_OF_LAYER)}"),
        **{key: _only(*only) for key, only in _NONE.items()},
    },
)
_OTHER_DEFAULTS = {"sliding_window": 1024, "hidden_size_per_layer_input": 0}
_UNIFIED = _TEXT._replace(
    title="Gemma 4 Unified (text)",
    differs="as Gemma 4, without experts",
    write=None,
    keys={**_KEYS, **_OTHER_DEFAULTS},
    checks={**_TEXT.checks, _HAS_EXPERTS: _only(False, "false; experts, which transformers ignores here, are not")},
)
_AROUND = {*gemma.TOKENS, "vision_config", "audio_config", "vision_soft_tokens_per_image"}
_AROUND |= {"video_token_id", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"}
FAMILIES = {
    "gemma4_text": _TEXT,
    "gemma4": _TEXT._replace(write=None, inside="gemma4_text", around=_AROUND),
    "gemma4_unified_text": _UNIFIED,
    "gemma4_unified": _UNIFIED._replace(inside="gemma4_unified_text", around=_AROUND),
}
