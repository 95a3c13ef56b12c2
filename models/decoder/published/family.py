"""Describes families of published models, and has functions that families like Llama share.

A family is a module in `models/families/` with `FAMILIES`: a `Family` for each of its `model_type`s.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from core import logical
from core.checkpoints.safetensors_files import Stored, Tensor
from core.checkpoints.tensor_map import Source
from core.errors import UserError
from models.decoder.config import DecoderConfig, LayerKind, period
from models.decoder.experts import Experts, experts_of
from models.decoder.layers import Attention
from models.decoder.parts import Part
from models.decoder.published import rope_settings
from models.decoder.published.rope_settings import FULL, LAYER_TYPES, SLIDING

Config = Mapping[str, Any]
Sources = dict[str, Source]
Dequantized = Callable[[Mapping[str, Tensor], Mapping[str, Any]], Mapping[str, Stored]]  # of `quantization_config`
# Prefixes of tensor names: of exports, of language models inside models with images, and of models without a head.
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
}


class Check(NamedTuple):
    """A test of a key's value in `config.json`, and a description of the values that pass it, for messages."""

    fits: Callable[[Any], bool]
    expected: str


NUMBER = Check(rope_settings.is_positive, "a number above 0")
WHOLE = Check(
    lambda value: rope_settings.is_positive(value) and isinstance(value, int) and value < 2**31,
    "a whole number above 0",
)
_BY_DEFAULT = {  # checks of keys, by the type of the value that transformers gives absent ones
    bool: Check(lambda value: isinstance(value, bool), "true or false"),
    str: Check(lambda value: isinstance(value, str), "the name of an activation"),
    float: NUMBER,
}


