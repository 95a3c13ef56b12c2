"""Qwen3-Next (Qwen team 2025): a gated delta rule in most layers, gated attention in the others, and experts."""

import functools
from collections.abc import Collection
from typing import Any

from core.errors import UserError
from models.decoder.config import DecoderConfig
from models.decoder.experts import Experts, experts_of
from models.decoder.layers import Attention, Mlp
from models.decoder.parts import Part
from models.decoder.published import family, rope_settings
from models.decoder.published.family import Check, Config, Family
from models.decoder.published.rope_settings import FULL, PARTIAL
from models.families import _delta
from models.mixers.gated_delta import GatedDelta

LINEAR = "linear_attention"
INTERVAL = "full_attention_interval"
_SIZES = {  # of the delta rule: keys of the file, and ours
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "kernel",
}
_EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "mlp_dim",
    "shared_expert_intermediate_size": "shared_mlp_dim",
}


def decoder(config: Config, *, without_effect: Collection[str] = (), **other: Any) -> dict[str, Any]:
    """Returns the fields of a decoder whose layers have the delta rule or attention, and `other`.

    `without_effect` are keys of the rotary embedding that change nothing. Raises UserError if settings are malformed or
    do not fit together.
    """
    layers, heads = config["num_hidden_layers"], config["linear_num_key_heads"]
    if config["linear_num_value_heads"] % heads:
        raise UserError(
            f"linear_num_value_heads = {config['linear_num_value_heads']}: expected a multiple of "
            f"linear_num_key_heads = {heads}"
        )
    kinds = family.layer_types(config, (LINEAR, FULL))
    if kinds is None:
        kinds = [FULL if (layer + 1) % config[INTERVAL] == 0 else LINEAR for layer in range(layers)]
    fraction, config = rope_settings.partial(config, config[PARTIAL], without_effect)
    of_kinds: dict[str, Part] = {
        LINEAR: GatedDelta(**{ours: config[key] for key, ours in _SIZES.items()}),
        FULL: Attention(qk_norm=True, output_gate=True, rotary_fraction=fraction),
    }
    mixer = family.repeated([of_kinds[kind] for kind in kinds])
    return family.llama(config, norm="rms_offset", mixer=mixer, **other)


def experts(config: Config, *, normalized: bool) -> Experts:
    """Returns the experts that a configuration describes, with a shared one.

    `normalized`: whether the weights of a token's experts are divided by their sum.
    """
    family.choices(config, "num_experts")
    sizes = {ours: config[key] for key, ours in _EXPERTS.items()}
    return Experts(**sizes, normalized=normalized, shared_gate=True)


def _read(config: Config) -> dict[str, Any]:
    listed, step = config["mlp_only_layers"] or [], config["decoder_sparse_step"]
    sparse, dense = experts(config, normalized=config["norm_topk_prob"]), Mlp()
    parts = [dense if layer in listed or (layer + 1) % step else sparse for layer in range(config["num_hidden_layers"])]
    return decoder(config, feed_forward=family.repeated(parts))


def written(model: DecoderConfig, **others: Any) -> dict[str, Any]:
    """Returns a model's entries of `config.json`, and `others`."""
    kinds = [model.layer_kind(layer) for layer in range(model.num_layers)]
    deltas = [part for kind in kinds for part in kind.mixers if isinstance(part, GatedDelta)]
    types = [LINEAR if isinstance(kind.mixers[0], GatedDelta) else FULL for kind in kinds]
    found = family.llama_config(model, layer_types=types, **{PARTIAL: family.attention_of(model).rotary_fraction})
    if deltas:
        found |= {key: getattr(deltas[0], ours) for key, ours in _SIZES.items()}
    if (part := experts_of(model)) is not None:
        found |= {key: getattr(part, ours) for key, ours in _EXPERTS.items()}
        found |= family.experts_to_write(model)[1]
    return {**found, **others}


def _write(model: DecoderConfig) -> dict[str, Any]:
    kinds = [model.layer_kind(layer).feed_forward for layer in range(model.num_layers)]
    dense = [layer for layer, part in enumerate(kinds) if not isinstance(part, Experts)]
    part = experts_of(model)
    return written(model, mlp_only_layers=dense, norm_topk_prob=part is None or part.normalized)


def _joined(part: GatedDelta) -> dict[str, tuple[str, str]]:
    k, v, g = part.key_dim, part.value_heads // part.key_heads * part.value_dim, part.value_heads // part.key_heads
    return {
        "delta_query": ("in_proj_qkvz", f"(heads head_dim+{k + 2 * v}) embed"),
        "delta_key": ("in_proj_qkvz", f"(heads {k}+head_dim+{2 * v}) embed"),
        "delta_value": ("in_proj_qkvz", f"(heads {2 * k}+head_dim+{v}) embed"),
        "delta_gate": ("in_proj_qkvz", f"(heads {2 * k + v}+head_dim) embed"),
        "strength": ("in_proj_ba", f"(heads _+{g}) embed"),
        "step": ("in_proj_ba", f"(heads {g}+_) embed"),
    }


KEYS: Config = {
    **family.LLAMA,
    "num_key_value_heads": 2,
    "head_dim": 256,
    **dict(zip(_SIZES, (16, 32, 128, 128, 4), strict=True)),
    INTERVAL: 4,
    PARTIAL: 0.25,
}
SPARSE: Config = dict(zip(_EXPERTS, (512, 10, 512, 512), strict=True))
NULLABLE = frozenset({"max_position_embeddings"})
# Read, or of published files without effect: the gate of attention is not optional, heads for later tokens not read.
OTHERS = family.ROPE | {"attn_output_gate", "mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
FAMILIES = {
    "qwen3_next": Family(
        title="Qwen3-Next",
        differs="gated delta rule, gated attention, a gated shared expert",
        architecture="Qwen3NextForCausalLM",
        read=_read,
        write=_write,
        sources=functools.partial(_delta.sources, projections=_joined),
        keys={**KEYS, **SPARSE, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        nullable=NULLABLE | {"mlp_only_layers"},
        others=OTHERS,
        checks={"mlp_only_layers": Check(family.are_layers, "a list of numbers of layers, counted from 0")},
    )
}
