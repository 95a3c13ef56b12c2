"""DeepSeek-V3 (DeepSeek-AI 2024), and Kimi K2 (2025): latent attention, experts by groups, dense layers before them."""

import functools
from collections.abc import Collection
from typing import Any

from core.checkpoints import fp8
from core.checkpoints.tensor_map import Source
from core.errors import UserError
from models.decoder.config import DecoderConfig
from models.decoder.experts import Experts, experts_of
from models.decoder.layers import Mlp
from models.decoder.parts import Part
from models.decoder.published import family, rope_settings
from models.decoder.published.family import Check, Config, Family, Sources
from models.families import _latent
from models.mixers.latent_attention import LatentAttention

_LATENT = {  # keys of the file, and ours
    "kv_lora_rank": "latent_dim",
    "q_lora_rank": "query_latent_dim",
    "qk_nope_head_dim": "plain_dim",
    "qk_rope_head_dim": "rotary_dim",
    "v_head_dim": "value_dim",
    "rope_interleave": "interleaved",
}
_EXPERTS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "mlp_dim",
    "n_group": "num_groups",
    "topk_group": "top_groups",
    "norm_topk_prob": "normalized",
    "routed_scaling_factor": "scale",
}
_DENSE, _SHARED, _LATER = "first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers"


def _read(config: Config) -> dict[str, Any]:
    _check(config)
    layers, dense = config["num_hidden_layers"], config[_DENSE]
    mixer = LatentAttention(
        **{ours: config[key] for key, ours in _LATENT.items()}, score_sharpening=rope_settings.of_scores(config)
    )
    experts: dict[str, Any] = {ours: config[key] for key, ours in _EXPERTS.items()}
    experts["shared_mlp_dim"] = config[_SHARED] * experts["mlp_dim"] or None
    return family.llama(
        {**config, "head_dim": config["qk_rope_head_dim"]},
        mixer=mixer,
        feed_forward=Mlp() if dense >= layers else Experts(**experts, scores="sigmoid", has_correction=True),
        first_feed_forward=(Mlp(),) * dense if dense < layers else (),
    )


def _check(config: Config) -> None:
    heads, keys, rotary = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "qk_rope_head_dim"))
    if keys not in (None, heads):
        raise UserError(
            f"num_key_value_heads = {keys}: expected num_attention_heads = {heads}, as each has its own key"
        )
    if rotary % 2:
        raise UserError(f"qk_rope_head_dim = {rotary}: rotary embeddings need an even size")
    if config.get("head_dim") not in (None, rotary):
        raise UserError(f"head_dim = {config['head_dim']!r}: expected qk_rope_head_dim = {rotary}")
    top_k, groups, top = family.choices(config, "n_routed_experts"), config["n_group"], config["topk_group"]
    of_group, rest = divmod(config["n_routed_experts"], groups)
    if rest or of_group < 2 or not top_k / of_group <= top <= groups:
        raise UserError(
            f"n_group = {groups}, topk_group = {top}: expected groups of at least 2 of n_routed_experts = "
            f"{config['n_routed_experts']}, and of these topk_group with num_experts_per_tok = {top_k} experts or more"
        )


def _write(model: DecoderConfig) -> dict[str, Any]:
    part, experts = model.layer_kind(0).mixers[0], experts_of(model)
    if not isinstance(part, LatentAttention):
        raise UserError("the decoder has no latent attention")
    found = family.llama_config(model, **{key: getattr(part, ours) for key, ours in _LATENT.items()}, **{_LATER: 0})
    found["head_dim"] = part.rotary_dim  # not read by latent attention, but by what turns its positions
    if part.score_sharpening and found["rope_scaling"]:
        found["rope_scaling"]["mscale_all_dim"] = part.score_sharpening
    if experts is None:
        return {**found, _DENSE: model.num_layers}
    if (experts.shared_mlp_dim or 0) % experts.width(model):
        raise UserError(f"Experts.shared_mlp_dim = {experts.shared_mlp_dim}: not a multiple of that of other experts")
    found |= {key: getattr(experts, ours) for key, ours in _EXPERTS.items()}
    shared = (experts.shared_mlp_dim or 0) // experts.width(model)
    found |= {"moe_intermediate_size": experts.width(model), _SHARED: shared, _DENSE: model.num_first_layers}
    return {**found, **family.experts_to_write(model)[1]}


def _feed_forward(part: Part | None) -> Sources:
    found = family.mlp_sources(part)
    if not isinstance(part, Experts):
        return found
    if part.shared_mlp_dim is not None:
        shared = family.mlp_sources(Mlp(), layer="mlp.shared_experts")
        found |= {f"shared_{name}": source for name, source in shared.items()}
    return {**found, "correction": Source("layers.{}.mlp.gate.e_score_correction_bias", "_", dtype="float32")}


def _later(config: Config) -> Collection[str]:
    """Returns patterns of tensors of the layers that predict later tokens, which follow the others."""
    first = config["num_hidden_layers"]
    return [f"*layers.{layer}.*" for layer in range(first, first + config[_LATER])]


def _only(value: Any) -> Check:
    return Check(lambda found: found == value and type(found) is type(value), f"{value!r}, which is how it is computed")


_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_WITHOUT_EFFECT = {"ep_size", "seq_aux", "aux_loss_alpha", "head_dim", "qk_head_dim"}
_COUNT = Check(lambda value: type(value) is int and value >= 0, "a whole number of at least 0")
_DEEPSEEK = Family(
    title="DeepSeek-V3",
    differs="latent attention, grouped experts after dense layers",
    architecture="DeepseekV3ForCausalLM",
    read=_read,
    write=_write,
    sources=functools.partial(family.llama_sources, attention=_latent.attention_sources, feed_forward=_feed_forward),
    keys={
        **{key: value for key, value in family.LLAMA.items() if key != "head_dim"},
        "num_key_value_heads": 128,
        **dict(zip(_LATENT, (512, 1536, 128, 64, 128, True), strict=True)),
        **dict(zip(_EXPERTS, (256, 8, 2048, 8, 4, True, 2.5), strict=True)),
        _SHARED: 1,
        _DENSE: 3,
        _LATER: 1,
        **_ONLY,
    },
    nullable={"num_key_value_heads", "max_position_embeddings", "q_lora_rank"},
    others=family.ROPE | _WITHOUT_EFFECT,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": _LATER},
    checks={
        **dict.fromkeys((_DENSE, _SHARED, _LATER), _COUNT),
        **{key: _only(value) for key, value in _ONLY.items()},
    },
    quantized={fp8.METHOD: fp8.dequantized},
    ignored=_later,
)
FAMILIES = {
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK._replace(title="Kimi K2", differs="as DeepSeek-V3", write=None),
}