class Family(NamedTuple):
    """A family of published models: how their `config.json` and tensors correspond to the decoder.

    Attributes:
      title: its name in tables and messages.
      differs: how its models differ from Llama, in a few words.
      architecture: the class of transformers that loads an export.
      read: returns the fields of the decoder, from a configuration with absent keys filled in.
      write: returns entries of `config.json`; None: exports have another `model_type`.
      sources: returns the source of each parameter by its path.
      keys: the keys that are read, with the values of absent ones; `...` if the key is required.
      nullable: keys that may be null.
      others: further known keys.
      aliases: other names of keys; the value under the other name wins.
      prefixes: of tensor names; exports have the first.
      inside: the `model_type` of `text_config`; "": there is no `text_config`.
      around: further keys of the configuration around it.
      quantized: functions that dequantize weights, by quantization method.
      ignored: returns patterns of tensors without a parameter of the decoder.
      ties_inside: whether `tie_word_embeddings` of `text_config` comes before the outer one.
      checks: of values, by key; others follow from `keys`.
    """

    title: str
    differs: str
    architecture: str
    read: Callable[[Config], dict[str, Any]]
    write: Callable[[DecoderConfig], dict[str, Any]] | None
    sources: Callable[[DecoderConfig], Sources]
    keys: Config
    nullable: Collection[str]
    others: Collection[str]
    aliases: Mapping[str, str] = MappingProxyType({})
    prefixes: Sequence[str] = PREFIXES
    inside: str = ""
    around: Collection[str] = ()
    quantized: Mapping[str, Dequantized] = MappingProxyType({})
    ignored: Callable[[Config], Collection[str]] = lambda config: ()
    ties_inside: bool = False
    checks: Mapping[str, Check] = MappingProxyType({})

    def problem(self, key: str, value: Any) -> str:
        """Returns what is wrong with the value of a key of `keys` (`...`: the key is absent); "" if nothing is."""
        if value is ...:
            return f"{key} is missing"
        check = self.checks.get(key) or _BY_DEFAULT.get(type(self.keys[key]), WHOLE)
        if check.fits(value) or (value is None and key in self.nullable):
            return ""
        return f"{key} = {json.dumps(value)}: expected {check.expected}"


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA: Mapping[str, Any] = {
    **dict.fromkeys(SIZES, ...),
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
NULLABLE = frozenset({"num_key_value_heads", "head_dim", "max_position_embeddings"})
ROPE = frozenset({"rope_parameters", "rope_scaling", "original_max_position_embeddings", "layer_types"})
WINDOWS_OF_QWEN = frozenset({"sliding_window", "max_window_layers"})  # without effect unless `use_sliding_window`


def known_activation(name: str) -> str:
    """Returns the decoder's name of an activation of transformers.

    Raises:
      UserError: it is not known.
    """
    if name not in _ACTIVATIONS:
        raise UserError(f"activation {name!r} is not known; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def published_activation(activation: str) -> str:
    """Returns the name in transformers of one of the decoder's activations."""
    names = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "gelu_sigmoid": "quick_gelu"}
    return names[activation]


def llama(
    config: Config, *, rope: rope_settings.Rope | None = None, activation: str = "hidden_act", **other: Any
) -> dict[str, Any]:
    """Returns the fields of a decoder that the keys of Llama describe, and `other`.

    Args:
      config: with absent keys filled in.
      rope: the rotary embedding; None: that of the configuration.
      activation: the key that names the activation.
    """
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
    heads, kv_heads, width = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads % (kv_heads or heads):
        raise UserError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
    if width is None and config["hidden_size"] % heads:
        raise UserError(f"hidden_size = {config['hidden_size']} is not a multiple of num_attention_heads = {heads}")
    if (width or config["hidden_size"] // heads) % 2:
        name = "head_dim" if width else "hidden_size / num_attention_heads"
        raise UserError(f"{name} = {width or config['hidden_size'] // heads}: rotary embeddings need an even size")


def without_windows(config: Config, **other: Any) -> dict[str, Any]:
    """Returns the fields as `llama`, for a family without `sliding_attention`. Raises UserError if a layer has it."""
    if SLIDING in (layer_types(config) or ()):
        raise UserError("layer_types has sliding_attention, which is not supported in this family")
    return llama(config, **other)


def layer_types(config: Config, known: Sequence[str] = LAYER_TYPES) -> list[str] | None:
    """Returns the type of each layer, as `layer_types` has it; None if the file leaves it out.

    Raises UserError if types are malformed, unknown or not one for each layer.
    """
    types, layers = config.get("layer_types"), config["num_hidden_layers"]
    if types is None:
        return None
    if not (isinstance(types, list) and all(isinstance(name, str) for name in types)):
        raise UserError(f"layer_types = {json.dumps(types)}: expected a list of {' or '.join(known)}")
    if unknown := sorted(set(types) - set(known)):
        raise UserError(f"layer_types has {', '.join(unknown)}; expected {' or '.join(known)}")
    if len(types) != layers:
        raise UserError(f"layer_types has {len(types)} entries, and num_hidden_layers = {layers}")
    return types


def attention_of_types(
    config: Config, types: list[str], *, usual: Attention | None = None, local_theta: float | None = None
) -> Attention | tuple[Attention, ...]:
    """Returns the attention of layers, as a pattern that repeats, from their types.

    Args:
      usual: the attention of layers without a window; None: the default attention.
      local_theta: rotary base of layers with a window; None: the decoder's.

    Raises:
      UserError: layers have a window, but the configuration has no size for it.
    """
    usual = usual or Attention()
    if SLIDING not in types:
        return usual
    if (window := config["sliding_window"]) is None:
        raise UserError("sliding_window = null, but there are layers of the type sliding_attention: expected a number")
    parts = {FULL: usual, SLIDING: dataclasses.replace(usual, window=window, rope_theta=local_theta)}
    return shortest([parts[kind] for kind in types])


def shortest(parts: Sequence[Any]) -> Any:
    """Returns the shortest pattern that, repeated, gives these parts, or the part itself if all are equal.

    The last repetition may be incomplete.
    """
    length = next(n for n in range(1, len(parts) + 1) if all(p == parts[i % n] for i, p in enumerate(parts)))
    return tuple(parts[:length]) if length > 1 else parts[0]


def repeated(parts: Sequence[Any], *, first: int = 0) -> Any:
    """Returns the pattern as `shortest`, but of complete repetitions only.

    `first` is the number of the first part's layer.
    """
    length = period(list(parts))
    return tuple(parts[(i - first) % length] for i in range(length)) if length > 1 else parts[0]


def are_layers(value: Any) -> bool:
    """Returns whether a value is a list of layer numbers, from 0."""
    return isinstance(value, list) and all(type(layer) is int and layer >= 0 for layer in value)


def choices(config: Config, number: str) -> int:
    """Returns `num_experts_per_tok`.

    Raises:
      UserError: it is above the number of experts, the value of the key `number`.
    """
    if (top_k := config["num_experts_per_tok"]) > config[number]:
        raise UserError(f"num_experts_per_tok = {top_k}, but {number} = {config[number]}: expected at most as many")
    return top_k


def llama_config(model: DecoderConfig, **others: Any) -> dict[str, Any]:
    """Returns the entries of a `config.json` as Llama has it, and `others`."""
    found = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.embed_dim,
        "intermediate_size": model.mlp_dim,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": published_activation(model.activation),
        "rope_theta": model.rope_theta,
        "rope_scaling": rope_settings.written(model.rope_scaling),
        "tie_word_embeddings": model.tied,
    }
    if model.max_positions is not None:
        found["max_position_embeddings"] = model.max_positions
    return {**found, **others}


def experts_to_write(model: DecoderConfig) -> tuple[Experts, dict[str, Any]]:
    """Returns the experts of a decoder, and the entries of `config.json` that families with experts share.

    Raises:
      UserError: the decoder has no experts.
    """
    if (experts := experts_of(model)) is None:
        raise UserError("the decoder has no experts")
    return experts, {
        "num_experts_per_tok": experts.top_k,
        "router_aux_loss_coef": experts.load_balance_coef,
        "output_router_logits": experts.load_balance_coef > 0,
    }


def attention_of(model: DecoderConfig) -> Attention:
    """Returns the attention of the first layer that has one; the default attention if none does."""
    return next(_attentions(model), Attention())


def windowed(model: DecoderConfig) -> Attention | None:
    """Returns the attention of the first layer that has one with a window; None if none does."""
    return next((part for part in _attentions(model) if part.window is not None), None)


def _attentions(model: DecoderConfig) -> Iterator[Attention]:
    return (part for kind in model.layer_kinds for part in kind.mixers if isinstance(part, Attention))


def attentions(model: DecoderConfig) -> list[Attention]:
    """Returns the attention of each layer; the default attention for layers with another mixer."""
    kinds = map(model.layer_kind, range(model.num_layers))
    return [next((part for part in kind.mixers if isinstance(part, Attention)), Attention()) for kind in kinds]


def types_of_layers(model: DecoderConfig) -> list[str]:
    """Returns the value of `layer_types` in the `config.json` of a decoder."""
    return [FULL if part.window is None else SLIDING for part in attentions(model)]


def attention_sources(model: DecoderConfig, kind: LayerKind) -> Sources:
    """Returns the sources of an attention, by our names."""
    found: Sources = {}
    without_values = any(part.values_are_keys for part in kind.mixers if isinstance(part, Attention))
    shares = any(part.shares_keys for part in kind.mixers if isinstance(part, Attention))
    for ours, rows in (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads")):
        if (ours == "value" and without_values) or (ours != "query" and shares):
            continue
        found[ours] = Source(f"layers.{{}}.self_attn.{ours[0]}_proj.weight", f"({rows} head_dim) embed")
        if model.bias != "none":
            found[f"{ours}_bias"] = Source(f"layers.{{}}.self_attn.{ours[0]}_proj.bias", f"({rows} head_dim)")
        has_norm = any(part.qk_norm for part in kind.mixers if isinstance(part, Attention))
        if has_norm and ours != "value":
            found[f"{ours}_norm"] = Source(f"layers.{{}}.self_attn.{ours[0]}_norm.weight", "norm")
    if any(part.sinks for part in kind.mixers if isinstance(part, Attention)):
        found["sinks"] = Source("layers.{}.self_attn.sinks", "heads")
    if model.bias == "all":
        found["output_bias"] = Source("layers.{}.self_attn.o_proj.bias", "norm")
    return {**found, "output": Source("layers.{}.self_attn.o_proj.weight", "embed (heads head_dim)")}


def mlp_sources(
    part: Part | None, *, layer: str = "mlp", names: Mapping[str, str] = MappingProxyType({}), of_experts: str = ""
) -> Sources:
    """Returns the sources of a dense feed-forward, or of experts.

    Args:
      part: the feed-forward; None is read as a dense one.
      layer: module of a dense feed-forward in tensor names.
      names: published names of `gate`, `up` and `down` that differ from Llama's.
      of_experts: module of experts in tensor names; "": as `layer`.
    """
    has_experts = isinstance(part, Experts)
    layer = of_experts or layer if has_experts else layer
    start = f"layers.{{}}.{layer}." + ("experts.{}." if has_experts else "")
    dims = {"gate": "mlp embed", "up": "mlp embed", "down": "embed mlp"}
    found = {ours: Source(f"{start}{names.get(ours, f'{ours}_proj')}.weight", dims[ours]) for ours in dims}
    return found if not has_experts else {**found, "router": Source(f"layers.{{}}.{layer}.gate.weight", "_ embed")}


NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def llama_sources(
    model: DecoderConfig,
    *,
    norms: Mapping[str, str] = MappingProxyType(NORMS),
    attention: Callable[[DecoderConfig, LayerKind], Sources] = attention_sources,
    feed_forward: Callable[[Part | None], Sources] = mlp_sources,
) -> Sources:
    """Returns the source of each parameter, by its path, for a family whose tensors have Llama's names.

    Args:
      norms: published names of a layer's norms, by ours.
      attention, feed_forward: return the sources of a layer's parts, by our names.
    """
    found: Sources = {
        "embedding": Source("embed_tokens.weight", "vocab embed"),
        "final_norm": Source("norm.weight", "norm"),
    }
    of_norms = {ours: Source(f"layers.{{}}.{theirs}.weight", "norm") for ours, theirs in norms.items()}
    first = model.num_first_layers
    places = [(logical.FIRST_LAYERS, layer, model.first_group) for layer in range(model.first_group if first else 0)]
    places += [(logical.LAYERS, layer, model.group) for layer in range(first, first + model.group)]
    for stack, layer, every in places:
        kind = model.layer_kind(layer)
        of_layer = {**of_norms, **attention(model, kind), **feed_forward(kind.feed_forward)}
        found |= {
            f"{stack}/{kind.module}/{ours}": dataclasses.replace(source, first=layer, every=every)
            for ours, source in of_layer.items()
        }
    return found if model.tied else {**found, "unembedding": Source("/lm_head.weight", "vocab embed")}
