"""Published families of models: their `config.json`, and the names and layouts of their tensors.

A family is a choice of fields of `transformer.Transformer`. `fields` reads a configuration in the format of
published folders (transformers 4 and 5), and `config` writes one. `family_tensors` says where parameters are.

docs/reference/published-families.md lists the families.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from core.checkpoints.published_files import CONFIG, read_object
from core.errors import UserError
from core.files import paths
from core.model_settings import differing_settings
from models.decoder.config import DecoderConfig
from models.decoder.experts import Experts, experts_of
from models.decoder.layers import Attention, Mlp
from models.decoder.parts import Part
from models.decoder.published import published_keys, rope_settings
from models.decoder.published.rope_settings import FULL, LAYER_TYPES, SLIDING

Config = Mapping[str, Any]
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
}


def fields(config: Config, *, where: str = CONFIG) -> dict[str, Any]:
    """Returns the fields of `Transformer` that a `config.json` describes.

    Absent keys have the values that transformers gives them, which differ between families. Sizes must be given.

    Args:
      config: the content of the file.
      where: the file, for messages.

    Raises:
      UserError: an unknown `model_type`, keys that are missing or have wrong values, or features that the decoder does
        not have; all of them at once.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise UserError(f"{where}: model_type = {kind!r} is not known; known are {', '.join(_FAMILIES)}")
    family, problems = _FAMILIES[kind], []
    text: Any = config
    if kind == "gemma3":
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise UserError(f"{where}: text_config = {text!r}: expected the configuration of the language model")
        problems = published_keys.problems(config, _AROUND_GEMMA3)
        if (inner := text.get("model_type", "gemma3_text")) != "gemma3_text":
            problems.append(f"text_config has model_type = {inner!r}, expected 'gemma3_text'")
        text = {**text, "tie_word_embeddings": config.get("tie_word_embeddings", True)}  # the inner one is not read
    aliases = {name: text[alias] for alias, name in family.aliases.items() if text.get(alias) is not None}
    found = {**family.keys, **text, **aliases}
    problems += published_keys.problems(text, {*family.keys, *family.aliases, *family.others})
    problems += [line for key in family.keys if (line := _problem(key, found[key], nullable=key in family.nullable))]
    if problems:
        raise UserError(f"{where} (model_type {kind}): " + "; ".join(problems))
    try:
        return family.read(found)
    except UserError as error:
        raise UserError(f"{where} (model_type {kind}): {error}") from error


def read_config(folder: paths.Path) -> dict[str, Any]:
    """Reads the `config.json` of a folder.

    Raises:
      UserError: it is missing or malformed.
    """
    file = folder / CONFIG
    if not file.exists():
        raise UserError(
            f"{folder} {f'has no {CONFIG}' if folder.exists() else 'does not exist'}: expected the folder of a "
            f"published model, with {CONFIG} and *.safetensors, or hf://OWNER/NAME"
        )
    return read_object(file)


