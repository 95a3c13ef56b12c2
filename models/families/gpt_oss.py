"""gpt-oss (2025): attention sinks, biases, windows in every other layer, experts with a bounded gate."""

import functools
from typing import Any

from core.checkpoints import mxfp4
from core.checkpoints.tensor_map import Source
from models.decoder.config import DecoderConfig
from models.decoder.experts import Experts
from models.decoder.layers import Attention
from models.decoder.parts import Part
from models.decoder.published import family, rope_settings
from models.decoder.published.family import Config, Family, Sources
from models.decoder.published.rope_settings import FULL, SLIDING
from models.derivatives import ClampedGate

_WINDOW = 128
_YARN = {  # without any settings
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    rope_settings.ORIGINAL: 4096,
}


def _read(config: Config) -> dict[str, Any]:
    if not config.get("rope_scaling") and config.get("rope_parameters") is None:
        config = {**config, "rope_scaling": _YARN}
    types = family.layer_types(config) or [FULL if i % 2 else SLIDING for i in range(config["num_hidden_layers"])]
    return family.llama(
        {**config, "hidden_act": "silu"},  # which its experts do not read
        bias="all" if config["attention_bias"] else "none",
        mixer=family.attention_of_types(config, types, usual=Attention(sinks=True)),
        feed_forward=Experts(
            num_experts=config["num_local_experts"],
            top_k=family.choices(config, "num_local_experts"),
            has_biases=True,
            clamped_gate=ClampedGate(slope=float(config["swiglu_alpha"]), limit=float(config["swiglu_limit"])),
        ),
    )


def _write(model: DecoderConfig) -> dict[str, Any]:
    local, (experts, keys) = family.windowed(model), family.experts_to_write(model)
    gate, found = experts.clamped_gate or ClampedGate(), family.llama_config(model)
    return found | {
        "rope_scaling": found["rope_scaling"] or {"rope_type": "default"},  # without, transformers takes YaRN
        "intermediate_size": experts.width(model),
        "num_local_experts": experts.num_experts,
        "attention_bias": model.bias == "all",
        "layer_types": family.types_of_layers(model),
        "sliding_window": (local and local.window) or _WINDOW,  # without a window: transformers needs a number
        "swiglu_alpha": gate.slope,
        "swiglu_limit": gate.limit,
        **keys,
    }


def _feed_forward(part: Part | None) -> Sources:
    del part
    router, experts = "layers.{}.mlp.router.", "layers.{}.mlp.experts."
    found = {
        "router": Source(f"{router}weight", "_ embed"),
        "router_bias": Source(f"{router}bias", "_"),
        "down": Source(f"{experts}down_proj", "expert mlp embed"),
        "down_bias": Source(f"{experts}down_proj_bias", "expert norm"),
    }
    for ours, i in (("gate", 0), ("up", 1)):
        found[ours] = Source(f"{experts}gate_up_proj", f"expert embed (mlp {i}/2)")
        found[f"{ours}_bias"] = Source(f"{experts}gate_up_proj_bias", f"expert (mlp {i}/2)")
    return found


FAMILIES = {
    "gpt_oss": Family(
        title="gpt-oss",
        differs="sinks, biases, windows, experts with a bounded gate",
        architecture="GptOssForCausalLM",
        read=_read,
        write=_write,
        sources=functools.partial(family.llama_sources, feed_forward=_feed_forward),
        keys={
            **{key: value for key, value in family.LLAMA.items() if key != "hidden_act"},
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "attention_bias": True,
            "sliding_window": _WINDOW,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        nullable={"max_position_embeddings", "sliding_window"},
        others=family.ROPE | {"hidden_act", "initial_context_length", "experts_per_token"},
        aliases={"num_experts": "num_local_experts"},
        quantized={mxfp4.METHOD: mxfp4.dequantized},
    )
}
