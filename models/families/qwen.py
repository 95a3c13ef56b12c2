"""Qwen 2, 2.5 and 3 (Qwen team 2024, 2025), and Qwen 3 with experts."""

import json
import math
from typing import Any

from core.errors import UserError
from models.decoder.config import DecoderConfig
from models.decoder.experts import Experts
from models.decoder.layers import Attention, Mlp
from models.decoder.published import family
from models.decoder.published.family import Check, Config, Family


def _qwen2(config: Config) -> dict[str, Any]:
    return family.without_windows(config, bias="qkv")


def _qwen3(config: Config) -> dict[str, Any]:
    return family.without_windows(config, mixer=Attention(qk_norm=True))


def _qwen3_moe(config: Config) -> dict[str, Any]:
    experts = Experts(
        num_experts=config["num_experts"],
        top_k=family.choices(config, "num_experts"),
        mlp_dim=config["moe_intermediate_size"],
        normalized=config["norm_topk_prob"],
    )
    parts = [experts if has_experts else Mlp() for has_experts in _layers_with_experts(config)]
    return {**_qwen3(config), "feed_forward": family.repeated(parts)}


def _layers_with_experts(config: Config) -> list[bool]:
    """Returns whether each layer l has experts: decoder_sparse_step divides l + 1, and mlp_only_layers lacks l."""
    layers, step, listed = config["num_hidden_layers"], config["decoder_sparse_step"], config["mlp_only_layers"] or []
    kinds = [layer not in listed and (layer + 1) % step == 0 for layer in range(layers)]
    if not any(kinds):
        raise UserError(
            f"decoder_sparse_step = {step} and mlp_only_layers = {json.dumps(listed)} leave none of {layers} layers "
            "with experts: expected some (without experts it is model_type qwen3)"
        )
    return kinds


def _qwen3_moe_config(model: DecoderConfig) -> dict[str, Any]:
    experts, keys = family.experts_to_write(model)
    with_experts = {i for i in range(model.num_layers) if model.layer_kind(i).feed_forward == experts}
    step = math.gcd(*(layer + 1 for layer in with_experts))
    others = [layer for layer in range(step - 1, model.num_layers, step) if layer not in with_experts]
    return family.llama_config(
        model,
        moe_intermediate_size=experts.width(model),
        num_experts=experts.num_experts,
        norm_topk_prob=experts.normalized,
        decoder_sparse_step=step,
        mlp_only_layers=others,
        **keys,
    )


_OTHERS = family.ROPE | family.WINDOWS_OF_QWEN
FAMILIES = {
    "qwen2": Family(
        title="Qwen 2.5",
        differs="biases of queries, keys and values",
        architecture="Qwen2ForCausalLM",
        read=_qwen2,
        write=family.llama_config,
        sources=family.llama_sources,
        keys={**family.LLAMA, "num_key_value_heads": 32},
        nullable=family.NULLABLE,
        others=_OTHERS,
    ),
    "qwen3": Family(
        title="Qwen 3",
        differs="norms of queries and keys",
        architecture="Qwen3ForCausalLM",
        read=_qwen3,
        write=family.llama_config,
        sources=family.llama_sources,
        keys={**family.LLAMA, "num_key_value_heads": 32, "head_dim": 128},
        nullable=family.NULLABLE - {"head_dim"},
        others=_OTHERS,
    ),
    "qwen3_moe": Family(
        title="Qwen 3 MoE",
        differs="as Qwen 3, with experts in all layers or in some",
        architecture="Qwen3MoeForCausalLM",
        read=_qwen3_moe,
        write=_qwen3_moe_config,
        sources=family.llama_sources,
        keys={
            **family.LLAMA,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        nullable={*family.NULLABLE, "mlp_only_layers"},
        others=_OTHERS,
        aliases={"num_local_experts": "num_experts"},
        checks={"mlp_only_layers": Check(family.are_layers, "a list of numbers of layers, counted from 0")},
    ),
}