_TEXTS = {"hidden_act", "hidden_activation", "activation_function"}
_NUMBERS = {"rms_norm_eps", "layer_norm_epsilon", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"}
_NUMBERS |= {"attn_logit_softcapping", "final_logit_softcapping"}


def _problem(key: str, value: Any, *, nullable: bool) -> str:
    """Returns what is wrong with the value of a key; "" if nothing is. `...` stands for an absent value."""
    if value is ...:
        return f"{key} is missing"
    if value is None and nullable:
        return ""
    if key in ("tie_word_embeddings", "norm_topk_prob"):
        fits, expected = isinstance(value, bool), "true or false"
    elif key in _TEXTS:
        fits, expected = isinstance(value, str), "the name of an activation"
    elif key == "mlp_only_layers":
        fits = isinstance(value, list) and all(type(layer) is int and layer >= 0 for layer in value)
        expected = "a list of numbers of layers, counted from 0"
    elif key in _NUMBERS:
        fits, expected = rope_settings.is_positive(value), "a number above 0"
    else:
        fits, expected = (
            rope_settings.is_positive(value) and isinstance(value, int) and value < 2**31,
            "a whole number above 0",
        )
    return "" if fits else f"{key} = {json.dumps(value)}: expected {expected}"


def _gpt2(config: Config) -> dict[str, Any]:
    embed, heads = config["n_embd"], config["n_head"]
    if embed % heads:
        raise UserError(f"n_embd = {embed} is not a multiple of n_head = {heads}")
    return {
        "vocab_size": config["vocab_size"],
        "num_layers": config["n_layer"],
        "embed_dim": embed,
        "mlp_dim": config["n_inner"] or 4 * embed,
        "num_heads": config["n_head"],
        "num_kv_heads": config["n_head"],
        "norm": "layer",
        "norm_eps": config["layer_norm_epsilon"],
        "bias": "all",
        "gated": False,
        "activation": known_activation(config["activation_function"]),
        "positions": "learned",
        "max_positions": config["n_positions"],
        "tied": config["tie_word_embeddings"],
    }


def _llama(
    config: Config, *, rope: rope_settings.Rope | None = None, activation: str = "hidden_act", **other: Any
) -> dict[str, Any]:
    theta, scaling = rope or rope_settings.of_all_layers(config)
    _check_heads(config)
    return {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "embed_dim": config["hidden_size"],
        "mlp_dim": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"] or config["num_attention_heads"],
        "head_dim": config["head_dim"],
        "norm_eps": config["rms_norm_eps"],
        "activation": known_activation(config[activation]),
        "max_positions": config["max_position_embeddings"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied": config["tie_word_embeddings"],
        **other,
    }


def _check_heads(config: Config) -> None:
    """Checks the sizes of heads against one another, under their names in the file."""
    heads, kv_heads, width = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads % (kv_heads or heads):
        raise UserError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
    if width is None and config["hidden_size"] % heads:
        raise UserError(f"hidden_size = {config['hidden_size']} is not a multiple of num_attention_heads = {heads}")
    if (width or config["hidden_size"] // heads) % 2:
        name = "head_dim" if width else "hidden_size / num_attention_heads"
        raise UserError(f"{name} = {width or config['hidden_size'] // heads}: rotary embeddings need an even size")


def _without_windows(config: Config, **other: Any) -> dict[str, Any]:
    """Reads a family whose windows, if it has any, do not follow `layer_types`."""
    if SLIDING in (_layer_types(config) or ()):
        raise UserError("layer_types has sliding_attention, which is not supported in this family")
    return _llama(config, **other)


def _mistral(config: Config) -> dict[str, Any]:
    usual = FULL if config["sliding_window"] is None else SLIDING
    types = _layer_types(config) or [usual] * config["num_hidden_layers"]
    return _llama(config, mixer=_attention(config, types))


def _attention(
    config: Config, types: list[str], *, usual: Attention | None = None, local_theta: float | None = None
) -> Attention | tuple[Part, ...]:
    """Returns the mixers of layers of these types; those with a window may have a rotary base of their own."""
    usual = usual or Attention()
    if SLIDING not in types:
        return usual
    if (window := config["sliding_window"]) is None:
        raise UserError("sliding_window = null, but there are layers of the type sliding_attention: expected a number")
    parts = {FULL: usual, SLIDING: dataclasses.replace(usual, window=window, rope_theta=local_theta)}
    found = tuple(parts[kind] for kind in _shortest(types))
    return found if len(found) > 1 else found[0]


def _mixtral(config: Config) -> dict[str, Any]:
    experts = Experts(num_experts=config["num_local_experts"], top_k=_choices(config, "num_local_experts"))
    return _without_windows(config, mixer=Attention(window=config["sliding_window"]), feed_forward=experts)


def _qwen3_moe(config: Config) -> dict[str, Any]:
    experts = Experts(
        num_experts=config["num_experts"],
        top_k=_choices(config, "num_experts"),
        mlp_dim=config["moe_intermediate_size"],
        normalized=config["norm_topk_prob"],
    )
    parts = tuple(experts if has_experts else Mlp() for has_experts in _layers_with_experts(config))
    mixer = Attention(qk_norm=True)
    return _without_windows(config, mixer=mixer, feed_forward=parts if len(parts) > 1 else parts[0])


def _choices(config: Config, number: str) -> int:
    """Returns the number of experts of a token, checked against that of all experts."""
    if (top_k := config["num_experts_per_tok"]) > config[number]:
        raise UserError(f"num_experts_per_tok = {top_k}, but {number} = {config[number]}: expected at most as many")
    return top_k


def _layers_with_experts(config: Config) -> tuple[bool, ...]:
    """Returns which layers have experts: the shortest pattern that repeats.

    Layer l, from 0, has experts if decoder_sparse_step divides l + 1 and mlp_only_layers does not list it.
    """
    layers, step, listed = config["num_hidden_layers"], config["decoder_sparse_step"], config["mlp_only_layers"] or []
    kinds = [layer not in listed and (layer + 1) % step == 0 for layer in range(layers)]
    if not any(kinds):
        raise UserError(
            f"decoder_sparse_step = {step} and mlp_only_layers = {json.dumps(listed)} leave none of {layers} layers "
            "with experts: expected some (without experts it is model_type qwen3)"
        )
    group = next(p for p in range(1, layers + 1) if layers % p == 0 and kinds == kinds[:p] * (layers // p))
    return tuple(kinds[:group])


def _gemma(
    config: Config, *, period: int, usual: Attention, local_theta: float | None = None, **other: Any
) -> dict[str, Any]:
    usual = dataclasses.replace(usual, scale=config["query_pre_attn_scalar"] ** -0.5)
    layers = config["num_hidden_layers"]
    types = _layer_types(config) or [SLIDING if (layer + 1) % period else FULL for layer in range(layers)]
    return _llama(
        config,
        activation="hidden_activation",
        norm="rms_offset",
        post_norm=True,
        scaled_embedding=True,
        logit_softcap=config["final_logit_softcapping"],
        mixer=_attention(config, types, usual=usual, local_theta=local_theta),
        **other,
    )


def _layer_types(config: Config) -> list[str] | None:
    """Returns the type of each layer by `layer_types`; None if the file leaves it out."""
    types, layers = config.get("layer_types"), config["num_hidden_layers"]
    if types is None:
        return None
    if not (isinstance(types, list) and all(isinstance(name, str) for name in types)):
        raise UserError(f"layer_types = {json.dumps(types)}: expected a list of {' or '.join(LAYER_TYPES)}")
    if unknown := sorted(set(types) - set(LAYER_TYPES)):
        raise UserError(f"layer_types has {', '.join(unknown)}; expected {' or '.join(LAYER_TYPES)}")
    if len(types) != layers:
        raise UserError(f"layer_types has {len(types)} entries, and num_hidden_layers = {layers}")
    return types


def _gemma3(config: Config) -> dict[str, Any]:
    rope, local_theta = rope_settings.of_each_type(config)
    period = config["sliding_window_pattern"]
    return _gemma(config, period=period, usual=Attention(qk_norm=True), local_theta=local_theta, rope=rope)


class _Family(NamedTuple):
    """A family of configurations.

    Attributes:
      read: returns the fields of the decoder.
      keys: that are read, with the values that transformers gives absent ones; `...` if the key must be there. An
        absent `max_position_embeddings` is None, because rotary embeddings do not limit positions.
      nullable: keys that may be null.
      others: keys that are read if they are there, or that transformers does not read in this family.
      aliases: other names of keys; the value under the other name wins.
    """

    read: Callable[[Config], dict[str, Any]]
    keys: Config
    nullable: Collection[str]
    others: Collection[str]
    aliases: Mapping[str, str] = MappingProxyType({})


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LLAMA = {
    **dict.fromkeys(_SIZES, ...),
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_GEMMA2 = {
    **{key: value for key, value in _LLAMA.items() if key != "hidden_act"},
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {
    **{key: value for key, value in _GEMMA2.items() if key != "attn_logit_softcapping"},
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
}
# Of the language model inside of one with images, published files leave out what is as in transformers.
_GEMMA3_NESTED = {
    **_GEMMA3,
    **dict(zip(_SIZES, (262208, 2304, 9216, 26, 8), strict=True)),
    "max_position_embeddings": 131072,
}
_GPT2 = {
    **dict.fromkeys(("vocab_size", "n_embd", "n_layer", "n_head"), ...),
    "n_inner": None,
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}
_MIXTRAL = {
    **_LLAMA,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN3_MOE: dict[str, Any] = {
    **_LLAMA,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_HEADS = {"num_key_value_heads", "head_dim", "max_position_embeddings"}
_ROPE = {"rope_parameters", "rope_scaling", "original_max_position_embeddings", "layer_types"}
_GEMMA = _ROPE | {"hidden_act", "sliding_window_size"}  # not read: `hidden_activation` and `sliding_window` are
_GEMMA3_OTHERS = (_GEMMA - {"original_max_position_embeddings"}) | {"attn_logit_softcapping", "_sliding_window_pattern"}
_QWEN = _ROPE | {"sliding_window", "max_window_layers"}  # of no use without `use_sliding_window`
_CAPS = {"final_logit_softcapping", "max_position_embeddings", "sliding_window"}
_FAMILIES: Mapping[str, _Family] = {
    "gpt2": _Family(
        _gpt2,
        _GPT2,
        {"n_inner"},
        {"n_ctx"},
        {
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
    "llama": _Family(_without_windows, _LLAMA, _HEADS, _ROPE),
    "mistral": _Family(
        _mistral, {**_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096}, {*_HEADS, "sliding_window"}, _ROPE
    ),
    "qwen2": _Family(
        lambda config: _without_windows(config, bias="qkv"), {**_LLAMA, "num_key_value_heads": 32}, _HEADS, _QWEN
    ),
    "qwen3": _Family(
        lambda config: _without_windows(config, mixer=Attention(qk_norm=True)),
        {**_LLAMA, "num_key_value_heads": 32, "head_dim": 128},
        _HEADS - {"head_dim"},
        _QWEN,
    ),
    "gemma2": _Family(
        lambda config: _gemma(config, period=2, usual=Attention(softcap=config["attn_logit_softcapping"])),
        _GEMMA2,
        {*_CAPS, "attn_logit_softcapping"},
        _GEMMA,
    ),
    "gemma3_text": _Family(_gemma3, _GEMMA3, _CAPS, _GEMMA3_OTHERS),
    # The model with images does not bound logits.
    "gemma3": _Family(
        lambda config: _gemma3({**config, "final_logit_softcapping": None}), _GEMMA3_NESTED, _CAPS, _GEMMA3_OTHERS
    ),
    "mixtral": _Family(_mixtral, _MIXTRAL, {*_HEADS, "sliding_window"}, _ROPE, {"num_experts": "num_local_experts"}),
    "qwen3_moe": _Family(
        _qwen3_moe, _QWEN3_MOE, {*_HEADS, "mlp_only_layers"}, _QWEN, {"num_local_experts": "num_experts"}
    ),
}
# Keys beside the language model in a configuration of Gemma 3 with images; the weights of the images are not read.
_AROUND_GEMMA3 = {"text_config", "tie_word_embeddings", "vision_config", "mm_tokens_per_image"}
_AROUND_GEMMA3 |= {f"{token}_token_{kind}" for token in ("boi", "eoi", "image") for kind in ("id", "index")}


def known_activation(name: str) -> str:
    """Returns our name of an activation of transformers. Raises UserError if it is not known."""
    if name not in _ACTIVATIONS:
        raise UserError(f"activation {name!r} is not known; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _shortest(kinds: list[str]) -> tuple[str, ...]:
    """Returns the shortest pattern whose repetition gives these kinds; the last repetition may be incomplete."""
    length = next(n for n in range(1, len(kinds) + 1) if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    return tuple(kinds[:length])


def family(model: DecoderConfig) -> str:
    """Returns the `model_type` whose format can express a decoder.

    Raises:
      UserError: no family has these fields.
    """
    has_norms = attention_of(model).qk_norm
    if model.positions == "learned":
        found = "gpt2"
    elif experts_of(model) is not None:
        found = "qwen3_moe" if has_norms else "mixtral"
    elif model.norm == "rms_offset":
        found = "gemma3_text" if has_norms else "gemma2"
    elif model.bias == "qkv":
        found = "qwen2"
    elif has_norms:
        found = "qwen3"
    else:
        found = "llama" if _windowed(model) is None else "mistral"
    again = DecoderConfig(**fields(config(model, found)))
    wrong = differing_settings(again, model)
    if model.attention == "none":
        wrong["attention"] = again.attention, model.attention
    if wrong:
        raise UserError(
            f"no published family has these fields; the nearest is {found}, which needs "
            + ", ".join(
                f"{name} = {getattr(again, name, theirs)!r} (here {getattr(model, name, ours)!r})"
                for name, (theirs, ours) in wrong.items()
            )
        )
    return found


def differences(model: DecoderConfig, config: Config, *, where: str = CONFIG) -> list[str]:
    """Returns one line for each field in which a decoder differs from a `config.json`, with both values."""
    published = DecoderConfig(**fields(config, where=where))
    return [
        f"{name} = {theirs!r} in {where}, {ours!r} in the model"
        for name, (theirs, ours) in differing_settings(published, model).items()
    ]


def config(model: DecoderConfig, kind: str) -> dict[str, Any]:
    """Returns the `config.json` of a decoder as a model of type `kind`."""
    if kind == "gpt2":
        return _gpt2_config(model)
    result = {
        **_heading(model, kind),
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.embed_dim,
        "intermediate_size": model.mlp_dim,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": _published(model.activation),
        "rope_theta": model.rope_theta,
        "rope_scaling": rope_settings.written(model.rope_scaling),
        "tie_word_embeddings": model.tied,
    }
    if model.max_positions is not None:
        result["max_position_embeddings"] = model.max_positions
    layers = [model.layer_kind(layer).mixers for layer in range(model.num_layers)]
    types = [SLIDING if any(map(_has_window, mixers)) else FULL for mixers in layers]
    local = _windowed(model)
    window = None if local is None else local.window
    if kind in ("mistral", "mixtral"):
        result["sliding_window"] = window
    if kind.startswith("gemma") or (kind == "mistral" and FULL in types):
        result["layer_types"] = types
    if (experts := experts_of(model)) is not None:
        result |= _experts_config(model, experts, kind)
    if kind.startswith("gemma"):
        result |= {
            "hidden_activation": _published(model.activation),
            "query_pre_attn_scalar": _whole(attention_of(model).score_scale(model) ** -2),
            "sliding_window": window or 4096,  # without a window in any layer: transformers needs a number
            "final_logit_softcapping": model.logit_softcap,
        }
    if kind == "gemma2":
        result["attn_logit_softcapping"] = attention_of(model).softcap
    if kind == "gemma3_text" and local is not None:
        result["rope_local_base_freq"] = local.rope_theta or model.rope_theta
    return result


def attention_of(model: DecoderConfig) -> Attention:
    """Returns the first attention of a decoder; the default one if it has none."""
    found = (part for kind in model.layer_kinds for part in kind.mixers if isinstance(part, Attention))
    return next(found, Attention())


def _has_window(part: Part) -> bool:
    return isinstance(part, Attention) and part.window is not None


def _windowed(model: DecoderConfig) -> Attention | None:
    """Returns the first attention with a window."""
    found = [part for kind in model.layer_kinds for part in kind.mixers if isinstance(part, Attention)]
    return next((part for part in found if part.window is not None), None)


def _experts_config(model: DecoderConfig, experts: Experts, kind: str) -> dict[str, Any]:
    training = {
        "router_aux_loss_coef": experts.load_balance_coef,
        "output_router_logits": experts.load_balance_coef > 0,
    }
    if kind == "mixtral":
        sizes: dict[str, Any] = {"intermediate_size": experts.width(model), "num_local_experts": experts.num_experts}
    else:
        sizes = {"moe_intermediate_size": experts.width(model), "num_experts": experts.num_experts}
        with_experts = {i for i in range(model.num_layers) if model.layer_kind(i).feed_forward == experts}
        step = math.gcd(*(layer + 1 for layer in with_experts))
        others = [layer for layer in range(step - 1, model.num_layers, step) if layer not in with_experts]
        sizes |= {"norm_topk_prob": experts.normalized, "decoder_sparse_step": step, "mlp_only_layers": others}
    return {**sizes, "num_experts_per_tok": experts.top_k, **training}


_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def _heading(model: DecoderConfig, kind: str) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [_ARCHITECTURES[kind]], "vocab_size": model.vocab_size}


def _gpt2_config(model: DecoderConfig) -> dict[str, Any]:
    return {
        **_heading(model, "gpt2"),
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
    names = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "gelu_sigmoid": "quick_gelu"}
    return names[activation]


def _whole(value: float) -> int | float:
    return round(value) if abs(value - round(value)) < 1e-9 * value else value
